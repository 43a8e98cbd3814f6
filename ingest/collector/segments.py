"""Segments: files of length-framed protobuf messages, as the OpenTelemetry Collector's ``format: proto`` writes them.

A frame is a 4-byte big-endian length and that many bytes of a serialised
``ExportTraceServiceRequest``, whose wire layout is that of ``TracesData``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from blis_replay.ingest.collector.limits import MAX_MESSAGE_BYTES
from blis_replay.ingest.errors import CollectorError

LENGTH_BYTES = 4
_NAME = re.compile(r"traces-\d{8}T\d{6}Z-(\d{1,9})\.pb", re.ASCII)


@dataclass(frozen=True)
class TornTail:
    """The end of a segment that is no whole frame.

    ``cut``: it was cut off, because it is what a killed collector leaves of a batch that it
    had not acknowledged; a longer tail is damage of another kind, and left as it is.
    """

    name: str
    offset: int
    bytes: int
    cut: bool


def framed(messages: Sequence[bytes]) -> bytes:
    """The messages, each behind its length."""
    return b"".join(part for message in messages for part in (len(message).to_bytes(LENGTH_BYTES, "big"), message))


def frame_spans(path: Path) -> Iterator[tuple[int, int]]:
    """``(offset of the message, its length)`` of each whole frame of a segment, in order; ``OSError``."""
    size = path.stat().st_size
    with path.open("rb") as segment:
        at = 0
        while at + LENGTH_BYTES <= size:
            segment.seek(at)
            length = int.from_bytes(segment.read(LENGTH_BYTES), "big")
            # No message is empty: zeros are a tail that was never written.
            if length == 0 or at + LENGTH_BYTES + length > size:
                return
            yield at + LENGTH_BYTES, length
            at += LENGTH_BYTES + length


def segments(directory: Path) -> list[Path]:
    """The segments of a directory in the order in which they were begun; ``OSError``."""
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=_number)


def new_segment(directory: Path, number: int) -> Path:
    """The path of a segment that begins now (UTC); ``number`` makes it unique and sorts it."""
    return directory / f"traces-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{number}.pb"


def next_number(directory: Path) -> int:
    """One more than the largest segment number of the directory, from 1; ``OSError``."""
    return 1 + max(map(_number, segments(directory)), default=0)


def recover(directory: Path) -> tuple[TornTail, ...]:
    """Cut torn tails off the segments that a killed collector left, and remove empty ones; ``OSError``."""
    tails = (_torn_tail(path) for path in segments(directory))
    return tuple(tail for tail in tails if tail is not None)


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """The directory, made if need be, for one collector alone.

    The lock is on the directory itself, so it leaves no file behind and ends with the process.
    Raises ``CollectorError`` if another collector has it, or it cannot be made or written.
    """
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
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


def _torn_tail(path: Path) -> TornTail | None:
    whole = max((offset + length for offset, length in frame_spans(path)), default=0)
    torn = path.stat().st_size - whole
    cut = torn < LENGTH_BYTES + MAX_MESSAGE_BYTES
    if whole == 0 and cut:
        path.unlink()
    elif torn and cut:
        with path.open("r+b") as segment:
            segment.truncate(whole)
            os.fsync(segment.fileno())
    return TornTail(path.name, whole, torn, cut) if torn else None
