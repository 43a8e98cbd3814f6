"""What became of everything that was sent to the collector."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from blis_replay.ingest.collector.batches import Batch, ServiceCounts

# Names come from clients; what goes beyond is counted together.
MAX_SERVICES = 100
OTHER_SERVICES = "(other services)"


@dataclass
class Counts:
    """Counts since the start; complete once the collector has ended.

    ``requests`` may be acknowledged, and their ``spans`` and ``bytes`` lie on disk (a batch
    that a client sent again is there, and counted, again).  ``rejected_spans`` were malformed;
    ``malformed_requests`` could not be read at all, or were too large; ``refused_requests``
    were not taken for want of room or time, and their client may send them again.  ``say``
    is called with one line at the first rejection of each kind.
    """

    say: Callable[[str], None]
    requests: int = 0
    spans: int = 0
    bytes: int = 0
    rejected_spans: int = 0
    malformed_requests: int = 0
    refused_requests: int = 0
    services: dict[str, ServiceCounts] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stored(self, batch: Batch) -> None:
        """A batch is durable; what was malformed in it is not."""
        with self._lock:
            self.requests += 1
            self.spans += batch.spans
            self.bytes += len(batch.message)
            for name, counts in batch.services.items():
                known = name in self.services or len(self.services) < MAX_SERVICES
                self.services.setdefault(name if known else OTHER_SERVICES, ServiceCounts()).add(counts)
            first = batch.rejected_spans and not self.rejected_spans
            self.rejected_spans += batch.rejected_spans
        if first:
            self.say(f"warning: a span was rejected, and later ones are only counted: {batch.reason}")

    def malformed(self, reason: str) -> None:
        """A request was refused for good."""
        with self._lock:
            self.malformed_requests += 1
            first = self.malformed_requests == 1
        if first:
            self.say(f"warning: a request was rejected, and later ones are only counted: {reason}")

    def refused(self) -> None:
        """A client was asked to send its request again."""
        with self._lock:
            self.refused_requests += 1
