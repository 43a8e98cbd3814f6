"""A step log beside what else is known: the spans of its server, and the requests of a client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.readers.otlp.journeys import READ_LIFECYCLE_SCHEMA, Journeys
from blis_replay.ingest.readers.otlp.traces import TracesRead, requests_of
from blis_replay.ingest.readers.recorder.step_log import StepLog
from blis_replay.ingest.readers.requests import RawPrompts, RequestsRead
from blis_replay.ingest.readers.server.clock import Bridge, bridge_of
from blis_replay.ingest.recording import LIFECYCLE_SCHEMA
from blis_replay.ingest.rows import Rows, Scratch, query, rows_of

_WITH_ENDS = """
WITH spans AS (
    SELECT request_id, any_value(sent_us) AS sent_us, any_value(ttft_us) AS ttft_us, any_value(e2e_us) AS e2e_us
    FROM requests WHERE request_id IS NOT NULL GROUP BY request_id HAVING count(*) = 1
)
SELECT lifecycles.* REPLACE (
    (sent_us + ttft_us) * 1000 - $offset_ns AS first_response_ns, (sent_us + e2e_us) * 1000 - $offset_ns AS departed_ns
)
FROM lifecycles LEFT JOIN spans ON spans.request_id = api_request_id ORDER BY journey
"""
_OWNED = """
SELECT lifecycles.* REPLACE (coalesce(owners.owner, request_index) AS request_index)
FROM lifecycles LEFT JOIN owners USING (journey) ORDER BY journey
"""


def with_step_log(traces: TracesRead, log: StepLog, scratch: Scratch) -> TracesRead:
    """The traces with the steps and journeys of a step log, which has them all, in place of their own.

    Their request spans say when the API server had a request's first token, and its last.
    """
    bridge = bridge_of(log.journeys.events["offset_ns"], log.steps)
    journeys = _with_ends(log.journeys, traces.requests, bridge, scratch)
    remarks = (*traces.remarks, *log.remarks)
    if own := traces.steps.height:
        remarks = (*remarks, f"{own:,} step records of traces: not used, the step log has every step")
    return replace(
        traces,
        steps=log.steps,
        snapshots=log.snapshots,
        journeys=journeys,
        requests=requests_of(journeys, scratch),
        bridge=bridge,
        dropped_events=0,
        sequential_span_ids=False,
        remarks=remarks,
    )


def _with_ends(journeys: Journeys, spans: RequestsRead | None, bridge: Bridge | None, scratch: Scratch) -> Journeys:
    if spans is None or bridge is None or spans.clock_kind != "epoch":
        return journeys
    bound = {"offset_ns": bridge.offset_ns}
    tables = {"lifecycles": journeys.lifecycles, "requests": spans.rows}
    return replace(journeys, lifecycles=scratch.kept(query(_WITH_ENDS, READ_LIFECYCLE_SCHEMA, bound, **tables)))


def journeys_of_requests(journeys: Journeys) -> Int64s:
    """int64[requests]: the journey of each request that :func:`requests_of` makes of them."""
    known = journeys.lifecycles.where("coalesce(arrived_ns, queued_ns) IS NOT NULL")
    numbers: Int64s = known["journey"].to_numpy()
    return numbers


def prompts_of_rows(prompts: RawPrompts, journeys: Int64s, rows: Int64s, count: int) -> RawPrompts:
    """The prompts of ``count`` requests, by the rows of theirs that journeys belong to (-1: to none)."""
    prompt = np.full(count, -1, np.int64)
    prompt[rows[rows >= 0]] = prompts.prompt[journeys[rows >= 0]]
    return replace(prompts, prompt=prompt)


def with_owners(lifecycles: Rows, journeys: Int64s, owners: Int64s, scratch: Scratch) -> Rows:
    """The lifecycles with ``request_index`` of those journeys that have an owner (-1: none)."""
    owned = pl.DataFrame({"journey": journeys, "owner": owners}).filter(pl.col("owner") >= 0)
    tables = {"lifecycles": lifecycles, "owners": rows_of(owned)}
    return scratch.kept(query(_OWNED, LIFECYCLE_SCHEMA, None, **tables))
