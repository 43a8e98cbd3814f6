"""Stream stamps of a recording, read from their flat file a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.recording import TokenEvents

if TYPE_CHECKING:
    import pyarrow as pa


# As a store keeps them: short runs, so that what it holds in memory at once stays small.
RUN_EVENTS = 64
_BATCH_EVENTS = 1 << 20
# Each touches some pages of the file, which stay in memory as long as the file is mapped.
_MAPPED_REQUESTS = 1024


def stamps_at(events: TokenEvents, requests: Int64s, event: Int64s) -> Int64s:
    """int64[len(requests)]: the time in us from the experiment's zero of one event of each request."""
    times_us = np.empty(len(requests), np.int64)
    places = events.offsets[requests] + event
    for first in range(0, len(requests), _MAPPED_REQUESTS):
        batch = slice(first, first + _MAPPED_REQUESTS)
        times_us[batch] = np.memmap(events.path, np.int64, "r")[places[batch]]
    return times_us - events.zero_us


def stamps_of(events: TokenEvents, requests: Int64s) -> pl.DataFrame:
    """``request_index``, ``event_index``, ``time_us``: all events of the given requests, in their order."""
    counts = events.counts[requests]
    columns = {
        "request_index": np.repeat(requests, counts),
        "event_index": _counting_up(counts),
        "time_us": _gathered(events, requests),
    }
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.Int64))


def runs(events: TokenEvents, tokens: Int64s) -> pa.RecordBatchReader:
    """All events as a stream of ``request_index``, ``first_event``, ``tokens``, ``times_us``.

    A row holds up to ``RUN_EVENTS`` consecutive events of a request; ``tokens[i]``: output tokens of request i.
    """
    import pyarrow as pa

    integer = pa.int64()
    schema = pa.schema(
        [("request_index", integer), ("first_event", integer), ("tokens", integer), ("times_us", pa.list_(integer))]
    )
    return pa.RecordBatchReader.from_batches(schema, _run_batches(events, tokens, schema))


def _run_batches(events: TokenEvents, tokens: Int64s, schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    for requests in _batches(events.counts):
        counts = events.counts[requests]
        owned = -(-counts // RUN_EVENTS)
        first_event = _counting_up(owned) * RUN_EVENTS
        starts = np.repeat(np.cumsum(counts) - counts, owned) + first_event
        times = pa.ListArray.from_arrays(
            pa.array(np.append(starts, counts.sum()), pa.int32()), pa.array(_gathered(events, requests))
        )
        columns = [pa.array(np.repeat(requests, owned)), pa.array(first_event)]
        yield pa.record_batch([*columns, pa.array(np.repeat(tokens[requests], owned)), times], schema=schema)


def _batches(counts: Int64s) -> Iterator[Int64s]:
    """Runs of request indices with about ``_BATCH_EVENTS`` events each."""
    edges = np.flatnonzero(np.diff(np.cumsum(counts) // _BATCH_EVENTS)) + 1
    for first, last in pairwise([0, *edges.tolist(), len(counts)]):
        yield np.arange(first, last)


def _gathered(events: TokenEvents, requests: Int64s) -> Int64s:
    begins = events.offsets[requests]
    ends = begins + events.counts[requests]
    if not (ends > begins).any():
        return np.empty(0, np.int64)
    stamps = np.asarray(np.memmap(events.path, np.int64, "r"))
    pieces = [stamps[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return np.concatenate(pieces) - events.zero_us


def _counting_up(counts: Int64s) -> Int64s:
    """0, 1, ... counts[0]-1, 0, 1, ... counts[1]-1, ..."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
