"""inference-perf's per-request records: generations, order, damage, bounded memory."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st
from pack import INFERENCE_PERF, inference_perf_records

from blis_replay.ingest.readers.clients.inference_perf import read_requests
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead, in_send_order
from blis_replay.ingest.recording import TokenEvents
from blis_replay.ingest.stream import stamps_of


def record(i: int = 0, **changed: Any) -> dict[str, Any]:
    """Request i is sent at 1000 + i s; its three tokens come 50, 70 and 90 ms later, each stamped twice."""
    start = 1000.0 + i
    stamps = [start + t for t in (0.05, 0.05003, 0.07, 0.07003, 0.09, 0.09002, 0.0901, 0.0901)]
    body = {"model": "org/m-7b", "prompt": "secret", "max_tokens": 3, "ignore_eos": True, "stream": True}
    made = {
        "start_time": start,
        "end_time": start + 0.095,
        "request": json.dumps(body),
        "response": "",
        "info": {"input_tokens": 12, "output_tokens": 4, "output_token_times": stamps},
        "error": None,
    }
    return {**made, **changed}


def read(folder: Path, content: object) -> tuple[RequestsRead, RecordedFile]:
    file = recorded_file(folder, content)
    return read_requests(file, folder / "stamps"), file


def events_of(found: RequestsRead) -> pl.DataFrame:
    assert found.events is not None
    _ordered, order, zero_us = in_send_order(found.rows)
    raw = found.events
    return stamps_of(TokenEvents(raw.path, raw.offsets[order], raw.counts[order], zero_us), np.arange(len(order)))


def test_a_record_of_the_paired_generation(tmp_path: Path) -> None:
    """The example of trace-formats, section 4.4: TTFT 50 ms, E2E 95 ms, eight stamps for three tokens."""
    found, _file = read(tmp_path, [record()])
    request = found.frame.row(0, named=True)
    assert (request["ttft_us"], request["e2e_us"], request["prompt_tokens"]) == (50_000, 95_000, 12)
    assert (request["output_tokens_reported"], request["max_tokens"], request["ignore_eos"]) == (4, 3, True)
    assert (request["status"], request["usage_output_tokens"], found.model) == ("ok", None, "org/m-7b")
    assert events_of(found)["time_us"].to_list() == [
        50_000,
        50_030,
        70_000,
        70_030,
        90_000,
        90_020,
        90_100,
        90_100,
    ]


@pytest.mark.parametrize("generation", ["response_info", "response_metrics"])
def test_later_generations_give_chunk_times_and_server_usage(tmp_path: Path, generation: str) -> None:
    usage = {"prompt_tokens": 13, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    response = {
        "output_tokens": 4,
        "chunk_times": [1000.05, 1000.07, 1000.09],
        "output_token_times": [1000.05, 1000.05, 1000.07, 1000.09],
        "server_usage": usage,
    }
    found, _file = read(tmp_path, [record(info={"input_tokens": 12, generation: response})])
    request = found.frame.row(0, named=True)
    assert (request["usage_output_tokens"], request["prompt_tokens"], request["cached_prompt_tokens"]) == (3, 13, 8)
    assert events_of(found)["time_us"].to_list() == [50_000, 70_000, 90_000]


def test_a_request_that_was_not_streamed_has_no_ttft(tmp_path: Path) -> None:
    found, _file = read(tmp_path, [record(info={"input_tokens": 12, "output_tokens": 3, "output_token_times": []})])
    assert found.frame["ttft_us"].to_list() == [None]
    assert found.events is None


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        ({"error_type": "TimeoutError", "error_msg": ""}, "timeout", "TimeoutError"),
        ({"error_type": "HTTP Error 500", "error_msg": "made"}, "error", "HTTP Error 500: made"),
        ("plain text", "error", "plain text"),
        (17, "error", None),
    ],
)
def test_a_failed_request_keeps_how_long_the_client_held_on(
    tmp_path: Path, error: object, status: str, words: str | None
) -> None:
    found, _file = read(tmp_path, [record(error=error)])
    request = found.frame.row(0, named=True)
    assert (request["status"], request["error"], request["ttft_us"], request["e2e_us"]) == (status, words, None, 95_000)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (record(9, end_time=1000.0), "it ends 9000000 us before"),
        (record(9, start_time="soon"), "Expected `float`"),
        (record(9, start_time=1e300), "not a usable time"),
        (record(9, info={"output_token_times": [999.0]}), "before the start"),
        (record(9, info={"output_token_times": [1e300]}), "not a usable time"),
        # Warnings are errors here: numpy does not complain on the user's terminal of what overflows in us.
        (record(9, info={"output_token_times": [1e308, -1e308]}), "a stream stamp that is not a usable time"),
        (record(9, info={"output_token_times": ["x"]}), "Expected `float`"),
        (record(9, info=None), "Expected `object`"),
        (record(9, start_time=float("nan")), "JSON is malformed"),
        (record(9, start_time=float("inf")), "JSON is malformed"),
        ([1, 2], "Expected `object`"),
        ({}, "missing required field"),
        (record(0), "identical"),
    ],
)
def test_a_broken_record_is_counted_with_its_ordinal_and_costs_itself_only(
    tmp_path: Path, broken: object, reason: str
) -> None:
    found, file = read(tmp_path, [record(0), broken, record(1)])
    assert found.frame["sent_us"].to_list() == [1_000_000_000, 1_001_000_000]
    assert [place for place, _why in file.tally.rejected] == ["record 2"]
    assert reason in file.tally.rejected[0][1]


@pytest.mark.parametrize("body", ["no json", "[]", '{"max_tokens": "many", "ignore_eos": 1}', "[" * 100_000, None])
def test_a_body_that_cannot_be_read_leaves_its_fields_null(tmp_path: Path, body: str | None) -> None:
    found, _file = read(tmp_path, [record(request=body)])
    assert found.frame.select("max_tokens", "ignore_eos", "e2e_us").row(0) == (None, None, 95_000)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\x00\xff" * 99, b"[" * 50_000, b'[{"a":' * 20_000])
def test_a_file_without_a_record_has_no_requests_and_says_why(tmp_path: Path, content: bytes) -> None:
    found, file = read(tmp_path, content)
    assert len(found.frame) == 0
    assert file.tally.rejected_count >= 1


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 3000))
def test_a_cut_file_keeps_the_records_before_the_cut(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    whole = json.dumps([record(i) for i in range(6)]).encode()
    found, file = read(tmp_path_factory.mktemp("cut"), whole[: -min(cut, len(whole))])
    assert found.frame["sent_us"].to_list() == [1_000_000_000 + i * 1_000_000 for i in range(len(found.frame))]
    assert file.tally.rejected_count == 1


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 99))
def test_events_follow_their_request_into_send_order(
    tmp_path_factory: pytest.TempPathFactory, n: int, seed: int
) -> None:
    """Request i has i + 1 events, the first one 10 + i ms after its send."""
    folder = tmp_path_factory.mktemp("order")
    records = [
        record(i, end_time=1100.0 + i, info={"output_token_times": [1000.010 + i + i / 1000] + [1001.0 + i] * i})
        for i in range(n)
    ]
    random.Random(seed).shuffle(records)  # noqa: S311 - a test
    found, _file = read(folder, records)
    events = events_of(found)
    firsts = events.filter(pl.col("event_index") == 0)
    assert firsts["request_index"].to_list() == list(range(n))
    assert firsts["time_us"].to_list() == [i * 1_000_000 + 10_000 + i * 1000 for i in range(n)]
    assert events.group_by("request_index").len().sort("request_index")["len"].to_list() == [i + 1 for i in range(n)]


@pytest.mark.parametrize("version", INFERENCE_PERF)
def test_real_records_agree_with_what_the_server_saw(data_pack: Path, tmp_path: Path, version: str) -> None:
    """The mock server's own clock (``truth.jsonl``) is the client's: it receives after the send and answers before
    the first stamp, both within milliseconds; lengths are exact."""
    for path in inference_perf_records(data_pack, version):
        file = RecordedFile(path, path.name)
        found = read_requests(file, tmp_path / "stamps")
        truth = [
            json.loads(line) for line in gzip.decompress((path.parents[1] / "truth.jsonl.gz").read_bytes()).splitlines()
        ]
        assert (len(found.frame), file.tally.rejected_count) == (len(truth), 0)
        assert (found.frame["status"] != "ok").sum() == sum(entry["fault"] is not None for entry in truth)
        frame = found.frame.sort("sent_us")
        received = sorted(entry["recv_mono_ns"] // 1000 for entry in truth)
        assert np.median(np.array(received) - frame["sent_us"].to_numpy()) < 20_000
        assert sorted(frame["max_tokens"].to_list()) == sorted(entry["max_tokens"] for entry in truth)
        usage = frame.filter(pl.col("usage_output_tokens").is_not_null())
        assert (usage["usage_output_tokens"] == usage["max_tokens"]).all()
        assert (len(usage) > 0) == (version >= "0.5")


def test_the_model_is_that_of_the_first_record_that_names_one(tmp_path: Path) -> None:
    bodies = [None, json.dumps({"model": "a"}), json.dumps({"model": "b"})]
    found, _ = read(tmp_path, [record(i, request=body) for i, body in enumerate(bodies)])
    assert found.model == "a"


@pytest.mark.parametrize(
    ("asked", "features"),
    [
        ({"n": 1, "prompt_logprobs": None, "response_format": {"type": "text"}}, ()),
        ({"n": 4, "cache_salt": "a"}, ("n",)),  # a salt sets prompts apart, and no more
        ({"prompt_logprobs": 0, "response_format": {"type": "json_object"}}, ("prompt_logprobs", "structured_outputs")),
        ({"structured_outputs": {"regex": "a+"}}, ("structured_outputs",)),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, ("multimodal",)),
        ({"messages": [{"content": "a"}, {"content": [{"audio_url": {"url": "a"}}]}]}, ("multimodal",)),
        ({"messages": [{"content": [{"type": "text", "text": '"image_url"'}]}, 1]}, ()),
        ({"messages": [{"content": '"image_url"'}, {"content": [{"type": "text", "text": "video"}]}]}, ()),
    ],
)
def test_what_a_body_asks_for_beyond_its_tokens_is_named(
    asked: dict[str, Any], features: tuple[str, ...], tmp_path: Path
) -> None:
    found, _ = read(tmp_path, [record(), record(1, request=json.dumps({"prompt": "a"} | asked))])
    assert found.features == features
