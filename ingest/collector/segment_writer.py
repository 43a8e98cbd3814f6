"""Group commit: one thread writes whatever waits, and one ``fsync`` makes all of it durable."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blis_replay.ingest.collector.limits import QUEUE_BYTES, SEGMENT_BYTES
from blis_replay.ingest.collector.segments import framed, new_segment, next_number, sync_directory

# Not everywhere; where there is none, the times of the file are written as well.
_sync = getattr(os, "fdatasync", os.fsync)


class BusyError(Exception):
    """More bytes wait for the disk than there is room for; the sender should try again."""


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

        Raises :class:`BusyError` if too much waits already, or the writer is closed.
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
            self._commit(framed(messages))
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
