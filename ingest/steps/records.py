"""Step records by step id, one per step; and what journey events say about steps."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import Rows, query


def one_a_step(steps: pl.DataFrame) -> pl.DataFrame:
    """The first record of each ``step_id``, by it."""
    return steps.sort("step_id", maintain_order=True).unique("step_id", keep="first", maintain_order=True)


def steps_by_id(steps: Rows, *columns: str) -> Rows:
    """``step_id`` and ``columns`` of the first record of each step that has them all, by step id."""
    names = ["step_id", *columns]
    known = steps.only(names).where(" AND ".join(f"{name} IS NOT NULL" for name in names))
    return query(
        """SELECT * EXCLUDE (place, before) FROM (
               SELECT *, lag(step_id) OVER (ORDER BY step_id, place) AS before
               FROM (SELECT *, row_number() OVER () AS place FROM steps))
           WHERE before IS DISTINCT FROM step_id ORDER BY step_id""",
        known.schema,
        steps=known,
    )


# Journey events that are stamped inside schedule() of the step they carry, and those that are stamped when the output
# of the step they carry is processed.
_INSIDE_SCHEDULE = "event IN ('journey.SCHEDULED', 'journey.PREEMPTED')"
_OF_OUTPUT = (
    "(event = 'journey.FIRST_TOKEN' OR (event = 'journey.FINISHED' AND finish_status IS DISTINCT FROM 'aborted'))"
)

_LATE_OUTPUTS = f"""
WITH records AS (
    SELECT step_id, start_us, true AS begins FROM steps
    UNION ALL
    SELECT CASE WHEN {_INSIDE_SCHEDULE} THEN step_id ELSE step_id + 1 END, time_us, {_INSIDE_SCHEDULE}
    FROM events WHERE {_INSIDE_SCHEDULE} OR {_OF_OUTPUT}
), stamped AS (
    SELECT * FROM records WHERE start_us IS NOT NULL AND abs(step_id % $parts) = $part
), begun AS (
    SELECT step_id, min(start_us) AS began_us FROM stamped WHERE begins GROUP BY step_id
)
SELECT count(*) AS outputs, count(*) FILTER (start_us > began_us) AS late
FROM stamped JOIN begun USING (step_id) WHERE NOT begins
"""  # noqa: S608 (constants of this module)
COARSE_US = 1_000  # stamps of whole ms do not show which of two calls came first, which are some 100 us apart
LOOKED_UP_ROWS = 3_000_000  # steps and events that the database joins at a time, in memory


def is_asynchronous(recording: Recording) -> bool:
    """Whether scheduling was asynchronous, by the engine arguments (journeys are one of their sources)."""
    return bool(recording.argument("async_scheduling"))


def detected_async(steps: Rows, journey_events: Rows) -> bool | None:
    """Whether the output of most steps was processed after the next step had begun; ``None`` if not recorded.

    Steps that all begin a whole number of ``COARSE_US`` apart have stamps too coarse to order them.
    ``steps``: ``STEP_SCHEMA``; ``journey_events``: ``JOURNEY_EVENT_SCHEMA``.
    """
    first_us = steps.aggregate(us="min(start_us)")["us"]
    if first_us is not None and steps.where(f"(start_us - {first_us}) % {COARSE_US} != 0").is_empty():
        return None
    counts = {"outputs": pl.Int64, "late": pl.Int64}
    parts = 1 + (steps.height + journey_events.height) // LOOKED_UP_ROWS
    counted = [
        query(_LATE_OUTPUTS, counts, {"parts": parts, "part": part}, steps=steps, events=journey_events).frame().row(0)
        for part in range(parts)
    ]
    outputs, late = (sum(numbers) for numbers in zip(*counted, strict=True))
    return 2 * late > outputs if outputs else None
