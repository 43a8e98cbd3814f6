"""One picture of the report by itself, for a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from blis_replay.validate.errors import ValidateError
from blis_replay.validate.report.charts import charts_of
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.svg import Chart, standalone

# What a picture is asked for by -> how its title begins.
TITLES = {
    "e2e": "Distribution of E2E",
    "ttft": "Distribution of TTFT",
    "itl": "Distribution of ITL",
    "ttft by prompt": "TTFT against prompt tokens",
    "ttft by queue": "TTFT against queue depth",
    "steps": "Step cycle against batch size",
    "errors": "Error over the time of the run",
    "depth": "Requests in flight",
    "attribution": "Where the error comes from",
}
# A recording with steps has the depths of its server, which are called otherwise.
_SERVER_DEPTH = "Running and waiting requests"


@dataclass(frozen=True)
class Picture:
    """A picture that notebooks show (``_repr_svg_``): ``svg`` is a file of its own, black on white."""

    title: str
    description: str
    svg: str
    numbers: pl.DataFrame

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: Path | str) -> None:
        """Write the SVG file."""
        Path(path).write_text(self.svg, "utf-8")


def picture(evidence: Evidence, what: str) -> Picture:
    """The picture of that name (one of TITLES), as the report draws it.

    Raises ``ValidateError`` for another name, and where the recording has no numbers for it.
    """
    if what not in TITLES:
        raise ValidateError(f"there is no picture {what!r}; there are {', '.join(TITLES)}")
    charts = charts_of(evidence)
    for chart in charts.shown:
        if chart.title == TITLES[what] or (what == "depth" and chart.title == _SERVER_DEPTH):
            return Picture(chart.title, chart.description, standalone(chart), _frame(chart))
    reasons = "; ".join(f"{name}: {why}" for name, why in charts.absent.items())
    raise ValidateError(f"{evidence.comparison.alias}: {what} cannot be drawn ({reasons})")


def _frame(chart: Chart) -> pl.DataFrame:
    """The numbers as texts, as the table below the picture has them; a column without a name is called ``of``."""
    names = [name or "of" for name in chart.numbers.columns]
    unique = [name if names.count(name) == 1 else f"{names[i - 1]}, {name}" for i, name in enumerate(names)]
    rows = [[None if cell is None else str(cell) for cell in row] for row in chart.numbers.rows]
    return pl.DataFrame(rows, orient="row", schema=dict.fromkeys(unique, pl.String))
