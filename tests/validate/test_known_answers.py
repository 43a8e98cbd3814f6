"""Recordings whose right answer their README states: what `ingest`, `inspect`, `validate` and `explain` say of each.

`live-vllm-0.29` and `live-vllm-0.32` are of real servers, `field` of the engine itself, written as tools of others
write it.  research/faults.md shows the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from blis_replay.ingest.recording import FIRST_TOKEN, WAY

pytestmark = pytest.mark.heavy

CSV = ("--columns", "arrival=start_time:s,ttft=ttft:ms,e2e=latency:ms")
V29, V32 = "live-vllm-0.29/q8c-coefficients.yaml", "cpu-vllm-0.32.0"
UNBLAMED = "unexplained"


@dataclass(frozen=True)
class Row:
    """``error_percent``: of the means that the README states.  ``stops``: what no verdict may rest on, by check.

    ``blamed``: what E2E is put down to.  ``calibrates``: whether a fit may be made of it; None: not asked.
    """

    folder: str
    verdict: str
    stops: tuple[tuple[str, str], ...] = ()
    blamed: str = UNBLAMED
    error_percent: tuple[tuple[str, float], ...] = ()
    calibrates: bool | None = None
    coefficients: str = "h100-vllm-0.15.1"


def live(folder: str, verdict: str, blamed: str = UNBLAMED, *stops: tuple[str, str], **of: object) -> Row:
    return Row(f"live-vllm-0.29/{folder}", verdict, stops, blamed, coefficients=V29, **of)  # type: ignore[arg-type]


EXACT = (("e2e", 0.0), ("ttft", 0.0))
ROWS = [
    Row("field/01-observe-tracev2", "PASS", error_percent=(*EXACT, ("itl", 0.0)), calibrates=True),
    Row("field/02-client-cap", "PASS", error_percent=EXACT),
    Row("field/03-rate-and-cap", "PASS", error_percent=(("ttft", -2.8),)),
    Row("field/04-default-bench-no-e2el", "PASS", error_percent=(("ttft", -2.8), ("tpot", -2.0))),
    Row("field/06-sglang-infinity", "PASS", error_percent=(("ttft", -2.8),)),
    Row("field/08-reasoning-ttft", "NOT JUDGED", (("token_events", FIRST_TOKEN),), calibrates=False),
    Row("field/10-preemption-hit-rate/control", "PASS", error_percent=EXACT),
    Row("field/10-preemption-hit-rate/with-hit-rate", "PASS", error_percent=EXACT),
    # Steps take longer than the server's, or the prefix cache was warm: both are named, and nothing is fitted to it.
    Row("field/11-warm-cache", "UNDECIDED", blamed="step time or prefix cache", calibrates=False),
    Row("field/15-aiperf-phases", "PASS", error_percent=(("ttft", -2.8),)),
    live("again", "FAIL", "step time", error_percent=(("e2e", -35.7),), calibrates=True),
    live("max-num-seqs-2", "UNDECIDED", "step time", error_percent=(("e2e", -38.4),)),
    live("cold", "FAIL", "cold start"),
    live("cold-bench", "UNDECIDED", "cold start", calibrates=True),
    live("client-only", "UNDECIDED"),
    live("lies/half-step-log", "FAIL", UNBLAMED, ("completeness", "step_time"), error_percent=(("e2e", -35.7),)),
    live("lies/step-log-of-another-run", "NOT JUDGED", UNBLAMED, ("ledger", ""), calibrates=False),
    live("lies/counts-x1.25", "NOT JUDGED", UNBLAMED, ("ledger", ""), calibrates=False),
    live("lies/proxy-40ms", "NOT JUDGED", UNBLAMED, ("server_metrics", WAY), calibrates=False),
    live("lies/two-servers", "NOT JUDGED", UNBLAMED, ("ledger", ""), calibrates=False),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.folder)
def test_each_recording_gets_its_answer(run: Run, data_pack: Path, row: Row) -> None:
    own = (data_pack / row.coefficients) if row.coefficients.endswith(".yaml") else row.coefficients
    columns = CSV if list((data_pack / row.folder).glob("client.csv")) else ()
    assert run("ingest", data_pack / row.folder, *columns, "--name", "it", "-q").code == 0
    inspected = run("inspect", "it", "--json").json
    assert {(f["check"], f["metric"]) for f in inspected["findings"] if f["severity"] == "unusable"} == set(row.stops)
    (judged,) = run("validate", "it", "--coefficients", own, "--json").json["experiments"]
    assert judged["verdict"] == row.verdict
    for metric, percent in row.error_percent:
        assert 100 * judged["metrics"][metric]["mean"]["error"] == pytest.approx(percent, abs=0.06), metric
    explained = run("explain", "it", "--coefficients", own, "--json").json
    assert blamed_for_e2e(explained) == row.blamed
    if row.calibrates is not None:
        assert run("calibrate", "--train", "it", "-o", "own.yaml").code == (0 if row.calibrates else 4)


def blamed_for_e2e(explained: dict[str, Any]) -> str:
    """The component with the largest share of the error of the mean, with those that explain it as well."""
    shares = {name: share["value"] for name, share in explained["errors"][0]["shares_ms"].items()}
    residual = explained["errors"][0]["residual_ms"]["value"]
    largest = max(shares, key=lambda name: abs(shares[name]), default="")
    if not largest or abs(shares[largest]) < abs(residual):
        return UNBLAMED
    (also,) = (one["also"] for one in explained["components"] if one["name"] == largest)
    return " or ".join([largest, *also])


@pytest.mark.parametrize(
    ("folder", "coefficients"),
    [
        *((f"live-vllm-0.29/{name}", V29) for name in ("q8c", "again", "max-num-seqs-2", "cold", "cold-bench")),
        ("live-vllm-0.32/A", V32),
        ("live-vllm-0.32/C", V32),
    ],
)
def test_recorded_parts_replay_a_live_server(run: Run, data_pack: Path, folder: str, coefficients: str) -> None:
    """Within 5 % of TTFT and 2 % of E2E."""
    own = (data_pack / coefficients) if coefficients.endswith(".yaml") else coefficients
    columns = CSV if list((data_pack / folder).glob("client.csv")) else ()
    assert run("ingest", data_pack / folder, *columns, "--name", "it", "-q").code == 0
    mode = "step_time=recorded,pre_queue=recorded,output_processing=recorded"
    (judged,) = run("validate", "it", "--coefficients", own, "--replay", mode, "--json").json["experiments"]
    assert abs(judged["metrics"]["ttft"]["mean"]["error"]) < 0.05
    assert abs(judged["metrics"]["e2e"]["mean"]["error"]) < 0.02


def test_a_model_with_sliding_windows_needs_the_config_that_has_them(run: Run, data_pack: Path, tmp_path: Path) -> None:
    """Tokens of each step are equal without it, KV usage is not, so nothing is judged; with it 5 % and 2 % hold."""
    folder, config = data_pack / "live-vllm-0.29" / "gemma3", tmp_path / "config.json"
    layers = '"num_hidden_layers": 8, "sliding_window": 256, "sliding_window_pattern": 4'
    config.write_text(f'{{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", {layers}}}')
    mode = "step_time=recorded,pre_queue=recorded,output_processing=recorded"
    assert run("ingest", folder, *CSV, "--name", "it", "-q").code == 0
    assert run("calibrate", "--train", "it", "-o", "own.yaml", "-q").code == 0
    judge = ("validate", "it", "--coefficients", "own.yaml", "--replay", mode, "--json")
    assert run(*judge).json["experiments"][0]["verdict"] == "NOT JUDGED"
    assert run("ingest", folder, *CSV, "--engine", config, "--name", "it", "-q").code == 0
    (judged,) = run(*judge).json["experiments"]
    assert judged["verdict"] == "FITS"
    assert abs(judged["metrics"]["ttft"]["mean"]["error"]) < 0.05
    assert abs(judged["metrics"]["e2e"]["mean"]["error"]) < 0.02


def test_an_argument_line_goes_on_where_a_terminal_wrapped_it(run: Run, data_pack: Path, tmp_path: Path) -> None:
    """The log alone is refused, though it was read; beside requests its arguments count."""
    log = data_pack / "field" / "13-wrapped-log"
    alone = run("ingest", log)
    assert alone.code == 4
    assert "server.log" in alone.err
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "server.log").symlink_to(log / "server.log")
    (folder / "bench.json").symlink_to(data_pack / "field" / "11-warm-cache" / "bench.json")
    assert run("ingest", folder, "--name", "it", "-q").code == 0
    inspected = run("inspect", "it", "--json").json
    stated = {name: one["value"] for name, one in inspected["engine"].items() if one["source"] == "recorded"}
    assert stated["max_num_seqs"] == 32 and stated["enable_prefix_caching"] is False
    assert inspected["model"] == "codellama/CodeLlama-34b-Instruct-hf" and inspected["tensor_parallelism"] == 2
