"""The writer: one fsync for all that wait, rotation, and a disk that refuses."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from collecting import stored_messages

from blis_replay_labs.collector import segments as segment_writer
from blis_replay_labs.collector.segments import BusyError, SegmentWriter, segments


class Disk:
    """Stands between the writer and the system: counts syncs, holds them up, or fails as told."""

    def __init__(self) -> None:
        self.syncs, self.failure = 0, 0
        self.fails_after_bytes: int | None = None
        self.at_sync, self.may_sync = threading.Event(), threading.Event()
        self.may_sync.set()

    def sync(self, handle: int) -> None:
        self.at_sync.set()
        assert self.may_sync.wait(10)
        if self.failure and self.fails_after_bytes is None:
            raise OSError(self.failure, os.strerror(self.failure))
        self.syncs += 1
        os.fsync(handle)

    def write(self, handle: int, data: memoryview) -> int:
        """A disk with a few bytes left takes them, and then no more: the frame is torn."""
        if self.failure and self.fails_after_bytes is not None:
            if self.fails_after_bytes == 0:
                raise OSError(self.failure, os.strerror(self.failure))
            data, self.fails_after_bytes = data[: self.fails_after_bytes], 0
        return WRITE(handle, data)


WRITE = os.write


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(segment_writer, "_sync", disk.sync)
    monkeypatch.setattr(segment_writer.os, "write", disk.write)
    return disk


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(tmp_path: Path, disk: Disk, said: list[str]) -> Iterator[SegmentWriter]:
    writer = SegmentWriter(tmp_path, said.append, segment_bytes=1000, queue_bytes=400)
    yield writer
    disk.may_sync.set()
    writer.close()


def test_nothing_is_acknowledged_into_a_segment_that_was_deleted(
    writer: SegmentWriter, tmp_path: Path, said: list[str]
) -> None:
    """Whoever tidies up the directory meanwhile; what is sent again goes into a new one."""
    writer.append(b"first").result()
    (segment,) = segments(tmp_path)
    segment.unlink()
    with pytest.raises(OSError, match="deleted meanwhile"):
        writer.append(b"second").result()
    writer.append(b"second").result()
    assert stored_messages(tmp_path) == [b"second"]
    assert [line.rpartition(": ")[2] for line in said] == ["make room", "written again"]
    assert "its segment was deleted meanwhile" in said[0]


def test_what_waits_while_the_disk_is_busy_shares_one_sync(writer: SegmentWriter, disk: Disk, tmp_path: Path) -> None:
    disk.may_sync.clear()
    first = writer.append(b"first")
    assert disk.at_sync.wait(10)
    others = [writer.append(b"%d" % number) for number in range(50)]
    assert not first.done()
    disk.may_sync.set()
    assert [future.result(10) for future in (first, *others)] == [None] * 51
    assert disk.syncs == 2
    assert stored_messages(tmp_path) == [b"first", *(b"%d" % number for number in range(50))]


def test_more_than_the_queue_holds_is_refused_at_once(writer: SegmentWriter, disk: Disk) -> None:
    """400 bytes are allowed to wait here, those being written included."""
    disk.may_sync.clear()
    held = [writer.append(bytes(200)) for _ in range(2)]
    with pytest.raises(BusyError):
        writer.append(b"x")
    disk.may_sync.set()
    for future in held:
        future.result(10)
    writer.append(bytes(400)).result(10)


def test_who_hangs_up_before_being_written_is_not_written(writer: SegmentWriter, disk: Disk, tmp_path: Path) -> None:
    disk.may_sync.clear()
    first = writer.append(b"first")
    assert disk.at_sync.wait(10)
    second, third = writer.append(b"second"), writer.append(b"third")
    assert second.cancel()
    disk.may_sync.set()
    third.result(10)
    assert first.done()
    assert stored_messages(tmp_path) == [b"first", b"third"]


def test_a_segment_ends_when_it_is_large_enough(writer: SegmentWriter, tmp_path: Path) -> None:
    """Frames of 313 bytes: the fourth passes 1,000 bytes, so it is the last of its segment."""
    for _ in range(10):
        writer.append(bytes(range(1, 101)) * 3).result(10)
    assert [path.stat().st_size for path in segments(tmp_path)] == [4 * 313, 4 * 313, 2 * 313]


@pytest.mark.parametrize("room", [0, 2, 40])
def test_a_full_disk_refuses_keeps_what_it_had_and_goes_on(
    writer: SegmentWriter, disk: Disk, said: list[str], tmp_path: Path, room: int
) -> None:
    writer.append(b"before").result(10)
    disk.failure, disk.fails_after_bytes = errno.ENOSPC, room
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            writer.append(b"during" * 10).result(10)
    assert stored_messages(tmp_path) == [b"before"]
    assert [path.stat().st_size for path in segments(tmp_path)] == [4 + 6 + 9]
    disk.failure = 0
    writer.append(b"after").result(10)
    assert stored_messages(tmp_path) == [b"before", b"after"]
    assert [line.split(" ")[0] for line in said] == ["error:", f"{tmp_path}:"], (
        "one line when it begins, one at its end"
    )


def test_after_a_failed_sync_nothing_more_is_written_to_that_segment(
    writer: SegmentWriter, disk: Disk, tmp_path: Path
) -> None:
    """What a failed fsync left in the page cache may never reach the disk, and no later fsync says so."""
    writer.append(b"before").result(10)
    disk.failure = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        writer.append(b"during").result(10)
    disk.failure = 0
    writer.append(b"after").result(10)
    assert [path.stat().st_size for path in segments(tmp_path)] == [4 + 6 + 9, 4 + 5 + 9]


def test_a_closed_writer_has_written_what_waited_and_takes_no_more(disk: Disk, tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, print)
    waiting = [writer.append(b"%d" % number) for number in range(20)]
    writer.close()
    assert all(future.done() for future in waiting)
    with pytest.raises(BusyError):
        writer.append(b"late")
    assert len(stored_messages(tmp_path)) == 20
