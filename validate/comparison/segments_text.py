"""The segments of a request side by side, as a table and as JSON."""

from __future__ import annotations

from typing import Any

from blis_replay.base.arrays import Floats
from blis_replay.ingest.tables import Cell, Column, Table, Toned, table_of
from blis_replay.validate.comparison.segments import Segment, Segments
from blis_replay.validate.metrics.latency import statistics
from blis_replay.validate.text.answer import Answer, Block, Line, Part

_SHOWN = ("mean", "p50", "p90", "p99")
_SEGMENT_COLUMNS = (
    Column("observed ms"),
    *(Column("mean", "ms"), Column("diff.", "ms_difference")),
    *(Column("p50", "ms"), Column("diff.", "ms_difference")),
    *(Column("p90", "ms", wide=1), Column("diff.", "ms_difference", wide=2)),
    *(Column("p99", "ms"), Column("diff.", "ms_difference")),
)


def segments_answer(segments: Segments) -> Answer:
    """Mean, median and p99 of every segment as observed, and how much more the simulated one has; the means sum up.

    The rows are ``segment, statistic, observed_ms, simulated_ms, difference_ms, paired_difference_ms``; the last one
    is E2E.  The last column has the statistic of the differences of single requests, the one before it that of one
    side less that of the other.
    """
    parts = (*segments.segments, segments.whole)
    notes = [f"- {line}" for line in segments.merged]
    if segments.left_out:
        notes.append(f"- {segments.left_out:,} requests left out: a stamp of theirs was not recorded")
    head: list[Part] = [
        Line(f"{segments.alias}  ({segments.slug})", mark=Toned(segments.alias, "heading")),
        f"  {len(segments.request_index):,} requests; stamps: {segments.source}",
    ]
    page: list[Part] = [
        Block(head),
        Table("", _SEGMENT_COLUMNS, [_row(part) for part in parts]),
        "diff.: simulated less observed; the differences of the means sum to that of E2E",
        Block(notes, "merged"),
        *([segments.overload] if segments.overload else []),
    ]
    described: list[dict[str, Any]] = [
        {
            "name": part.name,
            "observed_ms": _in_ms(part.a_us),
            "simulated_ms": _in_ms(part.b_us),
            "difference_ms": {name: _in_ms(part.b_us)[name] - value for name, value in _in_ms(part.a_us).items()},
            "paired_difference_ms": _in_ms(part.difference_us),
        }
        for part in parts
    ]
    document = {
        "experiment": segments.slug,
        "alias": segments.alias,
        "requests": len(segments.request_index),
        "stamps": segments.source,
        "left_out": segments.left_out,
        "overloaded": bool(segments.overload),
        "merged": list(segments.merged),
        "segments": described,
    }
    names = ("observed_ms", "simulated_ms", "difference_ms", "paired_difference_ms")
    rows = [
        {"segment": one["name"], "statistic": statistic, **{name: one[name][statistic] for name in names}}
        for one in described
        for statistic in one["observed_ms"]
    ]
    return Answer(page, document, table_of(rows))


def _in_ms(values_us: Floats) -> dict[str, float]:
    return {name: value / 1000 for name, value in statistics(values_us).items()}


def _row(part: Segment) -> list[Cell]:
    observed, simulated = statistics(part.a_us), statistics(part.b_us)
    return [part.name, *(cell for name in _SHOWN for cell in (observed[name], simulated[name] - observed[name]))]
