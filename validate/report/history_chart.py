"""The errors of an experiment, commit by commit, where a history is given."""

from __future__ import annotations

from math import inf

import numpy as np

from blis_replay.base.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table
from blis_replay.validate.history import Entry, History, Series
from blis_replay.validate.report.svg import Chart, Mark, Panel, band, drawn

# Numbers of an experiment that are judged: three, or four with TPOT.
_MOST_PANELS = 4


def history_chart(history: History, slug: str) -> Chart | None:
    """What is judged of an experiment, a panel per number, with its limits and its changes; None without a line."""
    shown = [one for one in history.series if one.newest.experiment == slug and one.newest.judged][:_MOST_PANELS]
    if not shown:
        return None
    places = {commit: at for at, commit in enumerate(history.commits)}
    panels = []
    for series in shown:
        known = series.known
        at = np.array([places[entry.of] for entry in known], np.float64)
        limit = 100 * (series.newest.limit or 0.0)
        marks = [Mark((-inf, inf), (y, y), "muted", width=0.8, dashes="4 2") for y in (-limit, limit)]
        low, high = (np.array([100 * _end(entry, side) for entry in known]) for side in (0, 1))
        line = Mark(at, [100 * error for error in series.errors], "simulated", dot=2.5)
        stages = [(float(places[one.first]), one.first.short.split(" ")[0]) for one in series.moved]
        marks = [band(at, low, high, "simulated"), *marks, line]
        panels.append(Panel(marks, "commit, oldest first", f"{series.newest.name}, %", stages=stages, whole_x=True))
    commits = counted(len(history.commits), "commit")
    return Chart(
        "Error by commit",
        f"Errors at {commits} with their 95 % intervals, for another recording of the load; dashed: the limits; "
        "vertical: where an error changed.",
        drawn(panels, 8.6, 0.8 + 1.2 * len(panels), share_x=True),
        _numbers(history, shown),
        wide=True,
    )


def _end(entry: Entry, side: int) -> float:
    return (entry.error or 0.0) if entry.interval is None else entry.interval[side]


def _numbers(history: History, shown: list[Series]) -> Table:
    of_series = [{entry.of: entry for entry in one.entries} for one in shown]
    rows: list[list[Cell]] = []
    for commit in history.commits:
        entries = [of.get(commit) for of in of_series]
        verdict = next((entry.verdict for entry in entries if entry), None)
        rows.append([commit.short, verdict, *(None if entry is None else entry.error for entry in entries)])
    columns = (Column("commit", "text"), Column("verdict", "text"), *(Column(s.newest.name, "error") for s in shown))
    return Table("errors by commit", columns, rows)
