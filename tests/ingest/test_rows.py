"""Rows behind a query: the same whether a frame, a table or SQL has them, in their order and types."""

from __future__ import annotations

import ctypes
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from builders import in_database, recording
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest import rows as ingest_rows
from blis_replay.ingest import scratch as ingest_scratch
from blis_replay.ingest.checks.evidence import steps_by_start
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import gathered, in_send_order
from blis_replay.ingest.recording import STEP_SCHEMA
from blis_replay.ingest.rows import Rows, no_rows, query, result_frame, rows_of
from blis_replay.ingest.scratch import Scratch, give_back, whole_groups

SCHEMA = {"key": pl.Int64, "name": pl.String, "row": pl.Int64}
VALUES = st.lists(st.tuples(st.none() | st.integers(-5, 5), st.none() | st.sampled_from("abc")), max_size=40)


def framed(values: list[tuple[int | None, str | None]]) -> pl.DataFrame:
    return pl.DataFrame([(*pair, row) for row, pair in enumerate(values)], schema=SCHEMA, orient="row")


def both(frame: pl.DataFrame) -> list[Rows]:
    return [rows_of(frame), in_database(frame, 3)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(VALUES, st.integers(1, 7))
def test_rows_are_those_of_the_frame_in_their_order(values: list, batch_rows: int) -> None:
    frame = framed(values)
    for rows in both(frame):
        assert (rows.height, rows.is_empty()) == (len(values), not values)
        assert rows.frame().equals(frame)
        assert rows["row"].equals(frame["row"])
        assert pl.concat(rows.batches(["row", "key"], batch_rows)).equals(frame.select("row", "key"))
        assert rows.only(["name"]).frame().equals(frame.select("name"))
        assert rows.where("key > $least", least=1).frame().equals(frame.filter(pl.col("key") > 1))
        assert rows.between("key", -1, 1).frame().equals(frame.filter(pl.col("key").is_between(-1, 1)))
        twice = frame.select(pl.col("key") * 2, row=pl.col("row") // 3)
        assert rows.select(pl.col("key") * 2, row=pl.col("row") // 3).equals(twice)
        with rows.reader() as reader:
            assert pl.DataFrame(reader.read_all()).cast(SCHEMA).equals(frame)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(*[st.none() | st.integers(0, 9)] * 2, st.integers(0, 9)), max_size=20))
def test_steps_by_start_are_those_of_a_database(read: list[tuple[int | None, int | None, int]]) -> None:
    """Steps without a number or a start are left out; of one start and number the first read comes first."""
    columns = ("step_id", "start_us", "running_depth")
    frame = pl.DataFrame([dict(zip(columns, step, strict=True)) for step in read], schema=STEP_SCHEMA)
    held, stored = (steps_by_start(recording(steps=rows), "running_depth").frame() for rows in both(frame))
    assert held.equals(stored)
    assert held.height == sum(None not in step[:2] for step in read)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(VALUES, st.integers(1, 7))
def test_ordering_is_stable_and_groups_are_not_cut(values: list, batch_rows: int) -> None:
    frame = framed(values)
    expected = frame.drop_nulls("key").sort("key", maintain_order=True)
    for rows in both(frame):
        ordered = rows.where("key IS NOT NULL").ordered("key")
        assert ordered.frame().equals(expected)
        groups = list(whole_groups(ordered.batches(rows=batch_rows), "key"))
        assert pl.concat(groups).equals(expected)
        keys = [key for group in groups for key in group["key"].unique().to_list()]
        assert len(keys) == len(set(keys))


def test_values_that_two_queries_call_alike_stay_apart() -> None:
    rows = rows_of(framed([(1, "a"), (2, "b"), (3, "c")]))
    assert rows.where("key > $it", it=1).where("name <> $it", it="c")["row"].to_list() == [1]


def test_a_query_joins_rows_wherever_they_are() -> None:
    here, there = rows_of(framed([(1, "a"), (2, "b")])), in_database(framed([(2, "x"), (1, "y")]), 1)
    joined = "SELECT a.name || b.name AS name FROM a JOIN b USING (key) ORDER BY key"
    for tables in ({"a": here, "b": there}, {"a": in_database(here.frame(), 1), "b": there}):
        assert query(joined, {"name": pl.String}, **tables)["name"].to_list() == ["ay", "bx"]


def test_types_are_those_of_the_schema_wherever_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names by number have other numbers in other frames; texts are what they have in common."""
    for memory_bytes in (0, 1 << 30):
        monkeypatch.setattr(ingest_scratch, "MEMORY_BYTES", memory_bytes)
        writer = Scratch().writer({"name": pl.Enum("xyz")})
        for names in ("xy", "yz"):
            writer.add(pl.DataFrame({"name": list(names)}, schema={"name": pl.Enum(names)}).cast(pl.String))
        rows = writer.done()
        assert (rows.held is None) == (memory_bytes == 0)
        assert rows.frame().equals(pl.DataFrame({"name": list("xyyz")}, schema={"name": pl.Enum("xyz")}))


def test_once_memory_is_full_rows_are_in_the_database_and_later_there_is_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 16 bytes, 100 at a time: two frames have 3,200 bytes, and a third does not go into 4,000."""
    monkeypatch.setattr(ingest_scratch, "MEMORY_BYTES", 4_000)
    scratch, frame = Scratch(), pl.DataFrame({"a": range(100), "b": range(100)})

    def written(frames: int) -> Rows:
        writer = scratch.writer(frame.schema)
        for _ in range(frames):
            writer.add(frame)
        return writer.done()

    few, more = written(2), written(1)
    assert few.held is not None and more.held is None
    assert more.frame().equals(frame)
    del few
    assert written(2).held is not None


def test_beside_a_database_fewer_rows_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 bytes: 1,600 go into 4,000, and after 4,800 have not, they do not go into the 1,000 that are left."""
    monkeypatch.setattr(ingest_scratch, "MEMORY_BYTES", 4_000)
    monkeypatch.setattr(ingest_scratch, "_BESIDE_BYTES", 1_000)
    scratch, frame = Scratch(), pl.DataFrame({"a": range(100), "b": range(100)})

    def is_held(frames: int) -> bool:
        writer = scratch.writer(frame.schema)
        for _ in range(frames):
            writer.add(frame)
        return writer.done().held is not None

    assert [is_held(1), is_held(3), is_held(1)] == [True, False, False]


def test_a_table_of_which_nobody_has_rows_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of its rows by SQL needs them; what was read of them does not."""
    monkeypatch.setattr(ingest_scratch, "MEMORY_BYTES", 0)
    scratch = Scratch()
    rows = scratch.kept(rows_of(framed([(1, "a"), (2, "b")])))
    made = query("SELECT * FROM these ORDER BY key DESC", SCHEMA, these=rows.where("key > 1").only([*SCHEMA]))
    assert tables_of(scratch) == 1
    del rows
    assert (tables_of(scratch), made["name"].to_list()) == (1, ["b"])
    del made
    assert tables_of(scratch) == 0


def tables_of(scratch: Scratch) -> int:
    with scratch.connection() as connection:
        return len(connection.execute("SHOW TABLES").fetchall())


def test_a_scratch_database_has_no_folder_before_it_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends without cleaning up would leave it behind."""
    monkeypatch.setattr(ingest_scratch, "MEMORY_BYTES", 0)
    monkeypatch.setattr(ingest_rows, "gettempdir", lambda: str(tmp_path))
    writer = Scratch().writer({"a": pl.Int64})
    writer.add(pl.DataFrame({"a": [1, 2]}))
    assert writer.done().database is not None
    assert list(tmp_path.iterdir()) == []


def test_a_text_does_not_keep_those_that_were_read_with_it() -> None:
    """Of a thousand texts of 100 bytes that one buffer has, ten are added: 1,000 bytes, and a view of 16 for each."""
    read = pl.DataFrame(pl.Series("name", [f"{number:0100}" for number in range(1_000)]))
    writer = Scratch().writer(read.schema)
    writer.add(read.head(10))
    kept = writer.done()["name"]
    assert kept.equals(read["name"].head(10))
    assert sum(buffer.size for buffer in _buffers(kept)) == 1_000 + 10 * 16


def _buffers(texts: pl.Series) -> list[pa.Buffer]:
    array = texts.to_arrow(compat_level=pl.CompatLevel.newest())
    return [buffer for buffer in array.buffers() if buffer is not None]


def test_what_all_writers_have_in_memory_counts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 bytes: frames of 1,600 bytes, one here and two there, are more than 4,000, which neither has alone."""
    monkeypatch.setattr(ingest_scratch, "MEMORY_BYTES", 4_000)
    scratch, frame = Scratch(), pl.DataFrame({"a": range(100), "b": range(100)})
    writers = [scratch.writer(frame.schema) for _ in range(2)]
    for writer in (*writers, writers[0]):
        writer.add(frame)
    assert [writer.held_bytes for writer in writers] == [0, 0]
    assert writers[0].done().frame().equals(pl.concat([frame, frame]))
    assert writers[1].done().frame().equals(frame)


def test_columns_that_came_in_unlike_chunks_have_like_ones() -> None:
    """Frames of 2 rows in one column and of 4 in the other: SQL would get a copy of such a frame whenever it asks."""
    halves = pl.concat([pl.DataFrame({"a": [1, 2]}), pl.DataFrame({"a": [3, 4]})], rechunk=False)
    writer = Scratch().writer({"a": pl.Int64, "b": pl.Int64})
    writer.add(halves.with_columns(pl.Series("b", [5, 6, 7, 8]).rechunk()))
    assert writer.done().frame().n_chunks("all") == [1, 1]


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_requests_in_send_order_are_alike_wherever_they_are(memory_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent at 7, 3, 3 and 5 us: the clock's zero is 3, and the two that were sent at once stay as in the file."""
    monkeypatch.setattr(ingest_scratch, "MEMORY_BYTES", memory_bytes)
    for sent_us, order in (([7, 3, 3, 5], [1, 2, 3, 0]), ([3, 3, 5, 7], [0, 1, 2, 3])):
        records = [("", {"sent_us": us, "prompt_tokens": number}) for number, us in enumerate(sent_us)]
        read, _events = gathered(RecordedFile(Path("r"), "r"), records, lambda row: (row, ()))
        assert (read.held is None) == (memory_bytes == 0)
        placed, found, zero_us = in_send_order(read)
        assert (found.tolist(), zero_us) == (order, 3)
        frame = placed.frame(["request_index", "arrival_us", "prompt_tokens"])
        assert frame.rows() == [(i, sent_us[number] - 3, number) for i, number in enumerate(order)]


def test_rows_of_a_scratch_database_go_to_another_process_as_a_frame() -> None:
    frame = framed([(1, "a"), (None, None)])
    for rows in both(frame):
        assert pickle.loads(pickle.dumps(rows)).frame().equals(frame)  # noqa: S301 (our own)


def test_no_rows_have_their_columns() -> None:
    rows = no_rows(SCHEMA)
    assert rows.frame().schema == rows.ordered("key").frame().schema == SCHEMA
    assert [batch.columns for batch in rows.ordered("key").batches(["row"])] == [["row"]]


def test_an_error_after_the_first_rows_is_one_of_the_database() -> None:
    # Rows come in batches of at most 2,048 to begin with: the last of three million is in none of the first.
    sql = "SELECT CASE WHEN i = 2999999 THEN error('a damaged block') ELSE 'ok' END AS a FROM range(3000000) t(i)"
    with duckdb.connect() as connection, pytest.raises(duckdb.Error, match="a damaged block"):
        result_frame(connection.sql(sql))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="asks glibc")
def test_memory_below_a_block_in_use_is_given_back() -> None:
    """Of 50,000 blocks of 2,000 bytes, 100 MB, the last one stays in use."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(2_000) for _ in range(50_000)]
    for block in blocks:
        ctypes.memset(block, 1, 2_000)
    for block in blocks[:-1]:
        libc.free(block)
    before_mb = _resident_mb()
    give_back()
    libc.free(blocks[-1])
    assert before_mb - _resident_mb() > 80


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def test_a_program_that_read_a_result_ends_in_silence() -> None:
    """What is left alive of DuckDB's types at the end of a process is complained of on stderr."""
    program = (
        "import duckdb; from blis_replay.ingest.rows import result_frame; result_frame(duckdb.sql('SELECT 1 AS a'))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
