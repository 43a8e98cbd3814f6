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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from blis_replay.compiled.arrays import Floats, Int64s
from blis_replay.ingest.tables import Table
from blis_replay.replay.executors import processors
from blis_replay.replay.processes import INSIDE_A_WORKER, Beside, beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    drawing: Drawing
    numbers: Table
    wide: bool = False
    beside: bool = False

    @property
    def svg(self) -> str:
        """The element, without title and with ids of its own (see ``inline``)."""
        return self.drawing.svg


class Drawing:
    """A figure to be drawn: here when it is asked for, or by an ``Artist`` before.

    ``draw`` puts it on an empty figure; it must use the colours of this module only.  To be sent to another process
    it is a function of this module, or a partial of one with arrays and texts.
    ``rows_at``: where the rows of the table of numbers lie along an axis, in data coordinates; the element carries
    them as ``data-at`` in its own, along y for each panel, for whoever shows the value under a pointer.
    """

    def __init__(
        self,
        draw: Callable[[Figure], None],
        width_in: float,
        height_in: float,
        rows_at: Sequence[float] = (),
        along: Literal["x", "y"] = "x",
    ) -> None:
        self._draw, self._size_in, self._rows_at, self._along = draw, (width_in, height_in), list(rows_at), along
        self._svg: str | None = None

    @property
    def svg(self) -> str:
        """The SVG element."""
        return self._svg or self.draw()

    def __eq__(self, other: object) -> bool:
        """Whether it looks the same."""
        return isinstance(other, Drawing) and self.svg == other.svg

    def __hash__(self) -> int:
        """Of what it looks like."""
        return hash(self.svg)

    @property
    def is_drawn(self) -> bool:
        """Whether the element is there already."""
        return self._svg is not None

    def draw(self, svg: str | None = None) -> str:
        """Keep the element, ``svg`` if it was drawn elsewhere."""
        self._svg = svg or self.drawn()
        return self._svg

    def drawn(self) -> str:
        """The SVG element, drawn now."""
        matplotlib = _matplotlib()
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # never the style of whoever runs this
            matplotlib.rcParams.update(_STYLE)
            figure = matplotlib.figure.Figure(figsize=self._size_in)
            matplotlib.backends.backend_svg.FigureCanvasSVG(figure)
            self._draw(figure)
            _keep_apart(figure)
            # Laid out here, once: a figure that has an engine for it is drawn twice.
            matplotlib.layout_engine.ConstrainedLayoutEngine().execute(figure)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata=_NO_METADATA)
            places = _places(figure, self._rows_at, self._along)
        at = " ".join(f"{place:.1f}" for place in places)
        known = f'data-along="{self._along}" data-at="{at}" ' if places else ""
        return _bare(text.getvalue()).replace("<svg ", f"<svg {known}", 1)


class Artist:
    """Draws in a process beside this one, which goes on meanwhile; without one, where it is to finish."""

    def __init__(self, process: Beside[Sequence[Drawing], list[str]] | None = None) -> None:
        self._process = process
        self._out: list[Drawing] = []
        if process is not None:
            self.draw([Drawing(draw_nothing, 1, 1)])  # what it has to import takes as long as a few charts

    def draw(self, drawings: Sequence[Drawing]) -> None:
        """Begin with those that nobody drew yet, once the last ones are finished."""
        self.finish()
        self._out = [drawing for drawing in drawings if not drawing.is_drawn]
        if self._process is not None:
            self._process.ask(self._out)

    def finish(self) -> None:
        """Wait for what was begun."""
        answer = self._process.answer() if self._process is not None and self._out else None
        for number, drawing in enumerate(self._out):
            drawing.draw(answer[number] if answer is not None else None)
        self._out = []


@contextmanager
def artist_beside(*, wanted: bool) -> Iterator[Artist]:
    """An artist with a process, where it is wanted and has a processor; it ends with the block."""
    if not wanted or processors() == 1 or INSIDE_A_WORKER in os.environ:
        yield Artist()
        return
    with beside(drawn_all) as process:
        yield Artist(process)


def drawn_all(drawings: Sequence[Drawing]) -> list[str]:
    """The SVG element of each."""
    return [drawing.drawn() for drawing in drawings]


def _nothing_listed(_artist: object) -> str:
    return ""


def _with_parts() -> Any:
    for name in ("backends.backend_svg", "figure", "layout_engine"):
        importlib.import_module(f"matplotlib.{name}")
    return sys.modules["matplotlib"]


@cache
def _matplotlib() -> Any:
    """Matplotlib without ``matplotlibrc``: it would read one of the working directory when it is imported.

    For whoever imports it later, the documentation of its classes lacks the lists of their properties.
    """
    if "matplotlib" in sys.modules:
        return _with_parts()
    here, said = os.getcwd(), os.environ.get("MATPLOTLIBRC")  # noqa: PTH109 - as it is, and not as a Path
    os.environ["MATPLOTLIBRC"] = os.devnull
    os.chdir(Path(__file__).parent)
    try:
        parent: Any = importlib.import_module("matplotlib.artist")
        listed, parent.kwdoc = parent.kwdoc, _nothing_listed  # of 106 classes: as long as drawing a few charts
        try:
            return _with_parts()
        finally:
            parent.kwdoc = listed
    finally:
        os.chdir(here)
        os.environ.pop("MATPLOTLIBRC")
        if said is not None:
            os.environ["MATPLOTLIBRC"] = said


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


# -- What is drawn, from arrays and texts alone: whoever draws it needs to import no more ---------------------------

# Dashes tell the lines apart without colour.
_DASHED = (0, (4, 2))
_LOOKS: dict[str, dict[str, Any]] = {
    "observed": {"color": OBSERVED, "label": "observed"},
    "simulated": {"color": SIMULATED, "linestyle": _DASHED, "label": "simulated"},
}
_METRIC_LOOKS = {"e2e": (E2E, "-"), "ttft": (TTFT, _DASHED), "itl": (ITL, (0, (1, 1.5)))}
# Where the legend of a wide picture stands: above its left end, which a phone shows, and the names of the load stages.
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": 4, "borderaxespad": 1.6}
# A stage's name: its size, the width of a letter of that size, and what share of a picture lies between its axes.
_STAGE_FONT_PT, _LETTER_PT, _PLOTTED_SHARE = 8, 4.4, 0.9
# Bars below it, in %, would be drawn against an axis of rounding errors.
_NOTHING = 0.05
# Shares of the fullest cell; each shade is one path, however many cells it has.
_SHADES = ((0.0, 0.12), (0.1, 0.28), (0.3, 0.48), (0.6, 0.75))

# When each load stage begins, s, and its name.
Stages = Sequence[tuple[float, str]]


def draw_nothing(figure: Figure) -> None:
    """Axes without anything."""
    figure.add_subplot()


def draw_distribution(
    x_label: str,
    unit_us: float,
    curves: Mapping[str, tuple[Floats, Floats, bool]],
    marks: Mapping[str, float],
    figure: Figure,
) -> None:
    """Level below 1, value in us and whether it was published, by side; ``marks``: shares that are slower, by name."""
    axes = figure.add_subplot()
    for side, (level, value_us, published) in curves.items():
        look = dict(_LOOKS[side])
        if published:
            look |= {"linestyle": "none", "marker": "o", "markersize": 4, "label": f"{side} (published)"}
        axes.plot(value_us / unit_us, 1 - level, **look)
    axes.set_yscale("log")
    axes.set_ylim(1.0, 0.0008)
    axes.set_yticks(list(marks.values()), list(marks))
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel("percentile")
    axes.legend(loc="best")


def draw_errors(at_s: Floats, metrics: Mapping[str, tuple[str, float, Floats]], stages: Stages, figure: Figure) -> None:
    """Name, limit and errors over time, fractions, by metric."""
    axes = figure.add_subplot()
    axes.axhline(0, color=INK, linewidth=0.8)
    for metric, (_, limit, _) in metrics.items():
        for at in (limit, -limit):
            axes.axhline(100 * at, color=_METRIC_LOOKS[metric][0], linewidth=0.7, alpha=0.6)
    for metric, (name, _, errors) in metrics.items():
        colour, dashes = _METRIC_LOOKS[metric]
        axes.plot(at_s, 100 * errors, color=colour, linestyle=dashes, label=name)
    _mark_stages(axes, stages)
    axes.set_xlabel("time of the run at which requests were sent, s")
    axes.set_ylabel("error of the mean, %")
    axes.legend(**_ABOVE)


def draw_bands(
    x_label: str, y_label: str, sides: Mapping[str, tuple[Floats, Floats, Floats, Floats]], figure: Figure
) -> None:
    """x, low, middle and high by side."""
    axes = figure.add_subplot()
    for side, (x, low, middle, high) in sides.items():
        look = _LOOKS[side]
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
        axes.plot(x, middle, marker="o", markersize=2.5, **look)
    axes.locator_params(axis="x", integer=True)  # tokens and requests are whole
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")


def draw_steps(
    x: Floats,
    middle_ms: Floats,
    model_ms: Floats,
    residual_ms: Floats,
    density: Int64s,
    edges: tuple[Floats, Floats],
    figure: Figure,
) -> None:
    """Medians of recorded and modelled cycles over batch sizes ``x``, and the cells between ``edges`` (x, ms)."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_density(upper, density, edges)
    upper.plot(x, middle_ms, "o", markersize=3, color=INK, label="recorded, median")
    upper.plot(x, model_ms, color=SIMULATED, linestyle=_DASHED, label="latency model, median")
    upper.set_ylabel("step cycle, ms")
    upper.set_ylim(0, edges[1][-1])
    upper.legend(loc="best")
    lower.axhline(0, color=SIMULATED, linestyle=_DASHED)
    lower.plot(x, residual_ms, "o", markersize=3, color=INK)
    lower.set_ylabel("residual, ms")
    lower.set_xlabel("running requests")


def _draw_density(axes: Axes, density: Int64s, edges: tuple[Floats, Floats]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    def box(i: int, j: int) -> Path:
        x, y = edges
        return Path([(x[i], y[j]), (x[i + 1], y[j]), (x[i + 1], y[j + 1]), (x[i], y[j + 1]), (x[i], y[j])], closed=True)

    most = int(density.max(initial=0))
    bounds = [share * most for share, _ in _SHADES] + [float(most)]
    for (_, opacity), low, high in zip(_SHADES, bounds[:-1], bounds[1:], strict=True):
        cells = np.argwhere((density > low) & (density <= high))
        if len(cells):
            boxes = Path.make_compound_path(*(box(i, j) for i, j in cells))
            axes.add_patch(PathPatch(boxes, facecolor=OBSERVED, alpha=opacity, linewidth=0))
    axes.plot([], [], "s", color=OBSERVED, alpha=0.5, label="recorded cycles")


def draw_depth(at_s: Floats, panels: Mapping[str, tuple[Floats, Floats]], stages: Stages, figure: Figure) -> None:
    """Depths observed and simulated, by what is counted."""
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, sides) in zip(rows, panels.items(), strict=True):
        for look, depth in zip(_LOOKS.values(), sides, strict=True):
            axes.plot(at_s, depth, **look)
        axes.set_ylabel(name)
        # An empty queue would otherwise be drawn against fractions of a request.
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0))
    _mark_stages(rows[0], stages)
    rows[0].legend(**_ABOVE)
    rows[-1].set_xlabel("time of the run, s")


def _mark_stages(axes: Axes, stages: Stages) -> None:
    """Draw a line at the start of each load stage, with its name where there is room.

    Call it after plotting: the limits of the axis decide how much room there is.
    """
    low_s, high_s = axes.get_xlim()
    width_pt = 72 * _PLOTTED_SHARE * axes.figure.get_figwidth()  # type: ignore[union-attr]
    taken_pt = float("-inf")
    for start_s, name in stages:
        if not low_s <= start_s <= high_s:
            continue  # requests without a latency are in no curve, and a label beyond it leaves no room for one
        axes.axvline(start_s, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        at_pt = width_pt * (start_s - low_s) / (high_s - low_s)
        name_pt = _LETTER_PT * len(name)
        if at_pt < taken_pt or at_pt + name_pt > width_pt:
            continue
        taken_pt = at_pt + name_pt + 2 * _LETTER_PT
        axes.annotate(
            name,
            (start_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 2),
            textcoords="offset points",
            color=MUTED,
            fontsize=_STAGE_FONT_PT,
        )
    axes.set_xlim(low_s, high_s)


class Bar(NamedTuple):
    """One bar of a waterfall, in fractions: ``text`` is its length ``part`` in words, and it ends between ``low`` and
    ``high`` with 95 % (nan if unknown)."""

    name: str
    text: str
    part: float
    start: float
    end: float
    low: float
    high: float


def draw_falls(panels: Mapping[str, Sequence[Bar]], figure: Figure) -> None:
    """Waterfalls by their title, below each other."""
    places = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, bars) in zip(places, panels.items(), strict=True):
        _draw_bars(axes, bars)
        axes.set_title(title, color=INK, loc="left")


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    for row, bar in enumerate(bars):
        colour = OVER if bar.part > 0 else UNDER
        axes.barh(row, 100 * (bar.end - bar.start), left=100 * bar.start, color=colour, height=0.6)
        ends = [bar.start, bar.end]
        if not isnan(bar.low):
            ends += [bar.low, bar.high]
            # How far it reaches to the left and to the right of the bar's end; never less than nothing.
            whiskers = [[100 * max(bar.end - bar.low, 0.0)], [100 * max(bar.high - bar.end, 0.0)]]
            axes.errorbar(100 * bar.end, row, xerr=whiskers, color=INK, elinewidth=1, capsize=2.5)
        axes.annotate(
            bar.text,
            (100 * max(ends), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
            bbox={"facecolor": PANEL, "edgecolor": "none", "pad": 0.5},
        )
    for row, bar in enumerate(bars[:-1]):
        axes.plot([100 * bar.end] * 2, [row + 0.3, row + 0.7], color=MUTED, linewidth=0.8)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.use_sticky_edges = False
    axes.margins(x=0.25)
    if max(abs(100 * bar.part) for bar in bars) < _NOTHING:
        axes.set_xlim(-1, 1)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
