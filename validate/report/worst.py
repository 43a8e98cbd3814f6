"""The requests with the largest errors: where their time went, observed above simulated, on one axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.ingest.tables import Column, Table
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.comparison.segments import OF_CLIENT, OF_SERVER, segments_of
from blis_replay.validate.report.html import html, html_text
from blis_replay.validate.report.svg import path
from blis_replay.validate.text.cells import time_text

_MOST_REQUESTS = 5
_WIDTH, _BAR = 440, 9
# A colour of the page for each segment.  What the client alone saw is mostly prefill, and then decode.
_COLOURS = dict(zip(OF_SERVER, ("sending", "wait", "prefill", "decode", "ink"), strict=True))
_COLOURS |= dict(zip(OF_CLIENT, ("prefill", "decode"), strict=True))
_COLUMNS = (
    *(Column("request", "count"), Column("observed", "time"), Column("simulated", "time")),
    Column("difference", "word"),
)


@dataclass(frozen=True)
class Worst:
    """The largest error of E2E first.

    ``index``: int64[k], in the recording; ``sent_us``: int64[k].  ``segments``: by name, float64[2, k] us, observed and
    simulated; they sum to E2E.  ``left_out``: requests without all stamps, which cannot be among them.
    """

    index: Int64s
    sent_us: Int64s
    segments: dict[str, Floats]
    left_out: int

    @property
    def e2e_us(self) -> Floats:
        """float64[2, k]: observed and simulated."""
        return np.asarray(np.sum([*self.segments.values()], axis=0), np.float64)


def worst_requests(run: ReplayRun) -> Worst:
    """The requests whose E2E is off by the most time; raises ``NothingToJudgeError`` without recorded latencies."""
    way = segments_of(run)
    places = np.argsort(-np.abs(way.whole.difference_us), kind="stable")[:_MOST_REQUESTS]
    index = way.request_index[places]
    segments = {part.name: np.stack([part.a_us[places], part.b_us[places]]) for part in way.segments}
    return Worst(index, run.arrival_us[index], segments, way.left_out)


def worst_html(worst: Worst, href: str) -> str:
    """A row per request with its lanes, and a link to ``href``, pictures over time.

    The link has the window of the request, us from begin to end, for a script that shows no more than that.
    """
    observed_us, simulated_us = worst.e2e_us
    latest_us = worst.e2e_us.max(axis=0)
    off_us = simulated_us - observed_us
    said = [f"{'+' if by > 0 else '-'}{time_text(abs(by))}" for by in off_us.tolist()]
    rows = [*zip(worst.index.tolist(), observed_us.tolist(), simulated_us.tolist(), said, strict=True)]
    cells = []
    for i, (sent_us, length_us) in enumerate(zip(worst.sent_us.tolist(), latest_us.tolist(), strict=True)):
        lanes = _lanes({name: us[:, i] for name, us in worst.segments.items()}, latest_us.max())
        window = f"{sent_us - length_us / 2:.0f} {sent_us + 1.5 * length_us:.0f}"
        link = f'<a href="{href}" data-window="{window}">timeline at {sent_us / 1e6:.1f} s</a>'
        cells.append(f'<td class="strip">{lanes}</td><td class="text">{link}</td>')
    left_out = f"; {worst.left_out:,} requests without all stamps are left out" if worst.left_out else ""
    note = f"top bar observed, bottom bar simulated, from the send on{left_out}"
    table = Table("Requests that are off by most", _COLUMNS, rows, note=note)
    named = (f'<span><i style="background: var(--{_COLOURS[name]})"></i>{name}</span>' for name in worst.segments)
    return f'{html(table, f"0 to {time_text(latest_us.max())}", cells)}<p class="legend">{" ".join(named)}</p>'


def _lanes(segments: dict[str, Floats], longest_us: float) -> str:
    """Two bars below each other; ``segments``: by name, float64[2] us of either side."""
    parts, said = [], []
    for side, name in enumerate(("observed", "simulated")):
        at, top = 0.0, 2 + side * (_BAR + 2)
        for segment, us in segments.items():
            wide = _WIDTH * max(float(us[side]), 0.0) / longest_us
            bar = f"M {at:.1f} {top} h {wide:.1f} v {_BAR} h -{wide:.1f} Z"
            parts.append(path(bar, f"fill: var(--{_COLOURS[segment]})"))
            at += wide
        lengths = (f"{segment} {time_text(float(us[side]))}" for segment, us in segments.items())
        said.append(f"{name}: {', '.join(lengths)}")
    label = html_text("; ".join(said))
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {2 * _BAR + 6}">{"".join(parts)}</svg>'
