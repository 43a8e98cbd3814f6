"""Commands that an answer prints to go on with can be given as they stand."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Run
from planted import PLANTED, planted_recording, wrong_release

from blis_replay.blis.releases.fit import FitRecord, PartScore
from blis_replay.blis.releases.release import CoefficientRelease, format_release
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import Recording, Stage
from blis_replay.ingest.store import open_store
from blis_replay.validate import STORE_DEFAULT
from blis_replay.validate.explain.attribute import attribute
from blis_replay.validate.explain.text import explanations
from blis_replay_labs.planted.causes import line

_COMMAND = re.compile(r"blis-replay ((?:explain|coefficients test|calibrate) [^;`]*)")


@pytest.mark.heavy
@pytest.mark.usefixtures("all_bundled")
def test_a_command_of_an_error_has_the_store_of_what_failed(run: Run, tmp_path: Path) -> None:
    """As typed it looked into the usual store, which knows no such experiment."""
    with open_store(tmp_path / "my store.duckdb") as store:
        ingest_recording(store, planted_recording(3).recording)
    there = ("--store", "my store.duckdb")
    refused = run("validate", "1b-general", "--coefficients", "cpu-vllm-0.32.0", *there).err
    (advised,) = re.findall(r"`blis-replay ([^`]*)`", refused)
    assert shlex.split(advised)[-2:] == list(there)
    assert run(*shlex.split(advised)).code == 0
    assert Path("FILE.yaml").exists()
    (advised,) = re.findall(r"`blis-replay ([^`]*)`", run("inspect", "nosuch", *there).err)
    assert "1b-general" in run(*shlex.split(advised)).out
    assert "--store" not in run("validate", "./runs/mine").err, "the usual one is not repeated"


@pytest.mark.heavy
def test_every_command_that_attribute_prints_runs_as_it_stands(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coefficients of one's own and a store elsewhere; steps 20 % too short are not called too long.

    Who has fitted them to this recording is sent to `coefficients test`, others to `calibrate`.
    """
    monkeypatch.chdir(tmp_path)
    planted = planted_recording(3, replace(PLANTED, stages=(Stage(0, 8.0, 20_000_000),)), tmp_path / "tokens")
    with open_store(tmp_path / "else.duckdb") as store:
        ingest_recording(store, planted.recording)
    printed: set[str] = set()
    for factor in (0.8, 1.25):
        release = wrong_release(planted, line(intercept=factor))
        commands = _printed(run, planted.recording, release, "longer" if factor > 1 else "less time")
        assert {command.split(" -")[0] for command in commands} == {
            "coefficients test 1b-general",
            "calibrate 1b-general",
        }
        printed |= commands
    for command in printed:
        words = shlex.split(re.split(r" (?=TTFT|E2E|ITL)", command)[0])
        assert "else.duckdb" in words
        assert words[0] == "calibrate" or "own.yaml" in words
        assert run(*words).code in (0, 1), command


def _printed(run: Run, recording: Recording, release: CoefficientRelease, take: str) -> set[str]:
    """The commands that are printed with this release in own.yaml, fitted elsewhere and to the recording."""
    Path("own.yaml").write_text(format_release(release), "utf-8")
    answer = run("explain", "--experiment", recording.alias, "--coefficients", "own.yaml", "--store", "else.duckdb")
    text = " ".join(answer.out.split())
    assert f"simulator's steps take {take} than the server's" in text

    score = PartScore(recording.slug, "fit", 0.0, 0.6, 100, {})
    record = FitRecord("line", 0.6, 0.8, "asynchronous", "asynchronous", "", coefficients=(), scores=(score,))
    fitted = replace(release, models=tuple(replace(entry, fit=record) for entry in release.models))
    told = " --coefficients own.yaml --store else.duckdb"
    sentences = explanations(attribute(recording, fitted, options=told))
    assert all(re.search(r": blis-replay [^;]*$", one) for one in sentences if "blis-replay" in one), "not at the end"
    return {command.strip() for command in _COMMAND.findall(" ".join(sentences)) + _COMMAND.findall(text)}


@pytest.mark.slow
@pytest.mark.usefixtures("stored_demo")
def test_the_command_after_a_fit_names_a_file_with_a_blank_and_the_store(run: Run) -> None:
    """Typed as it is printed, it judges by the fit and in the store of before."""
    STORE_DEFAULT.rename("my store.duckdb")
    fitted = run("calibrate", "1b-general", "--out", "my fit.yaml", "--store", "my store.duckdb")
    command = re.findall(r"^ +blis-replay (.*)$", fitted.out, flags=re.M)[-1]
    assert command == "validate 1b-general --coefficients 'my fit.yaml' --store 'my store.duckdb'"
    judged = run(*shlex.split(command))
    assert judged.code == 0
    assert "--coefficients 'my fit.yaml' --store 'my store.duckdb'" in " ".join(judged.out.split())


@pytest.mark.slow
@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("asked", [["--set", "max_num_seqs=64"], ["--find", "rate", "--slo", "ttft.p95=9s"]])
def test_the_command_of_whatif_names_the_coefficients_and_the_store(run: Run, asked: list[str]) -> None:
    """The error of the simulator is that of these coefficients, and the recording is in no other store."""
    STORE_DEFAULT.rename("my store.duckdb")
    Path("mine.yaml").rename("my fit.yaml")
    given = ["--coefficients", "my fit.yaml", "--store", "my store.duckdb"]
    printed = run("simulate", "1b-general", *asked, *given).out
    (command,) = re.findall(r"^ +blis-replay (.*)$", printed, flags=re.M)
    assert command == "validate 1b-general --coefficients 'my fit.yaml' --store 'my store.duckdb'"
    assert run(*shlex.split(command)).code == 0


@pytest.mark.slow
def test_failed_requests_of_published_experiments_stay_when_they_are_stored(run: Run) -> None:
    """Of the 16 bundled experiments 8,966 requests failed as published; one that is stored is made without."""

    def failed() -> int:
        return sum(row["failed"] for row in run("list", "--json").json["experiments"])

    before = failed()
    run("inspect", "--experiment", "34b-reasoning")
    assert (before, failed()) == (8966, 8966)
