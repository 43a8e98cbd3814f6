"""Calibration of synthetic servers whose coefficients are known: it comes to the minimum, or says that it did not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from blis_replay.base.errors import ValidateError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.ingest.recording import REQUEST_SCHEMA, Recording, Setting
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.fit.calibrate import ModelFit, Options, calibrate
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay_labs.planted.servers import Noise, Server, any_server, bent, run_of

pytestmark = pytest.mark.slow

# The bar of calibration on synthetic servers: the true error of mean E2E on another run of the same server.
HELD_OUT = 0.01


def fitted(*recordings: Recording) -> ModelFit:
    return calibrate(recordings, "fit", Options(load_release(DEFAULT_PRIOR)))[1][0]


def held_out_error(server: Server, fit: ModelFit, draw: int = 1) -> float:
    """Of mean E2E on other arrivals and lengths, without noise."""
    truth = run_of(replace(server, noise="none"), draw=draw)
    mode = ReplayMode(scheduling="asynchronous" if server.asynchronous else "synchronous")
    plan = plan_replay(truth, mode)
    result = simulate(plan.trace, plan.engine, fit.entry.latency, fit.entry.lifecycle)
    return float(result.e2e_us.mean() / truth.requests["e2e_us"].to_numpy().mean() - 1)


def test_600_requests_without_noise_give_the_line_back() -> None:
    """8000 us, 30 us a prefill token, 40 us a decode, 0.05 us a context token, 5 ms before the queue.

    A search that stopped far from the minimum gave an intercept of 7,456 us within 7,416 to 7,492.
    """
    line = LatencyModel("blackbox", 8_000_000, 30_000, 40_000, 50)
    server = Server(line, Lifecycle(pre_queue_us=5_000), depth=30, requests=600)
    fit = fitted(run_of(server))
    found = {c.name: c for c in fit.record.coefficients}
    assert found["intercept"].value_us == pytest.approx(8_000, rel=0.01)
    assert found["per_prefill_token"].value_us == pytest.approx(30, rel=0.03)
    assert found["per_context_token"].value_us == pytest.approx(0.05, rel=0.15)
    assert found["pre_queue"].value_us == pytest.approx(5_000, abs=500)
    assert abs(held_out_error(server, fit)) <= 0.003
    assert fit.missed == ()


@pytest.mark.parametrize(
    ("bends", "noise"),
    [
        *(((), noise) for noise in ("none", "steps", "clients")),
        ((16,), "steps"),
        ((64,), "steps"),
        ((32, 64), "clients"),
    ],
)
def test_a_server_of_any_form_is_found_again_at_its_own_load(bends: tuple[int, ...], noise: Noise) -> None:
    """Each number of bends and each noise.  At one load a line does as well as bends, and may be what is found."""
    server = any_server(9, bends, requests=1_000, noise=noise)
    assert abs(held_out_error(server, fitted(run_of(server)))) <= HELD_OUT


@pytest.mark.heavy
@pytest.mark.parametrize("bends", [(32,), (32, 64)])
def test_the_form_of_a_server_is_found_from_two_loads(bends: tuple[int, ...]) -> None:
    """From a load well below the bends and one well above: the bends, and the load between, which is in neither.

    A decode costs 10 us up to the first bend, 100 or 120 beyond it, 20 beyond the second.  Without that form the load
    between is 2.6 and 4.8 % off.
    """
    slopes_us, middle = ([10.0, 100.0] if len(bends) == 1 else [10.0, 120.0, 20.0]), float(np.mean(bends))
    latency = bent(8_000, 30, 0.05, np.array(slopes_us), np.array(bends))
    server = Server(latency, Lifecycle(pre_queue_us=5_000), middle, noise="clients", steps=0.2)
    runs = []
    for draw, share in ((12, 0.4), (13, 2.0)):
        depth = share * middle
        load = replace(server, depth=depth, requests=max(500, int(8 * depth)))
        runs.append(replace(run_of(load, draw=draw), slug=f"run {draw}", alias=f"run {draw}"))
    fit = fitted(*runs)
    above = [c.name.removeprefix("per_decode_token_above_") for c in fit.record.coefficients if "above" in c.name]
    assert above == [str(bend) for bend in bends]
    assert abs(held_out_error(replace(server, requests=1_000), fit)) <= HELD_OUT


def test_two_kinds_of_gpu_are_refused_by_name() -> None:
    """Pooled, the step time would be that of neither."""
    one = run_of(any_server(1, requests=300))
    other = replace(run_of(any_server(2, requests=300), draw=1), hardware="RTX 4090")
    with pytest.raises(ValidateError, match=r"2 kinds of GPU \(H100: 1b-\S+; RTX 4090: 1b-\S+\); calibrate each by"):
        fitted(one, other)
    less_said = replace(other, hardware="NVIDIA H100 80GB HBM3")
    assert fitted(one, less_said).used


def burst(blocks: int | None) -> Recording:
    """150 requests at once on a server whose KV cache holds about 50 of them."""
    line = LatencyModel("blackbox", 20_000_000, 90_000, 60_000, 300)
    server = Server(line, Lifecycle(pre_queue_us=10_000), depth=200, requests=150, output_tokens=150)
    engine = replace(server.engine, num_gpu_blocks=1_500)
    made = run_of(server)
    plan = plan_replay(made, ReplayMode())
    result = simulate(plan.trace, engine, line, server.lifecycle)
    times = {"ttft_us": pl.Series(result.ttft_us), "e2e_us": pl.Series(result.e2e_us)}
    known = {} if blocks is None else {"num_gpu_blocks": Setting(blocks, "recorded")}
    return replace(made, requests=rows_of(made.requests.frame().with_columns(**times)), engine=made.engine | known)


@pytest.mark.heavy
def test_a_fit_that_misses_its_own_training_data_says_so() -> None:
    """Without its KV blocks the server seems to serve all at once, and no step time makes those latencies."""
    known, unknown = fitted(burst(1_500)), fitted(burst(None))
    assert known.missed == ()
    assert any("mean TTFT by" in sentence or "mean E2E by" in sentence for sentence in unknown.missed)


def qwen(folder: Path, name: str, **engine: object) -> Recording:
    """A run of LLMServingSim's, with queue and prefill times of its server; its two clocks meet at the least gap."""
    rows = [json.loads(line) for line in (folder / "vllm" / "requests.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["arrival_time"])
    apart = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    zero = rows[0]["arrival_time"]

    def between(end: str, begin: str) -> list[int]:
        clock = {"arrival_time": apart}
        return [round(1e6 * (row[end] + clock.get(end, 0) - row[begin] - clock.get(begin, 0))) for row in rows]

    columns: dict[str, object] = {
        "request_index": range(len(rows)),
        "arrival_us": [round(1e6 * (row["arrival_time"] - zero)) for row in rows],
        "prompt_tokens": [row["input_toks"] for row in rows],
        "output_tokens": [row["output_toks"] for row in rows],
        "output_tokens_source": ["server usage"] * len(rows),
        "status": ["ok"] * len(rows),
        "ttft_us": between("first_token_ts", "arrival_time"),
        "e2e_us": between("last_token_ts", "arrival_time"),
        "queue_us": between("scheduled_ts", "queued_ts"),
        "prefill_us": between("first_token_ts", "scheduled_ts"),
    }
    frame = pl.DataFrame({n: columns.get(n, [None] * len(rows)) for n in REQUEST_SCHEMA}, schema=REQUEST_SCHEMA)
    made = run_of(any_server(1, requests=300))
    settings = made.engine | {key: Setting(value, "recorded") for key, value in engine.items()}  # type: ignore[arg-type]
    return replace(made, model=name, hardware="RTX", requests=rows_of(frame), engine=settings)


def test_a_real_burst_is_met_by_its_own_fit(data_pack: Path) -> None:
    """Qwen3-32B on an RTX PRO 6000, 128 sequences; a search from one start had an intercept of 0 and -13 % of E2E."""
    folder = data_pack / "llmservingsim" / "RTXPRO6000" / "Qwen3-32B"
    fit = fitted(qwen(folder, "Qwen/Qwen3-32B", max_num_seqs=128, max_model_len=40_960, async_scheduling=True))
    errors = {score.part: score.errors for score in fit.record.scores}
    assert abs(errors["fit"]["e2e"]) <= 0.005
    assert abs(errors["test"]["e2e"]) <= 0.02
    assert next(c for c in fit.record.coefficients if c.name == "intercept").value_us > 10_000
    assert fit.missed == ()


@pytest.mark.heavy
def test_a_real_burst_without_its_kv_blocks_is_refused_and_no_traceback(data_pack: Path) -> None:
    """Llama-3.1-8B on an RTX 4090 with 2,588 KV blocks: told none, a fit ended in NaN, and half of E2E stays missed."""
    folder = data_pack / "llmservingsim" / "RTX4090" / "Llama-3.1-8B"
    told = {"max_num_seqs": 256, "max_model_len": 32_768, "async_scheduling": True}
    fit = fitted(qwen(folder, "meta-llama/Llama-3.1-8B", **told))
    assert any("mean TTFT by -" in sentence for sentence in fit.missed)
    assert np.isfinite([c.value_us for c in fit.record.coefficients]).all()
