"""The file of a store: refused where it is not ours, not sound or not only a file."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock, patch

import duckdb
import pytest
from builders import recording, requests
from full_disk import files_of_at_most

from blis_replay.base.errors import StoreError
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store import file as store_file
from blis_replay.ingest.store import list_experiments, open_for_reading, open_store, read_stored
from blis_replay.ingest.store.file import SCHEMA_VERSION
from blis_replay.ingest.store.writing import write_recording
from blis_replay.ingest.stream import NO_EVENTS


def one_line_of(error: pytest.ExceptionInfo[StoreError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert "; " in text, "it says what to do"
    return text


def test_an_absent_store_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as error, open_store(tmp_path / "s.duckdb", read_only=True):
        pass
    assert "there is no store" in one_line_of(error)
    assert not (tmp_path / "s.duckdb").exists()


@pytest.mark.parametrize(
    ("version", "problem"),
    [(SCHEMA_VERSION + 1, "is newer than this program's"), (SCHEMA_VERSION - 1, "and this program reads")],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_of_another_schema_is_refused_and_left_alone(
    tmp_path: Path, version: int, problem: str, read_only: bool
) -> None:
    path = tmp_path / "s.duckdb"
    with open_store(path) as store:
        store.connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", [str(version)])
    before = path.read_bytes()
    with pytest.raises(StoreError) as error, open_store(path, read_only=read_only):
        pass
    assert f"{problem} {SCHEMA_VERSION}; " in one_line_of(error)
    assert path.read_bytes() == before


FULL = "its disk is full, and nothing was written; make room there, or choose another place with --store"


def test_a_store_that_a_full_disk_has_no_room_for_is_not_left_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12,288 bytes hold the head of a DuckDB file; tables and a long row need more."""
    path = tmp_path / "s.duckdb"
    with monkeypatch.context() as patch, files_of_at_most(12_288), pytest.raises(StoreError) as error:
        patch.setattr(store_file, "SCHEMA_VERSION", "6" * 20_000)
        with open_for_reading(path):
            pass
    assert one_line_of(error) == f"{path}: {FULL}"
    assert list(tmp_path.iterdir()) == []
    with open_for_reading(path) as store:
        assert store.path == path


def test_a_recording_that_a_full_disk_has_no_room_for_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with open_store(path) as store:
        write_recording(store, recording(), NO_EVENTS)
    more = replace(recording(content_hash="hash-2"), requests=rows_of(requests(50_000)))
    with files_of_at_most(path.stat().st_size + 50_000), pytest.raises(StoreError) as error, open_store(path) as store:
        write_recording(store, more, NO_EVENTS)
    assert one_line_of(error) == f"{path}: {FULL}"
    with open_store(path, read_only=True) as store:
        assert read_stored(store, recording().slug).content_hash == "hash-1"


def test_a_file_that_has_no_tables_yet_is_a_store_for_whoever_reads_it_first(tmp_path: Path) -> None:
    """Whoever made it was ended before its tables were written; it was told to change its permissions."""
    path = tmp_path / "s.duckdb"
    duckdb.connect(str(path)).close()
    with open_for_reading(path) as store:
        assert list_experiments(store) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_that_another_process_writes_is_waited_for_and_then_named_as_locked(
    tmp_path: Path, read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.duckdb"
    with open_store(path):
        pass
    script = f"import duckdb, sys; c = duckdb.connect({str(path)!r}); print('open', flush=True); sys.stdin.read()"
    monkeypatch.setenv("BLIS_REPLAY_LOCK_TIMEOUT", "0.3")
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        begin = time.monotonic()
        with (
            pytest.raises(StoreError, match="another process has it open") as error,
            open_store(path, read_only=read_only),
        ):
            pass
        assert time.monotonic() - begin >= 0.3
        one_line_of(error)
        other.communicate()
    with open_store(path, read_only=read_only):
        pass


def test_a_store_in_the_way_only_while_somebody_looks_is_tried_again(tmp_path: Path) -> None:
    """Of three validations one gave up: each try met another process, which was gone when it was looked for."""
    met = Mock(wraps=duckdb.connect, side_effect=[*[duckdb.IOException("locked")] * 3, *[DEFAULT] * 9])
    with patch("duckdb.connect", met), open_store(tmp_path / "s.duckdb") as store:
        assert list_experiments(store) == []


@pytest.mark.parametrize("content", [b"not a database", b"\x00" * 20_000, b"DUCK" * 5000, b"SQLite format 3\x00" * 999])
def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.duckdb"
    path.write_bytes(content)
    with pytest.raises(StoreError) as error, open_store(path):
        pass
    one_line_of(error)
    assert path.read_bytes() == content


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with open_store(path) as store:
        write_recording(store, recording(requests=requests(5000)), NO_EVENTS)
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(StoreError) as error, open_store(path) as store:
        read_stored(store, recording().slug)
    one_line_of(error)


def test_a_folder_and_a_path_below_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "s.duckdb"):
        with pytest.raises(StoreError) as error, open_store(path):
            pass
        one_line_of(error)


@pytest.mark.parametrize("name", [":memory:", "md:shared", "s3://bucket/s.duckdb", "sqlite:s.db"])
def test_a_store_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """DuckDB would keep nothing, or fetch native code for a service."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="a store is a file"), open_store(name):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("DROP TABLE findings; CREATE VIEW findings AS SELECT 1", "table findings is missing"),
        ("CREATE TABLE t (x INT)", "table t is not of a store"),
        ("CREATE VIEW v AS SELECT 1", "view v is not of a store"),
        ("DROP VIEW token_events; DROP TABLE meta", "not a blis-replay store"),
        # Its name is that of a function that our queries call.
        ("CREATE MACRO coalesce(a, b) AS 42", "macro coalesce is not of a store"),
    ],
)
def test_a_store_with_other_objects_is_refused(tmp_path: Path, sql: str, problem: str) -> None:
    """Also one that this process found in order before."""
    path = tmp_path / "s.duckdb"
    for _ in range(2):
        with open_store(path):
            pass
    with duckdb.connect(str(path)) as connection:
        connection.execute(sql)
    with pytest.raises(StoreError, match=problem) as error, open_store(path, read_only=True):
        pass
    one_line_of(error)


def test_a_store_reads_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    with open_store(tmp_path / "s.duckdb") as store, pytest.raises(duckdb.PermissionException):
        store.connection.execute(f"SELECT * FROM read_csv('{tmp_path}/secret.csv')")  # noqa: S608
    with open_store(tmp_path / "s.duckdb", read_only=True) as store, pytest.raises(duckdb.PermissionException):
        store.connection.execute(f"SELECT * FROM read_csv('{tmp_path}/secret.csv')")  # noqa: S608
