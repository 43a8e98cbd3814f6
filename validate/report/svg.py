"""Charts as SVG for the inside of a page: the same bytes for the same numbers.

Colours are CSS variables of the page (``page.css``), one meaning each, so that one drawing is legible in light, in dark
and on paper.  Lengths are in points from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Literal

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.ingest.tables import Table

# Dashes tell the lines apart without colour.
DASHED, DOTTED = "4 2", "1 1.5"

_POINTS_PER_INCH = 72
_FONT_PT, _SMALL_PT = 9, 8
_LETTER_EM = 0.6  # mean width of a letter or digit of a sans-serif font
_ROW_PT, _GAP_PT, _HANDLE_PT = 12.0, 4.0, 16.0
_TICK_LABEL_PT = 0.55 * _POINTS_PER_INCH  # some seven digits, and as much room beside them
_MARGIN = 0.04  # of the range of the data, on either side


@dataclass(frozen=True)
class Mark:
    """Points ``x``, ``y`` (float64[k]; nan: a gap, inf: the end of the axis) as a line, dots or filled outlines.

    ``name``: in the legend.  ``width``: of the line; 0: none.  ``dot``: diameter; 0: none.
    """

    x: Floats | Sequence[float]
    y: Floats | Sequence[float]
    colour: str
    name: str = ""
    dashes: str = ""
    width: float = 1.4
    dot: float = 0.0
    filled: bool = False
    opacity: float = 1.0


@dataclass(frozen=True)
class Panel:
    """Axes with marks.

    ``x_limits``, ``y_limits``: None in place of an end: that of the data with a margin; the first may be above the
    second.  ``x_ticks``, ``y_ticks``: names and places, in place of round numbers.  ``stages``: begin and name of each
    load stage.  ``texts``: y and a text beside the axes, to their right.  ``zooms``: the script of the page can stretch
    it along x.
    """

    marks: Sequence[Mark]
    x_label: str = ""
    y_label: str = ""
    title: str = ""
    x_limits: tuple[float | None, float | None] = (None, None)
    y_limits: tuple[float | None, float | None] = (None, None)
    x_ticks: Mapping[str, float] | None = None
    y_ticks: Mapping[str, float] | None = None
    log_y: bool = False
    whole_x: bool = False
    stages: Sequence[tuple[float, str]] = ()
    texts: Sequence[tuple[float, str]] = ()
    zooms: bool = False


@dataclass(frozen=True)
class Chart:
    """A picture with its numbers.

    ``title``, ``description``: what a screen reader says of it.  ``svg``: the element, without either (``inline``).
    ``numbers``: the same as a table.  ``wide``: as wide as the page.  ``beside``: next to the table of latencies.
    """

    title: str
    description: str
    svg: str
    numbers: Table
    wide: bool = False
    beside: bool = False


def band(x: Floats, low: Floats, high: Floats, colour: str) -> Mark:
    """The area between two lines over x."""
    return Mark(np.append(x, x[::-1]), np.append(low, high[::-1]), colour, filled=True, opacity=0.18)


def drawn(
    panels: Sequence[Panel],
    width_in: float,
    height_in: float,
    rows_at: Sequence[float] = (),
    along: Literal["x", "y"] = "x",
    *,
    share_x: bool = False,
) -> str:
    """Panels below each other as an SVG element; with ``share_x`` the last one alone has numbers and label along x.

    ``rows_at``: where the rows of the table of numbers lie along an axis.  The element has these places as
    ``data-at``, along y for each panel, for whoever shows the value under a pointer.
    """
    width, height = width_in * _POINTS_PER_INCH, height_in * _POINTS_PER_INCH
    x_limits = [_limits(panel.x_limits, [mark.x for mark in panel.marks]) for panel in panels]
    if share_x:
        x_limits = [(min(low for low, _ in x_limits), max(high for _, high in x_limits))] * len(panels)
    y_limits = [_limits(panel.y_limits, [mark.y for mark in panel.marks]) for panel in panels]
    y_ticks = [
        _ticks(limits, 6) if panel.y_ticks is None else panel.y_ticks
        for panel, limits in zip(panels, y_limits, strict=True)
    ]
    left = 2 * _GAP_PT + max(
        max(map(_width_pt, ticks)) + _ROW_PT * bool(panel.y_label) for panel, ticks in zip(panels, y_ticks, strict=True)
    )
    numbered = [not share_x or i == len(panels) - 1 for i in range(len(panels))]
    rows = [len(_legend(panel, width - left)) + bool(panel.stages) + bool(panel.title) for panel in panels]
    above = [_GAP_PT + _ROW_PT * count for count in rows]
    below = [
        _GAP_PT + _ROW_PT * shown * (1 + bool(panel.x_label)) for panel, shown in zip(panels, numbered, strict=True)
    ]
    room = (height - sum(above) - sum(below)) / len(panels)
    right = (
        width - 2 * _GAP_PT - max(_width_pt(text, _SMALL_PT) for panel in panels for _, text in [(0, ""), *panel.texts])
    )
    top = 0.0
    placed: list[_Axes] = []
    parts: list[str] = []
    for i, panel in enumerate(panels):
        top += above[i]
        bottom = top + room
        axes = _Axes(panel, (left, right), (top, bottom), x_limits[i], y_limits[i], y_ticks[i])
        parts += axes.drawn(numbered[i])
        placed.append(axes)
        top = bottom + below[i]
    places = (
        [placed[0].x_pt(at) for at in rows_at] if along == "x" else [axes.y_pt(at) for axes in placed for at in rows_at]
    )
    at = " ".join(f"{place:.1f}" for place in places)
    known = f'data-along="{along}" data-at="{at}" ' if places else ""
    if panels[0].zooms:
        first, last = (placed[0].x_pt(end) for end in x_limits[0])
        known += f'data-span="{first:.2f} {last:.2f} {x_limits[0][0]:.6g} {x_limits[0][1]:.6g}" '
    return f'<svg {known}viewBox="0 0 {width:.0f} {height:.0f}">{"".join(parts)}</svg>'


def _limits(
    given: tuple[float | None, float | None], values: Sequence[Floats | Sequence[float]]
) -> tuple[float, float]:
    known = np.concatenate([np.zeros(0), *(np.asarray(part, np.float64) for part in values)])
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    by = _MARGIN * (high - low)
    first, last = given
    return low - by if first is None else first, high + by if last is None else last


def _ticks(limits: tuple[float, float], most: int, *, whole: bool = False) -> dict[str, float]:
    """Evenly spaced round numbers within limits, ``most`` of them at most, by how they are written."""
    low, high = sorted(limits)
    power = 10.0 ** floor(log10((high - low) / most))
    for step in (1, 2, 2.5, 5, 10, 20, 50):
        apart = max(round(step * power), 1) if whole else step * power
        numbers = range(ceil(low / apart - 1e-9), floor(high / apart + 1e-9) + 1)
        if len(numbers) <= most:
            break
    decimals = next(digits for digits in range(20) if abs(round(apart, digits) - apart) < 1e-6 * apart)
    return {f"{i * apart + 0.0:.{decimals}f}": i * apart for i in numbers}


def _width_pt(text: str, size: float = _FONT_PT) -> float:
    return _LETTER_EM * size * len(text)


def _legend(panel: Panel, room: float) -> list[list[Mark]]:
    """The named marks in rows of this width."""
    rows: list[list[Mark]] = []
    used = room
    for mark in (mark for mark in panel.marks if mark.name):
        wanted = _HANDLE_PT + 2 * _GAP_PT + _width_pt(mark.name, _SMALL_PT)
        if used + wanted > room:
            rows.append([])
            used = 0.0
        rows[-1].append(mark)
        used += wanted
    return rows


@dataclass(frozen=True)
class _Axes:
    """A panel in its place: ``across`` and ``down`` are the ends of its axes, in points."""

    panel: Panel
    across: tuple[float, float]
    down: tuple[float, float]
    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    y_ticks: Mapping[str, float]

    def x_pt(self, value: float) -> float:
        """Where a value lies; what is infinite, at the end of the axis."""
        low, high = self.x_limits
        share = (min(max(value, low), high) if not isfinite(value) else value) - low
        return self.across[0] + (self.across[1] - self.across[0]) * share / (high - low)

    def y_pt(self, value: float) -> float:
        """The same, from the lower end of the axis to the upper one."""
        first, last = self.y_limits
        if not isfinite(value):
            value = min(max(value, min(first, last)), max(first, last))
        if self.panel.log_y:
            first, last, value = log10(first), log10(last), log10(value)
        return self.down[1] - (self.down[1] - self.down[0]) * (value - first) / (last - first)

    def drawn(self, numbered: bool) -> Iterator[str]:
        """The elements, what lies below first."""
        (left, right), (top, bottom), panel = self.across, self.down, self.panel
        most = min(max(int((right - left) / _TICK_LABEL_PT), 3), 9)
        x_ticks = _ticks(self.x_limits, most, whole=panel.whole_x) if panel.x_ticks is None else panel.x_ticks
        y_ticks = self.y_ticks
        grid = "".join(f"M {self.x_pt(x):.2f} {top:.2f} V {bottom:.2f} " for x in x_ticks.values())
        if panel.y_ticks is None or panel.log_y:  # names of rows have no lines
            grid += "".join(f"M {left:.2f} {self.y_pt(y):.2f} H {right:.2f} " for y in y_ticks.values())
        yield path(grid, stroke("grid", 0.6))
        box = f"{left:.2f} {top:.2f} {right - left:.2f} {bottom - top:.2f}"
        if panel.zooms:
            place = " ".join(f'{n}="{v}"' for n, v in zip(("x", "y", "width", "height"), box.split(), strict=True))
            yield f'<svg class="plot" {place} viewBox="{box}" preserveAspectRatio="none">'
        for mark in panel.marks:
            yield from self._mark(mark)
        yield from self._stages()
        yield "</svg>" if panel.zooms else ""
        yield from self._stage_names()
        yield path(f"M {left:.2f} {top:.2f} V {bottom:.2f} H {right:.2f}", stroke("muted", 0.8))
        for name, y in y_ticks.items():
            yield _text(left - _GAP_PT, self.y_pt(y) + 0.35 * _FONT_PT, name, "end")
        if numbered:
            for name, x in x_ticks.items():
                yield _text(self.x_pt(x), bottom + _ROW_PT, name, "middle", more=' class="tick"')
            yield _text((left + right) / 2, bottom + 2 * _ROW_PT, panel.x_label, "middle") if panel.x_label else ""
        if panel.y_label:
            turned = f' transform="rotate(-90 {_ROW_PT - 2:.2f} {(top + bottom) / 2:.2f})"'
            yield _text(_ROW_PT - 2, (top + bottom) / 2, panel.y_label, "middle", more=turned)
        for y, text in panel.texts:
            yield _text(right + _GAP_PT, self.y_pt(y) + 3, text, size=_SMALL_PT)
        yield from self._headings()

    def _mark(self, mark: Mark) -> Iterator[str]:
        points = [
            None if np.isnan(x) or np.isnan(y) else f"{self.x_pt(x):.2f} {self.y_pt(y):.2f}"
            for x, y in zip(map(float, mark.x), map(float, mark.y), strict=True)
        ]
        if mark.filled or mark.width:
            line = ""
            for before, point in zip([None, *points], points, strict=False):
                line += "" if point is None else f"{'L' if before else 'Z M' if line and mark.filled else 'M'} {point} "
            style = f"fill: var(--{mark.colour})" if mark.filled else stroke(mark.colour, mark.width, mark.dashes)
            yield path(line + ("Z" if mark.filled else ""), style + _opacity(mark)) if line else ""
        if mark.dot:
            dots = "".join(f"M {point} h 0 " for point in points if point is not None)
            yield path(dots, stroke(mark.colour, mark.dot) + "; stroke-linecap: round" + _opacity(mark))

    @property
    def _begun(self) -> list[tuple[float, str]]:
        """Place and name of each load stage; requests without a latency are in no curve."""
        low, high = self.x_limits
        return [(self.x_pt(start), name) for start, name in self.panel.stages if low <= start <= high]

    def _stages(self) -> Iterator[str]:
        """A line at the start of each load stage."""
        for at, _ in self._begun:
            yield path(f"M {at:.2f} {self.down[0]:.2f} V {self.down[1]:.2f}", stroke("muted", 0.8, "2 2"))

    def _stage_names(self) -> Iterator[str]:
        """The names of the stages, where there is room."""
        taken, right = float("-inf"), self.across[1]
        for at, name in self._begun:
            length = _width_pt(name, _SMALL_PT)
            if taken <= at <= right - length:
                taken = at + length + 2 * _GAP_PT
                yield _text(at + 3, self.down[0] - 3, name, size=_SMALL_PT, colour="muted", more=' class="begun"')

    def _headings(self) -> Iterator[str]:
        """Title and legend above the axes."""
        y = self.down[0] - _GAP_PT - _ROW_PT * bool(self.panel.stages)
        for row in reversed(_legend(self.panel, self.across[1] - self.across[0] + 2 * _GAP_PT)):
            x = self.across[0]
            for mark in row:
                middle, end = y - 0.3 * _SMALL_PT, x + _HANDLE_PT
                if mark.filled:
                    box = f"M {x:.2f} {middle - 3:.2f} h {_HANDLE_PT} v 6 h -{_HANDLE_PT} Z"
                    yield path(box, f"fill: var(--{mark.colour})" + _opacity(mark))
                elif mark.width:
                    yield path(f"M {x:.2f} {middle:.2f} H {end:.2f}", stroke(mark.colour, mark.width, mark.dashes))
                if mark.dot:
                    dot = stroke(mark.colour, mark.dot) + "; stroke-linecap: round"
                    yield path(f"M {x + _HANDLE_PT / 2:.2f} {middle:.2f} h 0", dot)
                yield _text(end + _GAP_PT, y, mark.name, size=_SMALL_PT)
                x = end + 2 * _GAP_PT + _width_pt(mark.name, _SMALL_PT)
            y -= _ROW_PT
        yield _text(self.across[0], y, self.panel.title) if self.panel.title else ""


def stroke(colour: str, width: float, dashes: str = "") -> str:
    """The style of a line."""
    return f"fill: none; stroke: var(--{colour}); stroke-width: {width:g}" + (
        f"; stroke-dasharray: {dashes}" if dashes else ""
    )


def _opacity(mark: Mark) -> str:
    return "" if mark.opacity == 1 else f"; opacity: {mark.opacity:g}"


def path(points: str, style: str) -> str:
    """A line or an outline through points."""
    return f'<path d="{points.strip()}" style="{style}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    *,
    size: float = _FONT_PT,
    colour: str = "ink",
    more: str = "",
) -> str:
    style = f"font-size: {size}px; text-anchor: {anchor}; fill: var(--{colour})"
    return f'<text x="{x:.2f}" y="{y:.2f}" style="{style}"{more}>{escape(text)}</text>'


def inline(chart: Chart, prefix: str) -> str:
    """The chart's element for a page, with title and description; their ids begin with ``prefix``."""
    opening, _, rest = chart.svg.removeprefix("<svg ").partition(">")
    return described(prefix, escape(chart.title), escape(chart.description), opening, rest)


def described(prefix: str, title: str, description: str, opening: str, rest: str) -> str:
    """An element that a screen reader says; ``opening``: its own attributes, ``rest``: what is drawn, and its end."""
    head = f'<svg role="img" aria-labelledby="{prefix}-title" aria-describedby="{prefix}-desc" {opening}>'
    return f'{head}<title id="{prefix}-title">{title}</title><desc id="{prefix}-desc">{description}</desc>{rest}'
