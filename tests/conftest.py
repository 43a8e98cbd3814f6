"""What tests share: where the recordings of the data pack are, and that they were used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine makes an example slow, which is no failure of what it shows.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

DATA_PACK = Path(os.environ.get("BLIS_REPLAY_DATA", Path(__file__).parents[2] / "shared" / "data"))
_outcomes = {"passed": 0, "failed": 0, "skipped": 0}


@pytest.fixture(scope="session")
def data_pack() -> Path:
    """The folder of real recordings; skips, with the reason, only where it is absent."""
    if not (DATA_PACK / "NOTES.md").is_file():
        pytest.skip(f"no data pack at {DATA_PACK}; set BLIS_REPLAY_DATA to its folder")
    return DATA_PACK


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what became of the tests on real recordings."""
    if "realdata" in report.keywords and (report.when == "call" or report.skipped):
        _outcomes[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where they must run (BLIS_REPLAY_DATA_MUST_RUN) and the folder is there, a run without them fails."""
    is_worker = hasattr(session.config, "workerinput")
    if is_worker or not os.environ.get("BLIS_REPLAY_DATA_MUST_RUN") or not (DATA_PACK / "NOTES.md").is_file():
        return
    if _outcomes["skipped"] or not _outcomes["passed"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran on real recordings."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in _outcomes.items())
    terminalreporter.write_line(f"on real recordings: {counts}")
