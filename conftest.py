"""What tests share: where the recordings of the data pack are, and that they were used."""

from __future__ import annotations

import os

# As the command line does, before anything imports numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import fcntl
import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from pack import JANUARY, h100_folders

from blis_replay.fixtures.catalogue import profile_of
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.store import Store, open_store
from blis_replay.replay import executors
from blis_replay.validate.experiment import all_experiments

# A busy machine makes an example slow, which is no failure of what it shows.
# In CI the same examples each time: what a new one finds is for the loop of daily work.
settings.register_profile("no_deadline", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("no_deadline")

# What is imported to collect tests stays: to look for garbage meanwhile takes a seventh of that time.
gc.disable()

# Beside other tests a pool of processes is no faster, and takes two seconds to start: who tests one says so.
executors.POOL_START_S = float("inf")

# Tests write thousands of small files and wait for the disk at each: they are kept in memory where that has room (all
# that is there at a time is below a gigabyte) and where a program can be run, as some of them are.
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 (pytest makes a folder of its own there)


def _serves(folder: Path) -> bool:
    if not os.access(folder, os.W_OK):
        return False
    told = os.statvfs(folder)
    return told.f_bavail * told.f_frsize > 4 << 30 and not told.f_flag & os.ST_NOEXEC


if _serves(_IN_MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_IN_MEMORY))

pytest_plugins = ["cli_fixtures"]

DATA_PACK = Path(os.environ.get("BLIS_REPLAY_DATA", Path(__file__).parents[1] / "shared" / "data"))
_outcomes = {"passed": 0, "failed": 0, "skipped": 0}


@pytest.fixture(scope="session")
def data_pack() -> Path:
    """The folder of real recordings; skips, with the reason, only where it is absent."""
    if not (DATA_PACK / "NOTES.md").is_file():
        pytest.skip(f"no data pack at {DATA_PACK}; set BLIS_REPLAY_DATA to its folder")
    return DATA_PACK


@pytest.fixture(scope="session")
def h100_store(data_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the twelve recorded H100 experiments, ingested once for all workers: copy it before you write."""

    def make(path: Path) -> None:
        for directory in h100_folders(data_pack):
            assert ingest_source(path, directory, profile=profile_of(directory.name)).outcome == "new"

    return _made_once(tmp_path_factory, "h100", make)


@pytest.fixture(scope="session")
def bundled_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of all experiments that ship, made once for all workers: copy it before you write."""

    def make(path: Path) -> None:
        with open_store(path) as store:
            all_experiments(store)

    return _made_once(tmp_path_factory, "bundled", make)


@pytest.fixture(scope="session")
def real_store(data_pack: Path, h100_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with the twelve H100 recordings and the three of vLLM 0.11 of the data pack."""
    path = Path(shutil.copy(h100_store, tmp_path_factory.mktemp("store")))
    for name in JANUARY:
        ingest_source(path, data_pack / "blis-eval" / name, profile=profile_of(name))
    with open_store(path) as store:
        yield store


def _made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The store of that name, which the first worker to ask makes."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = folder / f"{name}.duckdb"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = folder / f"{name}-made.duckdb"
            make(made)
            made.rename(path)
    return path


def pytest_collection_finish() -> None:
    """What was collected stays to the end: nobody has to go through its objects again, nor so often through others."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# What a test needs is seen from its fixtures, so that no mark can be forgotten.
_NEEDS = {"data_pack": "realdata", "browser": "browser"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need recordings or a browser, before `-m` chooses among them."""
    for item in items:
        for fixture, mark in _NEEDS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what became of the tests on real recordings."""
    if "realdata" in report.keywords and (report.when == "call" or report.skipped):
        _outcomes[report.outcome] += 1


def _missed() -> bool:
    """Whether tests on recordings must run (BLIS_REPLAY_DATA_MUST_RUN), could, and did not."""
    must = bool(os.environ.get("BLIS_REPLAY_DATA_MUST_RUN")) and (DATA_PACK / "NOTES.md").is_file()
    return must and bool(_outcomes["skipped"] or not _outcomes["passed"])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that should have used the recordings and did not fails."""
    gc.unfreeze()  # or modules written in C complain at the end of what is left
    if not hasattr(session.config, "workerinput") and _missed():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran on real recordings, where any was chosen."""
    if any(_outcomes.values()):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in _outcomes.items())
        terminalreporter.write_line(f"on real recordings: {counts}")
    if _missed():
        terminalreporter.write_line("failed: BLIS_REPLAY_DATA_MUST_RUN is set, and not all tests on recordings ran")
