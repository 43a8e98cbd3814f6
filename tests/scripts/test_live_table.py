"""The table of `make live`, made of the recordings that ship."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_table import BARS, FEWER, TRAINED, print_table

from blis_replay.fixtures.catalogue import RECORDED_FOLDER


@pytest.mark.heavy
def test_each_recording_has_a_row_with_the_pace_of_its_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One machine within a day: no run is 15 % off the line of two of them.  Bars are missed, as it was shared."""
    assert print_table(RECORDED_FOLDER, tmp_path / "store.duckdb") in (1, 3)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = [name.removeprefix("tiny-live-") for name in (*TRAINED, *BARS, FEWER)]
    paces = {row[0]: float(row[-1]) for row in rows if row and row[0] in names}
    assert list(paces) == names
    assert all(0.85 < pace < 1.15 for pace in paces.values())
