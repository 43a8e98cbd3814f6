"""OTLP JSON bodies: hex ids, decimal strings, and whatever else a client can send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from blis_replay_labs.collector.batches import MalformedError
from blis_replay_labs.collector.http_service import protobuf_of

# A span by hand after the examples of the OTLP specification, and the same in protobuf.
SPAN = {
    "traceId": "5B8EFFF798038103D269B633813FC60C",
    "spanId": "eee19b7ec3c1b174",
    "parentSpanId": "eee19b7ec3c1b173",
    "name": "llm_core",
    "kind": 1,
    "startTimeUnixNano": "1544712660000000001",
    "attributes": [
        {"key": "n", "value": {"intValue": "9007199254740993"}},
        {"key": "x", "value": {"doubleValue": 1}},
        {"key": "b", "value": {"bytesValue": "AQI="}},
    ],
    "links": [{"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174"}],
    "somethingNew": {"ignored": True},
}
IDS = {"trace_id": bytes.fromhex("5b8efff798038103d269b633813fc60c"), "span_id": bytes.fromhex("eee19b7ec3c1b174")}


def _document(*spans: Any) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


def _spans(text: bytes) -> list[Span]:
    found = ExportTraceServiceRequest.FromString(protobuf_of(text))
    return list(found.resource_spans[0].scope_spans[0].spans)


def test_ids_are_hex_and_integers_keep_64_bits() -> None:
    (found,) = _spans(_document(SPAN))
    expected = Span(
        **IDS,
        parent_span_id=bytes.fromhex("eee19b7ec3c1b173"),
        name="llm_core",
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=1544712660000000001,
        links=[Span.Link(**IDS)],
    )
    expected.attributes.add(key="n").value.int_value = 9007199254740993
    expected.attributes.add(key="x").value.double_value = 1.0
    expected.attributes.add(key="b").value.bytes_value = b"\1\2"
    assert found == expected


@pytest.mark.parametrize("identity", ["zz", "abc", "W47/95gDgQPSabYzgT/GDA==", "é"])
def test_an_id_that_is_no_hex_spoils_its_span_alone(identity: str) -> None:
    first, second = _spans(_document(SPAN | {"traceId": identity}, SPAN))
    assert (first.trace_id, second.trace_id) == (b"", IDS["trace_id"])


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000),
        *(b'{"resourceSpans": 5}', b'{"resourceSpans": [5]}', b'{"resourceSpans": [], "x": "\\ud800"}'),
        *(_document(SPAN | {"startTimeUnixNano": "soon"}), _document(SPAN | {"traceId": 5})),
        b'{"resourceSpans": ' * 5000 + b"{}" + b"}" * 5000,
    ],
)
def test_what_is_no_otlp_is_malformed(text: bytes) -> None:
    with pytest.raises(MalformedError, match="no OTLP JSON"):
        protobuf_of(text)


_KEYS = st.sampled_from(
    ["traceId", "spanId", "name", "links", "attributes", "value", "key", "events", "kind", "status"]
)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.slow
@given(_ANYTHING)
def test_no_document_breaks_it(value: Any) -> None:
    for document in (value, {"resourceSpans": value}, {"resourceSpans": [{"scopeSpans": [{"spans": [value]}]}]}):
        try:
            ExportTraceServiceRequest.FromString(protobuf_of(json.dumps(document).encode()))
        except MalformedError:
            continue


def test_an_empty_object_is_an_empty_request() -> None:
    assert protobuf_of(b"{}") == b""


def test_a_client_cannot_write_to_the_terminal_through_an_error() -> None:
    with pytest.raises(MalformedError, match=r"\\u202e") as told:
        protobuf_of('{"resourceSpans": [{"scopeSpans": "\u202e"}]}'.encode())
    assert str(told.value).isprintable()


def test_a_text_of_nothing_but_objects_is_refused_before_it_is_decoded() -> None:
    """16 MB hold five million, of which each takes some 8 us."""
    text = b'{"resourceSpans": [' + b",".join([b"{}"] * 100_000) + b"]}"
    with pytest.raises(MalformedError, match="more than 100000 objects and lists"):
        protobuf_of(text)
