"""OTLP files in every framing of trace-formats 0.3: recognised by content, cut into records, damage located."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from pathlib import Path

import pytest
import zstandard
from builders import recorded_file
from google.protobuf.json_format import Parse
from growth import ONE_PASS, growth
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.files import HEAD_BYTES, RecordedFile
from blis_replay.ingest.readers.otlp.framing import recognises
from blis_replay.ingest.readers.otlp.traces import trace_batches


def message(number: int) -> dict[str, object]:
    """One span of scope ``vllm.api``, named ``s<number>``."""
    span = {"traceId": f"{number:032x}", "spanId": f"{number:016x}", "name": f"s{number}"}
    scope_spans = [{"scope": {"name": "vllm.api"}, "spans": [span]}]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "srv"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scope_spans}]}


def protobuf(document: dict[str, object]) -> bytes:
    """The message of OTLP JSON, whose ids in hex a generic parser takes for base64."""
    text = re.sub(
        r'"((?:trace|span)Id)": "(\w+)"',
        lambda found: f'"{found[1]}": "{b64encode(bytes.fromhex(found[2])).decode()}"',
        json.dumps(document),
    )
    return Parse(text, TracesData()).SerializeToString()


MESSAGES = [message(number) for number in (1, 2, 3)]
LINES = [json.dumps(m, separators=(",", ":")).encode() for m in MESSAGES]


PROTOS = [protobuf(m) for m in MESSAGES]


def framed(*contents: bytes) -> bytes:
    return b"".join(len(content).to_bytes(4, "big") + content for content in contents)


FILES = {
    "lines": b"\n".join(LINES) + b"\n",
    "lines, byte order mark": b"\xef\xbb\xbf" + b"\r\n".join(LINES),
    "one object": json.dumps({"resourceSpans": [m["resourceSpans"][0] for m in MESSAGES]}).encode(),  # type: ignore[index]
    "pretty object": json.dumps({"resourceSpans": [m["resourceSpans"][0] for m in MESSAGES]}, indent=2).encode(),  # type: ignore[index]
    "array": json.dumps(MESSAGES).encode(),
    "pretty array": json.dumps(MESSAGES, indent=1).encode(),
    "JSON frames": framed(*LINES),
    "zstd JSON frames": framed(*map(zstandard.compress, LINES)),
    "protobuf frames": framed(*PROTOS),
    "zstd protobuf frames": framed(*map(zstandard.compress, PROTOS)),
    # As recorded by a former collector of ours: a CRC-32 stands behind each message, as its last field (2^29 - 1).
    "protobuf frames with checksums": framed(*(proto + b"\xfd\xff\xff\xff\x0f" + b"\0" * 4 for proto in PROTOS)),
    "one protobuf message": b"".join(PROTOS),  # messages one after the other are one message
}
COMPRESSIONS = {"": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}


def names_in(folder: Path, content: bytes) -> tuple[list[str], RecordedFile]:
    file = recorded_file(folder, content)
    return [name for batch in trace_batches(file) for name in batch.spans["name"]], file


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("framing", FILES)
def test_every_framing_holds_the_same_spans(tmp_path: Path, framing: str, compression: str) -> None:
    names, file = names_in(tmp_path, COMPRESSIONS[compression](FILES[framing]))
    assert names == ["s1", "s2", "s3"]
    assert file.tally.rejected_count == 0
    assert recognises(file.head(HEAD_BYTES))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"{}",
        b'{"resourceMetrics":[]}',
        b'[{"start_time": 5.0}]',
        b"request_id,input_tokens\n",
        b"model: resourceSpans\n",
        b'{"request": "what is \\"resourceSpans\\": 3?"}',
        b"\n \n\n text that starts with line feeds, which are a field's tag in protobuf\n",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x10\x28\xb5\x2f\xfd" + bytes(12),
        b"\x28\xb5\x2f\xfd",
        zstandard.compress(b"text"),
        framed(zstandard.compress(b"text")),
    ],
)
def test_other_files_are_not_taken_for_traces(content: bytes) -> None:
    assert not recognises(content)


def test_a_trace_is_recognised_behind_a_broken_first_line() -> None:
    assert recognises(LINES[0][40:] + b"\n" + LINES[1])


@settings(max_examples=200, deadline=None)
@given(head=st.binary(max_size=300))
@example(head=b"\x0a" + b"\xff" * 20)
def test_recognising_never_raises(head: bytes) -> None:
    recognises(head)
    recognises(b"\x00\x00\x00\xff\x28\xb5\x2f\xfd" + head)


# Byte counts of the cut: inside the last record's content, and inside its length.
@pytest.mark.parametrize("framing", [name for name in FILES if name not in ("one object", "pretty object")])
def test_the_last_record_of_a_cut_file_is_rejected_with_its_place_and_the_rest_used(
    tmp_path: Path, framing: str
) -> None:
    names, file = names_in(tmp_path, FILES[framing][:-20])
    assert names == ["s1", "s2"]
    assert file.tally.rejected_count >= 1
    place = file.tally.rejected[0][0]
    assert place.split()[0] in ("line", "record", "frame", "resource")
    assert place.endswith(" 3")


@pytest.mark.parametrize("left", [1, 3, 4])
def test_a_length_without_its_frame_is_rejected(tmp_path: Path, left: int) -> None:
    names, file = names_in(tmp_path, framed(*LINES) + (50).to_bytes(4, "big")[:left])
    assert names == ["s1", "s2", "s3"]
    assert file.tally.rejected == [("frame 4", "the file ends inside this frame")]


def test_a_broken_frame_costs_itself_only(tmp_path: Path) -> None:
    frames = [zstandard.compress(content) for content in LINES]
    frames[1] = frames[1][:20] + b"\xff" * (len(frames[1]) - 20)
    names, file = names_in(tmp_path, framed(*frames))
    assert names == ["s1", "s3"]
    assert file.tally.rejected[0][0] == "frame 2"
    names, file = names_in(tmp_path, framed(LINES[0], b"\x0a\xff\xff", LINES[2]))
    assert names == ["s1", "s3"]
    assert file.tally.rejected[0][0] == "frame 2"


def test_a_frame_that_expands_without_end_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blis_replay.ingest.readers.files.FREE_EXPANSION_BYTES", 1 << 20)
    names, file = names_in(tmp_path, framed(LINES[0], zstandard.compress(bytes(16 << 20)), LINES[2]))
    assert names == ["s1", "s3"]
    assert file.tally.rejected == [("frame 2", "its zstd content is more than 1048576 bytes")]


def test_a_length_beyond_every_bound_ends_the_reading_with_its_place(tmp_path: Path) -> None:
    names, file = names_in(tmp_path, framed(LINES[0]) + b"\xff\xff\xff\xff" + framed(*LINES))
    assert names == ["s1"]
    assert file.tally.rejected[0][0] == "frame 2"
    assert len(file.source("x").sha256) == 64


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    framing=st.sampled_from(sorted(FILES)),
    compression=st.sampled_from(sorted(COMPRESSIONS)),
    edits=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 2000),
)
def test_mutated_files_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, framing: str, compression: str, edits: list[tuple[int, int]], cut: int
) -> None:
    content = bytearray(COMPRESSIONS[compression](FILES[framing]))
    for position, byte in edits:
        content[position % len(content)] = byte
    try:
        names_in(tmp_path_factory.mktemp("mutated"), bytes(content[: max(1, len(content) - cut)]))
    except RecordingError as error:
        assert "\n" not in str(error)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=400))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    for whole in (content, framed(content), framed(LINES[0], content), LINES[0] + content):
        try:
            names_in(folder, whole)
        except RecordingError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("blank", [b"\n", b" \n", b"{\n", b"[\n,"])
def test_blank_lines_are_looked_through_in_one_pass(blank: bytes) -> None:
    """A pattern that began at each of them took 6 s for the head of a file of line ends."""
    assert recognises(blank * 1000 + b"\n" + LINES[0])

    def look(size: int) -> None:
        assert not recognises(blank * (size // len(blank)))

    assert growth(look, HEAD_BYTES // 4) < ONE_PASS


def test_a_record_in_the_middle_of_a_line_is_none() -> None:
    assert not recognises(b"INFO " + LINES[0])
    assert recognises(b"INFO\n , " + LINES[0])
