"""The same requests with other engine arguments, through the command line."""

from __future__ import annotations

import pytest
from command_line import Run

from blis_replay.validate.experiment import DEFAULT_RELEASE


@pytest.mark.slow
def test_a_change_beside_what_was_recorded(run: Run) -> None:
    """10 requests a second that stay 3.7 s each (published) take 37 places: of 24 they have to wait."""
    answer = run("simulate", "--experiment", "34b-codegen", "--set", "max_num_seqs=24", "--json")
    (point,) = answer.json["points"]
    assert answer.code == 0
    (validated,) = run("validate", "34b-codegen", "--json").json["experiments"]
    assert answer.json["judgement"] == validated["judgement"], "one verdict everywhere"
    assert answer.json["recorded"]["engine"] == {"max_num_seqs": 128}
    assert answer.json["provenance"]["coefficients"] == DEFAULT_RELEASE
    assert point["values"]["running"] <= 24
    assert point["values"]["ttft_mean_ms"] > 10 * answer.json["recorded"]["values"]["ttft_mean_ms"]
    # Its queue grows to the end, so nothing but the length of the run says how much longer the wait is.
    assert point["values"]["saturated_from_s"] is not None
    assert (point["change"]["ttft_mean_ms"], point["change_intervals"]["e2e_mean_ms"]) == (None, None)
    assert point["change"]["itl_mean_ms"] == pytest.approx(-0.027, abs=0.01), "24 places are fewer than 28"


@pytest.mark.slow
def test_a_sweep_is_a_table_of_its_combinations(run: Run) -> None:
    sweeps = ["--sweep", "max_num_seqs=64,128", "--sweep", "async_scheduling=false,true"]
    answer = run("simulate", "--experiment", "34b-codegen", *sweeps, "--jobs", "1")
    assert answer.code == 0
    assert answer.err == ""  # progress is for terminals
    assert [line for line in answer.out.splitlines() if line.startswith(("1  max", "4  max"))] == [
        "1  max_num_seqs=64 async_scheduling=false",
        "4  max_num_seqs=128 async_scheduling=true",
    ]
    assert max(map(len, answer.out.splitlines())) <= 80
    # Asynchronous scheduling with 128 places is what was recorded: it changes no mean.
    (same,) = (line for line in answer.out.partition("change of the mean:")[2].splitlines() if line.startswith("4  "))
    assert same.count("+0.0 % (+0.0 .. +0.0 %)") == 3
