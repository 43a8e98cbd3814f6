"""One map for many replays: the same answers whatever executes it, and nothing lost or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import executor_jobs as work
import pytest

from blis_replay.base.errors import ReplayError
from blis_replay.replay import executors
from blis_replay.replay.executors import Progress, map_jobs, pool_map, pool_pays

Map = Callable[..., list[Any]]


@pytest.fixture(params=["serial", "pool"])
def any_map(request: pytest.FixtureRequest) -> Map:
    """Each executor; ``pool`` without the rule that keeps short jobs in this process."""
    return workers_map if request.param == "pool" else partial(map_jobs, workers=1)


def workers_map(work: Callable[[Any], Any], jobs: Sequence[Any], progress: Progress | None = None) -> list[Any]:
    return pool_map(work, jobs, 2, progress)


@pytest.mark.heavy
def test_answers_are_those_of_the_jobs_in_their_order(any_map: Map) -> None:
    assert any_map(work.drawn, range(20)) == [work.drawn(seed) for seed in range(20)]
    assert any_map(work.drawn, []) == []


def test_the_failure_is_the_first_in_order_and_as_it_was_raised(any_map: Map) -> None:
    """Where it happened in a worker is noted."""
    with pytest.raises(KeyError) as raised:
        any_map(work.failing_from_four, range(8))
    assert raised.value.args == (4,)
    assert any_map is not workers_map or "in failing_from_four" in str(raised.value.__cause__)


def test_a_failure_that_cannot_be_carried_over_is_named() -> None:
    with pytest.raises(ReplayError, match=r"^StubbornError: no 0$"):
        workers_map(work.stubborn, range(2))


@pytest.mark.slow
def test_a_killed_worker_is_one_clear_line(tmp_path: Path) -> None:
    line = r"^a worker process was killed; if memory is short use fewer --jobs, or 1 to see .*$"
    with pytest.raises(ReplayError, match=line) as raised:
        workers_map(partial(work.killed_always, tmp_path), range(4))
    assert len(str(raised.value).splitlines()) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_what_the_work_binds_goes_to_a_worker_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    assert workers_map(partial(work.with_large, work.Large(notes)), range(30)) == list(range(30))
    processes = notes.read_text().split()
    assert len(processes) == len(set(processes)) < 10


def test_progress_is_told_after_each_job(any_map: Map) -> None:
    told: list[tuple[int, int]] = []
    any_map(work.drawn, range(5), progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 5) for done in (1, 2, 3, 4, 5)]


def test_workers_import_nothing_from_the_working_directory(tmp_path: Path) -> None:
    """Python puts it first on the path of what multiprocessing starts: workers and the tracker of their resources."""
    for name in ("multiprocessing", "pickle", "random"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath('executed').write_text('')\n")
    script = "from blis_replay.replay.executors import pool_map; print(pool_map(abs, [-1, -2], 2, None))"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.stderr) == ("[1, 2]\n", "")
    assert not (tmp_path / "executed").exists()


def test_a_map_inside_a_worker_stays_there() -> None:
    (processes,) = map(set, workers_map(work.map_inside, [0]))
    assert len(processes) == 1
    assert processes != {os.getpid()}


@pytest.fixture
def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool takes to start, as it is outside of tests."""
    monkeypatch.setattr(executors, "POOL_START_S", 2.0)


@pytest.mark.usefixtures("two_seconds")
@pytest.mark.parametrize(
    ("jobs", "seconds_each", "workers", "pays"),
    [
        # Saved: the jobs that others do meanwhile, 100 - 50 of 0.1 s, against 2 s of start.
        (100, 0.1, 2, True),
        (100, 0.03, 2, False),
        # One worker, or one job, saves nothing, however long it takes.
        (100, 10.0, 1, False),
        (1, 100.0, 8, False),
        # Three jobs on two workers: the longer share has two.
        (3, 2.0, 2, False),
        (4, 2.0, 2, True),
    ],
)
def test_when_a_pool_pays(jobs: int, seconds_each: float, workers: int, pays: bool) -> None:
    assert pool_pays(jobs, seconds_each, workers) is pays


@pytest.mark.usefixtures("two_seconds")
def test_short_jobs_stay_in_this_process() -> None:
    assert set(map_jobs(work.process_of, range(50), workers=2)) == {os.getpid()}


@pytest.mark.heavy
@pytest.mark.usefixtures("two_seconds")
def test_long_jobs_go_to_a_pool_after_the_first() -> None:
    told: list[int] = []
    first, *others = map_jobs(
        work.process_of_a_long, range(5), workers=4, progress=lambda done, total: told.append(done)
    )
    assert first == os.getpid()
    assert os.getpid() not in others
    assert told == [1, 2, 3, 4, 5]


_SCRIPT = """
import sys
from functools import partial
from pathlib import Path
import executor_jobs as work
from blis_replay.replay.executors import pool_map
if __name__ == "__main__":
    pool_map(partial(work.slow, Path(sys.argv[1])), {jobs}, 2, None)
"""


def _started(tmp_path: Path, jobs: list[int]) -> tuple[subprocess.Popen[str], list[int]]:
    """A program that maps slow jobs, in a process group of its own, and the processes of its two workers."""
    script, notes = tmp_path / "script.py", tmp_path / "notes"
    script.write_text(_SCRIPT.format(jobs=jobs))
    notes.mkdir()
    program = subprocess.Popen(
        [sys.executable, script, notes],
        env=os.environ | {"PYTHONPATH": str(Path(work.__file__).parent)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _until(lambda: len(list(notes.iterdir())) == 2)
    return program, [int(note.name) for note in notes.iterdir()]


def _until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.02)


def _gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _blocks_interrupts(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.split("SigBlk:")[1].split()[0], 16) & 1 << signal.SIGINT - 1)


@pytest.mark.slow
def test_an_interrupt_ends_all_processes_at_once(tmp_path: Path) -> None:
    program, workers = _started(tmp_path, [1, 2])
    assert all(map(_blocks_interrupts, workers))  # the first as well, with which a tracker of multiprocessing starts
    os.killpg(program.pid, signal.SIGINT)  # what Ctrl-C does: workers get it too
    _, said = program.communicate(timeout=5)  # of jobs of 60 s
    assert program.returncode == -signal.SIGINT
    assert said.count("KeyboardInterrupt") == 1  # nobody but the program itself complains
    assert all(map(_gone, workers))


@pytest.mark.slow
def test_workers_of_a_killed_program_end_with_their_job(tmp_path: Path) -> None:
    program, workers = _started(tmp_path, [0, 0, 0, 0])
    program.kill()
    program.communicate()
    _until(lambda: all(map(_gone, workers)), seconds=5)  # of jobs of 1.1 s
