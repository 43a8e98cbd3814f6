"""Where spans and events of several files stand, and how those that make no sense are rejected with it."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.numbers import MAX_INTEGER
from blis_replay.ingest.readers.otlp_columns import TraceBatch

# Where a row came from: the number of its file, and its place there in words.
PLACE_SCHEMA = {"file": pl.Int64, "place": pl.String}
_MAX_NS = 1 << 62  # epoch stamps stay below it until 2116


def placed_spans(batch: TraceBatch, file: int) -> pl.DataFrame:
    """The spans with their place (``PLACE_SCHEMA``)."""
    place = pl.format("{} {}, span {}", pl.lit(batch.unit), "record", "span")
    return batch.spans.with_columns(pl.lit(file, pl.Int64).alias("file"), place.alias("place"))


def placed_events(batch: TraceBatch, file: int, names: Sequence[str]) -> pl.DataFrame:
    """The events of some names with their place (``PLACE_SCHEMA``)."""
    events = batch.events.filter(pl.col("name").is_in(names))
    spans = batch.spans.select("record", "span")[events["span_row"]]
    place = pl.format("{} {}, span {}, event {}", pl.lit(batch.unit), "record", "span", "event")
    return events.hstack(spans).with_columns(pl.lit(file, pl.Int64).alias("file"), place.alias("place"))


def no_count(columns: Sequence[str]) -> pl.Expr:
    """What is wrong with the first of these columns that holds no number from 0 to 2^61, null if none is."""
    return pl.coalesce(
        pl.when((pl.col(name) < 0) | (pl.col(name) >= MAX_INTEGER)).then(
            pl.format("{} is {}, which is no count", pl.lit(name), name)
        )
        for name in columns
    )


def no_time(column: str) -> pl.Expr:
    """That a column holds no epoch time, null if it does or is null."""
    return pl.when(pl.col(column) >= _MAX_NS).then(pl.lit("a timeUnixNano that is no epoch time"))


def sound(frame: pl.DataFrame, problem: pl.Expr, files: Sequence[RecordedFile]) -> pl.DataFrame:
    """The rows without a ``problem``; the others are rejected in their files, the sound ones counted there."""
    judged = frame.with_columns(problem.alias("problem"))
    kept = judged.filter(pl.col("problem").is_null()).drop("problem")
    for file, place, reason in judged.drop_nulls("problem").select("file", "place", "problem").iter_rows():
        files[file].tally.reject(place, reason)
    for file, count in kept["file"].value_counts().iter_rows():
        files[file].tally.records += count
    return kept


def without_repeated_spans(spans: pl.DataFrame, files: Sequence[RecordedFile]) -> pl.DataFrame:
    """The first span of each (trace, span) id; later ones are rejected as identical or as contradicting it.

    ``spans`` has its place, ``trace_id``, ``span_id``, ``content`` (a hash of all there is of it) and ``records``
    (how many records of its file were counted for it).  A span without an id is kept.
    """
    key = ["trace_id", "span_id"]
    told = spans.with_row_index("row").with_columns(
        (pl.col("span_id").is_not_null() & (pl.col("row") != pl.col("row").min().over(key))).alias("repeated"),
        (pl.col("content") == pl.col("content").first().over(key)).alias("same"),
    )
    repeated = told.filter("repeated").select("file", "place", "span_id", "same", "records")
    for file, place, span_id, same, records in repeated.iter_rows():
        files[file].tally.reject(place, f"span {span_id[:40]} again, {'identical' if same else 'with other values'}")
        files[file].tally.records -= records
    return told.filter(~pl.col("repeated")).drop("row", "repeated", "same")


def one_line_text(column: str) -> pl.Expr:
    """A column's text on one line, at most 500 characters, null if nothing is left (``documents.text`` on columns)."""
    line = pl.col(column).str.slice(0, 500).str.replace_all(r"[\p{C}\p{Z}]", " ").str.strip_chars()
    return pl.when(line != "").then(line)
