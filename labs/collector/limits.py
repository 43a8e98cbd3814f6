"""What is let in: who may send, how much at once, and whose turn it is to be decoded.

A limit is a constant here, with the sender that it leaves room for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from hmac import compare_digest
from itertools import count
from pathlib import Path

from blis_replay.ingest.errors import IngestError

# As gRPC takes by default, and so the OpenTelemetry Collector. A batch of 512 spans, the SDK's most, is 1 to 2 MB of
# request spans, or 50 MB of step spans of 128 events; but it is sent every 5 s, with a few of those.
MESSAGE_BYTES = 4 << 20
# The most that may be asked for: gRPC keeps whole what 64 calls send at once.
MAX_MESSAGE_BYTES = 16 << 20
# As many as fit into that with 800 bytes each, 40 of the SDK's largest batches; each of them is looked at in Python.
MAX_MESSAGE_SPANS = 20_000
# An SDK groups a batch by its one resource and some scopes; each of them is looked at in Python.
MAX_MESSAGE_GROUPS = 10_000
# Of resources, where the name of the service is looked for.
MAX_MESSAGE_ATTRIBUTES = 100_000
# Of spans that are decoded at once, while no other thread runs; empty ones take 23 MB then, and 5 ms.
PIECE_BYTES = 1 << 18
# A span of an engine step with 128 events has 0.1 MB.
MAX_SPAN_BYTES = 4 << 20
# Beside resources, scopes and spans: what a resource or a scope says of itself, and what a later schema adds.
MAX_OTHER_FIELDS = 30_000
# Who waits longer for a decoder is asked to come again: exporters give up after ten seconds.
WAIT_SECONDS = 1.0
# An oversize HTTP body is read to its end, so that its sender hears why; the SDK itself sends no more than this.
MAX_DISCARDED_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 10
# Calls of gRPC under way, and connections of HTTP, of which each has a thread; an exporter has one batch in flight.
MAX_CONNECTIONS = 64
# Connections of gRPC, which wait without a thread: a hundred exporters have one each, and idle ones lock nobody out.
MAX_CHANNELS = 512
# Where all of these are taken, who has not sent its request for so long makes room for one that comes.
GRACE_SECONDS = 2.0
# From the end of one request to the end of the next: exporters send every 5 s, or not at all.
READ_SECONDS = 60.0
# Room for a few of the largest messages while the disk is slow.
QUEUE_BYTES = 64 << 20
# Size at which the OpenTelemetry Collector rotates its files, too.
SEGMENT_BYTES = 100 << 20
# SDK exporters try six times within ten seconds.
RETRY_SECONDS = 1
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Access:
    """Who may send, and how what they send is kept from others.

    ``certificate``, ``key``: PEM files for TLS; ``token``: what a client sends as ``authorization: Bearer TOKEN``.
    """

    certificate: Path | None = None
    key: Path | None = None
    token: str = ""

    def allows(self, authorization: object) -> bool:
        """Whether a client with this header may send; in a time that does not tell how much of it is right."""
        said = authorization if isinstance(authorization, str) else ""
        return not self.token or compare_digest(said.encode(), f"Bearer {self.token}".encode())


OPEN = Access()
NOT_ALLOWED = "no bearer token, or a wrong one; set OTEL_EXPORTER_OTLP_HEADERS"


class CollectorError(IngestError):
    """The collector cannot start: its directory is taken or cannot be written, or an address is in use."""


class BusyError(Exception):
    """More waits, for the decoder or for the disk, than there is time or room for; the sender should try again."""


class Turns:
    """One thread at a time, the one with the smallest message first: whoever sends large ones waits for the others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._numbers = count()
        self._taken = False
        self._rest_until = 0.0

    @contextmanager
    def turn(self, size: int, wait_seconds: float | None = None, *, rests: bool = False) -> Iterator[None]:
        """Within, no other thread is; ``BusyError`` if the turn does not come in time.

        ``rests``: the turn after it begins as much later as it took of CPU time, which others have.
        """
        mine = (size, next(self._numbers))
        with self._changed:
            heappush(self._waiting, mine)
            its_turn = self._changed.wait_for(lambda: not self._taken and self._waiting[0] == mine, wait_seconds)
            if not its_turn:
                self._waiting.remove(mine)
                self._waiting.sort()
                self._changed.notify_all()
                raise BusyError("other messages are being decoded")
            heappop(self._waiting)
            self._taken = True
        time.sleep(max(self._rest_until - time.monotonic(), 0.0))
        begin = time.thread_time()
        try:
            yield
        finally:
            if rests:
                self._rest_until = time.monotonic() + time.thread_time() - begin
            with self._changed:
                self._taken = False
                self._changed.notify_all()


# Messages above this are rare: so many are in memory at once, and one is worked on at a time and half of the time.
LARGE_BYTES, MAX_LARGE = 2 << 20, 4
DECODING, LARGE, _ROOM = Turns(), Turns(), threading.BoundedSemaphore(MAX_LARGE)


@contextmanager
def room_for(size: int, wait_seconds: float = 0.0) -> Iterator[None]:
    """Within, a message of so many bytes may be in memory; ``BusyError`` if as many large ones stay as may be."""
    if size <= LARGE_BYTES:
        yield
        return
    if not _ROOM.acquire(timeout=wait_seconds):
        raise BusyError(f"{MAX_LARGE} messages of more than {LARGE_BYTES >> 20} MB are worked on")
    try:
        yield
    finally:
        _ROOM.release()
