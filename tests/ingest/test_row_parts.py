"""Rows in parts: the same rows, whatever the parts, and in memory no more than a few of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blis_replay.ingest import part_files
from blis_replay.ingest.part_files import give_back_pages
from blis_replay.ingest.row_parts import (
    PartWriter,
    RowParts,
    by_ranges,
    gathered,
    in_files,
    in_one_part,
    slices_of,
)

SCHEMA = {"key": pl.Int64, "name": pl.String, "row": pl.Int64}
rows = st.lists(st.tuples(st.none() | st.integers(-5, 5), st.none() | st.sampled_from("abc")), max_size=40)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[0, 1 << 30], ids=["in files", "in memory"], autouse=True)
def memory_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "MEMORY_BYTES", request.param)


def framed(values: list[tuple[int | None, str | None]]) -> pl.DataFrame:
    numbered = [(*pair, row) for row, pair in enumerate(values)]
    return pl.DataFrame(numbered, schema=SCHEMA, orient="row")


def in_parts(frame: pl.DataFrame, folder: Path, part_rows: int) -> RowParts:
    """Added three rows at a time."""
    writer = PartWriter(SCHEMA, folder, "rows", part_rows)
    for part in frame.iter_slices(3):
        writer.add(part)
    return writer.done()


@quick
@given(values=rows, part_rows=st.integers(1, 7))
def test_parts_are_the_rows_in_their_order(tmp_path: Path, values: list, part_rows: int) -> None:
    frame = framed(values)
    parts = in_parts(frame, tmp_path, part_rows)
    assert parts.whole().equals(frame)
    assert parts.whole(["row"]).equals(frame.select("row"))
    assert (parts.height, parts.is_empty()) == (len(values), not values)


@quick
@given(values=rows, part_rows=st.integers(1, 7))
def test_ranges_of_a_key_follow_each_other_and_keep_the_order_within(
    tmp_path: Path, values: list, part_rows: int
) -> None:
    """One after the other and sorted by key they are what a stable sort makes of the rows with a key."""
    frame = framed(values)
    parts = in_parts(frame, tmp_path, part_rows)
    ranges = list(by_ranges(parts, lambda part: part["key"], ["key"], part_rows))
    found = pl.concat([*ranges, frame.clear()])
    expected = frame.drop_nulls("key").sort("key", maintain_order=True)
    assert found.sort("key", maintain_order=True).equals(expected)
    ends = [(part["key"].min(), part["key"].max()) for part in ranges if len(part)]
    assert all(before[1] < after[0] for before, after in pairwise(ends))


@quick
@given(values=rows, part_rows=st.integers(1, 7))
def test_columns_that_are_made_are_worked_out_of_those_of_the_parts(
    tmp_path: Path, values: list, part_rows: int
) -> None:
    """A third of ``row`` and twice ``key``, neither of which stands in a file; ``name`` is not read for them."""
    frame = framed(values)
    parts = in_parts(frame, tmp_path, part_rows)
    made = {"twice": 2 * pl.col("key"), "third": pl.col("row") // 3}
    worked_out = replace(parts, schema={"third": pl.Int64, "twice": pl.Int64, "name": pl.String}, made=made)
    expected = frame.select((pl.col("row") // 3).alias("third"), (2 * pl.col("key")).alias("twice"), "name")
    assert worked_out.whole().equals(expected)
    assert worked_out.column("twice").to_list() == [None if key is None else 2 * key for key, _name in values]


def test_of_too_many_rows_only_the_last_part_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50,010 rows, 1,000 a part, there are 50 files; columns that are not asked for are not read."""
    monkeypatch.setattr(part_files, "MEMORY_BYTES", 0)
    writer = PartWriter({"a": pl.Int64, "b": pl.Int64}, tmp_path, "rows", 1000)
    part = pl.DataFrame({"a": range(1000), "b": range(1000)})
    for _ in range(50):
        writer.add(part)
    writer.add(part.head(10))
    parts = writer.done()
    assert [part.rows.height for part in parts.parts if part.rows is not None] == [10]
    assert len(parts.parts) == 51 == len(list(tmp_path.iterdir())) + 1
    assert [frame.columns for frame in parts.frames(["b"])] == [["b"]] * 51


def test_as_soon_as_one_part_stands_in_a_file_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 bytes, 100 a part: two parts have 3,200 bytes, and a third does not go into 4,000.

    Those that follow stand in files too, whoever writes them; once the rows are gone there is room again.
    """
    monkeypatch.setattr(part_files, "MEMORY_BYTES", 4_000)
    frame = pl.DataFrame({"a": range(100), "b": range(100)})

    def written(name: str, parts: int) -> RowParts:
        writer = PartWriter(frame.schema, tmp_path, name, 100)
        for _ in range(parts):
            writer.add(frame)
        return writer.done()

    def files() -> int:
        return len(list(tmp_path.iterdir()))

    few = written("few", 2)
    assert files() == 0
    more = written("more", 1)
    assert files() == 3
    last = written("last", 1)
    assert files() == 4
    assert all(rows.whole().equals(pl.concat([frame] * len(rows.parts))) for rows in (few, more, last))
    del few, more, last
    again = written("again", 2)
    assert files() == 4 and again.height == 200


def test_types_are_those_of_the_schema_wherever_a_part_stands(tmp_path: Path) -> None:
    narrow = pl.DataFrame({"name": ["x", "y"]}, schema={"name": pl.Enum(["x", "y"])})
    for part_rows in (1, 100):
        writer = PartWriter({"name": pl.String}, tmp_path, f"part-{part_rows}", part_rows)
        writer.add(narrow)
        (frame,) = writer.done().frames()
        assert frame.schema == {"name": pl.String}
        assert frame["name"].to_list() == ["x", "y"]


@pytest.mark.parametrize("rows", [in_one_part(framed([])), RowParts(SCHEMA, (), 0)])
def test_no_rows_are_a_frame_without_rows(rows: RowParts) -> None:
    assert rows.whole().schema == SCHEMA
    assert next(rows.frames(["row"])).columns == ["row"]


@quick
@given(values=rows, part_rows=st.integers(1, 7), order=st.randoms())
def test_rows_that_are_picked_are_those_of_the_frame(tmp_path: Path, values: list, part_rows: int, order: Any) -> None:
    frame = in_parts(framed(values), tmp_path, part_rows).whole()
    picked = [i for i in range(len(values)) if order.random() < 0.7]
    order.shuffle(picked)
    found = gathered(frame, np.array(picked, np.int64), tmp_path, "picked")
    assert found.equals(frame[picked])


def test_rows_that_are_all_picked_as_they_stand_are_not_written_again(tmp_path: Path) -> None:
    frame = framed([(1, "a"), (2, "b")])
    assert gathered(frame, np.arange(2), tmp_path, "picked") is frame


def test_columns_of_a_frame_in_files_are_cut_at_the_same_rows(tmp_path: Path) -> None:
    """Or a look at one of them would copy them all: polars aligns the pieces of all columns first."""
    pieces = (framed([(i, "a") for i in range(30_000)]) for _ in range(9))
    frame = in_files(pieces, SCHEMA, tmp_path, "pieces")
    numbered = frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("key"))
    slices = (part.select(SCHEMA.keys()) for part in slices_of(numbered))
    frame = in_files(slices, SCHEMA, tmp_path, "rows")
    assert len({tuple(map(len, frame[name].get_chunks())) for name in frame.columns}) == 1
    assert frame.equals(numbered)


def test_rows_can_be_read_after_their_pages_were_given_back_and_their_files_are_gone(tmp_path: Path) -> None:
    frame = in_parts(framed([(i, "abc"[i % 3]) for i in range(9)]), tmp_path, 3).whole()
    for path in tmp_path.iterdir():
        path.unlink()
    give_back_pages()
    assert frame["key"].to_list() == list(range(9))
    assert frame["name"].to_list() == list("abcabcabc")
