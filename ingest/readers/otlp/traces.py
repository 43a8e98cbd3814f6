"""All OTLP files of a recording: steps, snapshots, journeys and upstream request spans."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp import journeys as otlp_journeys
from blis_replay.ingest.readers.otlp import requests as otlp_requests
from blis_replay.ingest.readers.otlp import steps as otlp_steps
from blis_replay.ingest.readers.otlp.columns import ENGINE_SCOPE, STEP_SCOPE, TraceBatch
from blis_replay.ingest.readers.otlp.decode import trace_batches
from blis_replay.ingest.readers.otlp.journeys import JourneyParts, Journeys, is_since
from blis_replay.ingest.readers.otlp.places import first_spans, reject_repeated
from blis_replay.ingest.readers.otlp.steps import READ_SNAPSHOT_SCHEMA, READ_STEP_SCHEMA, Repeats
from blis_replay.ingest.readers.requests_frame import READ_SCHEMA, RequestsRead
from blis_replay.ingest.readers.server.journey_requests import requests_of
from blis_replay.ingest.readers.server.server_clock import Bridge, bridge_of
from blis_replay.ingest.recording import SNAPSHOT_SCHEMA, empty_frame
from blis_replay.ingest.row_parts import PART_ROWS, PartWriter, RowParts, by_ranges, in_one_part

# Names can be as many as spans; so many are told apart, running numbers aside.
MAX_OTHER_NAMES = 100
_FURTHER = ("(further)", "(further)")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class TracesRead:
    """What OTLP files hold.

    ``steps``: ``READ_STEP_SCHEMA``, by step id, none twice; ``snapshots``: ``SNAPSHOT_SCHEMA``, none twice.
    ``journeys``: ``None`` if there are none.  ``requests``: those of the journeys, else upstream
    ``llm_request`` spans, ``None`` if there are neither.  ``bridge``: monotonic to epoch clock, ``None`` if no event
    has both.  ``dropped_events``: step events that the tracing SDK says it discarded.  ``other_spans``:
    spans that are not read, by scope and name with ``*`` for its numbers, from 100 of these on together.
    ``sequential_span_ids``: the ids of the step spans are small counting numbers, so somebody
    made them up.  ``remarks``: what else is missing or odd, in words.
    """

    steps: RowParts
    snapshots: RowParts
    journeys: Journeys | None
    requests: RequestsRead | None
    bridge: Bridge | None
    dropped_events: int
    other_spans: dict[tuple[str, str], int]
    sequential_span_ids: bool
    remarks: tuple[str, ...]


@dataclass
class _Collected:
    steps: PartWriter
    snapshots: PartWriter
    journey_spans: PartWriter
    journey_events: PartWriter
    requests: list[pl.DataFrame] = field(default_factory=list)
    step_spans: list[pl.DataFrame] = field(default_factory=list)
    others: Counter[tuple[str, str]] = field(default_factory=Counter)
    other_events: int = 0
    spans: int = 0

    def add(self, batch: TraceBatch, number: int, file: RecordedFile) -> None:
        """Keep what is read of a batch of file ``number``."""
        self.steps.add(otlp_steps.steps_of(batch, file))
        if batch.snapshots.height:
            self.snapshots.add(otlp_steps.snapshots_of(batch, file))
        if (batch.spans["scope"] == ENGINE_SCOPE).any():
            self.requests.append(otlp_requests.request_spans_of(batch, number, file))
        self.step_spans.append(_step_spans(batch))
        spans, stamped = otlp_journeys.spans_and_events_of(batch, number, file, self.spans)
        self.journey_spans.add(spans)
        self.journey_events.add(stamped)
        for scope, name, count in _others(batch).iter_rows():
            family = scope[:100], _NUMBER.sub("*", name[:100])
            known = family in self.others or len(self.others) < MAX_OTHER_NAMES
            self.others[family if known else _FURTHER] += count
        self.other_events += int(batch.spans["other_events"].sum())
        self.spans += len(batch.spans)


def read_traces(files: Sequence[RecordedFile], scratch: Path | None = None, part_rows: int = PART_ROWS) -> TracesRead:
    """What all OTLP files of a recording hold together (collectors rotate them).

    Malformed lines, spans and events are rejected and counted with their place; identical
    duplicates are dropped and counted, records that contradict each other are rejected.  Whenever there are
    ``part_rows`` of them, steps, snapshots, spans and events go to files of the folder ``scratch``, which have to
    stay; without it they are in memory.
    """
    if not files:
        nothing = in_one_part(empty_frame(READ_STEP_SCHEMA)), in_one_part(empty_frame(SNAPSHOT_SCHEMA))
        return TracesRead(*nothing, None, None, None, 0, {}, False, ())
    found = _Collected(
        PartWriter(READ_STEP_SCHEMA, scratch, "read-steps", part_rows),
        PartWriter(READ_SNAPSHOT_SCHEMA, scratch, "read-snapshots", part_rows),
        PartWriter(otlp_journeys.SPAN_SCHEMA, scratch, "journey-spans", part_rows),
        PartWriter(otlp_journeys.EVENT_SCHEMA, scratch, "read-journey-events", part_rows),
    )
    for number, file in enumerate(files):
        for batch in trace_batches(file):
            found.add(batch, number, file)
    read_steps, parts = found.steps.done(), JourneyParts(found.journey_spans.done(), found.journey_events.done())
    ended_ns = otlp_steps.end_of_earlier_starts(read_steps, part_rows)
    remarks = [*_unread_events(found)]
    if ended_ns is not None:
        remarks.append(_earlier(read_steps, parts, ended_ns))
    steps = _steps(read_steps, ended_ns, files[0], scratch, part_rows)
    snapshots = _snapshots(found.snapshots.done(), ended_ns, files[0], scratch, part_rows)
    bridge = bridge_of(otlp_journeys.bridging_offsets(parts, ended_ns), steps)
    journeys = None
    if not parts.spans.is_empty():
        offset_ns, hits = bridge.offset_ns if bridge else None, otlp_journeys.cache_hits(snapshots)
        journeys = otlp_journeys.joined(parts, hits, offset_ns, ended_ns, files, scratch, part_rows)
        remarks += journeys.remarks
    step_spans = _whole(found.step_spans).unique("identity", keep="last")
    return TracesRead(
        steps=steps,
        snapshots=snapshots,
        journeys=journeys if journeys and journeys.lifecycles.height else None,
        requests=(requests_of(journeys, scratch) if journeys else None) or _upstream(found, files),
        bridge=bridge,
        dropped_events=int(step_spans["dropped_events"].sum()),
        other_spans=dict(found.others),
        sequential_span_ids=_counting(step_spans.filter("named")["number"]),
        remarks=tuple(remarks),
    )


def _steps(found: RowParts, ended_ns: int | None, file: RecordedFile, scratch: Path | None, part_rows: int) -> RowParts:
    """The steps since then by id, none twice."""
    if ended_ns is None and (found.column("step_id").diff().drop_nulls() > 0).all():
        return found
    writer, repeats = PartWriter(READ_STEP_SCHEMA, scratch, "steps", part_rows), Repeats()
    for frame in by_ranges(found, lambda part: part["step_id"], ["step_id"], part_rows):
        since = frame if ended_ns is None else frame.filter(is_since(ended_ns, "epoch_ns"))
        writer.add(otlp_steps.without_repeats(since.sort("step_id", maintain_order=True), ["step_id"], repeats))
    repeats.reject(file, "step")
    return writer.done()


def _snapshots(
    found: RowParts, ended_ns: int | None, file: RecordedFile, scratch: Path | None, part_rows: int
) -> RowParts:
    """The snapshots since then by step and request, none twice."""
    key, repeats = ["step_id", "request_id"], Repeats()
    writer = PartWriter(SNAPSHOT_SCHEMA, scratch, "snapshots", part_rows)
    for frame in by_ranges(found, lambda part: part["step_id"], ["step_id"], part_rows):
        since = frame if ended_ns is None else frame.filter(is_since(ended_ns, "epoch_ns"))
        once = otlp_steps.without_repeats(since.sort(key), key, repeats)
        writer.add(once.select(SNAPSHOT_SCHEMA.keys()))
    repeats.reject(file, "snapshot of step")
    return writer.done()


def _whole(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """The frames as one; the list lets go of them, so that what is made of the whole takes their place."""
    whole = pl.concat(frames)
    frames.clear()
    return whole


def _upstream(found: _Collected, files: Sequence[RecordedFile]) -> RequestsRead | None:
    if not found.requests:
        return None
    spans, repeated = first_spans(_whole(found.requests))
    reject_repeated([repeated], files)
    return RequestsRead(spans.select(READ_SCHEMA.keys()), "server", "epoch") if len(spans) else None


def _others(batch: TraceBatch) -> pl.DataFrame:
    """Scope, name and number of the spans of a batch that nobody reads."""
    upstream = (pl.col("scope") == ENGINE_SCOPE) & (pl.col("name") == otlp_requests.REQUEST_SPAN)
    read = (pl.col("scope") == STEP_SCOPE) | upstream | otlp_journeys.is_journey_span()
    return batch.spans.filter(~read).group_by("scope", "name").len()


def _unread_events(found: _Collected) -> list[str]:
    return [f"{found.other_events} span events of unknown names: not read"] if found.other_events else []


def _earlier(steps: RowParts, parts: JourneyParts, ended_ns: int) -> str:
    left = sum(frame.filter(~is_since(ended_ns)).height for frame in parts.spans.frames(["last_ns"]))
    count = sum(frame.filter(~is_since(ended_ns, "epoch_ns")).height for frame in steps.frames(["epoch_ns"]))
    return f"{count} steps and {left} journey spans of earlier starts of the server: not used, the last one is"


def _step_spans(batch: TraceBatch) -> pl.DataFrame:
    """Of each step span a hash of its ids, its own id as a number (null: it is none), and what the SDK discarded."""
    return batch.spans.filter(pl.col("scope") == STEP_SCOPE).select(
        pl.struct("trace_id", "span_id").hash().alias("identity"),
        pl.col("span_id").is_not_null().alias("named"),
        pl.col("span_id").str.to_integer(base=16, strict=False).alias("number"),
        "dropped_events",
    )


def _counting(numbers: pl.Series) -> bool:
    """Whether span ids count 1, 2, 3, ...: real ones are random."""
    if numbers.is_empty() or numbers.null_count():
        return False
    return int(numbers.max()) <= 2 * numbers.n_unique()  # type: ignore[arg-type]
