"""Where spans and events of several files stand, and how those that make no sense are rejected with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from blis_replay.ingest.readers.documents import MAX_INTEGER
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.scan.otlp_columns import TraceBatch

# Where a row came from: the number of its file, what a record of that file is called, and which one it is in.
PLACE_COLUMNS = ("file", "unit", "record", "span")
_LONGEST_TEXT = 500
_MAX_NS = 1 << 62  # epoch stamps stay below it until 2116

# When a row cannot be used, and why.  Texts are made of the rows that cannot, which hardly ever are any.
Problem = tuple[pl.Expr, pl.Expr]


def placed_spans(batch: TraceBatch, number: int) -> pl.DataFrame:
    """The spans of a batch of file ``number`` with their place (``PLACE_COLUMNS``) and ``span_row``."""
    rows = pl.int_range(pl.len(), dtype=pl.Int64).alias("span_row")
    return batch.spans.with_columns(rows, pl.lit(number, pl.Int64).alias("file"), pl.lit(batch.unit).alias("unit"))


def _in_words(row: Mapping[str, object]) -> str:
    place = f"{row['unit']} {row['record']}, span {row['span']}"
    return f"{place}, event {row['event']}" if "event" in row else place


def no_count(columns: Sequence[str]) -> list[Problem]:
    """That one of these columns holds no number from 0 to 2^61."""
    return [
        (
            (pl.col(name) < 0) | (pl.col(name) >= MAX_INTEGER),
            pl.format("{} is {}, which is no count", pl.lit(name), name),
        )
        for name in columns
    ]


def no_time(column: str) -> Problem:
    """That a column holds no epoch time."""
    return pl.col(column) >= _MAX_NS, pl.lit("a timeUnixNano that is no epoch time")


def sound(batch: TraceBatch, rows: pl.DataFrame, problems: Sequence[Problem], file: RecordedFile) -> pl.DataFrame:
    """The rows without a problem; the others are rejected in the file of the batch, the sound ones counted there.

    ``rows``: spans or events of the batch with ``span_row``, events with ``event`` too.
    """
    wrong = rows.select(pl.any_horizontal(pl.lit(False), *(when.fill_null(False) for when, _why in problems)))
    flags = wrong.to_series()
    kept = rows
    if flags.any():
        kept = rows.filter(~flags)
        reason = pl.coalesce(pl.when(when).then(why) for when, why in problems).alias("reason")
        names = [name for name in ("span_row", "event") if name in rows.columns]
        for row in rows.filter(flags).select(*names, reason).iter_rows(named=True):
            span = batch.spans.select("record", "span").row(row["span_row"], named=True)
            file.tally.reject(_in_words({"unit": batch.unit, **span, **row}), row["reason"])
    file.tally.records += kept.height
    return kept


def first_spans(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The first span of each (trace, span) id, and the later ones (for :func:`reject_repeated`).

    ``spans`` has its place, ``trace_id``, ``span_id``, ``content`` (a hash of all there is of it) and ``records``
    (how many records of its file were counted for it).  A span without an id is kept.
    """
    key = ["trace_id", "span_id"]
    told = spans.with_row_index("row").with_columns(
        (pl.col("span_id").is_not_null() & (pl.col("row") != pl.col("row").min().over(key))).alias("repeated"),
        (pl.col("content") == pl.col("content").first().over(key)).alias("same"),
    )
    repeated = told.filter("repeated").select(*PLACE_COLUMNS, "span_id", "same", "records")
    return spans.filter(~told["repeated"]) if len(repeated) else spans, repeated


def reject_repeated(repeated: Sequence[pl.DataFrame], files: Sequence[RecordedFile]) -> None:
    """Reject spans of :func:`first_spans` as identical to the first one or as contradicting it."""
    for row in pl.concat(repeated).sort("file", "record", "span").iter_rows(named=True):
        how = "identical" if row["same"] else "with other values"
        files[row["file"]].tally.reject(_in_words(row), f"span {row['span_id'][:40]} again, {how}")
        files[row["file"]].tally.records -= row["records"]


def with_texts_on_one_line(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The texts of these columns on one line, at most 500 characters, null if nothing is left.

    ``documents.text`` on columns.  Columns of printable ASCII alone, which nearly all are, are only looked at.
    """
    line = {
        name: pl.col(name).str.slice(0, _LONGEST_TEXT).str.replace_all(r"[\p{C}\p{Z}]", " ").str.strip_chars()
        for name in columns
        if not _is_plain(frame[name])
    }
    return frame.with_columns(pl.when(text != "").then(text).alias(name) for name, text in line.items())


def _is_plain(texts: pl.Series) -> bool:
    known = texts.drop_nulls()
    lengths = known.str.len_bytes()
    if not len(known):
        return True
    short = int(lengths.min()) > 0 and int(lengths.max()) <= _LONGEST_TEXT  # type: ignore[arg-type]
    return short and not known.str.contains("[^!-~]").any()
