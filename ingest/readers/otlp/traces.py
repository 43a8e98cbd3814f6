"""All OTLP files of a recording: steps, snapshots, journeys and upstream request spans."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp import journeys as otlp_journeys
from blis_replay.ingest.readers.otlp import requests as otlp_requests
from blis_replay.ingest.readers.otlp import steps as otlp_steps
from blis_replay.ingest.readers.otlp.columns import ENGINE_SCOPE, STEP_SCOPE, TraceBatch
from blis_replay.ingest.readers.otlp.decode import trace_batches
from blis_replay.ingest.readers.otlp.journeys import JourneyParts, Journeys
from blis_replay.ingest.readers.otlp.places import without_repeated_spans
from blis_replay.ingest.readers.otlp.steps import READ_STEP_SCHEMA
from blis_replay.ingest.readers.requests_frame import READ_SCHEMA, RequestsRead
from blis_replay.ingest.readers.server.journey_requests import requests_of
from blis_replay.ingest.readers.server.server_clock import Bridge, bridge_of
from blis_replay.ingest.recording import SNAPSHOT_SCHEMA, empty_frame

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

    steps: pl.DataFrame
    snapshots: pl.DataFrame
    journeys: Journeys | None
    requests: RequestsRead | None
    bridge: Bridge | None
    dropped_events: int
    other_spans: dict[tuple[str, str], int]
    sequential_span_ids: bool
    remarks: tuple[str, ...]


@dataclass
class _Collected:
    steps: list[pl.DataFrame] = field(default_factory=list)
    snapshots: list[pl.DataFrame] = field(default_factory=list)
    requests: list[pl.DataFrame] = field(default_factory=list)
    step_spans: list[pl.DataFrame] = field(default_factory=list)
    journey_spans: list[pl.DataFrame] = field(default_factory=list)
    journey_events: list[pl.DataFrame] = field(default_factory=list)
    others: Counter[tuple[str, str]] = field(default_factory=Counter)
    other_events: int = 0
    spans: int = 0

    def add(self, batch: TraceBatch, file: int, files: Sequence[RecordedFile]) -> None:
        self.steps.append(otlp_steps.steps_of(batch, file, files))
        self.snapshots.append(otlp_steps.snapshots_of(batch, file, files))
        self.requests.append(otlp_requests.request_spans_of(batch, file, files))
        self.step_spans.append(
            batch.spans.filter(pl.col("scope") == STEP_SCOPE).select("trace_id", "span_id", "dropped_events")
        )
        parts = otlp_journeys.parts_of(batch, file, files, self.spans)
        self.journey_spans.append(parts.spans)
        self.journey_events.append(parts.events)
        for scope, name, count in _others(batch).iter_rows():
            family = scope[:100], _NUMBER.sub("*", name[:100])
            known = family in self.others or len(self.others) < MAX_OTHER_NAMES
            self.others[family if known else _FURTHER] += count
        self.other_events += int(batch.spans["other_events"].sum())
        self.spans += len(batch.spans)


def read_traces(files: Sequence[RecordedFile]) -> TracesRead:
    """What all OTLP files of a recording hold together (collectors rotate them).

    Malformed lines, spans and events are rejected and counted with their place; identical
    duplicates are dropped and counted, records that contradict each other are rejected.
    """
    found = _Collected()
    for index, file in enumerate(files):
        for batch in trace_batches(file):
            found.add(batch, index, files)
    if not files:
        return TracesRead(
            empty_frame(READ_STEP_SCHEMA), empty_frame(SNAPSHOT_SCHEMA), None, None, None, 0, {}, False, ()
        )
    steps, snapshots = _whole(found.steps), _whole(found.snapshots)
    parts = JourneyParts(_whole(found.journey_spans), _whole(found.journey_events))
    ended_ns = otlp_steps.end_of_earlier_starts(steps)
    remarks = [*_unread_events(found)]
    if ended_ns is not None:
        remarks.append(_earlier(steps, parts, ended_ns))
        steps, snapshots = (frame.filter(_after(ended_ns, "epoch_ns")) for frame in (steps, snapshots))
        parts = _since(parts, ended_ns)
    steps = otlp_steps.without_duplicates(files[0], steps, ["step_id"], "step")
    snapshots = otlp_steps.without_duplicates(files[0], snapshots, ["step_id", "request_id"], "snapshot of step")
    bridge = bridge_of(parts.events, steps)
    journeys = None
    if len(parts.spans):
        journeys = otlp_journeys.joined(parts, snapshots, bridge.offset_ns if bridge else None, files)
        remarks += journeys.remarks
    step_spans = _whole(found.step_spans).unique(["trace_id", "span_id"], keep="last")
    return TracesRead(
        steps=steps,
        snapshots=snapshots.select(SNAPSHOT_SCHEMA.keys()),
        journeys=journeys,
        requests=(requests_of(journeys) if journeys else None) or _upstream(found, files),
        bridge=bridge,
        dropped_events=int(step_spans["dropped_events"].sum()),
        other_spans=dict(found.others),
        sequential_span_ids=_counting(step_spans["span_id"].drop_nulls()),
        remarks=tuple(remarks),
    )


def _whole(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """The frames as one; the list lets go of them, so that what is made of the whole takes their place."""
    whole = pl.concat(frames)
    frames.clear()
    return whole


def _upstream(found: _Collected, files: Sequence[RecordedFile]) -> RequestsRead | None:
    spans = without_repeated_spans(_whole(found.requests), files)
    return RequestsRead(spans.select(READ_SCHEMA.keys()), "server", "epoch") if len(spans) else None


def _others(batch: TraceBatch) -> pl.DataFrame:
    """Scope, name and number of the spans of a batch that nobody reads."""
    upstream = (pl.col("scope") == ENGINE_SCOPE) & (pl.col("name") == otlp_requests.REQUEST_SPAN)
    read = (pl.col("scope") == STEP_SCOPE) | upstream | otlp_journeys.is_journey_span()
    return batch.spans.filter(~read).group_by("scope", "name").len()


def _unread_events(found: _Collected) -> list[str]:
    return [f"{found.other_events} span events of unknown names: not read"] if found.other_events else []


def _after(ended_ns: int, column: str) -> pl.Expr:
    return pl.col(column).is_null() | (pl.col(column) > ended_ns)


def _since(parts: JourneyParts, ended_ns: int) -> JourneyParts:
    """The journeys that were not over when an earlier start of the server was last seen."""
    over = parts.events.group_by("span_key").agg(pl.col("time_ns").max()).filter(~_after(ended_ns, "time_ns"))
    return JourneyParts(
        parts.spans.join(over, on="span_key", how="anti"), parts.events.join(over, on="span_key", how="anti")
    )


def _earlier(steps: pl.DataFrame, parts: JourneyParts, ended_ns: int) -> str:
    left = len(parts.spans) - len(_since(parts, ended_ns).spans)
    count = steps.filter(~_after(ended_ns, "epoch_ns")).height
    return f"{count} steps and {left} journey spans of earlier starts of the server: not used, the last one is"


def _counting(span_ids: pl.Series) -> bool:
    """Whether span ids count 1, 2, 3, ...: real ones are random."""
    numbers = span_ids.unique().str.to_integer(base=16, strict=False)
    if numbers.is_empty() or numbers.null_count():
        return False
    return int(numbers.max()) <= 2 * len(numbers)  # type: ignore[arg-type]
