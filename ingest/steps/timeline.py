"""A start time for every engine step: sampled, from journey events that name a step, or interpolated.

What an event says about the start of a step (trace-formats, sections 2.2 and 2.5):

* ``SCHEDULED`` and ``PREEMPTED`` happen inside ``schedule()`` of their step, at or just after its start.
* ``QUEUED`` and the end of an aborted request carry the last step begun before.  The engine takes them in between two
  steps, and begins the next one right after.
* ``FIRST_TOKEN`` and ``FINISHED`` carry the step that computed the token and are stamped when its output is
  processed.  The loop then goes on with ``schedule()``: of the next step, or of the one after it
  where scheduling is asynchronous, because the next one had begun before.

The distance of each kind of event from the start of its step is measured on steps that have both, and subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import Rows, Scratch, no_rows, query, rows_of
from blis_replay.ingest.steps.records import INSIDE_SCHEDULE, LOOKED_UP_ROWS, OF_OUTPUT, is_asynchronous, steps_by_id

_NEVER, _FOREVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def in_order(start_us: Int64s, believed: Bools) -> Bools:
    """bool[anchors]: which starts to keep so that time never runs backwards; ``believed`` ones are kept first."""
    first = _ascending(start_us, believed)
    low = np.maximum.accumulate(np.where(first, start_us, _NEVER))
    high = np.minimum.accumulate(np.where(first, start_us, _FOREVER)[::-1])[::-1]
    return _ascending(start_us, first | ((start_us >= low) & (start_us <= high)))


def _ascending(start_us: Int64s, among: Bools) -> Bools:
    """``among`` without starts before an earlier one, or without those after a later one: whichever keeps more."""
    latest_so_far = np.maximum.accumulate(np.where(among, start_us, _NEVER))
    early: Bools = among & (start_us == latest_so_far)
    if early.sum() == among.sum():
        return early
    earliest_from_here = np.minimum.accumulate(np.where(among, start_us, _FOREVER)[::-1])[::-1]
    late: Bools = among & (start_us == earliest_from_here)
    return early if early.sum() >= late.sum() else late


SAMPLED, SCHEDULED, QUEUED, OUTPUT, INTERPOLATED = (
    *("sampled", "scheduled event", "queued event", "output event"),
    "interpolated",
)
# Best first.
SOURCES = (SAMPLED, SCHEDULED, QUEUED, OUTPUT, INTERPOLATED)
TIMELINE_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "step_id": pl.Int64,
    "start_us": pl.Int64,  # start of schedule(), from the experiment's zero
    "source": pl.Enum(SOURCES),
    "cycle_us": pl.Int64,  # to the start of the next step; null if either of the two was interpolated
}
_DISTANCE_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "source": pl.UInt8,
    "lag_us": pl.Int64,
}
_RECORD_SCHEMA = {name: TIMELINE_SCHEMA[name] for name in ("step_id", "start_us", "source")}
_FEWEST_LAGS = 5  # steps with both a sample and an event of a kind, for the median lag of that kind
_LOWEST, _HIGHEST = -(1 << 61), 1 << 61  # beyond all step ids
MOST_STEPS = 20_000_000  # more steps would take over 1 GB: their ids are taken for mistaken


# Sources are numbered as in SOURCES.  The event of each kind that comes nearest to the start of a step.
_NEAREST = f"""
WITH told AS (
    SELECT time_us AS start_us,
           CASE WHEN {INSIDE_SCHEDULE} THEN 1 WHEN {OF_OUTPUT} THEN 3 ELSE 2 END AS source,
           step_id + CASE source WHEN 1 THEN 0 WHEN 3 THEN $output_of ELSE 1 END AS step_id
    FROM events
    WHERE ({INSIDE_SCHEDULE} OR {OF_OUTPUT} OR event IN ('journey.QUEUED', 'journey.FINISHED'))
      AND events.step_id BETWEEN $first - 2 AND $last
)
SELECT step_id, CASE source WHEN 1 THEN min(start_us) ELSE max(start_us) END AS start_us, source
FROM told WHERE step_id BETWEEN $first AND $last AND start_us IS NOT NULL GROUP BY step_id, source
"""  # noqa: S608 (constants of this package)
_NEAREST_SCHEMA = dict.fromkeys(("step_id", "start_us", "source"), pl.Int64)
# From each event to the start of its step, where that was sampled.
_DISTANCES = """
SELECT source::UTINYINT AS source, sampled.start_us - nearest.start_us AS lag_us
FROM nearest JOIN sampled USING (step_id)
"""
# The best record of each step, events moved by the lag of their kind.  Under asynchronous scheduling an output is of
# the step before the last one begun, unless nothing was left to schedule: the step after it then begins later than
# the event, which says nothing of the one after that.
_BEST = """
WITH records AS (SELECT step_id, start_us, 0 AS source FROM sampled UNION ALL SELECT * FROM nearest),
drained AS (
    SELECT output.step_id
    FROM records AS output JOIN records AS before ON before.step_id = output.step_id - 1
    WHERE $output_of = 2 AND output.source = 3 AND before.source < 3 AND before.start_us > output.start_us
),
best AS (
    SELECT step_id, arg_min(start_us, source) AS start_us, min(source) AS source
    FROM records WHERE step_id BETWEEN $first AND $last AND NOT (source = 3 AND step_id IN (FROM drained))
    GROUP BY step_id
)
SELECT step_id, start_us + $lags_us[source + 1] AS start_us, $sources[source + 1] AS source FROM best ORDER BY step_id
"""


@dataclass(frozen=True)
class StepAnchors:
    """Steps with a recorded start.

    ``rows``: ``step_id``, ``start_us``, ``source``, ascending in the first two.  ``lags``: ``source``, ``steps``,
    ``lag_us``, ``low_us``, ``high_us``: how long after an event of each kind its step began, over steps that were
    sampled too (median and middle 98 %).  ``out_of_order``: records left out because time would run backwards.
    """

    rows: Rows
    lags: pl.DataFrame
    out_of_order: int

    @property
    def frame(self) -> pl.DataFrame:
        """``rows`` as one frame."""
        return self.rows.frame()

    @cached_property
    def steps(self) -> int:
        """Steps from the first anchor to the last, both included."""
        if self.rows.is_empty():
            return 0
        return int(self.rows.aggregate(steps="coalesce(max(step_id) - min(step_id) + 1, 0)")["steps"])


def step_anchors(recording: Recording) -> StepAnchors:
    """The anchors of a recording's step clock, one per step with a record."""
    if recording.steps.is_empty() and recording.journey_events.is_empty():
        return StepAnchors(no_rows(_RECORD_SCHEMA), _lags(pl.DataFrame(schema=_DISTANCE_SCHEMA)), 0)
    scratch = Scratch(share=3)  # beside that of the recording
    output_of = {"output_of": 2 if is_asynchronous(recording) else 1}
    nearest, distances, ranges = scratch.writer(_NEAREST_SCHEMA), [], _step_ranges(recording)
    events = recording.journey_events.only(["event", "finish_status", "step_id", "time_us"])
    for first, last in ranges:
        of_range = query(_NEAREST, _NEAREST_SCHEMA, output_of | {"first": first, "last": last}, events=events).frame()
        nearest.add(of_range)
        both = {"nearest": rows_of(of_range), "sampled": _sampled(recording, first, last)}
        distances.append(query(_DISTANCES, _DISTANCE_SCHEMA, **both).frame())
    lags, placed, best = _lags(pl.concat(distances)), nearest.done(), scratch.writer(_RECORD_SCHEMA)
    del distances
    highest = {"last": "coalesce(max(step_id), 0)"}
    last_step = max(int(rows.aggregate(**highest)["last"]) for rows in (recording.steps, recording.journey_events))
    bound: dict[str, object] = {**output_of, "sources": SOURCES, "lags_us": _lags_us(lags)}
    for first, last in ranges:
        # What is said of the output of a step depends on the one before it.
        both = {"nearest": placed.between("step_id", first - 1, last), "sampled": _sampled(recording, first - 1, last)}
        inside = {"first": max(first, 1), "last": min(last, last_step)}
        for batch in query(_BEST, _RECORD_SCHEMA, bound | inside, **both).batches():
            best.add(batch)
    anchors = best.done()
    stays = pl.Series(in_order(anchors["start_us"].to_numpy(), (anchors["source"] == SAMPLED).to_numpy()))
    writer, first = scratch.writer(_RECORD_SCHEMA), 0
    for batch in anchors.batches():
        writer.add(batch.filter(stays.slice(first, batch.height)))
        first += batch.height
    kept = writer.done()
    return StepAnchors(kept, lags, anchors.height - kept.height)


def _sampled(recording: Recording, first: int, last: int) -> Rows:
    """Start of the sampled steps of a range."""
    return steps_by_id(recording.steps.only(["step_id", "start_us"]).between("step_id", first, last), "start_us")


_IDS = "SELECT step_id FROM steps UNION ALL SELECT step_id FROM events"


def _step_ranges(recording: Recording) -> list[tuple[int, int]]:
    """First and last id of ranges of steps with at most ``LOOKED_UP_ROWS`` records each."""
    both = {"steps": recording.steps.only(["step_id"]), "events": recording.journey_events.only(["step_id"])}
    parts = 1 + sum(rows.height for rows in both.values()) // LOOKED_UP_ROWS
    shares = ", ".join(str(part / parts) for part in range(1, parts))
    cuts = f"SELECT unnest(approx_quantile(step_id, [{shares}])) AS cut FROM ({_IDS})"  # noqa: S608 (numbers)
    places = query(cuts, {"cut": pl.Int64}, **both)["cut"].drop_nulls().to_list() if shares else []
    ends = sorted({int(cut) for cut in places})
    return list(zip([_LOWEST, *(end + 1 for end in ends)], [*ends, _HIGHEST], strict=True))


def timeline_of(anchors: StepAnchors) -> pl.DataFrame:
    """Every step from the first anchor to the last, ``TIMELINE_SCHEMA``; empty without an anchor.

    Steps between two anchors lie evenly between them.  Raises ``ReconstructionError`` for more than MOST_STEPS steps.
    """
    at = anchors.frame
    if at.is_empty():
        return pl.DataFrame(schema=TIMELINE_SCHEMA)
    if anchors.steps > MOST_STEPS:
        raise ReconstructionError(f"{anchors.steps} steps are more than {MOST_STEPS}: their ids are mistaken")
    ids, start_us = at["step_id"].to_numpy(), at["start_us"].to_numpy()
    every = np.arange(ids[0], ids[-1] + 1)
    starts = np.rint(np.interp(every, ids, start_us)).astype(np.int64)
    frame = pl.DataFrame({"step_id": every, "start_us": starts})
    frame = frame.join(at.select("step_id", "source"), on="step_id", how="left", maintain_order="left")
    known = pl.col("source").is_not_null()
    cycle = pl.when(known & known.shift(-1)).then(pl.col("start_us").shift(-1) - pl.col("start_us"))
    return frame.with_columns(cycle.alias("cycle_us"), pl.col("source").fill_null(INTERPOLATED)).select(
        TIMELINE_SCHEMA.keys()
    )


def _lags(distances: pl.DataFrame) -> pl.DataFrame:
    lag, numbers = pl.col("lag_us"), range(len(SOURCES))
    return (
        distances.group_by("source")
        .agg(
            pl.len().cast(pl.Int64).alias("steps"),
            lag.median().round().cast(pl.Int64),
            *(
                lag.quantile(share, "lower").cast(pl.Int64).alias(name)
                for share, name in ((0.01, "low_us"), (0.99, "high_us"))
            ),
        )
        .sort("source")
        .with_columns(pl.col("source").replace_strict(numbers, SOURCES, return_dtype=TIMELINE_SCHEMA["source"]))
    )


def _lags_us(lags: pl.DataFrame) -> list[int]:
    """By how much the records of each source are moved, us."""
    rows = lags.filter(pl.col("steps") >= _FEWEST_LAGS).select("source", "lag_us").iter_rows()
    known: dict[str, int] = dict(rows)
    return [known.get(source, 0) for source in SOURCES]
