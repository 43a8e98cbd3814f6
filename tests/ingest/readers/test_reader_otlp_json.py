"""OTLP JSON: steps and request spans in any order, framing and number spelling; damage costs itself only."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp.traces import MAX_OTHER_NAMES, TracesRead, read_traces

COUNTS = [
    "queue.running_depth",
    "queue.waiting_depth",
    "batch.num_prefill_reqs",
    "batch.num_decode_reqs",
    "batch.scheduled_tokens",
    "batch.prefill_tokens",
    "batch.decode_tokens",
    "batch.num_finished",
    "batch.num_preempted",
]


def step_event(step_id: int, **changed: Any) -> dict[str, Any]:
    """Step n starts n ms into the run and takes 70 us inside schedule()."""
    start_ns = 2_261_067_235_753_402 + step_id * 1_000_000
    numbers: dict[str, Any] = {
        "step.id": step_id,
        "step.ts_start_ns": start_ns,
        "step.ts_end_ns": start_ns + 70_000,
        "step.duration_us": 70,
        **{name: index for index, name in enumerate(COUNTS)},
        "kv.usage_gpu_ratio": 0.25,
        "kv.blocks_total_gpu": 1000,
        "kv.blocks_free_gpu": 750,
    }
    attributes = []
    for name, number in {**numbers, **changed}.items():
        spelled = {"doubleValue": number} if isinstance(number, float) else {"intValue": str(number)}
        attributes.append({"key": name, "value": spelled})
    return {
        "timeUnixNano": str(1_770_000_000_000_000_000 + start_ns),
        "name": "step.BATCH_SUMMARY",
        "attributes": attributes,
    }


def request_span(number: int, **changed: Any) -> dict[str, Any]:
    values = {"time_to_first_token": 0.5, "e2e": 2, "time_in_queue": 1e-05, **changed}
    attributes = [{"key": f"gen_ai.latency.{name}", "value": {"doubleValue": value}} for name, value in values.items()]
    attributes += [
        {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "900"}},
        {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": 61}},
        {"key": "gen_ai.request.id", "value": {"stringValue": f"cmpl-{number}"}},
    ]
    return {
        "traceId": f"{number:032x}",
        "spanId": f"{number + 2**60:016x}",
        "name": "llm_request",
        "startTimeUnixNano": str(1_770_000_000_000_000_999 + number * 1_000_000),
        "attributes": attributes,
    }


def traces(scope: str, *spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": scope}, "spans": list(spans)}]}]}


def step_line(*step_ids: int, span_id: str = "a1b2c3d4e5f60718", dropped: int = 0, **changed: Any) -> str:
    span = {"spanId": span_id, "name": "scheduler_steps_1", "events": [step_event(i, **changed) for i in step_ids]}
    if dropped:
        span["droppedEventsCount"] = dropped
    return json.dumps(traces("vllm.scheduler.step", span), separators=(",", ":"))


def request_line(number: int, **changed: Any) -> str:
    return json.dumps(traces("vllm.llm_engine", request_span(number, **changed)))


def read(folder: Path, content: str | bytes) -> tuple[TracesRead, RecordedFile]:
    file = recorded_file(folder, content)
    return read_traces([file]), file


def test_a_step_keeps_every_number_exactly(tmp_path: Path) -> None:
    found, file = read(tmp_path, step_line(7))
    step = found.steps.frame().row(0, named=True)
    assert step["ts_start_ns"] == 2_261_067_235_753_402 + 7_000_000
    assert (step["step_id"], step["duration_us"], step["running_depth"], step["preempted_requests"]) == (7, 70, 0, 8)
    assert (step["kv_usage"], step["kv_blocks_total"], step["kv_blocks_free"]) == (0.25, 1000, 750)
    assert file.tally.records == 1


@pytest.mark.parametrize("scope", ["vllm.llm_engine", "vllm.tracing.otel"])
def test_a_request_span_is_read_of_every_scope_that_vllm_gave_it(tmp_path: Path, scope: str) -> None:
    """The second since tracing is a package (``vllm/tracing/otel.py``); spans of the start-up are counted by name."""
    start_up = {"name": "Load model", "spanId": "a1b2c3d4e5f60718"}
    lines = [json.dumps(traces(scope, request_span(1))), json.dumps(traces("vllm.v1.worker", start_up))]
    found, _file = read(tmp_path, "\n".join(lines))
    assert found.requests is not None
    assert found.requests.frame["request_id"].to_list() == ["cmpl-1"]
    assert found.other_spans == {("vllm.v1.worker", "Load model"): 1}


def test_upstream_request_spans_are_requests_as_the_server_saw_them(tmp_path: Path) -> None:
    found, _file = read(tmp_path, request_line(3))
    assert found.requests is not None
    request = found.requests.frame.row(0, named=True)
    assert (request["ttft_us"], request["e2e_us"], request["queue_us"], request["prefill_us"]) == (
        500_000,
        2_000_000,
        10,
        None,
    )
    assert (request["prompt_tokens"], request["usage_output_tokens"], request["request_id"]) == (900, 61, "cmpl-3")
    assert request["sent_us"] == 1_770_000_000_003_000


@pytest.mark.parametrize(("sequences", "features"), [(1, ()), (4, ("n",))])
@pytest.mark.parametrize("client", [False, True])
def test_one_span_for_several_sequences_is_named(
    client: bool, sequences: int, features: tuple[str, ...], tmp_path: Path
) -> None:
    """Its engine had ``n`` requests in flight, and the span has their sum.  ``client``: latencies are a client's."""
    several = request_span(2)
    several["attributes"].append({"key": "gen_ai.request.n", "value": {"intValue": str(sequences)}})
    lines = [json.dumps(traces("vllm.llm_engine", span)) for span in (request_span(1), several)]
    found, _file = read(tmp_path, "\n".join(lines))
    assert found.requests is not None
    assert found.requests.features == features
    if client:
        info = {"input_tokens": 900, "output_tokens": 61, "output_token_times": [1000.5, 1002.0]}
        seen = {"start_time": 1000.0, "end_time": 1002.0, "request": "{}", "response": "", "info": info, "error": None}
        (tmp_path / "per_request_lifecycle_metrics.json").write_text(json.dumps([seen, seen]))
    with read_recording(tmp_path) as recording:
        setting = recording.engine.get("request_features")
    assert (setting.value if setting else None) == (", ".join(features) or None)


def test_each_sequence_with_a_span_of_its_own_is_a_request(tmp_path: Path) -> None:
    """vLLM 0.32: the children of a request of 3 sequences have its ``external_req_id``, and ``n`` 1 each."""
    sequences = [request_span(1) | {"spanId": f"{i:016x}"} for i in range(1, 4)]
    found, _file = read(tmp_path, json.dumps(traces("vllm.llm_engine", *sequences)))
    assert found.requests is not None
    assert (len(found.requests.frame), found.requests.features) == (3, ())


def test_spans_of_other_scopes_and_names_are_counted_and_not_read(tmp_path: Path) -> None:
    others = [("mine", "llm_request"), ("mine", "llm_request"), ("vllm.scheduler", "llm_request"), ("vllm.api", "x")]
    lines = [json.dumps(traces(scope, {"name": name})) for scope, name in others]
    found, _file = read(tmp_path, "\n".join(lines))
    assert (found.requests, found.journeys) == (None, None)
    assert found.other_spans == {
        ("mine", "llm_request"): 2,
        ("vllm.scheduler", "llm_request"): 1,
        ("vllm.api", "x"): 1,
    }


def test_dropped_events_are_summed_once_a_span(tmp_path: Path) -> None:
    found, _file = read(
        tmp_path, "\n".join([step_line(1, span_id="aa", dropped=72), step_line(2, span_id="bb", dropped=3)])
    )
    assert found.dropped_events == 75


def test_identical_duplicates_are_dropped_and_contradictions_rejected(tmp_path: Path) -> None:
    lines = [step_line(1), step_line(1), step_line(2), step_line(2, **{"queue.running_depth": 99}), step_line(3)]
    found, file = read(tmp_path, "\n".join(lines))
    assert found.steps["step_id"].to_list() == [1, 3]
    assert file.tally.records == 2
    assert [reason for _place, reason in file.tally.rejected] == [
        "the same step again, identical",
        "recorded more than once with other values",
        "recorded more than once with other values",
    ]


def test_duplicate_request_spans_are_counted_with_what_they_are(tmp_path: Path) -> None:
    found, file = read(tmp_path, "\n".join([request_line(1), request_line(1), request_line(1, e2e=3)]))
    assert found.requests is not None
    assert len(found.requests.frame) == 1
    first, second = (reason for _place, reason in file.tally.rejected)
    assert first.endswith(" again") and second.endswith(" again")


@pytest.mark.parametrize(
    "broken",
    [
        step_line(2)[:-40],
        "{}",
        "[]",
        "null",
        '{"resourceSpans": 5}',
        '{"resourceSpans": [{"scopeSpans": [{"scope": {"name": "vllm.scheduler.step"}, "spans": {"a": 1}}]}]}',
        '{"a":' * 50_000,
        '{"resourceSpans":' + "[" * 50_000,
        '{"resourceSpans":[{"scopeSpans":[{"spans":' + "[" * 50_000 + "]" * 50_000 + "}]}]}",
        "\x00\x01\x02",
        step_line(2, **{"step.id": "x"}),
        step_line(2, **{"step.id": 10**30}),
        step_line(2, **{"step.duration_us": 10**19}),
        step_line(2, **{"kv.usage_gpu_ratio": 7.0}),
        step_line(2, **{"kv.usage_gpu_ratio": float("nan")}),
        step_line(2).replace('"name":"step.BATCH_SUMMARY"', '"name":17'),
        step_line(2).replace('"timeUnixNano":"', '"timeUnixNano":"-'),
        request_line(1, e2e=-1),
        request_line(1, e2e="soon"),
        request_line(1).replace("17700000000", "x"),
    ],
)
def test_a_broken_line_is_counted_with_its_number_and_costs_itself_only(tmp_path: Path, broken: str) -> None:
    found, file = read(tmp_path, "\n".join([step_line(1), broken, step_line(3)]))
    assert found.steps["step_id"].to_list() == [1, 3]
    assert found.requests is None
    assert file.tally.rejected_count == 1
    assert file.tally.rejected[0][0].startswith("line 2")


def test_a_step_that_lacks_a_count_keeps_the_others(tmp_path: Path) -> None:
    document = json.loads(step_line(1))
    del document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["events"][0]["attributes"][4]
    found, _file = read(tmp_path, json.dumps(document))
    assert found.steps.frame(["running_depth", "waiting_depth"]).row(0) == (None, 1)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x1f\x8b", b"\x89PNG\r\n\x1a\n" + bytes(500), b"[" * 10_000])
def test_a_file_of_something_else_holds_no_steps(tmp_path: Path, content: bytes) -> None:
    found, _file = read(tmp_path, content)
    assert (found.steps.height, found.requests, found.other_spans) == (0, None, {})


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    ids=st.lists(st.integers(1, 10_000), unique=True, min_size=1, max_size=20),
    seed=st.integers(0, 99),
    per_line=st.integers(1, 5),
)
def test_steps_come_out_by_id_whatever_the_order_of_lines(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], seed: int, per_line: int
) -> None:
    shuffled = random.Random(seed).sample(ids, len(ids))  # noqa: S311 - a test
    lines = [step_line(*shuffled[i : i + per_line]) for i in range(0, len(ids), per_line)]
    found, file = read(tmp_path_factory.mktemp("order"), "\n".join(lines))
    assert found.steps["step_id"].to_list() == sorted(ids)
    assert file.tally.records == len(ids)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 5000), byte=st.integers(0, 255))
def test_one_flipped_byte_never_raises_and_never_touches_another_line(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    first, second = step_line(1).encode(), step_line(2).encode()
    if byte == ord("\n"):
        byte = 0
    damaged = bytearray(second)
    damaged[position % len(damaged)] = byte
    found, _file = read(tmp_path_factory.mktemp("flip"), first + b"\n" + bytes(damaged))
    assert 1 in found.steps["step_id"].to_list() or found.steps.is_empty()  # empty: the flip made it a second step 1


def test_the_recorded_steps_and_spans(data_pack: Path) -> None:
    """NOTES, section 2: 7,441 sampled steps of 34b-general; blis-eval: 280, 197 and 282 request spans."""
    general = data_pack / "h100" / "20260218-150304-codellama-34b-tp2-general" / "traces.json.gz"
    found = read_traces([RecordedFile(general, general.name)])
    assert (found.steps.height, found.steps["kv_blocks_total"].unique().to_list()) == (7441, [26602])
    for run, count in (
        ("jan20-codellama-train-1", 280),
        ("jan20-prefill-llama7b-tp1-1", 197),
        ("jan21-llama7b-train-1", 282),
    ):
        path = data_pack / "blis-eval" / run / "traces.json.gz"
        requests = read_traces([RecordedFile(path, path.name)]).requests
        assert requests is not None
        assert len(requests.frame) == count


def test_names_of_unread_spans_are_told_apart_as_far_as_there_are_not_too_many(tmp_path: Path) -> None:
    """Without numbers they would be the words of as many remarks as there are spans."""
    names = [*(chr(ord("a") + i // 20) + "x" * (i % 20) for i in range(120)), "step 7", "step 8"]
    found, _file = read(tmp_path, "\n".join(json.dumps(traces("mine", {"name": name})) for name in names))
    assert len(found.other_spans) == MAX_OTHER_NAMES + 1
    assert sum(found.other_spans.values()) == len(names)
    (tmp_path / "few").mkdir()
    found, _file = read(tmp_path / "few", "\n".join(json.dumps(traces("mine", {"name": name})) for name in names[-2:]))
    assert found.other_spans == {("mine", "step *"): 2}
