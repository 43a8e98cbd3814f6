"""What the generator writes, read back by plain parsers, is the truth to the microsecond."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth
from blis_replay_labs.planted.files import ALL, write_experiment
from blis_replay_labs.planted.generate import generate

FAILING = replace(SyntheticExperiment(), failures=12, request_spans=True)


@pytest.fixture(scope="module")
def truth() -> SyntheticTruth:
    return generate(FAILING)


@pytest.fixture(scope="module")
def folder(truth: SyntheticTruth, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / truth.spec.slug
    write_experiment(truth, path)
    return path


def test_all_files_of_an_experiment_are_there(folder: Path) -> None:
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "exp-config.yaml",
        "profile.yaml",
        "results/config.yaml",
        "results/per_request_lifecycle_metrics.json",
        "results/stage_0_lifecycle_metrics.json",
        "results/stage_1_lifecycle_metrics.json",
        "results/summary_lifecycle_metrics.json",
        "trace.csv.gz",
        "trace.yaml",
        "traces.json.gz",
    ]


def test_equal_specs_give_equal_bytes(tmp_path: Path, folder: Path) -> None:
    write_experiment(generate(FAILING), tmp_path)
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (folder / path.relative_to(tmp_path)).read_bytes(), path.name


def test_only_the_files_asked_for_are_written(tmp_path: Path) -> None:
    truth = generate(replace(SyntheticExperiment(), requests=2))
    write_experiment(truth, tmp_path, files=["trace.yaml"])
    assert [path.name for path in tmp_path.rglob("*")] == ["trace.yaml"]
    with pytest.raises(ValueError, match=r"no such file of an experiment: \['gpu\.csv'\]"):
        write_experiment(truth, tmp_path, files=["gpu.csv"])
    assert len(ALL) == 9


def test_a_run_cut_off_in_its_first_stage_has_no_report_of_the_second(tmp_path: Path) -> None:
    write_experiment(generate(replace(SyntheticExperiment(), requests=5)), tmp_path)
    assert [path.name for path in tmp_path.glob("results/stage_*")] == ["stage_0_lifecycle_metrics.json"]


def test_a_run_in_which_everything_fails_has_null_latencies(tmp_path: Path) -> None:
    # The load generator writes null where it has no samples.
    write_experiment(generate(replace(SyntheticExperiment(), requests=5, failures=5)), tmp_path)
    report = json.loads((tmp_path / "results" / "summary_lifecycle_metrics.json").read_text())
    assert report["successes"]["count"] == 0
    assert set(report["successes"]["latency"].values()) == {None}
    assert report["failures"]["request_latency"]["mean"] == pytest.approx(0.1)
