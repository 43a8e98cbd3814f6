"""One map for many replays: the same answers whatever executes it, and nothing lost or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import executor_jobs as work
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.replay import executors
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.executors import map_jobs, pool_pays
from blis_replay.replay.processes import RETRIES, Ledger, attempt, pool_map

Map = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A real Ray of two processors, for all tests of this module."""
    ray = pytest.importorskip("ray", reason="install the extra blis-replay[ray]")
    from blis_replay.replay.executors import _start

    _start(ray, 2)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # what Ray leaves to the garbage collector
        ray.shutdown()


# Ray takes seconds to start.
RAY = pytest.param("ray", marks=pytest.mark.slow)


@pytest.fixture(params=["serial", "pool", RAY])
def any_map(request: pytest.FixtureRequest) -> Map:
    """Each executor; ``pool`` without the rule that keeps short jobs in this process."""
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    return _mapping(request.param)


@pytest.fixture(params=["pool", RAY])
def workers_map(request: pytest.FixtureRequest) -> Map:
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    return _mapping(request.param)


def _mapping(name: str) -> Map:
    if name == "pool":
        return lambda work, jobs, progress=None: pool_map(work, jobs, 2, progress)
    return partial(map_jobs, executor=name, workers=2)


@pytest.mark.heavy
def test_answers_are_those_of_the_jobs_in_their_order(any_map: Map) -> None:
    assert any_map(work.drawn, range(20)) == [work.drawn(seed) for seed in range(20)]
    assert any_map(work.drawn, []) == []


def test_the_failure_is_the_first_in_order_and_as_it_was_raised(any_map: Map) -> None:
    with pytest.raises(KeyError) as raised:
        any_map(work.failing_from_four, range(8))
    assert raised.value.args == (4,)


def test_where_a_failure_in_a_worker_happened_is_noted(workers_map: Map) -> None:
    with pytest.raises(KeyError) as raised:
        workers_map(work.failing_from_four, range(8))
    assert "in failing_from_four" in raised.value.__notes__[0]


def test_a_failure_that_cannot_be_carried_over_is_named(workers_map: Map) -> None:
    with pytest.raises(ReplayError, match=r"^StubbornError: no 0$"):
        workers_map(work.stubborn, range(2))


@pytest.mark.slow
def test_a_lost_worker_is_replaced_and_its_job_done_again(workers_map: Map, tmp_path: Path) -> None:
    assert workers_map(partial(work.killed_once, tmp_path), range(6)) == [0, 1, 4, 9, 16, 25]
    assert (tmp_path / "killed").exists()


@pytest.mark.slow
def test_a_job_that_always_loses_its_worker_is_given_up(workers_map: Map, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"^job 3 of 4 lost its worker 3 times .* --executor serial"):
        workers_map(partial(work.killed_always, tmp_path), range(4))
    assert len(list(tmp_path.iterdir())) == 1 + RETRIES


def test_what_the_work_binds_goes_to_a_worker_once(workers_map: Map, tmp_path: Path) -> None:
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
    script = "from blis_replay.replay.processes import pool_map; print(pool_map(abs, [-1, -2], 2, None))"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.stderr) == ("[1, 2]\n", "")
    assert not (tmp_path / "executed").exists()


def test_a_map_inside_a_worker_stays_there(workers_map: Map) -> None:
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


def test_without_ray_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ReplayError, match=r"pip install 'blis-replay\[ray\]'") as raised:
        map_jobs(work.drawn, [1], executor="ray")
    assert len(str(raised.value).splitlines()) == 1


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nSee the documentation.")

    nobody = SimpleNamespace(RayError=RuntimeError)
    unconnected = SimpleNamespace(init=init, is_initialized=lambda: False, shutdown=lambda: None, exceptions=nobody)
    monkeypatch.setitem(sys.modules, "ray", unconnected)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ReplayError) as raised:
        map_jobs(work.drawn, [1], executor="ray")
    assert str(raised.value) == (
        "the cluster at 10.0.0.1:6379 does not answer (Could not find any running Ray instance.); use --executor local"
    )


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("kind", [RuntimeError, Exception])
def test_a_ray_of_this_machine_that_does_not_come_up_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception], failures: int
) -> None:
    """Its server that does not come up is a RuntimeError; a node that does not register in 30 s, a bare Exception."""
    starts: list[dict[str, object]] = []

    def init(**options: object) -> None:
        starts.append(options)
        if len(starts) <= failures:
            raise kind("Timed out waiting for file /tmp/port")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    slow = SimpleNamespace(init=init, exceptions=SimpleNamespace(RayError=RuntimeError))
    said = "a Ray of this machine does not answer (Timed out waiting for file /tmp/port); "
    if failures == 1:
        executors._start(slow, 2)
    else:
        with pytest.raises(ReplayError) as raised:
            executors._start(slow, 2)
        assert str(raised.value) == said + "use --executor local"
    assert capsys.readouterr().err == said + "starting it once more\n"
    assert [options["num_cpus"] for options in starts] == [2, 2]


def test_processes_of_a_start_that_failed_are_let_go_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves their handles in circles for the collector of garbage; a test fails where one is warned of later."""
    running: list[weakref.ref[subprocess.Popen[bytes]]] = []

    def init(**_options: object) -> None:
        if not running:
            circle: list[object] = [
                subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
            ]
            circle.append(circle)
            running.append(weakref.ref(circle[0]))  # type: ignore[arg-type]
            raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    executors._start(SimpleNamespace(init=init, exceptions=SimpleNamespace(RayError=RuntimeError)), 2)
    assert running[0]() is None


_SCRIPT = """
import sys
from functools import partial
from pathlib import Path
import executor_jobs as work
from blis_replay.replay.processes import pool_map
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


@pytest.mark.slow
@given(st.integers(0, 12), st.sets(st.integers(0, 12)), st.randoms(use_true_random=False))
def test_the_books_end_as_if_done_one_after_the_other(jobs: int, failing: set[int], chance: Any) -> None:
    """Whatever comes back when, and is lost now and then: all answers, or the first failure in order."""
    import pickle

    def outcome(job: int) -> bytes:
        if job in failing:
            return pickle.dumps((False, KeyError(job)))
        return attempt(pickle.dumps(work.drawn), pickle.dumps(job))

    ledger, out, lost = Ledger(jobs, None), [], set()
    while not ledger.finished:
        while len(out) < 3 and (handed := ledger.hand_out()) is not None:
            out.append(handed)
        job = out.pop(chance.randrange(len(out)))
        if job not in lost and chance.random() < 0.2:
            lost.add(job)
            ledger.lost(job, "killed")
        else:
            ledger.done(job, outcome(job))
    first = min((job for job in failing if job < jobs), default=None)
    if first is None:
        assert ledger.answers() == [work.drawn(job) for job in range(jobs)]
    else:
        with pytest.raises(KeyError) as raised:
            ledger.answers()
        assert raised.value.args == (first,)
