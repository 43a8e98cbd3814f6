"""What the server recorded of steps and requests, and how it belongs to what the client recorded of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.base.errors import counted
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.formats import OTLP, STEP_LOG
from blis_replay.ingest.readers.otlp import journeys as otlp_journeys
from blis_replay.ingest.readers.otlp import traces as otlp_traces
from blis_replay.ingest.readers.otlp.journeys import READ_LIFECYCLE_SCHEMA, Journeys
from blis_replay.ingest.readers.otlp.spans import lifecycles_of_spans
from blis_replay.ingest.readers.otlp.traces import TracesRead, requests_of
from blis_replay.ingest.readers.pairing import BY_IDS, Pairing, paired, with_request_indices
from blis_replay.ingest.readers.requests import RawPrompts, RequestsRead
from blis_replay.ingest.readers.server.clock import bridge_of, nearest_us, server_times, steps_on_zero
from blis_replay.ingest.readers.step_log import StepLog, read_step_log
from blis_replay.ingest.recording import IDENTITIES, JOURNEY_EVENT_SCHEMA, LIFECYCLE_SCHEMA, NOT_KNOWN, Clock
from blis_replay.ingest.rows import Rows, no_rows, query, rows_of
from blis_replay.ingest.scratch import Scratch


@dataclass(frozen=True)
class ServerTimes:
    """What the server's traces say, from the experiment's zero."""

    steps: Rows
    lifecycles: Rows
    journey_events: Rows
    clocks: tuple[Clock, ...]


class ServerSide:
    """The server's half of one reading: its traces and its step log, and which of its requests are the client's.

    ``missing``: takes remarks on what could not be determined.  ``order``: int64, the client's rows in send order,
    once known.
    """

    def __init__(self, scratch: Scratch, missing: list[str]) -> None:
        self.scratch, self.missing = scratch, missing
        self.spans: pl.DataFrame | None = None  # requests as the server traced them, beside those of a client
        self.pairing: Pairing | None = None  # of requests that both recorded
        self.order: NDArray[np.int64] = np.empty(0, np.int64)
        self.log: StepLog | None = None
        self.logged: NDArray[np.int64] = np.empty(0, np.int64)  # the journeys of the requests in it

    def read(self, known: Mapping[str, list[RecordedFile]]) -> otlp_traces.TracesRead:
        """What the server wrote of its steps and requests: traces, and a step log in place of what it has better."""
        traces = otlp_traces.read_traces(known.get(OTLP, []), self.scratch)
        self.log = read_step_log(known.get(STEP_LOG, []), self.scratch)
        if self.log is None:
            return traces
        traces = with_step_log(traces, self.log, self.scratch)
        if traces.journeys is not None:
            arrived = traces.journeys.lifecycles.where("coalesce(arrived_ns, queued_ns) IS NOT NULL")
            self.logged = arrived["journey"].to_numpy()
        return traces

    def paired_with(
        self, traced: RequestsRead, client: RequestsRead | None, used: str, files: NDArray[np.str_]
    ) -> RequestsRead:
        """The ``client``'s requests, of the file ``used``, with what the server traced; else the server's requests.

        ``files``: str[requests], the client's file of each.
        """
        if client is None or client.rows.is_empty():
            return replace(traced, prefix=self._logged_prompts(np.arange(len(self.logged)), len(self.logged)))
        self.spans = traced.frame
        kind = traced.clock_kind
        alike = client.clock_kind == kind
        self.pairing = paired(client.frame, self.spans, kind, alike and kind == "monotonic", files, alike)
        self._note_pairing(self.pairing, used)
        logged = self._logged_prompts(self.pairing.client_rows, self.pairing.frame.height)
        return replace(client, rows=rows_of(self.pairing.frame), prefix=logged or client.prefix)

    def _logged_prompts(self, rows: NDArray[np.int64], count: int) -> RawPrompts | None:
        """The prompts of ``count`` requests by the step log; ``rows``: which of them its own requests are, -1: none."""
        if self.log is None or self.log.prompts is None or not (rows >= 0).any():
            return None
        prompt = np.full(count, -1, np.int64)
        prompt[rows[rows >= 0]] = self.log.prompts.prompt[self.logged[rows >= 0]]
        return replace(self.log.prompts, prompt=prompt)

    def _note_pairing(self, pairing: Pairing, used: str) -> None:
        """Note requests of the server without a pair, and pairs that were not found by their ids."""
        traced, pairs = len(pairing.client_rows), int((pairing.client_rows >= 0).sum())
        if not pairs:
            self.missing.append(
                f"which of the {traced:,} requests that the server traced are those of {used}: neither ids, nor "
                "lengths and arrivals, tell"
            )
        elif pairing.how != BY_IDS:
            others = f"; {traced - pairs:,} others are not of {used}" if traced > pairs else ""
            self.missing.append(
                f"ids that client and server share: {pairs:,} of {traced:,} requests that the server traced are those "
                f"of {used} by {pairing.how}{others}"
            )

    def placed(self, traces: otlp_traces.TracesRead, requests: Rows, client: Clock | None) -> ServerTimes:
        """Steps and journeys beside the requests."""
        journeys = traces.journeys
        arrivals_ns = pl.Series(dtype=pl.Int64)
        if journeys is not None:
            arrivals_ns = journeys.lifecycles.select(pl.coalesce("arrived_ns", "queued_ns")).to_series()
        of_pairs = self._clock_by_identities(client, traces.bridge_ns)
        times = server_times(traces.steps, arrivals_ns, traces.bridge_ns, client, requests, of_pairs)
        self._note_traces(traces, times.remark if times else "")
        zero_us = times.zero_us if times else 0
        steps, clocks = steps_on_zero(traces.steps, zero_us), times.clocks if times else ()
        if of_pairs is not None:
            clocks = (*(clock for clock in clocks if clock.name != of_pairs.name), of_pairs)
        if journeys is None:
            lifecycles, own_clock = self._span_lifecycles(client, of_pairs)
            return ServerTimes(steps, lifecycles, no_rows(JOURNEY_EVENT_SCHEMA), (*clocks, *own_clock))
        lifecycles, events = otlp_journeys.on_zero(journeys, zero_us, self.scratch)
        lifecycles = with_request_indices(lifecycles, requests, self.scratch)
        if self.pairing is not None and self.log is not None:
            owners = pl.DataFrame({"journey": self.logged, "owner": self._owners(self.pairing)})
            tables = {"lifecycles": lifecycles, "owners": rows_of(owners.filter(pl.col("owner") >= 0))}
            lifecycles = self.scratch.kept(query(_OWNED, LIFECYCLE_SCHEMA, None, **tables))
        if unknown := lifecycles.where("request_index IS NULL").height:
            self.missing.append(f"which requests {unknown} journeys belong to: their ids are not those of the requests")
        return ServerTimes(steps, lifecycles, events, clocks)

    def _span_lifecycles(self, client: Clock | None, of_pairs: Clock | None) -> tuple[Rows, tuple[Clock, ...]]:
        """Requests as upstream spans have them, beside those of a client; and their clock, where no pair places it."""
        spans, pairing = self.spans, self.pairing
        if spans is None or pairing is None or client is None:
            return no_rows(LIFECYCLE_SCHEMA), ()
        clock = of_pairs
        if clock is None:
            epochs = client.kind == "epoch" and not client.constructed
            zero_us = client.zero_us if epochs else int(spans["sent_us"].min() or 0)  # type: ignore[arg-type]
            clock = Clock("server", "epoch", zero_us, placed=NOT_KNOWN)
        owners = pl.Series(self._owners(pairing)).replace(-1, None)
        rows = lifecycles_of_spans(spans, owners, clock.zero_us)
        return self.scratch.hold(rows), () if of_pairs is not None else (clock,)

    def _owners(self, pairing: Pairing) -> NDArray[np.int64]:
        """int64[server's requests]: the index of the client's request that each belongs to, or -1."""
        position = np.full(len(self.order) + 1, -1, np.int64)
        position[self.order] = np.arange(len(self.order))
        owners: NDArray[np.int64] = position[pairing.client_rows]  # of -1 it is the last
        return owners

    def _clock_by_identities(self, client: Clock | None, bridge_ns: int | None) -> Clock | None:
        """The server's clock by the requests that it and the client both recorded: its stamps, if those allow them."""
        alignment = None if self.pairing is None else self.pairing.alignment
        if alignment is None or client is None:
            return None
        if alignment.crossed:
            self.missing.append(
                f"one offset between the clocks of client and server: by the {alignment.pairs:,} requests that both "
                f"recorded it is at least {alignment.low_us:,} us and at most {alignment.high_us:,} us"
            )
        name = "step" if alignment.clock_kind == "monotonic" else "server"
        stamped_us = 0 if client.kind == alignment.clock_kind else None
        if client.kind == "epoch" and alignment.clock_kind == "monotonic" and bridge_ns is not None:
            stamped_us = -nearest_us(bridge_ns)
        offset_us = alignment.offset_us(stamped_us)
        uncertainty_us = alignment.uncertainty_us(offset_us)
        zero_us = client.zero_us + offset_us
        return Clock(name, alignment.clock_kind, zero_us, placed=IDENTITIES, uncertainty_us=uncertainty_us)

    def _note_traces(self, traces: otlp_traces.TracesRead, remark: str) -> None:
        if traces.steps.is_empty():
            self.missing.append("step records")
        if traces.dropped_events:
            self.missing.append(f"{traces.dropped_events} step span events that the tracing SDK discarded")
        if others := traces.other_spans:
            names = ", ".join(sorted({name for _scope, name in others}))
            self.missing.append(f"{counted(sum(others.values()), 'span')} that are not steps or requests ({names})")
        self.missing += traces.remarks
        if remark:
            self.missing.append(remark)


# -- A step log beside what else is known ---------------------------------------------------------

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
    bridge_ns = bridge_of(log.journeys.events["offset_ns"], log.steps)
    journeys = _with_ends(log.journeys, traces.requests, bridge_ns, scratch)
    remarks = (*traces.remarks, *log.remarks)
    if own := traces.steps.height:
        remarks = (*remarks, f"{own:,} step records of traces: not used, the step log has every step")
    return replace(
        traces,
        steps=log.steps,
        snapshots=log.snapshots,
        journeys=journeys,
        requests=requests_of(journeys, scratch),
        bridge_ns=bridge_ns,
        dropped_events=0,
        remarks=remarks,
    )


def _with_ends(journeys: Journeys, spans: RequestsRead | None, bridge_ns: int | None, scratch: Scratch) -> Journeys:
    if spans is None or bridge_ns is None or spans.clock_kind != "epoch":
        return journeys
    bound = {"offset_ns": bridge_ns}
    tables = {"lifecycles": journeys.lifecycles, "requests": spans.rows}
    return replace(journeys, lifecycles=scratch.kept(query(_WITH_ENDS, READ_LIFECYCLE_SCHEMA, bound, **tables)))
