"""Numbers that a load generator reports of its own run, as rows of ``AGGREGATE_SCHEMA``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.numbers import MAX_INTEGER, finite
from blis_replay.ingest.recording import AGGREGATE_SCHEMA

WHOLE_RUN = -1
US_PER_S = 1e6
US_PER_MS = 1e3

# metric, statistic, value
Reported = tuple[str, str, float]


def reported_number(
    file: RecordedFile, metric: str, statistic: str, value: object, unit: float = 1.0
) -> Iterator[Reported]:
    """``value`` times ``unit`` as one row, none if it is null; what is no usable number is rejected."""
    if value is None:
        return
    number = finite(value)
    if number is None or isinstance(value, str):
        file.tally.reject(f"{metric}.{statistic}", "no finite number")
        return
    if abs(number * unit) >= MAX_INTEGER:
        file.tally.reject(f"{metric}.{statistic}", "larger than any time or count can be")
        return
    yield metric, statistic, number * unit


def aggregate_frame(rows: Iterable[tuple[int, str, str, float]]) -> pl.DataFrame:
    """``(stage, metric, statistic, value)`` as a frame of ``AGGREGATE_SCHEMA``."""
    return pl.DataFrame(list(rows), schema=AGGREGATE_SCHEMA, orient="row")
