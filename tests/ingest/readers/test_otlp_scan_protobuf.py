"""The compiled scan of OTLP in protobuf makes of any bytes what the decoder makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData
from otlp_trees import documents
from pack import VLLM_TRACES
from test_otlp_scan import Read, assert_same, read

from blis_replay.fixtures.writers_otlp import as_protobuf
from blis_replay.ingest.readers.otlp import scan as otlp_scan
from blis_replay.ingest.readers.otlp import scan as scan_columns
from blis_replay.ingest.scan import otlp_columns

SEEDS = st.integers(0, 1 << 32)
# Mostly as vLLM has them; some that no writer should.
INTEGERS = [1771430000140574000, 0, 17, 127, 128, (1 << 63) - 1]
DOUBLES = [0.5, 0.0, 1e-05, 226106.840574, 1e300, -0.25]
TEXTS = ["llm_request", "DECODE", "", "12 letters..", "13 letters...", "a\tb\0"]
ODD: list[Any] = [-5, 3.0, -0.0, float("nan"), float("-inf"), "\u00e9", True, b"bytes", ["list"], None]


def set_value(attributes: Any, key: str, value: Any) -> None:
    into = attributes.add(key=key).value
    if isinstance(value, list):
        into.array_value.values.add(string_value=value[0])
    elif value is not None:
        kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value", bytes: "bytes_value"}
        setattr(into, kinds[type(value)], value)


def fill(rng: random.Random, attributes: Any, integers: Any, floats: Any, strings: Any) -> None:
    usual = dict.fromkeys(integers, INTEGERS) | dict.fromkeys(floats, DOUBLES) | dict.fromkeys(strings, TEXTS)
    usual |= {"event.type": TEXTS, "gen_ai.request.n": INTEGERS, "gen_ai.request.top_p": DOUBLES}
    usual |= {"gen_ai.request.id": TEXTS, "step.id": INTEGERS}  # the other's, of spans and of events
    for key in rng.choices(list(usual), k=rng.randint(0, 8)):
        set_value(attributes, key, rng.choice(usual[key] if rng.random() < 0.98 else ODD))


def fill_span(rng: random.Random, span: Span) -> None:
    span.name = rng.choice(TEXTS)
    span.trace_id, span.span_id = rng.randbytes(16), rng.choice([b"", rng.randbytes(8)])
    span.parent_span_id = rng.choice([b"", rng.randbytes(8)])
    span.kind, span.flags, span.dropped_events_count = 2, 256, rng.choice([0, 3, (1 << 32) - 1])
    span.start_time_unix_nano, span.end_time_unix_nano = rng.choice(INTEGERS), rng.choice(INTEGERS)
    fill(rng, span.attributes, otlp_columns.SPAN_INTEGERS, otlp_columns.SPAN_FLOATS, otlp_columns.SPAN_STRINGS)
    if rng.random() < 0.3:
        span.status.code, span.status.message = rng.choice([0, 1, 2]), rng.choice(TEXTS)
    for _ in range(rng.randint(0, 5)):
        event = span.events.add(name=rng.choice([*otlp_columns.EVENTS, "exception"]))
        event.time_unix_nano = rng.choice(INTEGERS)
        fill(rng, event.attributes, otlp_columns.EVENT_INTEGERS, otlp_columns.EVENT_FLOATS, otlp_columns.EVENT_STRINGS)
    unusual = rng.random()
    if unusual < 0.02:
        span.links.add(trace_id=b"1")
    elif unusual < 0.04:
        span.start_time_unix_nano = (1 << 64) - 1
    elif unusual < 0.06:
        span.trace_state = rng.choice(["a=b", "\u00e9"])


def message(rng: random.Random) -> bytes:
    data = TracesData()
    for _ in range(rng.randint(1, 2)):
        resource = data.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = "vllm \u00e9"
        for _ in range(rng.randint(0, 3)):
            scoped = resource.scope_spans.add()
            if rng.random() < 0.95:
                scoped.scope.name = rng.choice([*otlp_columns.SCOPES, "other", ""])
                scoped.scope.version = "1"
            for _ in range(rng.randint(0, 4)):
                fill_span(rng, scoped.spans.add())
    content = data.SerializeToString()
    # Serialised messages one behind the other are one message, in which fields can be there twice.
    return content if rng.random() < 0.95 else content + content


def framed(messages: Iterable[bytes]) -> bytes:
    """Behind a first message that tells the framing."""
    first = TracesData()
    first.resource_spans.add().scope_spans.add().spans.add(trace_id=bytes(16), name="first")
    return b"".join(len(content).to_bytes(4, "big") + content for content in (first.SerializeToString(), *messages))


def assert_alike(folder: Path, messages: Iterable[bytes]) -> Read:
    return assert_same(folder / "traces.pb", framed(messages), "frame")


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_any_sound_file_is_read_alike(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    assert_alike(tmp_path_factory.mktemp("sound"), [message(rng) for _ in range(rng.randint(1, 6))])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=3)), max_size=4))
@example(seed=1, edits=[(1.0, 1, b"")])
def test_any_damage_is_read_alike(
    tmp_path_factory: pytest.TempPathFactory, seed: int, edits: list[tuple[float, int, bytes]]
) -> None:
    rng = random.Random(seed)  # noqa: S311
    messages = [message(rng) for _ in range(3)]
    for share, left_out, piece in edits:
        damaged = messages[rng.randrange(3)]
        at = int(share * len(damaged))
        messages[messages.index(damaged)] = damaged[:at] + piece + damaged[at + left_out :]
    assert_alike(tmp_path_factory.mktemp("damaged"), messages)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(documents, min_size=1, max_size=3))
def test_any_numbers_and_texts_are_read_alike(
    tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, Any]]
) -> None:
    assert_alike(tmp_path_factory.mktemp("trees"), map(as_protobuf, found))


def test_usual_messages_are_taken_by_the_scan(tmp_path: Path) -> None:
    """A scan that left everything to the decoder would pass all other tests."""
    data = TracesData()
    scoped = data.resource_spans.add().scope_spans.add()
    scoped.scope.name = "vllm.scheduler"
    span = scoped.spans.add(name="llm_core", trace_id=bytes(range(16)), span_id=bytes(8), start_time_unix_nano=5)
    set_value(span.attributes, "gen_ai.request.id", "cmpl-1")
    event = span.events.add(name="journey.QUEUED", time_unix_nano=7)
    set_value(event.attributes, "ts.monotonic_ns", 226106840574000)
    set_value(event.attributes, "ts.monotonic", 1e-05)
    (tmp_path / "traces.pb").write_bytes(framed([data.SerializeToString()]))
    with patch.object(otlp_scan, "read_record", side_effect=AssertionError("left to the decoder")):
        found = read(tmp_path / "traces.pb", scanned=True, unit="frame")
    assert found[0]["spans"].select("record", "span", "name", "trace_id", "start_ns", "request_id").rows() == [
        (1, 1, "first", None, None, None),  # of a scope that is not read
        (2, 1, "llm_core", "000102030405060708090a0b0c0d0e0f", 5, "cmpl-1"),
    ]
    assert found[0]["journey_events"].select("name", "time_ns", "monotonic_ns", "monotonic_s").row(0) == (
        "journey.QUEUED",
        7,
        226106840574000,
        1e-05,
    )


def test_real_traces_are_read_alike_and_all_by_the_scan(data_pack: Path, tmp_path: Path) -> None:
    for path in (data_pack / "vllm-traces" / name / "traces.pb" for name in VLLM_TRACES):
        decoded = read(path, scanned=False, unit="frame", batch_rows=1_000)
        with patch.object(otlp_scan, "read_record", side_effect=AssertionError("left to the decoder")):
            scanned = read(path, scanned=True, unit="frame", batch_rows=1_000)
        assert all(frame.equals(decoded[0][kind]) for kind, frame in scanned[0].items()), path
        assert scanned[1:] == decoded[1:] == (0, [])


def test_a_bare_message_is_read_alike_resource_by_resource(tmp_path: Path) -> None:
    rng = random.Random(5)  # noqa: S311
    content = b"".join(message(rng) for _ in range(20))
    found = assert_same(tmp_path / "traces.pb", framed([])[4:] + content, "resource")
    resources = TracesData.FromString(content).resource_spans
    with_spans = {2 + i for i, resource in enumerate(resources) if any(scoped.spans for scoped in resource.scope_spans)}
    assert set(found[0]["spans"]["record"]) == {1} | with_spans


def test_a_message_that_needs_too_much_room_is_left_to_the_decoder(tmp_path: Path) -> None:
    data = TracesData()
    scoped = data.resource_spans.add().scope_spans.add()
    for _ in range(100):
        scoped.spans.add(name="x")
    with (
        patch.object(scan_columns, "_MOST_ROWS", 16),
        patch.object(otlp_scan, "read_record", side_effect=otlp_scan.read_record) as decoder,
    ):
        found = assert_alike(tmp_path, [data.SerializeToString()] * 3)
    assert (len(found[0]["spans"]), decoder.call_count) == (301, 3)
