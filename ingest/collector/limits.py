"""What the collector allows a client to use, and why that much."""

from __future__ import annotations

# A batch of 512 spans, the SDK's most, is 1 to 2 MB of request spans; 16 MB are 200 step spans of 100 summaries.
MAX_MESSAGE_BYTES = 16 << 20
# Far above any batch; bounds the work on a message that is made of nothing but empty spans.
MAX_MESSAGE_SPANS = 100_000
# An oversize HTTP body is read to its end, so that its sender hears why; the SDK itself sends no more than this.
MAX_DISCARDED_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 10
# An exporter holds one connection and one batch in flight; a server has a handful of them.
MAX_CONNECTIONS = 64
# From the end of one request to the end of the next: exporters send every 5 s, or not at all.
READ_SECONDS = 60.0
# Room for a few of the largest messages while the disk is slow.
QUEUE_BYTES = 64 << 20
# Size at which the OpenTelemetry Collector rotates its files, too.
SEGMENT_BYTES = 100 << 20
# SDK exporters try six times within ten seconds.
RETRY_SECONDS = 1
STOP_SECONDS = 10.0
