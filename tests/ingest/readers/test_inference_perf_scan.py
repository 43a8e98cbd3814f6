"""The compiled scan of per-request records makes of any bytes what the decoder makes of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blis_replay.ingest.readers import files
from blis_replay.ingest.readers.clients.inference_perf_requests import read_requests
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests_frame import RawPrefix, RawPrompts
from blis_replay.ingest.scan import window

Read = tuple[pl.DataFrame, list[list[int]], RawPrompts | None, str | None, int, list[tuple[str, str]]]


def read(path: Path, *, scanned: bool, window_bytes: int = 1 << 12) -> Read:
    """Requests, the stamps of each, their prompts, their model, and what was rejected."""
    file = RecordedFile(path, path.name)
    with (
        patch.object(files, "LARGE_BYTES", 0 if scanned else 1 << 60),
        patch.object(files, "CHUNK_BYTES", window_bytes // 2),
        patch.object(window, "_USUAL_BYTES", window_bytes),
    ):
        found = read_requests(file, path.with_name("stamps"))
    stamps: list[list[int]] = [[]] * len(found.frame)
    if found.events is not None:
        flat = np.fromfile(found.events.path, np.int64)
        pairs = zip(found.events.offsets, found.events.counts, strict=True)
        stamps = [flat[at : at + count].tolist() for at, count in pairs]
    # Only the first are kept in words, and the scan finds duplicates last.
    rejected = sorted(file.tally.rejected) if file.tally.rejected_count < files.KEPT_REJECTIONS else []
    assert not isinstance(found.prefix, RawPrefix)
    return found.frame, stamps, found.prefix, found.model, file.tally.rejected_count, rejected


def assert_same_prompts(scanned: RawPrompts | None, decoded: RawPrompts | None) -> None:
    if scanned is None or decoded is None:
        assert scanned is decoded
        return
    assert scanned.source == decoded.source
    for name in ("prompt", "parent", "shared_tokens", "tokens"):
        assert getattr(scanned, name).tolist() == getattr(decoded, name).tolist(), name


def assert_same(path: Path, content: bytes) -> Read:
    path.write_bytes(content)
    decoded, scanned = read(path, scanned=False), read(path, scanned=True)
    assert scanned[0].equals(decoded[0])
    assert scanned[0].schema == decoded[0].schema
    assert_same_prompts(scanned[2], decoded[2])
    assert (scanned[1], *scanned[3:]) == (decoded[1], *decoded[3:])
    return scanned


def record(rng: random.Random, generation: str) -> dict[str, Any]:
    """A record of a few tokens, of a generation of the tool, with keys in any order."""
    start = round(rng.uniform(1, 1e7), rng.randint(0, 9))
    stamps = [start + 0.05 + i * rng.uniform(0.001, 0.02) for i in range(rng.randint(0, 6))]
    stamps = sorted(round(stamp, rng.choice([6, 9, 17])) for stamp in stamps)
    content = 'a "quote" \\ é \n 🙂 ' * rng.randint(0, 9)
    prompt: dict[str, Any] = rng.choice([{"prompt": content}, {"messages": [{"role": "user", "content": content}]}, {}])
    body = {"model": rng.choice(["org/m", "org/other"]), "ignore_eos": rng.random() < 0.5, **prompt}
    body |= rng.choice([{}, {}, {"tools": [{"type": "function"}]}, {"cache_salt": "s"}, {"prompt": None}])
    body |= {rng.choice(["max_tokens", "max_completion_tokens"]): rng.choice([3, 0, None, 300])}
    usage = {
        "prompt_tokens": 13,
        "completion_tokens": 3,
        "prompt_tokens_details": rng.choice([None, {"cached_tokens": 8}]),
    }
    response = {
        "output_tokens": rng.choice([4, None]),
        "chunk_times": stamps if rng.random() < 0.5 else None,
        "output_token_times": stamps * 2,
        "server_usage": rng.choice([None, usage]),
        "response_chunks": ['{"id": "x", "text": "é\\u00e9"}'] * len(stamps),
    }
    info: dict[str, Any] = {
        "input_tokens": rng.choice([12, 0, None]),
        "output_tokens": 5,
        "extra_info": {"a": [1, {}, []]},
    }
    info |= {"output_token_times": stamps} if generation == "" else {generation: response}
    error = rng.choice([None, None, None, {"error_type": "TimeoutError", "error_msg": "é"}, "words", ""])
    made = {
        "start_time": start,
        "end_time": start + 0.5,
        "request": shuffled(rng, body) if rng.random() < 0.9 else rng.choice([None, "", "no json", "[]"]),
        "response": 'data: {"text": " \\"ris\\""}\n\n',
        "info": json.loads(shuffled(rng, info)),
        "error": error,
    }
    return dict(json.loads(shuffled(rng, made)))


def shuffled(rng: random.Random, made: dict[str, Any]) -> str:
    """As JSON, with keys in any order."""
    return json.dumps(dict(rng.sample(list(made.items()), len(made))), ensure_ascii=rng.random() < 0.8)


def document(rng: random.Random) -> bytes:
    """An array of records, or objects one after the other, in any of a writer's styles."""
    records = [record(rng, rng.choice(["", "response_info", "response_metrics"])) for _ in range(rng.randint(1, 8))]
    records += rng.choices(records, k=rng.randint(0, 2))
    indent, ascii_only = rng.choice([None, 0, 2]), rng.random() < 0.8
    if rng.random() < 0.8:
        return json.dumps(records, indent=indent, ensure_ascii=ascii_only).encode()
    return "\n".join(json.dumps(made, indent=indent, ensure_ascii=ascii_only) for made in records).encode()


SEEDS = st.integers(0, 1 << 32)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_any_sound_file_is_read_alike(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    found = assert_same(tmp_path_factory.mktemp("sound") / "r.json", document(random.Random(seed)))  # noqa: S311
    assert len(found[0]) > 0


# Bytes that mean something to JSON, and some that do not.
PIECES = [bytes([byte]) for byte in b'"\\{}[]:,0123456789.eE-+ \n\tnulltrefas\x00\x1f\x80\xff'] + [
    b"null",
    b"\\u",
    b'""',
]


@settings(max_examples=400, deadline=None)
@given(seed=SEEDS, places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.sampled_from(PIECES)), max_size=4))
@example(seed=1, places=[(0.0, 1, b"")])
def test_any_damage_is_read_alike(
    tmp_path_factory: pytest.TempPathFactory, seed: int, places: list[tuple[float, int, bytes]]
) -> None:
    """Up to four times some bytes are left out and others put in their place."""
    content = document(random.Random(seed))  # noqa: S311
    for share, left_out, piece in places:
        at = int(share * len(content))
        content = content[:at] + piece + content[at + left_out :]
    assert_same(tmp_path_factory.mktemp("damaged") / "r.json", content)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.tuples(st.integers(0, 10**18), st.integers(0, 18), st.booleans()), min_size=1, max_size=20))
@example(texts=[(2**53 + 1, 9, False), (2**53 - 1, 9, False), (90071992547409935, 1, False), (10**18 - 1, 9, False)])
def test_times_are_those_of_float(tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[int, int, bool]]) -> None:
    """A stamp in us is its text as ``float`` reads it, times 1e6, rounded half to even."""
    numbers = []
    for digits, decimals, trimmed in texts:
        text = f"{digits // 10**decimals}.{digits % 10**decimals:0{decimals}d}" if decimals else str(digits)
        numbers.append(text.rstrip("0") + "0" if trimmed and decimals else text)
    usable = [text for text in numbers if float(text) < 2.3e12]
    head = b'[{"start_time": 0, "end_time": 2300000000000.0, "info": {"output_token_times": ['
    found = assert_same(tmp_path_factory.mktemp("times") / "r.json", head + ",".join(usable).encode() + b"]}}]")
    assert found[1] == [[round(float(text) * 1e6) for text in usable]]


def test_a_record_larger_than_the_window_is_read_alike(tmp_path: Path) -> None:
    rng = random.Random(5)  # noqa: S311
    large = {
        **record(rng, ""),
        "response": "x" * 100_000,
        "info": {"output_token_times": [2e7 + i for i in range(9_000)]},
    }
    found = assert_same(tmp_path / "r.json", json.dumps([record(rng, ""), large, record(rng, "")]).encode())
    assert len(found[0]) == 3


def test_the_model_is_that_of_the_first_record_that_names_one(tmp_path: Path) -> None:
    """Of two records one has an escape in a key; the scan leaves it to the decoder, which reads it before the other."""
    first, second = ({"start_time": 1, "end_time": 2, "info": {}, "request": json.dumps({"model": m})} for m in "ab")
    for records in ([{**first, 'a"': 0}, second], [first, {**second, 'a"': 0}]):
        assert assert_same(tmp_path / "r.json", json.dumps(records).encode())[3] == "a"


@pytest.mark.realdata
def test_real_records_are_read_alike(data_pack: Path, tmp_path: Path) -> None:
    paths = sorted((data_pack / "clients").glob("inference-perf-*/*/reports/per_request_lifecycle_metrics.json*"))
    assert len(paths) >= 20
    for path in paths:
        link = tmp_path / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        decoded, scanned = read(link, scanned=False), read(link, scanned=True)
        assert scanned[0].equals(decoded[0]), path
        assert_same_prompts(scanned[2], decoded[2])
        assert (scanned[1], *scanned[3:]) == (decoded[1], *decoded[3:]), path
