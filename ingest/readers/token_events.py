"""Raw stream event stamps, brought into send order as a Parquet file, never all in memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from blis_replay.ingest.readers.requests_frame import RawEvents

BATCH_EVENTS = 1 << 18

_SCHEMA = pa.schema([("request_index", pa.int64()), ("event_index", pa.int64()), ("time_us", pa.int64())])


def write_token_events(raw: RawEvents, order: NDArray[np.int64], zero_us: int, path: Path) -> int:
    """Write the stamps as ``TOKEN_EVENT_SCHEMA`` Parquet, sorted by request and event; returns how many.

    ``order[k]``: the place in the raw file of the request that was sent as number ``k``;
    ``zero_us``: the client clock at the experiment's zero.
    """
    stamps = np.memmap(raw.path, np.int64, "r")
    written = 0
    # Small differences in sorted columns: delta coding is both the smallest and the fastest here.
    delta = dict.fromkeys(_SCHEMA.names, "DELTA_BINARY_PACKED")
    with pq.ParquetWriter(path, _SCHEMA, compression="none", use_dictionary=False, column_encoding=delta) as writer:
        for first, last in _batches(raw.counts[order]):
            batch = order[first:last]
            counts = raw.counts[batch]
            index_in_request = _ranges(counts)
            places = np.repeat(raw.offsets[batch], counts) + index_in_request
            columns = (np.repeat(np.arange(first, last), counts), index_in_request, stamps[places] - zero_us)
            writer.write_table(pa.table([pa.array(column) for column in columns], schema=_SCHEMA))
            written += len(places)
    del stamps
    return written


def _batches(counts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of requests with about ``BATCH_EVENTS`` events each."""
    group = np.cumsum(counts) // BATCH_EVENTS
    edges = np.flatnonzero(np.diff(group)) + 1
    bounds = [0, *edges.tolist(), len(counts)]
    yield from pairwise(bounds)


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... counts[0]-1, 0, 1, ... counts[1]-1, ..."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
