"""Segments: files of frames (``frames``), each a serialised ``ExportTraceServiceRequest`` and its checksum.

Without the checksum, which readers of protobuf pass over, they are what the OpenTelemetry Collector writes as
``format: proto``; the message's wire layout is that of ``TracesData``.  ``Intake`` is the one path from a client's
bytes to the disk, whichever transport brought them.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path

from blis_replay.base.files import whole_file
from blis_replay_labs.collector.batches import Batch, Counts, batch_of
from blis_replay_labs.collector.frames import (
    LENGTH_BYTES,
    SEAL_BYTES,
    Segment,
    Stretch,
    framed,
    opened,
    stretches,
)
from blis_replay_labs.collector.limits import (
    MAX_MESSAGE_BYTES,
    MESSAGE_BYTES,
    QUEUE_BYTES,
    SEGMENT_BYTES,
    BusyError,
    CollectorError,
    room_for,
)

_NAME = re.compile(r"traces-\d{8}T\d{6}Z-(\d+)\.pb", re.ASCII)
# A longer tail is not what a killed collector leaves.
_MOST_TORN_BYTES = LENGTH_BYTES + MAX_MESSAGE_BYTES + SEAL_BYTES


@dataclass(frozen=True)
class Damage:
    """A stretch of a segment that is no sound frame, and in words what became of it.

    ``cut off``: the end of the last segment, which a killed collector leaves of a batch that it had not acknowledged.
    Anything else may have been acknowledged: it is ``set aside`` in a file beside, or its length ``corrected``.  A
    segment that cannot be mended, and what has the name of one and is no file, is ``left as it is``.
    """

    name: str
    offset: int
    bytes: int
    done: str


def segments(directory: Path) -> list[Path]:
    """The segments of a directory in the order in which they were begun; ``OSError``."""
    return [path for path in _named_so(directory) if _is_own_file(path)]


def _named_so(directory: Path) -> list[Path]:
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def _is_own_file(path: Path) -> bool:
    """Whether it is a file of this directory; what a link points to is not the collector's to mend."""
    return path.is_file() and not path.is_symlink()


def new_segment(directory: Path, number: int) -> Path:
    """The path of a segment that begins now (UTC); ``number`` makes it unique and sorts it."""
    return directory / f"traces-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{number}.pb"


def next_number(directory: Path) -> int:
    """One more than the largest segment number of the directory, from 1; ``OSError``."""
    return 1 + max((_number(path.with_suffix(".pb")) for path in directory.iterdir()), default=0)


def recover(directory: Path) -> tuple[Damage, ...]:
    """Make the segments that a killed collector left sound, lose nothing that it acknowledged; ``OSError``."""
    found = _named_so(directory)
    return tuple(damage for path in found for damage in _mended(path, is_last=path == found[-1]))


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """The directory, made if need be, for one collector alone.

    The lock is on the directory itself, so it leaves no file behind and ends with the process.
    Raises ``CollectorError`` if another collector has it, or it cannot be made or written.
    """
    import fcntl

    try:
        _make_durable(directory)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CollectorError(
            f"{directory}: cannot be made or opened ({error.strerror or error}); choose another --out"
        ) from error
    try:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise CollectorError(f"{directory}: cannot be written; change its permissions or choose another --out")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CollectorError(
                f"{directory}: another collector writes here; end that one or choose another --out"
            ) from error
        yield
    finally:
        os.close(handle)


def _make_durable(directory: Path) -> None:
    """Make a folder and those above it that are not there; a crash of the machine leaves them."""
    absent = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in absent:
        sync_directory(folder.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable; ``OSError``."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _mended(path: Path, *, is_last: bool) -> list[Damage]:
    """What was damaged of a segment; one that cannot be read, or not be written, keeps no collector from starting."""
    if not _is_own_file(path):
        return [Damage(path.name, 0, 0, f"{LEFT}: it is a link, a pipe or a folder")]
    try:
        return _recovered(path, is_last=is_last)
    except OSError as error:
        return [Damage(path.name, 0, 0, f"{LEFT}: {error.strerror or error}")]


def _recovered(path: Path, *, is_last: bool) -> list[Damage]:
    with opened(path) as content:
        parts = list(stretches(content))
        odd = [part for part in parts if part.kind != "frame"]
        kept = [_kept(path, content, part, is_last) for part in odd]
        done = [Damage(path.name, p.begin, p.end - p.begin, text) for p, text in zip(odd, kept, strict=True)]
        if len(odd) == 1 and done[0].done == CUT_OFF:
            with path.open("r+b") as segment:
                segment.truncate(odd[0].begin)
                os.fsync(segment.fileno())
        elif odd:
            with whole_file(path) as segment:
                for part in parts:
                    if part.kind == "wrong length":
                        segment.write((part.end - part.begin - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big"))
                        segment.writelines(content.pieces(part.begin + LENGTH_BYTES, part.end))
                    elif part.kind == "frame":
                        segment.writelines(content.pieces(part.begin, part.end))
    if not path.stat().st_size:
        path.unlink()
    if odd:
        sync_directory(path.parent)
    return done


CUT_OFF, CORRECTED = "cut off: it was never acknowledged", "its length was wrong, and is corrected"
LEFT = "left as it is"


def _kept(path: Path, content: Segment, part: Stretch, is_last: bool) -> str:
    """What is done with a stretch that is no sound frame; a file of its own where it may have been acknowledged."""
    if part.kind == "wrong length":
        return CORRECTED
    if part.kind == "torn" and is_last and part.end - part.begin < _MOST_TORN_BYTES:
        return CUT_OFF
    aside = _set_aside(path.with_name(f"{path.name}.damaged-{part.begin}"), content, part)
    return f"set aside in {aside.name}: it may have been acknowledged"


def _set_aside(first: Path, content: Segment, part: Stretch) -> Path:
    """A file of its own, on disk before the segment is changed; what was set aside under that name before stays."""
    names = (first.with_name(f"{first.name}-{number}") if number > 1 else first for number in count(1))
    for aside in names:
        there = os.path.lexists(aside)
        if not there:
            with whole_file(aside) as file:
                file.writelines(content.pieces(part.begin, part.end))
            sync_directory(aside.parent)
        if not there or (_is_own_file(aside) and _has(aside, content, part)):
            return aside
    raise AssertionError("count ends nowhere")


def _has(aside: Path, content: Segment, part: Stretch) -> bool:
    with opened(aside) as kept:
        pairs = zip(kept.pieces(0, kept.size), content.pieces(part.begin, part.end), strict=False)
        return kept.size == part.end - part.begin and all(one == other for one, other in pairs)


# Not everywhere; where there is none, the times of the file are written as well.
_sync = getattr(os, "fdatasync", os.fsync)


@dataclass
class _Segment:
    path: Path
    handle: int
    durable_bytes: int = 0


class SegmentWriter:
    """Appends messages to the segments of a directory.

    ``say``: called with one line when the disk refuses, and when it takes messages again.
    ``segment_bytes``: size at which the next segment is begun; ``queue_bytes``: of messages
    that may wait for the disk.
    """

    def __init__(
        self,
        directory: Path,
        say: Callable[[str], None],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.directory, self.say = directory, say
        self.segment_bytes, self.queue_bytes = segment_bytes, queue_bytes
        self._number = next_number(directory)
        self._segment: _Segment | None = None
        self._refusing = False
        self._wake = threading.Condition()
        self._waiting: list[tuple[bytes, Future[None]]] = []
        self._waiting_bytes = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="segment writer")
        self._thread.start()

    def append(self, message: bytes) -> Future[None]:
        """A future that is done when the message is durable, and ends with ``OSError`` if it cannot be.

        Raises ``BusyError`` if too much waits already, or the writer is closed.
        """
        future: Future[None] = Future()
        with self._wake:
            if self._closing:
                raise BusyError("the collector is ending")
            if self._waiting_bytes + len(message) > self.queue_bytes:
                raise BusyError(f"{self._waiting_bytes} bytes wait for the disk")
            self._waiting.append((message, future))
            self._waiting_bytes += len(message)
            self._wake.notify()
        return future

    def close(self) -> None:
        """Write what waits and end; later messages are refused."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while group := self._next_group():
            failure = self._try_commit([message for message, _ in group])
            with self._wake:
                self._waiting_bytes -= sum(len(message) for message, _ in group)
            for _, future in group:
                if failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(failure)
        self._end_segment()

    def _next_group(self) -> list[tuple[bytes, Future[None]]]:
        """All that waits, and is still wanted; nothing once the writer is closed and done."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                taken, self._waiting = self._waiting, []
                group = [entry for entry in taken if entry[1].set_running_or_notify_cancel()]
                self._waiting_bytes -= sum(len(message) for message, _ in taken) - sum(len(m) for m, _ in group)
            if group or not taken:
                return group

    def _try_commit(self, messages: list[bytes]) -> OSError | None:
        try:
            self._commit(b"".join(map(framed, messages)))
        except OSError as error:
            self._abandon()
            if not self._refusing:
                self.say(
                    f"error: {self.directory}: cannot be written ({error.strerror or error}); nothing of it is "
                    "acknowledged and exporters are asked to try again: make room"
                )
            self._refusing = True
            return error
        if self._refusing:
            self.say(f"{self.directory}: written again")
        self._refusing = False
        return None

    def _commit(self, frames: bytes) -> None:
        if self._segment is None:
            self._segment = self._begin_segment()
        segment, rest = self._segment, memoryview(frames)
        while rest:
            rest = rest[os.write(segment.handle, rest) :]
        _sync(segment.handle)
        if not os.fstat(segment.handle).st_nlink:
            raise OSError(errno.ENOENT, "its segment was deleted meanwhile")
        segment.durable_bytes += len(frames)
        if segment.durable_bytes >= self.segment_bytes:
            self._end_segment()

    def _begin_segment(self) -> _Segment:
        path = new_segment(self.directory, self._number)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        self._number += 1
        try:
            sync_directory(self.directory)
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        return _Segment(path, handle)

    def _end_segment(self) -> None:
        if self._segment is not None:
            os.close(self._segment.handle)
        self._segment = None

    def _abandon(self) -> None:
        """Take back what was not made durable; the next message begins a new segment.

        After a failed ``fsync`` nobody knows which pages are on disk, so that segment is not written to again.
        If even this fails, whole frames that nobody was promised stay behind, or a torn one, which readers skip.
        """
        segment, self._segment = self._segment, None
        if segment is None:
            return
        with suppress(OSError):
            os.ftruncate(segment.handle, segment.durable_bytes)
        with suppress(OSError):
            os.close(segment.handle)
        if segment.durable_bytes == 0:
            with suppress(OSError):
                segment.path.unlink()


class Intake:
    """Takes messages of so many bytes at most for the writer, and counts what becomes of them."""

    def __init__(self, writer: SegmentWriter, counts: Counts, message_bytes: int = MESSAGE_BYTES) -> None:
        self.writer, self.counts, self.message_bytes = writer, counts, message_bytes

    @contextmanager
    def room_for(self, size: int, wait_seconds: float = 0.0) -> Iterator[None]:
        """As of ``batches``; who finds none is counted."""
        with ExitStack() as room:
            try:
                room.enter_context(room_for(size, wait_seconds))
            except BusyError:
                self.counts.refused()
                raise
            yield

    def submit(self, message: bytes, decoded: Callable[[bytes], bytes] | None = None) -> tuple[Batch, Future[None]]:
        """The batch in a serialised request, and a future that is done when it may be acknowledged.

        ``decoded``: makes a serialised request of what is none.  The future ends with ``OSError`` if the disk does not
        take it.  Raises ``MalformedError``, or ``BusyError`` if too much waits for a decoder or for the disk.
        """
        try:
            batch = batch_of(decoded(message) if decoded else message, self.message_bytes)
            durable = self.writer.append(batch.message) if batch.message else _done()
        except BusyError:
            self.counts.refused()
            raise
        durable.add_done_callback(partial(self._settled, batch))
        return batch, durable

    def _settled(self, batch: Batch, durable: Future[None]) -> None:
        # A client that hung up before its turn had not been written yet: it sends again, or never asks.
        if durable.cancelled() or durable.exception() is not None:
            self.counts.refused()
        else:
            self.counts.stored(batch)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
