"""Segments as a table, a frame and JSON."""

from __future__ import annotations

from typing import Any

import polars as pl

from blis_replay.validate.attribution.resampled import Floats
from blis_replay.validate.attribution.segments import Segment, Segments
from blis_replay.validate.metrics import statistics
from blis_replay.validate.terminal import milliseconds, table, toned, wrap

_SHOWN = ("mean", "p50", "p90", "p99")
_WIDE = (5, 6)  # the p90


def segments_text(segments: Segments) -> str:
    """Mean, median and p99 of every segment as observed, and how much more the simulated one has; the means sum up."""
    header = ["observed ms", *(column for name in _SHOWN for column in (name, "diff."))]
    rows = [_row(part) for part in (*segments.segments, segments.whole)]
    title = f"{toned(segments.alias, 'heading')}  ({segments.slug})"
    head = f"{title}\n  {len(segments.request_index):,} requests; stamps: {segments.source}"
    notes = [f"- {line}" for line in segments.merged]
    if segments.left_out:
        notes.append(f"- {segments.left_out:,} requests left out: a stamp of theirs was not recorded")
    return "\n\n".join(
        [
            head,
            table(header, rows, wide=_WIDE),
            "diff.: simulated less observed; the differences of the means sum to that of E2E",
            "\n".join([toned("merged:", "heading"), *map(wrap, notes)]),
        ]
    )


def segments_json(segments: Segments) -> dict[str, Any]:
    """The same for programs; ms."""
    return {
        "experiment": segments.slug,
        "alias": segments.alias,
        "requests": len(segments.request_index),
        "stamps": segments.source,
        "left_out": segments.left_out,
        "merged": list(segments.merged),
        "segments": [
            {
                "name": part.name,
                "observed_ms": _in_ms(part.a_us),
                "simulated_ms": _in_ms(part.b_us),
                "difference_ms": _in_ms(part.difference_us),
            }
            for part in (*segments.segments, segments.whole)
        ],
    }


def segments_frame(segments: Segments) -> pl.DataFrame:
    """The same: ``segment, statistic, observed_ms, simulated_ms, difference_ms``; the last segment is E2E."""
    return pl.DataFrame(
        [
            {
                "segment": part["name"],
                "statistic": statistic,
                **{f"{side}_ms": part[f"{side}_ms"][statistic] for side in ("observed", "simulated", "difference")},
            }
            for part in segments_json(segments)["segments"]
            for statistic in part["observed_ms"]
        ]
    )


def _in_ms(values_us: Floats) -> dict[str, float]:
    return {name: value / 1000 for name, value in statistics(values_us).items()}


def _row(part: Segment) -> list[str]:
    observed, simulated = statistics(part.a_us), statistics(part.b_us)
    cells = [part.name]
    for name in _SHOWN:
        cells += [milliseconds(observed[name]), f"{(simulated[name] - observed[name]) / 1000:+,.2f}"]
    return cells
