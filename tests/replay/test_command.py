"""A simulator as a command: what it is given, what it may answer, and one line for whatever it does wrong."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import make_recording
from simulator_program import simulator_program

from blis_replay.blis.latency.datasheets import bundled_architectures
from blis_replay.replay.command import CommandError, CommandSimulator, command_simulator
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import parse_mode
from blis_replay.replay.program import run_to_end
from blis_replay.replay.release_file import load_release

RELEASE = load_release("h100-vllm-0.15.1")
# Of three requests the first token comes after 10 us a prompt token, another one each millisecond.
HEADER: dict[str, object] = {"name": "made-up", "version": "7"}
FROM_ENGINE = """
lines.reverse()
engine = json.loads((folder / "engine.json").read_text())
header["not_modelled"].append(engine["arguments"]["max_num_seqs"])
"""


def simulator(folder: Path, change: str = "", timeout_s: float = 60.0) -> CommandSimulator:
    program = folder / "simulator.py"
    program.write_text(simulator_program("10 * int(row['prefill_tokens'])", 1_000, HEADER, FROM_ENGINE + change))
    return command_simulator(f"cmd:{sys.executable} {program}", RELEASE, timeout_s)


def recording(**changed: list[int]):  # type: ignore[no-untyped-def]  # as the fixture makes it
    columns = {
        "arrival_us": [0, 1_000, 2_000],
        "prompt_tokens": [100, 300, 200],
        "output_tokens": [11, 21, 31],
        "ttft_us": [1_000, 3_000, 2_000],
        "e2e_us": [11_000, 23_000, 32_000],
        **changed,
    }
    return make_recording(columns, engine={"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_model_len": 4096})


def test_a_command_gets_the_requests_and_its_answers_are_taken_by_index(tmp_path: Path) -> None:
    """Lines are in reverse order; 300 prompt tokens at 10 us are 3 ms, 20 more tokens 20 ms."""
    run = replay(recording(), RELEASE, parse_mode("exact"), simulator(tmp_path))
    assert run.simulator == f"cmd:{Path(sys.executable).name} {tmp_path / 'simulator.py'}"
    assert run.ttft_us.tolist() == [1_000, 3_000, 2_000]
    assert run.e2e_us.tolist() == [11_000, 23_000, 32_000]
    assert run.simulated.differences == ("made-up 7 does not model: queues", "made-up 7 does not model: 32")


def test_a_command_gets_the_architecture_of_a_model_in_any_case(tmp_path: Path) -> None:
    named = replace(recording(), model=next(iter(bundled_architectures())).upper())
    program = simulator(tmp_path, "header['not_modelled'] = [path.name for path in folder.glob('config.json')]")
    assert replay(named, RELEASE, None, program).simulated.differences == ("made-up 7 does not model: config.json",)


def test_a_single_token_may_wait_for_longer_than_one_ever_takes(tmp_path: Path) -> None:
    """Ten seconds in a queue are no other unit; between two tokens they would be."""
    ones = recording(output_tokens=[1, 1, 1], e2e_us=[1_000, 3_000, 2_000])
    late = simulator(tmp_path, "lines = [(a, 10_000_000, 10_000_000) for a, b, c in lines]")
    assert replay(ones, RELEASE, parse_mode("exact"), late).e2e_us.tolist() == [10_000_000] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sys.exit('no such model')", "ended with exit code 1: no such model"),
        (
            "lines = [(a, b, 'soon') for a, b, c in lines]",
            "is not a table of request_index, ttft_us, e2e_us in numbers",
        ),
        ("lines = lines + lines[:1]", "a request has two lines"),
        ("lines = [(9, b, c) for a, b, c in lines]", "a request_index that is not among 0 to 2"),
        ("lines = [(a, c, b) for a, b, c in lines]", "a request ends before its first token"),
        *[(f"lines = [(a, b * {by}, c * {by}) for a, b, c in lines]", "times are in us") for by in (1e-6, 1e-3, 1e4)],
        ("lines = [(a, -1, c) for a, b, c in lines]", "a time that is not a number from 0 on"),
        ("lines = [(a, 'nan', c) for a, b, c in lines]", "a time that is not a number from 0 on"),
        ("lines = [(a, b, 'inf') for a, b, c in lines]", "a time that is not a number from 0 on"),
        ("lines = [(a, b, 1e300) for a, b, c in lines]", "a time that is not a number from 0 on"),
        ("lines = [('1.5', b, c) for a, b, c in lines]", "a request_index that is not among 0 to 2"),
        ("columns = 'request_index,ttft_us,ttft_us'", "is not a table of"),
        ("lines = [('\\0' * 9, b, c) for a, b, c in lines]", "is not a table of"),
        ("lines = [('\\x1b[31m', b, c) for a, b, c in lines]", "is not a table of"),
        ("header['name'] = '\\ud800\\x1b[31m'; lines = []", "no request was completed"),
        ("header['not_modelled'] = 7", "simulator.json is not"),
        ("header['not_modelled'] = 'queues'", "simulator.json is not"),
        ("header['fitted_on'] = '7b-train'", "simulator.json is not"),
        ("header = eval('[' * 90 + ']' * 90)", "simulator.json is not"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by signal 11"),
        ("import shutil; shutil.rmtree(folder); sys.exit(0)", "wrote no simulator.json"),
        ("import os; os.mkfifo(folder / 'simulator.json'); sys.exit(0)", "wrote no simulator.json"),
        ("(folder / 'simulator.json').symlink_to('/dev/zero'); sys.exit(0)", "wrote no simulator.json"),
        ("(folder / 'simulator.json').mkdir(); sys.exit(0)", "wrote no simulator.json"),
        ("lines = []", "no request was completed"),
        ("lines = lines[1:]", "did not complete 1 requests"),
        ("lines = [(a, b, c) for a, b, c in lines] * 10_000", "has more than 800 bytes"),
        ("header = ['made-up']", "simulator.json is not"),
        ("sys.exit(0)", "wrote no simulator.json"),
    ],
)
def test_what_a_command_does_wrong_is_one_line(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(Exception, match=said) as error:
        replay(recording(), RELEASE, parse_mode("exact"), simulator(tmp_path, change))
    assert type(error.value).__name__ in ("CommandError", "ReplayError")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("told", "scheduled_us", "said"),
    [
        ("500", [500, 500, 500], ()),
        ("500 if a == '1' else ''", None, ("scheduled_us is told of 1 of 3 requests, and used only if of all",)),
        ("''", None, ()),
    ],
)
def test_times_of_scheduling_are_used_if_told_of_all(
    tmp_path: Path, told: str, scheduled_us: list[int] | None, said: tuple[str, ...]
) -> None:
    change = f"columns += ',scheduled_us'; lines = [(a, b, str(c) + ',' + str({told})) for a, b, c in lines]"
    simulated = replay(recording(), RELEASE, None, simulator(tmp_path, change)).simulated
    assert (None if simulated.scheduled_us is None else simulated.scheduled_us.tolist()) == scheduled_us
    assert simulated.differences[2:] == said


def test_a_command_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    slow = simulator(tmp_path, "import time; time.sleep(60)", timeout_s=0.2)
    with pytest.raises(CommandError, match=r"did not end within 0.2 s and was stopped; raise --simulator-timeout"):
        replay(recording(), RELEASE, None, slow)


@pytest.mark.slow
def test_the_last_words_are_the_last_however_many_there_are(tmp_path: Path) -> None:
    """40 MB: neither on a disk nor in memory, where they would be as many as a program writes in its time."""
    talks = "sys.stdout.write('x' * (1 << 22)); sys.stderr.write('garbage\\n' * 5_000_000); sys.exit('no such model')"
    with pytest.raises(CommandError, match="ended with exit code 1: no such model"):
        replay(recording(), RELEASE, None, simulator(tmp_path, talks))


def test_a_file_that_grows_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blis_replay.replay.program.MOST_FILE_BYTES", 1 << 20)
    with pytest.raises(CommandError, match="File too large"):
        replay(recording(), RELEASE, None, simulator(tmp_path, "(folder / 'results.csv').write_bytes(bytes(1 << 22))"))


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    """It answers, and what it started would go on; its standard error is kept open by that."""
    pid = tmp_path / "pid"
    starts = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(pid)!r}, 'w').write(str(p.pid))"
    assert replay(recording(), RELEASE, None, simulator(tmp_path, starts)).ttft_us.tolist() == [1_000, 3_000, 2_000]
    state = Path("/proc", pid.read_text(), "stat")
    for _wait_for_init in range(100):
        if not state.exists() or ") Z " in state.read_text():
            break
        time.sleep(0.01)
    else:
        pytest.fail("it is still there")


@pytest.mark.slow
def test_memory_is_that_of_the_program_and_not_of_this_process() -> None:
    """48 MiB are touched there, while far more are held here."""
    held = bytearray(os.urandom(1)) * (200 << 20)
    with Path(os.devnull).open("w") as nowhere:
        words = [sys.executable, "-c", "held = b'x' * (48 << 20)"]
        end = run_to_end(words, Path.cwd(), nowhere.fileno(), nowhere.fileno(), 60.0)
    assert len(held) == 200 << 20
    assert end.code == 0
    assert 48 << 20 < end.peak_bytes < 100 << 20


def test_a_program_ends_as_it_did(tmp_path: Path) -> None:
    (tmp_path / "no-program").write_text("nothing")
    with Path(os.devnull).open("w") as nowhere:
        at = (tmp_path, nowhere.fileno(), nowhere.fileno(), 60.0)
        assert run_to_end([sys.executable, "-c", "import sys; sys.exit(7)"], *at).code == 7
        assert run_to_end([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], *at).code == -9
        with pytest.raises(PermissionError):
            run_to_end([str(tmp_path / "no-program")], *at)


@pytest.mark.parametrize("text", ["cmd:", "cmd:no-such-program-at-all", "cmd:'open"])
def test_a_command_that_there_is_not_is_named(text: str) -> None:
    with pytest.raises(CommandError):
        command_simulator(text, RELEASE, 1.0)


def test_the_coefficients_are_passed_on(tmp_path: Path) -> None:
    """The command reads the release that the user named, in the form in which releases are written."""
    keep = tmp_path / "kept.yaml"
    reads = f"import shutil; shutil.copy(folder / 'coefficients.yaml', {str(keep)!r})\n"
    replay(recording(), RELEASE, None, simulator(tmp_path, reads))
    assert load_release(str(keep)).models == RELEASE.models
