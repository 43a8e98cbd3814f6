"""The functions for notebooks say what the command line says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from blis_replay.fixtures.synthetic import write_demo
from blis_replay.ingest.errors import UnknownExperimentError
from blis_replay.validate import notebook as br

_TUTORIAL = Path(__file__).parents[2] / "scripts" / "tutorial.py"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebook")
    truth = write_demo(folder)
    read = br.ingest(folder / truth.spec.slug, store=folder / "s.duckdb")
    assert read["alias"].to_list() == ["1b-general"]
    return folder / "s.duckdb"


def test_metrics_are_those_of_the_table(store: Path) -> None:
    """34b-general, published: TTFT 51.59 ms, E2E 4,092.50 ms."""
    frame = br.metrics("34b-general", store=store)
    means = {row["metric"]: row for row in frame.filter(pl.col("statistic") == "mean").iter_rows(named=True)}
    assert means["ttft"]["observed_us"] == pytest.approx(51_590, abs=5)
    assert means["e2e"]["observed_us"] == pytest.approx(4_092_500, abs=5)
    assert means["e2e"]["error"] == pytest.approx(means["e2e"]["simulated_us"] / means["e2e"]["observed_us"] - 1)


def test_requests_and_steps_are_those_of_one_run(store: Path) -> None:
    """The first token of a request comes of its prefill, every other one of a decode; none is preempted."""
    requests, steps = br.requests("34b-codegen", store=store), br.steps("34b-codegen", store=store)
    run = br.replay("34b-codegen", store=store)
    assert requests["simulated_ttft_us"].to_list() == run.ttft_us.tolist()
    assert requests["simulated_e2e_us"].to_list() == run.e2e_us.tolist()
    assert steps["decode_tokens"].cast(pl.Int64).sum() == requests["output_tokens"].sum() - len(requests)


def test_parts_of_an_error_sum_to_it(store: Path) -> None:
    frame = br.attribution("34b-general", replay="scheduling=synchronous", store=store)
    ttft = frame.filter((pl.col("metric") == "ttft") & (pl.col("statistic") == "mean"))
    shares = dict(ttft.select("part", "share_us").iter_rows())
    error_us = shares.pop("error")
    assert sum(shares.values()) == pytest.approx(error_us)
    assert max(shares, key=lambda part: abs(shares[part])) == "scheduling mode"


def test_the_environment_names_the_store_as_for_the_command_line(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLIS_REPLAY_STORE", str(store))
    assert br.recording("1b-general").requests.height == 300
    with pytest.raises(UnknownExperimentError, match="did you mean 1b-general"):
        br.recording("1b-generl")


def test_the_tutorial_runs_to_its_end() -> None:
    ended = subprocess.run([sys.executable, _TUTORIAL], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "scheduling mode" in ended.stdout
    assert ended.stdout.rstrip().endswith("┘")  # the last table was printed whole
