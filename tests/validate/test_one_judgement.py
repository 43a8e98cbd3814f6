"""One judgement for every output, on whatever a recording holds; judgement.py has its states and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from schemas import problems

from blis_replay.validate.experiment import DEFAULT_RELEASE

OVERLOADED = ("34b-reasoning", "70b-hf-reasoning", "7b-reasoning", "mixtral-reasoning")


def strict(text: str) -> Any:
    """JSON without NaN and infinity, which only Python reads."""

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.heavy
@pytest.mark.usefixtures("all_bundled")
def test_validate_explain_gate_and_report_say_the_same_of_each_experiment(run: Run, tmp_path: Path) -> None:
    """34b-reasoning was five failures in one output, an open question in another and a red card in the third."""
    validated = run("validate", "--all", "--json")
    document = strict(validated.out)
    said = {one["alias"]: one["judgement"]["verdict"] for one in document["experiments"]}
    assert {"PASS", "FITS", "UNDECIDED", "NOT JUDGED"} <= set(said.values())

    gate = strict(run("gate", DEFAULT_RELEASE, "--json").out)
    assert {one["alias"]: one["judgement"]["verdict"] for one in gate["experiments"]} == {
        name: said[name] for name in said if not name.startswith("tiny") and name not in gate["left_out"]
    }
    assert {said[name] for name in gate["left_out"] if not name.startswith("tiny")} == {"NOT JUDGED"}

    for name in ("34b-roleplay", "34b-reasoning"):
        assert strict(run("explain", name, "--json").out)["judgement"]["verdict"] == said[name]

    assert run("report", "--all", "--out", "page.html").code == 0
    page = Path("page.html").read_text("utf-8")
    rows = re.findall(r'">([A-Z ]+)</strong></td><th scope="row"><a href="#[^"]*">([^<]+)</a>', page)
    assert {name: verdict for verdict, name in rows} == said


@pytest.mark.slow
@pytest.mark.parametrize("name", OVERLOADED)
@pytest.mark.parametrize("form", ["json", "csv", "markdown", "text"])
def test_a_gate_on_an_overloaded_run_answers_in_every_form(run: Run, name: str, form: str) -> None:
    """Its latencies have no number, and a NaN ended the answer once.  Nothing is covered, so nothing is judged: 4."""
    answer = run("gate", DEFAULT_RELEASE, name, *(() if form == "text" else (f"--{form}",)))
    assert answer.code == 4 and answer.out and not answer.err
    if form == "json":
        document = strict(answer.out)
        assert document["verdict"] == "NOT JUDGED" and list(problems(document)) == []


@pytest.mark.realdata
def test_tpot_three_times_the_simulated_one_fails_though_no_e2e_was_recorded(
    run: Run, data_pack: Path, tmp_path: Path
) -> None:
    """The default file of `vllm bench serve` states TTFT, TPOT and ITL.  Measured are 13.9 ms and -2.0 % of error.

    41.7 ms is beyond: 13.62 simulated are -67.3 %.  E2E of 248 tokens is derived, 45 + 247 x 41.7 ms.
    """
    folder, was = tmp_path / "slow", data_pack / "field" / "04-default-bench-no-e2el"
    folder.mkdir()
    (folder / "engine.yaml").write_bytes((was / "engine.yaml").read_bytes())
    stated = json.loads((was / "inf-cap1.json").read_text("utf-8"))
    tripled = {key: 3 * stated[key] for key in stated if key.endswith(("_tpot_ms", "_itl_ms"))}
    (folder / "bench.json").write_text(json.dumps(stated | tripled))
    assert run("ingest", folder, "--name", "it", "-q").code == 0
    answer = run("validate", "it", "--coefficients", DEFAULT_RELEASE, "--json")
    (judged,) = answer.json["experiments"]
    assert (answer.code, judged["verdict"]) == (1, "FAIL")
    states = {one["key"]: one["state"] for one in judged["judgement"]["judged"]}
    assert states == {"e2e": "beyond", "ttft": "within", "itl": "beyond", "tpot": "beyond"}
    assert judged["metrics"]["e2e"]["mean"]["observed_ms"] == pytest.approx(45 + 247 * 41.7, rel=1e-3)
    assert judged["metrics"]["tpot"]["mean"]["error"] == pytest.approx(-0.673, abs=0.002)
