"""The command line as a user calls it, in the same process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import Answer, Run

from blis_replay.fixtures.synthetic import write_demo
from blis_replay.validate.cli.main import main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call blis-replay with these arguments, in an empty folder with a store of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("BLIS_REPLAY_STORE", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["blis-replay", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Answer(int(ended.value.code or 0), printed.out, printed.err)

    return call


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A complete synthetic experiment of 300 requests in the real file formats."""
    truth = write_demo(tmp_path)
    return tmp_path / truth.spec.slug
