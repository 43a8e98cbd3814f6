"""Figures as text: SVG for the inside of a page, the same bytes for the same numbers.

Colours are drawn as stand-ins and become CSS variables of the page, so that one drawing is
legible in light, in dark and on paper.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from blis_replay.ingest.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One meaning a colour: the two sides, the three metrics, and the sign of an error.
_NAMES = ("ink", "muted", "grid", "panel", "observed", "simulated", "e2e", "ttft", "itl", "over", "under")
# By the name of the page's CSS variable.
COLOURS: Mapping[str, str] = {name: f"#0a0b{number:02x}" for number, name in enumerate(_NAMES)}
INK, MUTED, GRID, PANEL, OBSERVED, SIMULATED, E2E, TTFT, ITL, OVER, UNDER = COLOURS.values()

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "blis-replay",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    # Numbers as they are, never a factor in the corner.
    "axes.formatter.limits": (-7, 9),
    "axes.formatter.useoffset": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "axes.unicode_minus": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "path.simplify": False,
    "savefig.facecolor": "none",
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Chart:
    """A picture with its numbers: ``svg`` without title and with ids of its own, see ``inline``.

    ``title``, ``description``: what a screen reader says of it.  ``numbers``: the same as a table.
    ``wide``: whether it takes the whole width of the page.  ``beside``: whether it stands beside the latencies.
    """

    title: str
    description: str
    svg: str
    numbers: Table
    wide: bool = False
    beside: bool = False


def _nothing_listed(_artist: object) -> str:
    return ""


@cache
def _matplotlib() -> Any:
    """Matplotlib without ``matplotlibrc``: it would read one of the working directory when it is imported.

    For whoever imports it later, the documentation of its classes lacks the lists of their properties.
    """
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"]
    here, said = os.getcwd(), os.environ.get("MATPLOTLIBRC")  # noqa: PTH109 - as it is, and not as a Path
    os.environ["MATPLOTLIBRC"] = os.devnull
    os.chdir(Path(__file__).parent)
    try:
        matplotlib = importlib.import_module("matplotlib")
        artist: Any = importlib.import_module("matplotlib.artist")
        listed, artist.kwdoc = artist.kwdoc, _nothing_listed  # of 106 classes: as long as drawing a few charts
        try:
            importlib.import_module("matplotlib.backends.backend_svg")
        finally:
            artist.kwdoc = listed
        return matplotlib
    finally:
        os.chdir(here)
        os.environ.pop("MATPLOTLIBRC")
        if said is not None:
            os.environ["MATPLOTLIBRC"] = said


def drawn(
    draw: Callable[[Figure], None],
    width_in: float,
    height_in: float,
    rows_at: Sequence[float] = (),
    along: Literal["x", "y"] = "x",
) -> str:
    """The SVG element of what ``draw`` puts on an empty figure; it must use the colours of this module only.

    ``rows_at``: where the rows of the table of numbers lie along an axis, in data coordinates; the element carries
    them as ``data-at`` in its own, along y for each panel, for whoever shows the value under a pointer.
    """
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # never the style of whoever runs this
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(width_in, height_in))
        FigureCanvasSVG(figure)
        draw(figure)
        _keep_apart(figure)
        # Laid out here, once: a figure that has an engine for it is drawn twice.
        ConstrainedLayoutEngine().execute(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA)
        places = _places(figure, rows_at, along)
    known = f'data-along="{along}" data-at="{" ".join(f"{place:.1f}" for place in places)}" ' if places else ""
    return _bare(text.getvalue()).replace("<svg ", f"<svg {known}", 1)


def _places(figure: Figure, rows_at: Sequence[float], along: Literal["x", "y"]) -> list[float]:
    """Data coordinates as those of the drawing, in points from its upper left corner.

    Panels below each other share what is along x, but each has rows of its own along y.
    """
    points = 72 / figure.dpi
    placed = [
        axes.transData.transform((value, axes.get_ylim()[0]) if along == "x" else (axes.get_xlim()[0], value))
        for axes in (figure.axes[:1] if along == "x" else figure.axes)
        for value in rows_at
    ]
    return [float(x if along == "x" else figure.bbox.height - y) * points for x, y in placed]


# A label has some seven characters of this size, and as much room beside it.
_INCHES_PER_LABEL = 0.55


def _keep_apart(figure: Figure) -> None:
    """Leave so many numbers on a horizontal axis that they do not run together."""
    from matplotlib.ticker import AutoLocator

    for axes in figure.axes:
        columns = axes.get_subplotspec().get_gridspec().ncols  # type: ignore[union-attr]
        if isinstance(axes.xaxis.get_major_locator(), AutoLocator):
            most = int(figure.get_figwidth() * 0.8 / columns / _INCHES_PER_LABEL)
            axes.locator_params(axis="x", nbins=min(max(most, 2), 9))


def inline(chart: Chart, prefix: str) -> str:
    """The chart's element for a page: ids begin with ``prefix``, title and description (escaped) inside."""
    from markupsafe import escape

    svg = re.sub(r'\bid="', f'id="{prefix}-', chart.svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    names = f'<title id="{prefix}-title">{escape(chart.title)}</title>'
    names += f'<desc id="{prefix}-desc">{escape(chart.description)}</desc>'
    head = f'<svg role="img" aria-labelledby="{prefix}-title" aria-describedby="{prefix}-desc" '
    return re.sub(r"<svg ([^>]*)>", lambda found: f"{head}{found[1]}>{names}", svg, count=1)


_PX_A_POINT = 1.6
# As on paper (``page.css``).
ON_PAPER = {
    **{"ink": "#000000", "muted": "#444444", "grid": "#cccccc", "panel": "#ffffff"},
    **{"observed": "#1f5fa8", "simulated": "#b4450b", "e2e": "#000000", "ttft": "#7a5b00", "itl": "#6a3fb5"},
    **{"over": "#a0246a", "under": "#0b7568"},
}


def standalone(chart: Chart) -> str:
    """The chart as an SVG file of its own: on white, in the colours that the page has in print."""
    svg = inline(chart, "chart")
    for name, colour in ON_PAPER.items():
        svg = svg.replace(f"var(--{name})", colour)
    # As large as letters are read well: a notebook would make a small picture as wide as itself.
    points = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    width = f"; width: min(100%, {_PX_A_POINT * float(points[1]):.0f}px)" if points else ""
    style = f"background: #ffffff; font-family: sans-serif{width}"
    head = f'xmlns:xlink="http://www.w3.org/1999/xlink" style="{style}"'
    return re.sub(r"^<svg ([^>]*)>", lambda found: f"<svg {_with_namespace(found[1])} {head}>", svg, count=1)


def _with_namespace(attributes: str) -> str:
    bare = re.sub(r' ?xmlns(:xlink)?="[^"]*"', "", attributes)
    return f'xmlns="http://www.w3.org/2000/svg" {bare}'


def _bare(document: str) -> str:
    """The element alone: no prolog, no metadata, no style sheet for the whole page, no size of its own."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for name, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)  # the page's
    svg = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", svg)
    return re.sub(r"\s*\n\s*", " ", svg).strip()
