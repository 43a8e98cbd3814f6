"""The same requests with other engine arguments, through the command line."""

from __future__ import annotations

import pytest
from command_line import Run

from blis_replay.validate.experiment import DEFAULT_RELEASE


@pytest.mark.slow
def test_a_change_beside_what_was_recorded(run: Run) -> None:
    """10 requests a second that stay 3.7 s each (published) take 37 places: of 24 they have to wait."""
    answer = run("whatif", "--experiment", "34b-codegen", "--set", "max_num_seqs=24", "--json")
    (point,) = answer.json["points"]
    assert answer.code == 0
    assert answer.json["recorded"]["engine"] == {"max_num_seqs": 128}
    assert answer.json["provenance"]["coefficients"] == DEFAULT_RELEASE
    assert point["values"]["running"] <= 24
    assert point["change"]["ttft_mean_ms"] > 10


@pytest.mark.slow
def test_a_sweep_is_a_table_of_its_combinations(run: Run) -> None:
    sweeps = ["--sweep", "max_num_seqs=64,128", "--sweep", "async_scheduling=false,true"]
    answer = run("whatif", "--experiment", "34b-codegen", *sweeps, "--executor", "serial")
    assert answer.code == 0
    assert answer.err == ""  # progress is for terminals
    assert [line for line in answer.out.splitlines() if line.startswith(("1  max", "4  max"))] == [
        "1  max_num_seqs=64 async_scheduling=false",
        "4  max_num_seqs=128 async_scheduling=true",
    ]
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ([], 2, "say what is to change"),
        (["--set", "max_num_seqs"], 2, "--set max_num_seqs: no value; write max_num_seqs=VALUE"),
        (["--set", "max_num_seqs=1", "--set", "max_num_seqs=2"], 2, "max_num_seqs is given twice"),
        (["--set", "max_num_seqs=1", "--sweep", "max_num_seqs=2"], 2, "by --set and by --sweep"),
        (["--set", "temperature=1"], 2, "error: 'temperature' is not an engine argument; use max_num_seqs"),
        (["--set", "max_num_seqs=1,2"], 2, "that is several values; try each: --sweep max_num_seqs=1,2"),
        (["--sweep", "max_num_seqs=1,x"], 2, "error: max_num_seqs=x is not possible; give a whole number"),
        (["--set", "max_model_len=100"], 3, "error: 34b-codegen: nothing could be simulated: request 0: a prompt of"),
        (["--set", "max_num_seqs=1", "--workers", "0"], 2, "--workers"),
        (["--find", "rate"], 2, "give limits with --slo ttft.p95=500ms,itl.p95=50ms"),
        (["--find", "rate", "--slo", "ttft=1s"], 2, "error: --slo 'ttft=1s' is not an objective"),
        (["--find", "rate", "--slo", "ttft.p95=1s", "--set", "rate=2"], 2, "leave rate to it"),
        (["--set", "ramp_s=2"], 2, "say how many clients"),
    ],
)
def test_wrong_use_is_one_line(run: Run, arguments: list[str], code: int, complaint: str) -> None:
    answer = run("whatif", "--experiment", "34b-codegen", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert complaint in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.slow
@pytest.mark.usefixtures("stored_demo")
def test_validate_says_which_of_the_two_is_saturated(run: Run) -> None:
    """The demo never queues as recorded, and does with 2 places: 10 to 15 requests a second of 24 steps of 9 ms."""
    run("calibrate", "--train", "1b-general", "--out", "own.yaml")
    validate = ["validate", "--experiment", "1b-general", "--coefficients", "own.yaml"]
    assert "saturation" not in run(*validate).out
    validate += ["--replay", "max_num_seqs=2"]
    (experiment,) = run(*validate, "--json").json["experiments"]
    queues = experiment["saturation"]
    assert queues["meaningless_from_s"] is None and queues["observed"]["from_s"] is None
    assert queues["simulated"]["from_s"] is not None
