"""The SQL of this package.  Values are bound (``?``, ``$name``), never pasted.

Where a table's name varies it comes from a constant of this module, never from input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from blis_replay.ingest.rows import result_frame

if TYPE_CHECKING:
    import duckdb

# Tables that hold one recording, all keyed by slug.
RECORDING_TABLES = (
    "experiments",
    "source_files",
    "rejected_records",
    "engine_args",
    "stages",
    "clocks",
    "requests",
    "aggregates",
    "token_event_runs",
    "prefix_identity",
    "prompts",
    "request_prompts",
    "steps",
    "snapshots",
    "lifecycles",
    "journey_events",
    "iterations",
    "findings",
)

RUN_TABLES = ("runs", "run_requests", "run_steps", "errors")

INSERT_STAMPS = """
INSERT INTO token_event_runs
SELECT $slug, request_index, first_event, tokens, $stamps_per_token, $leading_events, times_us FROM rows_to_store
"""

# Gaps of a few hundred requests, to tell how a client stamped its stream.
SAMPLED_GAPS = """
WITH gaps AS (
    SELECT request_index, event_index,
           lead(time_us) OVER (PARTITION BY request_index ORDER BY event_index) - time_us AS gap_us
    FROM sampled
)
SELECT request_index, count(*) AS stamps,
       coalesce(avg((gap_us < $tiny_us)::INT) FILTER (WHERE event_index % 2 = 0 AND gap_us IS NOT NULL), 0)
           AS even_tiny_share,
       median(gap_us) FILTER (WHERE event_index % 2 = 0) AS even_gap_us,
       median(gap_us) FILTER (WHERE event_index % 2 = 1) AS odd_gap_us,
       arg_max(gap_us, event_index) FILTER (WHERE event_index % 2 = 1 AND gap_us IS NOT NULL) AS last_odd_gap_us,
       median(gap_us) AS gap_us,
       arg_min(gap_us, event_index) FILTER (WHERE gap_us IS NOT NULL) AS first_gap_us,
       arg_max(gap_us, event_index) FILTER (WHERE gap_us IS NOT NULL) AS last_gap_us
FROM gaps GROUP BY request_index ORDER BY request_index
"""

OUTPUT_TIMES = """
SELECT request_index, token_index, time_us FROM token_events
WHERE slug = $slug AND token_index IS NOT NULL ORDER BY request_index, token_index
"""

# ``chosen_requests``: a view that is registered where not all requests are pooled.
OF_CHOSEN = "request_index IN (SELECT request_index FROM chosen_requests)"
POOLED_OUTPUT_GAPS = """
WITH gaps AS (
    SELECT time_us - lag(time_us) OVER (PARTITION BY request_index ORDER BY token_index) AS gap_us
    FROM token_events
    WHERE slug = $slug AND token_index IS NOT NULL
      AND request_index IN (SELECT request_index FROM requests WHERE slug = $slug AND status = 'ok')
      AND {of_chosen}
)
SELECT gap_us, count(*) AS count FROM gaps WHERE gap_us IS NOT NULL GROUP BY gap_us ORDER BY gap_us
"""

# Four bins a decade, from 1 us on; what is below is counted in the first.
STAMP_GAPS = """
WITH gaps AS (
    SELECT time_us - lag(time_us) OVER (PARTITION BY request_index ORDER BY event_index) AS gap_us
    FROM token_events WHERE slug = $slug
)
SELECT floor(4 * log10(greatest(gap_us, 1)))::BIGINT AS bin, count(*) AS count
FROM gaps WHERE gap_us IS NOT NULL GROUP BY bin
"""

HASHES = "SELECT content_hash, derived_hash FROM experiments WHERE slug = ?"

STORED_COUNTS = """
SELECT alias, (SELECT count(*) FROM requests r WHERE r.slug = e.slug),
       (SELECT count(*) FROM steps s WHERE s.slug = e.slug),
       (SELECT count(*) FROM iterations i WHERE i.slug = e.slug),
       (SELECT count(*) FROM findings f WHERE f.slug = e.slug),
       (SELECT coalesce(sum(rejected_count), 0)::BIGINT FROM source_files f WHERE f.slug = e.slug),
       (SELECT coalesce(sum(bytes), 0)::BIGINT FROM source_files f WHERE f.slug = e.slug),
       ground_truth, content_hash, read_by
FROM experiments e WHERE slug = ?
"""

LIST_EXPERIMENTS = """
SELECT e.slug, CASE WHEN count(*) OVER (PARTITION BY e.alias) > 1 THEN e.slug ELSE e.alias END AS alias,
       e.model, e.hardware, e.tensor_parallelism, e.workload, e.ground_truth,
       (SELECT count(*) FROM requests r WHERE r.slug = e.slug) AS requests,
       (SELECT count(*) FROM requests r WHERE r.slug = e.slug AND r.status NOT IN ('ok', 'aborted')) AS failed,
       EXISTS (SELECT 1 FROM findings f WHERE f.slug = e.slug AND f.check_name = 'overloaded') AS overloaded,
       (SELECT count(*) FROM findings f WHERE f.slug = e.slug) AS findings
FROM experiments e ORDER BY e.slug
"""


def fetch(
    connection: duckdb.DuckDBPyConnection, sql: str, bound: dict[str, object], schema: Mapping[str, type[pl.DataType]]
) -> pl.DataFrame:
    """The rows of a query as a frame of ``schema``; values are bound by name."""
    return typed(result_frame(connection.sql(sql, params=bound)), schema)


def first_row(
    connection: duckdb.DuckDBPyConnection, sql: str, bound: Sequence[object] | dict[str, object] | None = None
) -> tuple[Any, ...] | None:
    """The first row of a query or None; the result is read to its end, which DuckDB asks for."""
    rows: list[tuple[Any, ...]] = connection.execute(sql, bound).fetchall()
    return rows[0] if rows else None


def insert_stream(
    connection: duckdb.DuckDBPyConnection, sql: str, bound: Sequence[object] | dict[str, object], rows: Any
) -> None:
    """Run an INSERT that selects from ``rows_to_store``; ``rows``: Arrow data, as a stream where there are many.

    What an INSERT leaves of a row group stays in memory until the commit: one stream leaves one.
    """
    connection.register("rows_to_store", rows)
    connection.execute(sql, bound)
    connection.unregister("rows_to_store")


def typed(frame: pl.DataFrame, schema: Mapping[str, type[pl.DataType]]) -> pl.DataFrame:
    """The columns of ``schema`` out of a frame, in its order and types."""
    return frame.select(pl.col(name).cast(kind) for name, kind in schema.items())
