"""What of an export request is stored, and what is counted."""

from __future__ import annotations

import threading
import time

import pytest
from collecting import request, span
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from blis_replay_labs.collector.batches import MalformedError, ServiceCounts, batch_of, response_to
from blis_replay_labs.collector.limits import (
    MAX_MESSAGE_BYTES,
    MAX_MESSAGE_GROUPS,
    MAX_MESSAGE_SPANS,
    BusyError,
    Turns,
)


def test_a_sound_request_is_stored_byte_by_byte() -> None:
    """Even what this version of the schema does not know: here field 99, as bytes."""
    message = request(span(0), span(1)).SerializeToString() + b"\x9a\x06\x03new"
    batch = batch_of(message)
    assert (batch.message, batch.spans, batch.rejected_spans) == (message, 2, 0)
    assert response_to(batch).SerializeToString() == b"", "full success is an empty response (OTLP)"


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"trace_id": b"short"}, "trace_id of 5 bytes instead of 16"),
        ({"trace_id": bytes(16)}, "trace_id of nothing but zeros"),
        ({"span_id": b""}, "span_id of 0 bytes instead of 8"),
        ({"span_id": bytes(8)}, "span_id of nothing but zeros"),
        ({"name": ""}, "no name"),
    ],
)
def test_a_malformed_span_is_rejected_and_its_neighbours_are_kept(fields: dict[str, object], fault: str) -> None:
    batch = batch_of(request(span(0), span(1, **fields), span(2)).SerializeToString())
    assert ExportTraceServiceRequest.FromString(batch.message) == request(span(0), span(2))
    partial = response_to(batch).partial_success
    assert partial.rejected_spans == 1
    assert partial.error_message == f"1 of 3 spans; span 2 of scope 'vllm.scheduler': {fault}"


@given(sound=st.lists(st.booleans(), max_size=30))
def test_exactly_the_sound_spans_stay_in_their_order(sound: list[bool]) -> None:
    spans = [span(number, name="s" if is_sound else "") for number, is_sound in enumerate(sound)]
    batch = batch_of(request(*spans).SerializeToString())
    kept = [one for one in spans if one.name]
    assert (batch.spans, batch.rejected_spans) == (len(kept), len(spans) - len(kept))
    assert batch.message == (request(*kept).SerializeToString() if kept else b"")


def test_drops_that_exporters_report_are_summed_by_service() -> None:
    message = request(span(0, dropped_events_count=72), span(1, dropped_events_count=1, dropped_links_count=3))
    message.MergeFrom(request(span(2, dropped_attributes_count=5), service="api"))
    message.MergeFrom(request(span(3, dropped_events_count=4, name="")))  # rejected, so not counted
    services = batch_of(message.SerializeToString()).services
    assert services == {"vllm": ServiceCounts(2, 73, 0, 3), "api": ServiceCounts(1, 0, 5, 0)}


def test_names_of_services_are_made_printable() -> None:
    message = request(span(0), service="\x1b[31m" + "x" * 200)
    message.MergeFrom(request(span(1), service=""))
    assert list(batch_of(message.SerializeToString()).services) == ["\\x1b[31m" + "x" * 95, "(no name)"]


def test_an_empty_request_is_fine() -> None:
    assert batch_of(b"").message == b""


def test_more_spans_or_bytes_than_a_message_may_have() -> None:
    """An empty span takes two bytes, so that a small message can hold many."""
    length = 2 * (MAX_MESSAGE_SPANS + 1)
    scope = b"\x12" + _varint(length) + b"\x12\x00" * (MAX_MESSAGE_SPANS + 1)
    with pytest.raises(MalformedError, match="more than 20000 spans"):
        batch_of(b"\x0a" + _varint(len(scope)) + scope)
    with pytest.raises(MalformedError, match="larger than the 16 MB"):
        batch_of(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("within", ["resources", "scopes"])
def test_more_resources_or_scopes_than_a_message_may_have(within: str) -> None:
    """16 MB of them are 16 KB of gzip, and kept the collector busy for up to a minute."""
    many = (b"\x0a" if within == "resources" else b"\x12") + b"\x00"
    message = many * (MAX_MESSAGE_GROUPS + 1)
    if within == "scopes":
        message = b"\x0a" + _varint(len(message)) + message
    with pytest.raises(MalformedError, match="resources and scopes in one message"):
        batch_of(message)


@given(st.binary(max_size=200))
def test_no_bytes_break_it(message: bytes) -> None:
    try:
        batch = batch_of(message)
    except MalformedError:
        return
    assert batch.message in (b"", message)


def test_nesting_without_end_is_malformed() -> None:
    """An AnyValue in an array in an AnyValue ..., 1,000 times."""
    value = b"\x10\x01"
    for _ in range(1000):
        value = b"\x0a" + _varint(len(value)) + value  # ArrayValue.values
        value = b"\x2a" + _varint(len(value)) + value  # AnyValue.array_value
    attribute = b"\x12" + _varint(len(value)) + value
    resource = b"\x0a" + _varint(len(attribute)) + attribute
    resource_spans = b"\x0a" + _varint(len(resource)) + resource
    with pytest.raises(MalformedError):
        batch_of(b"\x0a" + _varint(len(resource_spans)) + resource_spans)


def _varint(number: int) -> bytes:
    low = bytes([number & 127 | (128 if number > 127 else 0)])
    return low + (_varint(number >> 7) if number > 127 else b"")


def test_attributes_of_a_resource_are_bounded() -> None:
    """16 KB of gzip hold eight million; looked through for each of 5,000 scopes they took minutes."""
    message = request(span(1))
    message.resource_spans[0].resource.attributes.extend(KeyValue() for _ in range(100_001))
    with pytest.raises(MalformedError, match="more than 100000 attributes of resources in one message"):
        batch_of(message.SerializeToString())


def test_who_has_taken_long_leaves_as_long_to_others() -> None:
    """After a turn of at least 50 ms of CPU time the next one begins at least 50 ms later."""
    turns = Turns()
    with turns.turn(1, rests=True):
        begin = time.thread_time()
        while time.thread_time() - begin < 0.05:
            pass
        ended = time.monotonic()
    with turns.turn(1, rests=True):
        assert time.monotonic() - ended >= 0.05


def test_a_large_message_is_sorted_out_a_piece_at_a_time() -> None:
    """Of three spans of 0.7 MB each is a piece of its own, and the second has no name."""
    spans = [span(number, name="" if number == 1 else "s" * 700_000) for number in range(3)]
    spans[1].trace_state = "s" * 700_000
    batch = batch_of(request(*spans).SerializeToString())
    assert (batch.spans, batch.rejected_spans) == (2, 1)
    assert batch.reason == "span 2 of scope 'vllm.scheduler': no name"
    assert ExportTraceServiceRequest.FromString(batch.message) == request(spans[0], spans[2])


@pytest.mark.parametrize(
    ("field", "unit", "said"),
    [
        (b"\x12", b"\x5a\x00", "a span of 5000000 bytes, of 4194304 at most"),  # empty events
        (b"\x0a", b"\x0a\x00", "5000005 bytes of a resource or a scope, of 4194304 at most"),  # empty attributes
        (b"\xaa\x06", b"\xf8\x07\x00", "5000006 bytes of a resource or a scope, of 4194304 at most"),  # field 101
    ],
)
def test_no_part_of_a_message_is_larger_than_is_decoded_at_once(field: bytes, unit: bytes, said: str) -> None:
    """16 MB of them were 8,000,000 objects and took half a second in which no other thread ran."""
    content = unit * (5_000_000 // len(unit)) + b"\xf8\x07\x00"[: 5_000_000 % len(unit)]
    part = field + _varint(len(content)) + content
    scope = b"\x12" + _varint(len(part)) + part
    with pytest.raises(MalformedError, match=said):
        batch_of(b"\x0a" + _varint(len(scope)) + scope)


def test_fields_of_no_schema_are_bounded() -> None:
    """16 MB of fields of three bytes; each is looked at in Python."""
    with pytest.raises(MalformedError, match="more than 30000 fields of resources and scopes"):
        batch_of(b"\xf8\x07\x00" * 5_000_000)


def test_what_a_reader_could_not_decode_is_not_taken() -> None:
    """Field 0 is none of protobuf's; acknowledged, it would cost the batch."""
    sound = request(span(0)).SerializeToString()
    with pytest.raises(MalformedError):
        batch_of(sound + b"\x02\x00")


def test_who_has_the_smallest_message_is_decoded_next() -> None:
    turns, order = Turns(), []

    def take(size: int) -> None:
        with turns.turn(size):
            order.append(size)

    threads = [threading.Thread(target=take, args=(size,)) for size in (16, 1, 4)]
    with turns.turn(9):
        for thread in threads:
            thread.start()
        while len(turns._waiting) < 3:
            time.sleep(0.001)
        with pytest.raises(BusyError), turns.turn(2, wait_seconds=0.01):
            pass
    for thread in threads:
        thread.join()
    assert order == [1, 4, 16]
