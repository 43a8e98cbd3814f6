"""All OTLP files of a recording: steps, snapshots, journeys and upstream request spans."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile, is_large
from blis_replay.ingest.readers.otlp import journeys as otlp_journeys
from blis_replay.ingest.readers.otlp import spans
from blis_replay.ingest.readers.otlp.decode import BatchRows, read_json
from blis_replay.ingest.readers.otlp.framing import records
from blis_replay.ingest.readers.otlp.journeys import Journeys, is_since
from blis_replay.ingest.readers.otlp.spans import (
    READ_SNAPSHOT_SCHEMA,
    READ_STEP_SCHEMA,
    Repeats,
    first_spans,
    reject_repeated,
)
from blis_replay.ingest.readers.requests import READ_SCHEMA, RequestsRead
from blis_replay.ingest.readers.server.clock import bridge_of
from blis_replay.ingest.recording import ARRIVAL_TIME, SNAPSHOT_SCHEMA
from blis_replay.ingest.rows import Rows, no_rows, query, rows_of, shaped
from blis_replay.ingest.scan.otlp_columns import ENGINE_SCOPES, STEP_SCOPE, TraceBatch
from blis_replay.ingest.scratch import Scratch, Writer, whole_groups

MAX_OTHER_NAMES = 100  # names of unread spans, without their numbers, that are counted apart
_FURTHER = ("(further)", "(further)")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class TracesRead:
    """What OTLP files hold.

    ``steps`` (``READ_STEP_SCHEMA``, by id) and ``snapshots`` (``SNAPSHOT_SCHEMA``): none twice.  ``requests``: those of
    the journeys, else of upstream ``llm_request`` spans.  ``bridge_ns``: epoch less monotonic clock, None if no event
    has both.  ``dropped_events``: step events that the tracing SDK discarded.  ``other_spans``: spans that are not
    read, by scope and name with ``*`` for its numbers.  ``remarks``: what else is missing or odd, in words.
    """

    steps: Rows
    snapshots: Rows
    journeys: Journeys | None
    requests: RequestsRead | None
    bridge_ns: int | None
    dropped_events: int
    other_spans: dict[tuple[str, str], int]
    remarks: tuple[str, ...]


@dataclass
class _Collected:
    steps: Writer
    snapshots: Writer
    journey_spans: Writer
    journey_events: Writer
    requests: list[pl.DataFrame] = field(default_factory=list)
    step_spans: list[pl.DataFrame] = field(default_factory=list)
    others: Counter[tuple[str, str]] = field(default_factory=Counter)
    other_events: int = 0
    spans: int = 0
    several_sequences: bool = False

    def add(self, batch: TraceBatch, number: int, file: RecordedFile) -> None:
        """Keep what is read of a batch of file ``number``."""
        # Even of no rows each of these takes milliseconds.
        if batch.steps.height:
            self.steps.add(spans.steps_of(batch, file))
        if batch.snapshots.height:
            self.snapshots.add(spans.snapshots_of(batch, file))
        if batch.spans["scope"].is_in(ENGINE_SCOPES).any():
            self.requests.append(spans.request_spans_of(batch, number, file))
        self.step_spans.append(_step_spans(batch))
        if batch.journey_events.height or batch.spans.filter(otlp_journeys.is_journey_span()).height:
            journey_spans, stamped = otlp_journeys.spans_and_events_of(batch, number, file, self.spans)
            self.journey_spans.add(journey_spans)
            self.journey_events.add(stamped)
        for scope, name, count in _others(batch).iter_rows():
            family = scope[:100], _NUMBER.sub("*", name[:100])
            known = family in self.others or len(self.others) < MAX_OTHER_NAMES
            self.others[family if known else _FURTHER] += count
        if (batch.spans["sequences"] > 1).any():
            of_requests = spans.is_request_span() | otlp_journeys.is_journey_span()
            self.several_sequences |= not batch.spans.filter(of_requests & (pl.col("sequences") > 1)).is_empty()
        self.other_events += int(batch.spans["other_events"].sum())
        self.spans += len(batch.spans)


def read_traces(files: Sequence[RecordedFile], scratch: Scratch | None = None) -> TracesRead:
    """What all OTLP files of a recording hold together (collectors rotate them); rows are in ``scratch``.

    Malformed lines, spans and events are rejected and counted with their place; identical
    duplicates are dropped and counted, records that contradict each other are rejected.
    """
    if not files:
        return TracesRead(no_rows(READ_STEP_SCHEMA), no_rows(SNAPSHOT_SCHEMA), None, None, None, 0, {}, ())
    scratch = scratch or Scratch()
    collected = _Collected(
        steps=scratch.writer(READ_STEP_SCHEMA),
        snapshots=scratch.writer(READ_SNAPSHOT_SCHEMA),
        journey_spans=scratch.writer(otlp_journeys.SPAN_SCHEMA),
        journey_events=scratch.writer(otlp_journeys.EVENT_SCHEMA),
    )
    for number, file in enumerate(files):
        for batch in trace_batches(file):
            collected.add(batch, number, file)
    read_steps, journey_spans, journey_events = (
        writer.done() for writer in (collected.steps, collected.journey_spans, collected.journey_events)
    )
    ended_ns = spans.end_of_earlier_starts(read_steps)
    unread = f"{collected.other_events} span events of unknown names: not read"
    remarks = [unread] if collected.other_events else []
    if ended_ns is not None:
        left = journey_spans.height - is_since(journey_spans, ended_ns).height
        before = read_steps.height - is_since(read_steps, ended_ns, "epoch_ns").height
        earlier = f"{before} steps and {left} journey spans of earlier starts of the server"
        remarks.append(f"{earlier}: not used, the last one is")
    steps = _steps(read_steps, ended_ns, files[0], scratch)
    snapshots = _snapshots(collected.snapshots.done(), ended_ns, files[0], scratch)
    bridge_ns = bridge_of(otlp_journeys.bridging_offsets(journey_spans, journey_events, ended_ns), steps)
    journeys = None
    if not journey_spans.is_empty():
        hits = otlp_journeys.cache_hits(snapshots)
        journeys = otlp_journeys.joined(journey_spans, journey_events, hits, bridge_ns, ended_ns, files, scratch)
        remarks += journeys.remarks
    requests = (requests_of(journeys, scratch) if journeys else None) or _upstream(collected, files)
    if requests is not None and collected.several_sequences:
        requests = replace(requests, features=("n",))
    step_spans = _whole(collected.step_spans).unique("identity", keep="last")
    return TracesRead(
        steps=steps,
        snapshots=snapshots,
        journeys=journeys if journeys and journeys.lifecycles.height else None,
        requests=requests,
        bridge_ns=bridge_ns,
        dropped_events=int(step_spans["dropped_events"].sum()),
        other_spans=dict(collected.others),
        remarks=tuple(remarks),
    )


_NOT_LATER = "SELECT step_id, lag(step_id) OVER () AS before FROM steps"


def _steps(rows: Rows, ended_ns: int | None, file: RecordedFile, scratch: Scratch) -> Rows:
    """The steps since then by id, none twice."""
    ids = {"step_id": pl.Int64, "before": pl.Int64}
    if ended_ns is None and query(_NOT_LATER, ids, steps=rows).where("step_id <= before").is_empty():
        return rows
    return _once(is_since(rows, ended_ns, "epoch_ns"), ["step_id"], scratch, file, "step")


def _snapshots(rows: Rows, ended_ns: int | None, file: RecordedFile, scratch: Scratch) -> Rows:
    """The snapshots since then by step and request, none twice."""
    if rows.is_empty():
        return no_rows(SNAPSHOT_SCHEMA)
    since = is_since(rows, ended_ns, "epoch_ns")
    return _once(since, ["step_id", "request_id"], scratch, file, "snapshot of step").only([*SNAPSHOT_SCHEMA])


def _once(rows: Rows, key: Sequence[str], scratch: Scratch, file: RecordedFile, what: str) -> Rows:
    """Rows in order of a key that begins with the step, none twice; what is left out is rejected."""
    repeats, groups = Repeats(), whole_groups(rows.ordered(", ".join(key)).batches(), key[0])
    once = scratch.gathered(rows.schema, (spans.without_repeats(batch, key, repeats) for batch in groups))
    repeats.reject(file, what)
    return once


def _whole(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """The frames as one; the list lets go of them, so that what is made of the whole takes their place."""
    whole = pl.concat(frames)
    frames.clear()
    return whole


def _upstream(collected: _Collected, files: Sequence[RecordedFile]) -> RequestsRead | None:
    if not collected.requests:
        return None
    requests, repeated = first_spans(_whole(collected.requests))
    reject_repeated([repeated], files)
    return RequestsRead(rows_of(requests.select(READ_SCHEMA.keys())), "server", "epoch") if len(requests) else None


def _others(batch: TraceBatch) -> pl.DataFrame:
    """Scope, name and number of the spans of a batch that nobody reads."""
    read = (pl.col("scope") == STEP_SCOPE) | spans.is_request_span() | otlp_journeys.is_journey_span()
    return batch.spans.filter(~read).group_by("scope", "name").len()


def _step_spans(batch: TraceBatch) -> pl.DataFrame:
    """Per step span: a hash of its ids, and dropped events."""
    ids = pl.struct("trace_id", "span_id").hash().alias("identity")
    return batch.spans.filter(pl.col("scope") == STEP_SCOPE).select(ids, "dropped_events")


def trace_batches(file: RecordedFile) -> Iterator[TraceBatch]:
    """The spans and events of a file in batches of about 50,000 rows, scanned ones of 100,000; at least one batch.

    What cannot be used is rejected with its place in the file.  Raises
    :class:`RecordingError` if the file cannot be read at all.
    """
    unit, found = records(file)
    if unit == "line" and is_large(file):
        from blis_replay.ingest.readers.otlp.scan import scanned_lines

        yield from scanned_lines(file)
        return
    rows = BatchRows()
    for number, content in found:
        for _ in read_json(content, f"{unit} {number}", number, rows, file.tally):
            if rows.full:
                yield rows.batch(unit)
                rows.spans, rows.events = [], []
    yield rows.batch(unit)


def requests_of(journeys: Journeys, scratch: Scratch) -> RequestsRead | None:
    """The journeys as requests on the server's monotonic clock, in ``scratch``; ``None`` without any.

    Arrival is that at the API server (of a request without its API span: when it was queued, and it
    has no TTFT and no E2E).  TTFT ends with the API server's first response where that is recorded, else
    with the scheduler's first token.  E2E ends with the departure (of an aborted request: when its client was gone),
    in a step log without traces with the scheduler's last token.
    """
    arrived = pl.coalesce("arrived_ns", "queued_ns").is_not_null()
    ended = pl.when(pl.col("arrived_stamp") == ARRIVAL_TIME).then("finished_ns")
    status = pl.col("status")
    columns = {
        "request_id": pl.coalesce("api_request_id", "core_request_id"),
        "sent_us": _us(pl.coalesce("arrived_ns", "queued_ns")),
        "prompt_tokens": spans.tokens("prompt_tokens"),
        "output_tokens_reported": spans.tokens("output_tokens"),
        # What a given-up request got is not what the server would have decoded.
        "usage_output_tokens": pl.when(status == "ok").then(spans.tokens("output_tokens")),
        "max_tokens": spans.tokens("max_tokens"),
        "ttft_us": _us(pl.coalesce("first_response_ns", "first_token_ns")) - _us(pl.col("arrived_ns")),
        "e2e_us": _us(pl.coalesce("departed_ns", ended)) - _us(pl.col("arrived_ns")),
        "queue_us": _us(pl.col("scheduled_ns")) - _us(pl.col("queued_ns")),
        "prefill_us": _us(pl.col("first_token_ns")) - _us(pl.col("scheduled_ns")),
        "decode_us": _us(pl.col("finished_ns")) - _us(pl.col("first_token_ns")),
        "cached_prompt_tokens": pl.col("cached_prompt_tokens"),
        "status": pl.when(status == "ok").then(pl.lit("ok")).otherwise(pl.lit("error")),
        "error": pl.when(status != "ok").then(pl.concat_str(status, pl.format(": {}", "reason"), ignore_nulls=True)),
    }
    batches = journeys.lifecycles.batches()
    requests = scratch.gathered(READ_SCHEMA, (shaped(batch.filter(arrived), READ_SCHEMA, columns) for batch in batches))
    return RequestsRead(requests, "server", "monotonic", model=journeys.model) if requests.height else None


def _us(ns: pl.Expr) -> pl.Expr:
    # Stamps are rounded down one by one, so that segments add up to the whole.
    return ns // 1000
