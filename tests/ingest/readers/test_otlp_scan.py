"""The compiled scan of OTLP JSON lines makes of any bytes what the decoder makes of them."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pack import JANUARY, VLLM_TRACES, WITH_SPANS

from blis_replay.ingest.readers import files
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp import scan as otlp_scan
from blis_replay.ingest.readers.otlp.traces import trace_batches
from blis_replay.ingest.scan import otlp_columns

EVENTS = ("steps", "snapshots", "journey_events")
Read = tuple[dict[str, pl.DataFrame], int, list[tuple[str, str]]]


def read(path: Path, *, scanned: bool, chunk_bytes: int = 1 << 11, batch_rows: int = 8, unit: str = "line") -> Read:
    """All spans and events by their kind (``span_row`` among all spans), and what was rejected."""
    file = RecordedFile(path, path.name)
    found: dict[str, list[pl.DataFrame]] = {kind: [] for kind in ("spans", *EVENTS)}
    count = 0
    with (
        patch.object(files, "LARGE_BYTES", 0 if scanned else 1 << 60),
        patch.object(files, "CHUNK_BYTES", chunk_bytes),
        patch.object(otlp_scan, "BATCH_ROWS", batch_rows),
        patch.object(otlp_scan, "_ROOM_FOR_TEXTS", 40 * batch_rows),
    ):
        for batch in trace_batches(file):
            assert batch.unit == unit
            found["spans"].append(batch.spans)
            for kind in EVENTS:
                found[kind].append(getattr(batch, kind).with_columns(pl.col("span_row") + count))
            count += len(batch.spans)
    whole = {kind: pl.concat(frames) for kind, frames in found.items()}
    return whole, file.tally.rejected_count, file.tally.rejected


def assert_same(path: Path, content: bytes, unit: str = "line") -> Read:
    path.write_bytes(content)
    decoded, scanned = read(path, scanned=False, unit=unit), read(path, scanned=True, unit=unit)
    for kind, of_decoder in decoded[0].items():
        assert scanned[0][kind].schema == of_decoder.schema
        assert scanned[0][kind].equals(of_decoder)
    assert scanned[1:] == decoded[1:]
    return scanned


# Mostly as vLLM writes them; some that no writer should.
TEXTS = ["llm_request", "DECODE", "", "a \\ b", 'a "b"', "é", "cmpl-0", "x" * 30]
INTEGERS = [
    "1771430000140574000",
    "0",
    17,
    0,
    "9223372036854775807",
    "9223372036854775808",
    "-5",
    -5,
    1.0,
    "007",
    "1e3",
]
DOUBLES = [0.5, 0, 1e-05, 1.2345678901234567e-7, 226106.840574, 3.0, 1e22, 1e300, -0.25, "NaN", "0.5"]
ODD = [
    {},
    {"boolValue": True},
    {"arrayValue": {"values": []}},
    {"intValue": None},
    None,
    {"intValue": "1", "doubleValue": 2},
]


def value(rng: random.Random, usual: str) -> Any:
    kind = usual if rng.random() < 0.97 else rng.choice(["intValue", "doubleValue", "stringValue", "odd"])
    if kind == "odd":
        return rng.choice(ODD)
    among = {"intValue": INTEGERS[:4], "doubleValue": DOUBLES[:5], "stringValue": TEXTS[:3]}[kind]
    if rng.random() < 0.03:
        among = {"intValue": INTEGERS, "doubleValue": DOUBLES, "stringValue": TEXTS}[kind]
    return {kind: rng.choice(among)}


def attributes(rng: random.Random, integers: Any, floats: Any, strings: Any) -> list[dict[str, Any]]:
    usual = (
        dict.fromkeys(integers, "intValue")
        | dict.fromkeys(floats, "doubleValue")
        | dict.fromkeys(strings, "stringValue")
    )
    usual |= {"event.type": "stringValue", "http.route": "stringValue", "gen_ai.request.n": "intValue"}
    usual |= {"gen_ai.request.id": "stringValue", "step.id": "intValue"}  # the other's, of spans and of events
    keys = rng.choices(list(usual), k=rng.randint(0, 8))
    return [{"key": key, "value": value(rng, usual[key])} for key in keys]


def event(rng: random.Random) -> dict[str, Any]:
    of_event = (otlp_columns.EVENT_INTEGERS, otlp_columns.EVENT_FLOATS, otlp_columns.EVENT_STRINGS)
    made = {
        "timeUnixNano": rng.choice(INTEGERS[:4]),
        "name": rng.choice([*otlp_columns.EVENTS, "exception"]),
        "attributes": attributes(rng, *of_event),
    }
    return some_of(rng, made)


def span(rng: random.Random) -> dict[str, Any]:
    of_span = (otlp_columns.SPAN_INTEGERS, otlp_columns.SPAN_FLOATS, otlp_columns.SPAN_STRINGS)
    status = rng.choice([{}, {"code": 2, "message": "gone"}, {"code": 1}, {"message": ""}, None])
    odd_status = rng.choice([{"code": "STATUS_CODE_ERROR"}, {"code": "2"}, {"code": -1}])
    made = {
        "traceId": rng.choice(["af816aef93aa13972e000fda74a21a71", "r4Fq75OqE5cuAA/adKIacQ==", "", "AB"]),
        "spanId": rng.choice(["1ad93d0fa2eb94a3", "", None]),
        "parentSpanId": rng.choice(["1AD93D0FA2EB94A3", "", None]),
        "flags": 256,
        "name": rng.choice(TEXTS[:3] if rng.random() < 0.98 else TEXTS),
        "startTimeUnixNano": rng.choice(INTEGERS[:4] if rng.random() < 0.98 else INTEGERS),
        "endTimeUnixNano": rng.choice(INTEGERS[:4]),
        "attributes": attributes(rng, *of_span),
        "events": [event(rng) for _ in range(rng.randint(0, 5))],
        "links": [{"traceId": "00", "attributes": [1, [], {}]}],
        "droppedEventsCount": rng.choice([0, 3, "4", 1 << 32] if rng.random() < 0.05 else [0, 3]),
        "status": status if rng.random() < 0.97 else odd_status,
    }
    return some_of(rng, made)


def some_of(rng: random.Random, made: dict[str, Any]) -> dict[str, Any]:
    """An object without some of its members, now and then in another order."""
    kept = {key: made[key] for key in made if rng.random() < 0.95}
    return dict(rng.sample(list(kept.items()), len(kept))) if rng.random() < 0.3 else kept


def line(rng: random.Random) -> bytes:
    scopes = [*otlp_columns.SCOPES, "other", "vllm.api"]
    scoped = [
        {"scope": {"name": rng.choice(scopes), "version": "1"}, "spans": [span(rng) for _ in range(rng.randint(0, 4))]}
        for _ in range(rng.randint(0, 3))
    ]
    if rng.random() < 0.05:
        scoped.append({"spans": [span(rng)], "scope": {"name": "vllm.api"}})
    made = {"resourceSpans": [{"resource": {"attributes": attributes(rng, {}, {}, {})}, "scopeSpans": scoped}]}
    style = {"separators": (",", ":")} if rng.random() < 0.7 else {}
    return json.dumps(made, ensure_ascii=rng.random() < 0.9, **style).encode()  # type: ignore[arg-type]


def document(rng: random.Random) -> bytes:
    lines = [line(rng) for _ in range(rng.randint(1, 9))]
    lines += rng.choices([b"", b"  ", b"{}", b"null", b"[]", b'{"resourceSpans":null}'], k=rng.randint(0, 2))
    opening = b"\xef\xbb\xbf" if rng.random() < 0.1 else b""
    first = b'{"resourceSpans":[]}'  # so that the framing is told from the beginning
    return (
        opening + rng.choice([b"\n", b"\r\n"]).join([first, *rng.sample(lines, len(lines))]) + rng.choice([b"", b"\n"])
    )


SEEDS = st.integers(0, 1 << 32)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_any_sound_file_is_read_alike(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    assert_same(tmp_path_factory.mktemp("sound") / "traces.json", document(random.Random(seed)))  # noqa: S311


# Bytes that mean something to JSON, and some that do not.
PIECES = [bytes([byte]) for byte in b'"\\{}[]:,0123456789.eE-+ \n\tnulltrefas\x00\x1f\x80\xff'] + [
    b"null",
    b"\\u",
    b'""',
]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.sampled_from(PIECES)), max_size=4))
@example(seed=1, places=[(1.0, 0, b"\n\n{")])
@example(seed=239, places=[(0.0, 0, b"{")])
@example(seed=2, places=[(0.060546875, 2, b"{")])  # a list that ends and does not begin
def test_any_damage_is_read_alike(
    tmp_path_factory: pytest.TempPathFactory, seed: int, places: list[tuple[float, int, bytes]]
) -> None:
    """Up to four times some bytes are left out and others put in their place, behind the first line."""
    content = document(random.Random(seed))  # noqa: S311
    start = content.index(b"\n") + 1  # the first line tells the framing
    for share, left_out, piece in places:
        at = start + int(share * (len(content) - start))
        content = content[:at] + piece + content[at + left_out :]
    assert_same(tmp_path_factory.mktemp("damaged") / "traces.json", content)


def test_most_lines_of_the_collector_are_taken_by_the_scan(tmp_path: Path) -> None:
    """A scan that left everything to the decoder would pass all other tests."""
    rng = random.Random(3)  # noqa: S311
    spans = [span(rng) | {"name": "llm_core", "status": {}, "droppedEventsCount": 1, "startTimeUnixNano": "5"}]
    spans[0]["attributes"] = [{"key": "gen_ai.request.id", "value": {"stringValue": "cmpl-1"}}]
    stamp = {"key": "ts.monotonic_ns", "value": {"intValue": "226106840574000"}}
    seconds = {"key": "ts.monotonic", "value": {"doubleValue": 1e-05}}
    spans[0]["events"] = [{"timeUnixNano": "7", "name": "journey.QUEUED", "attributes": [stamp, seconds]}]
    whole = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "vllm.scheduler"}, "spans": spans}]}]}
    (tmp_path / "traces.json").write_text(json.dumps(whole) + "\n")
    with patch.object(otlp_scan, "read_json", side_effect=AssertionError("left to the decoder")):
        found = read(tmp_path / "traces.json", scanned=True)
    assert found[0]["spans"].select("name", "start_ns", "request_id").row(0) == ("llm_core", 5, "cmpl-1")
    assert found[0]["journey_events"].select("name", "time_ns", "monotonic_ns", "monotonic_s").row(0) == (
        "journey.QUEUED",
        7,
        226106840574000,
        1e-05,
    )


def test_an_attribute_of_spans_in_an_event_is_none_of_it(tmp_path: Path) -> None:
    """Nor where it follows an unknown one there, and all spans begin with it."""
    identity = {"key": "gen_ai.request.id", "value": {"stringValue": "cmpl-1"}}
    unknown = {"key": "event.type", "value": {"stringValue": "QUEUED"}}
    step = {"key": "scheduler.step", "value": {"intValue": "7"}}
    error = {"key": "error", "value": {"stringValue": "gone"}}  # the last field of a row
    events = [{"name": "journey.QUEUED", "attributes": [error, unknown, identity, step]}] * 2
    spans = [{"name": "llm_core", "attributes": [identity], "events": events}] * 3
    whole = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "vllm.scheduler"}, "spans": spans}]}]}
    found = assert_same(tmp_path / "traces.json", json.dumps(whole, separators=(",", ":")).encode() + b"\n")
    assert found[0]["journey_events"].select("step_id", "error").rows() == [(7, "gone")] * 6


def test_real_traces_are_read_alike(data_pack: Path, tmp_path: Path) -> None:
    places = {"vllm-traces": VLLM_TRACES, "blis-eval": JANUARY, "h100": WITH_SPANS}
    for path in (data_pack / place / name / "traces.json.gz" for place, names in places.items() for name in names):
        plain = tmp_path / "traces.json"
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        usual = {"chunk_bytes": 1 << 19, "batch_rows": 1_000}
        decoded, scanned = read(plain, scanned=False), read(plain, scanned=True, **usual)
        assert all(frame.equals(decoded[0][kind]) for kind, frame in scanned[0].items()), path
        assert scanned[1:] == decoded[1:] == (0, [])


def test_a_line_that_needs_too_much_room_is_left_to_the_decoder(tmp_path: Path) -> None:
    """Rows have a fixed width, which is more than a hundred times an empty span."""
    spans = ",".join(["{}"] * 100)
    line = '{"resourceSpans":[{"scopeSpans":[{"scope":{"name":"vllm.api"},"spans":[' + spans + "]}]}]}"
    with (
        patch.object(otlp_scan, "_MOST_ROWS", 16),
        patch.object(otlp_scan, "read_json", side_effect=otlp_scan.read_json) as decoder,
    ):
        found = assert_same(tmp_path / "traces.json", (line + "\n").encode() * 3)
    assert (len(found[0]["spans"]), decoder.call_count) == (300, 3)
