"""The segments of a request side by side, in an answer about a replay."""

from __future__ import annotations

from dataclasses import replace

from blis_replay.base.arrays import Floats
from blis_replay.ingest.tables import Cell, Column, Table
from blis_replay.validate.comparison.segments import Segment, Segments
from blis_replay.validate.metrics.latency import statistics
from blis_replay.validate.text.answer import Answer, Block, Part

_SHOWN = ("mean", "p50", "p90", "p99")
_SEGMENT_COLUMNS = (
    Column("observed ms"),
    *(Column("mean", "ms"), Column("diff.", "ms_difference")),
    *(Column("p50", "ms"), Column("diff.", "ms_difference")),
    *(Column("p90", "ms", wide=1), Column("diff.", "ms_difference", wide=2)),
    *(Column("p99", "ms"), Column("diff.", "ms_difference")),
)


def with_segments(answer: Answer, segments: Segments | None, *, shown: bool) -> Answer:
    """The answer with the segments in its JSON, and ``shown`` on its page."""
    document = {**answer.document, "segments": None if segments is None else segments_json(segments)}
    page = [*answer.page, *segments_parts(segments)] if shown and segments is not None else answer.page
    return replace(answer, page=page, document=document)


def segments_parts(segments: Segments) -> list[Part]:
    """Mean, median and p99 of every segment as observed, and how much more the simulated one has; the means sum up."""
    notes = [f"- {line}" for line in segments.merged]
    if segments.left_out:
        notes.append(f"- {segments.left_out:,} requests left out: a stamp of theirs was not recorded")
    head = f"Where the time of {len(segments.request_index):,} requests goes; stamps: {segments.source}"
    rows = [_row(part) for part in (*segments.segments, segments.whole)]
    return [
        Block([head, Table("", _SEGMENT_COLUMNS, rows)]),
        "diff.: simulated less observed; the differences of the means sum to that of E2E",
        Block(notes, "merged"),
    ]


def segments_json(segments: Segments) -> dict[str, object]:
    """``parts``: the segments in the order of the way, then E2E, each with its statistics in ms.

    ``difference_ms`` is the statistic of one side less that of the other, ``paired_difference_ms`` that of the
    differences of single requests.
    """
    parts: list[dict[str, object]] = []
    for part in (*segments.segments, segments.whole):
        observed, simulated, paired = map(_in_ms, (part.a_us, part.b_us, part.difference_us))
        apart = {name: simulated[name] - value for name, value in observed.items()}
        sides = {"observed_ms": observed, "simulated_ms": simulated, "difference_ms": apart}
        parts.append({"name": part.name, **sides, "paired_difference_ms": paired})
    counts = {"requests": len(segments.request_index), "left_out": segments.left_out}
    return {**counts, "stamps": segments.source, "merged": list(segments.merged), "parts": parts}


def _in_ms(values_us: Floats) -> dict[str, float]:
    return {name: value / 1000 for name, value in statistics(values_us).items()}


def _row(part: Segment) -> list[Cell]:
    observed, simulated = statistics(part.a_us), statistics(part.b_us)
    return [part.name, *(cell for name in _SHOWN for cell in (observed[name], simulated[name] - observed[name]))]
