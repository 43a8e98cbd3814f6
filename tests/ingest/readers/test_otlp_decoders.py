"""The library decoder: JSON in its spellings fills the same columns; damage costs itself only."""

from __future__ import annotations

import base64
import json
from typing import Any
from unittest.mock import patch

import polars as pl
import pytest
from hypothesis import given, settings
from otlp_trees import MAX_INT64, documents

from blis_replay.ingest.readers.files import Tally
from blis_replay.ingest.readers.otlp import decode as otlp_json
from blis_replay.ingest.readers.otlp.decode import BatchRows, read_json
from blis_replay.ingest.scan import otlp_columns
from blis_replay.ingest.scan.otlp_columns import (
    JOURNEY_EVENT_SCHEMA,
    SNAPSHOT_EVENT_SCHEMA,
    SPAN_SCHEMA,
    STEP_EVENT_SCHEMA,
    TraceBatch,
)


def decoded(document: dict[str, Any] | bytes) -> tuple[TraceBatch, Tally]:
    rows, tally = BatchRows(), Tally()
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    for _ in read_json(content, "line 7", 7, rows, tally):
        pass
    return rows.batch("line"), tally


def assert_same_events(found: TraceBatch, expected: TraceBatch) -> None:
    assert found.steps.equals(expected.steps)
    assert found.snapshots.equals(expected.snapshots)
    assert found.journey_events.equals(expected.journey_events)


def one_span(scope: str = "vllm.api", **fields: Any) -> dict[str, Any]:
    span = {"traceId": "0a" * 16, "spanId": "0b" * 8, "name": "llm_request"} | fields
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": scope}, "spans": [span]}]}]}


def attribute(key: str, **value: Any) -> dict[str, Any]:
    return {"key": key, "value": value}


def event(*attributes: dict[str, Any], name: str = "api.ARRIVED", at: Any = "5") -> dict[str, Any]:
    return {"name": name, "timeUnixNano": at, "attributes": list(attributes)}


def test_a_span_and_its_event_fill_their_columns() -> None:
    document = one_span(
        parentSpanId="0C" * 8,
        startTimeUnixNano="1770000000000000001",
        endTimeUnixNano=1770000000000000003,
        droppedEventsCount=72,
        status={"code": 2, "message": "gone"},
        attributes=[
            attribute("gen_ai.request.id", stringValue="chatcmpl-1"),
            attribute("gen_ai.usage.prompt_tokens", intValue="900"),
            attribute("gen_ai.latency.e2e", doubleValue=2),
            attribute("http.route", stringValue="/v1"),
        ],
        events=[event(attribute("scheduler.step", intValue=str(MAX_INT64)), name="journey.QUEUED"), event(name="mine")],
    )
    batch, tally = decoded(document)
    assert batch.spans.schema == pl.Schema(SPAN_SCHEMA)
    assert batch.journey_events.schema == pl.Schema(JOURNEY_EVENT_SCHEMA)
    assert batch.snapshots.schema == pl.Schema(SNAPSHOT_EVENT_SCHEMA)
    assert batch.steps.schema == pl.Schema(STEP_EVENT_SCHEMA)
    span = {name: value for name, value in batch.spans.row(0, named=True).items() if value is not None}
    assert span == {
        "record": 7,
        "span": 1,
        "scope": "vllm.api",
        "name": "llm_request",
        "trace_id": "0a" * 16,
        "span_id": "0b" * 8,
        "parent_span_id": "0c" * 8,
        "start_ns": 1770000000000000001,
        "status_message": "gone",
        "dropped_events": 72,
        "other_events": 1,
        "request_id": "chatcmpl-1",
        "prompt_tokens": 900,
        "e2e_s": 2.0,
    }
    (row,) = batch.journey_events.rows(named=True)
    assert {name: value for name, value in row.items() if value is not None} == {
        "span_row": 0,
        "event": 1,
        "name": "journey.QUEUED",
        "time_ns": 5,
        "step_id": MAX_INT64,
    }
    assert tally.rejected_count == 0


def test_a_generic_protobuf_printer_writes_base64_ids_and_enum_names() -> None:
    """The same span as the Collector writes it, and as protobuf's own JSON does."""
    plain = one_span(status={"code": 2}, kind=2)
    printed = one_span(
        traceId=base64.b64encode(bytes.fromhex("0a" * 16)).decode(),
        spanId=base64.b64encode(bytes.fromhex("0b" * 8)).decode(),
        status={"code": "STATUS_CODE_ERROR"},
        kind="SPAN_KIND_SERVER",
    )
    assert decoded(printed)[0].spans.equals(decoded(plain)[0].spans)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"intValue": "12"}, 12),
        ({"intValue": 12}, 12),
        ({"doubleValue": 12.0}, 12),
        ({}, None),
        (None, None),
    ],
)
def test_an_integer_comes_in_several_spellings(value: Any, read: int | None) -> None:
    batch, tally = decoded(one_span(events=[event({"key": "scheduler.step", "value": value})]))
    assert batch.journey_events["step_id"].to_list() == [read]
    assert tally.rejected_count == 0


@pytest.mark.parametrize(
    "value",
    [
        {"intValue": "x"},
        {"intValue": "9223372036854775808"},
        {"intValue": 10**30},
        {"doubleValue": 1.5},
        {"doubleValue": 2.0**53},
        {"doubleValue": "NaN"},
        {"stringValue": "12"},
        {"boolValue": True},
        {"arrayValue": {"values": []}},
        [],
    ],
)
def test_a_known_attribute_of_another_type_costs_its_event(value: Any) -> None:
    events = [event(attribute("scheduler.step", intValue="1")), event({"key": "scheduler.step", "value": value})]
    batch, tally = decoded(one_span(events=[*events, events[0]]))
    assert batch.journey_events["event"].to_list() == [1, 3]
    assert tally.rejected_count == 1
    assert tally.rejected[0][0] == "line 7, span 1, event 2"


def test_a_malformed_attribute_that_nobody_reads_costs_nothing() -> None:
    batch, tally = decoded(one_span(events=[event({"key": "mine", "value": {"intValue": "x"}})]))
    assert (len(batch.journey_events), tally.rejected_count) == (1, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"attributes": [attribute("gen_ai.request.id", intValue=1)]},
        {"startTimeUnixNano": "-1"},
        {"startTimeUnixNano": str(2**63)},
        {"name": 3},
        {"droppedEventsCount": -1},
    ],
)
def test_a_malformed_span_costs_itself(fields: dict[str, Any]) -> None:
    document = one_span()
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans[:] = [spans[0], spans[0] | fields, spans[0]]
    batch, tally = decoded(document)
    assert batch.spans["span"].to_list() == [1, 3]
    assert [place for place, _reason in tally.rejected] == ["line 7, span 2"]


def test_spans_of_other_scopes_are_named_and_not_read() -> None:
    batch, tally = decoded(one_span("mine", startTimeUnixNano="x", events=[{"name": 5}]))
    assert batch.spans.row(0)[:4] == (7, 1, "mine", "llm_request")
    assert batch.spans.row(0)[4:] == (None,) * (len(SPAN_SCHEMA) - 4)
    assert tally.rejected_count == 0


def test_a_time_beyond_int64_costs_its_event_also_one_that_is_not_read() -> None:
    document = one_span()
    document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["events"] = [{"name": "mine", "timeUnixNano": str(2**63)}]
    batch, tally = decoded(document)
    assert (len(batch.spans), [place for place, _ in tally.rejected]) == (1, ["line 7, span 1, event 1"])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(document=documents)
def test_a_large_record_is_read_as_a_small_one(document: dict[str, Any]) -> None:
    """A large one in pieces, because a list of empty objects takes 60 times its text when it is decoded at once."""
    at_once, tally = decoded(document)
    with patch.object(otlp_json, "LARGE_BYTES", len(b"null")):
        in_pieces, tally_of_pieces = decoded(document)
    assert in_pieces.spans.equals(at_once.spans)
    assert_same_events(in_pieces, at_once)
    assert tally_of_pieces == tally


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"resourceSpans": [5, 5]}, "members of a list that are not objects"),
        ({"resourceSpans": "text"}, "members of a list that are not objects"),
        ({"resourceSpans": [{"scopeSpans": [[], []]}]}, "no OTLP JSON"),
        ({"resourceSpans": [{"scopeSpans": [{"scope": {"name": "mine"}, "spans": [None, 7]}]}]}, "not objects"),
    ],
)
def test_what_a_large_record_has_in_place_of_objects_is_rejected(document: dict[str, Any], reason: str) -> None:
    with patch.object(otlp_json, "LARGE_BYTES", len(b"null")):
        batch, tally = decoded(document)
    assert (len(batch.spans), tally.rejected_count) == (0, 1)
    assert reason in tally.rejected[0][1]


@pytest.mark.parametrize("scope", ["vllm.api", "mine"])
def test_a_span_larger_than_any_is_rejected(scope: str) -> None:
    """A real one is smaller than the record from which on spans are taken one by one."""
    assert otlp_columns.MAX_SPAN_BYTES >= otlp_json.LARGE_BYTES
    document = one_span(scope, attributes=[attribute("mine", stringValue="x" * 1000)])
    with patch.object(otlp_json, "LARGE_BYTES", len(b"null")), patch.object(otlp_columns, "MAX_SPAN_BYTES", 1000):
        batch, tally = decoded(document)
        assert (len(batch.spans), tally.rejected_count) == (0, 1)
        place, reason = tally.rejected[0]
        assert (place, reason[:11]) == ("line 7, span 1", "a span of 1")
