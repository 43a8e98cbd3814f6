"""Kept answers of a command, scored from a zip file: the same numbers as the command, or one line."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from recordings import make_recording
from simulator_program import simulator_program

from blis_replay.ingest.recording import Recording
from blis_replay.replay.command import CommandError, command_simulator
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import parse_mode
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulators import SimulatorInputs, simulator_named
from blis_replay.validate.comparison.held_out import use_of_run

RELEASE = load_release("h100-vllm-0.15.1")
# 10 us per prompt token, 1 ms per further token; keeps its folder, as a submitter would.
HEADER: dict[str, object] = {"name": "mine", "not_modelled": [], "fitted_on": ["some-test"]}
KEEP = """
import shutil
shutil.copytree(folder, pathlib.Path(sys.argv[1]) / folder.name)
"""
PROGRAM = simulator_program("10 * int(row['prompt_tokens'])", 1_000, HEADER) + KEEP


def recording(first_prompt: int) -> Recording:
    columns = {
        "arrival_us": [0, 1_000],
        "prompt_tokens": [first_prompt, 300],
        "output_tokens": [11, 21],
        "ttft_us": [1_000, 3_000],
        "e2e_us": [11_000, 23_000],
    }
    return make_recording(columns)


def served(name: str, of: Recording) -> ReplayRun:
    return replay(of, RELEASE, parse_mode("exact"), simulator_named(name, SimulatorInputs(RELEASE, Path("store"))))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folders of answers to two recordings."""
    (tmp_path / "program.py").write_text(PROGRAM)
    simulator = command_simulator(f"cmd:{sys.executable} {tmp_path / 'program.py'} {tmp_path / 'kept'}", RELEASE, 60.0)
    for first_prompt in (100, 200):
        replay(recording(first_prompt), RELEASE, parse_mode("exact"), simulator)
    return tmp_path / "kept"


def zipped(kept: Path, *without: str) -> str:
    file = kept.with_suffix(".zip")
    with zipfile.ZipFile(file, "w") as archive:
        for path in kept.rglob("*"):
            if path.name not in without:
                archive.write(path, path.relative_to(kept))
    return f"zip:{file}"


def test_answers_are_found_by_their_requests(kept: Path) -> None:
    """100 and 200 prompt tokens at 10 us each."""
    name = zipped(kept)
    for first_prompt in (100, 200):
        run = served(name, recording(first_prompt))
        assert run.ttft_us.tolist() == [10 * first_prompt, 3_000]
        assert run.e2e_us.tolist() == [10 * first_prompt + 10_000, 23_000]
        assert run.simulator == "zip:kept.zip"


def test_a_submission_says_itself_what_it_was_fitted_on_by_slug_or_alias(kept: Path) -> None:
    assert use_of_run(served(zipped(kept), recording(100))) == "fitted on this run"


@pytest.mark.parametrize("without", ["results.csv", "simulator.json", "requests.csv"])
def test_an_incomplete_submission_is_refused(kept: Path, without: str) -> None:
    with pytest.raises(CommandError):
        served(zipped(kept, without), recording(100))


def test_answers_to_other_requests_are_not_taken(kept: Path) -> None:
    with pytest.raises(CommandError, match="no answers to these requests"):
        served(zipped(kept), recording(101))


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04" + bytes(100), b"PK\x05\x06" + bytes(18)])
def test_what_is_no_zip_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(CommandError):
        served(f"zip:{tmp_path / 'a.zip'}", recording(100))


def test_a_damaged_member_is_refused(kept: Path) -> None:
    path = Path(zipped(kept).removeprefix("zip:"))
    path.write_bytes(path.read_bytes().replace(b"request_index", b"request_indez"))
    with pytest.raises(CommandError):
        served(f"zip:{path}", recording(100))


def test_two_answers_to_the_same_requests_are_refused(kept: Path) -> None:
    for folder in [path.parent for path in kept.rglob("requests.csv")]:
        shutil.copytree(folder, kept / "again" / folder.name)
    with pytest.raises(CommandError, match="2 folders"):
        served(zipped(kept), recording(100))


def test_a_missing_file_is_said() -> None:
    with pytest.raises(CommandError, match="no such file"):
        served("zip:nowhere.zip", recording(100))
