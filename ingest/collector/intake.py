"""One way from a client's bytes to the disk, whatever brought them."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from blis_replay.ingest.collector.batches import Batch, batch_of
from blis_replay.ingest.collector.counts import Counts
from blis_replay.ingest.collector.segment_writer import BusyError, SegmentWriter


class Intake:
    """Takes messages for the writer, and counts what becomes of them."""

    def __init__(self, writer: SegmentWriter, counts: Counts) -> None:
        self.writer, self.counts = writer, counts

    def submit(self, message: bytes) -> tuple[Batch, Future[None]]:
        """The batch in a serialised request, and a future that is done when it may be acknowledged.

        The future ends with ``OSError`` if the disk does not take it.  Raises
        ``MalformedError``, or :class:`BusyError` if too much waits for the disk.
        """
        batch = batch_of(message)
        try:
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


def response_to(batch: Batch) -> ExportTraceServiceResponse:
    """The acknowledgement of a batch: partial success if spans of it were rejected."""
    if not batch.rejected_spans:
        return ExportTraceServiceResponse()
    return ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(
            rejected_spans=batch.rejected_spans,
            error_message=f"{batch.rejected_spans} of {batch.spans + batch.rejected_spans} spans; {batch.reason}",
        )
    )


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
