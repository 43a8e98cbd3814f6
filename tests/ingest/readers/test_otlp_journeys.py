"""Journeys from hand-made spans: joined by parent, what is lost is said, restarts of the server are told apart.

The monotonic clock shows 1,000 s when the epoch is 1,770,000,000 s; times below are ms after that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_trees import documents

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp.journeys import on_zero
from blis_replay.ingest.readers.otlp.traces import TracesRead, read_traces
from blis_replay.ingest.readers.pairing import with_request_indices
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.scratch import Scratch
from blis_replay_labs.planted.writers_otlp import Values, attributes

EPOCH_NS, MONOTONIC_NS = 1_770_000_000_000_000_000, 1_000_000_000_000


def event(name: str, at_ms: float, **values: int | float | str) -> dict[str, Any]:
    at_ns = round(at_ms * 1e6)
    clock: Values = {"ts.monotonic_ns": MONOTONIC_NS + at_ns}
    if name.startswith("api."):
        clock = {"event.ts.monotonic": (MONOTONIC_NS + at_ns) / 1e9}
    named = {key.replace("__", "."): value for key, value in values.items()}
    return {"name": name, "timeUnixNano": str(EPOCH_NS + at_ns), "attributes": attributes(clock | named)}


def api_span(number: int, *events: dict[str, Any], start_ms: float = 0) -> tuple[str, dict[str, Any]]:
    span = {
        "traceId": f"{number:032x}",
        "spanId": f"{number + 2**40:016x}",
        "name": "llm_request",
        "startTimeUnixNano": str(EPOCH_NS + round(start_ms * 1e6)),
        "attributes": attributes({"gen_ai.request.id": f"cmpl-load-{number}", "gen_ai.usage.prompt_tokens": 100}),
        "events": list(events),
    }
    return "vllm.api", span


def core_span(
    number: int, *events: dict[str, Any], dropped: int = 0, parent: int | None = None
) -> tuple[str, dict[str, Any]]:
    span = {
        "traceId": f"{number:032x}",
        "spanId": f"{number + 2**50:016x}",
        "parentSpanId": f"{(number if parent is None else parent) + 2**40:016x}",
        "name": "llm_core",
        "attributes": attributes({"gen_ai.request.id": f"cmpl-load-{number}-0-0000000{number}"}),
        "events": list(events),
        "droppedEventsCount": dropped,
    }
    return "vllm.scheduler", span


def whole(number: int, at_ms: float = 0) -> list[tuple[str, dict[str, Any]]]:
    """A request served without trouble: 5 ms to the queue, 1 to the schedule, 20 to its token, 30 to its end, 2 out."""
    return [
        core_span(
            number,
            event("journey.QUEUED", at_ms + 5, scheduler__step=10),
            event("journey.SCHEDULED", at_ms + 6, scheduler__step=11, schedule__kind="FIRST", num_preemptions=0),
            event("journey.FIRST_TOKEN", at_ms + 26, scheduler__step=11, decode__done_tokens=1),
            event("journey.FINISHED", at_ms + 56, scheduler__step=13, finish__status="stopped", decode__done_tokens=3),
        ),
        api_span(
            number,
            event("api.ARRIVED", at_ms),
            event("api.FIRST_RESPONSE_FROM_CORE", at_ms + 27),
            event("api.DEPARTED", at_ms + 58),
        ),
    ]


def step_span(number: int, *steps: tuple[int, float], mono_shift_ns: int = 0) -> tuple[str, dict[str, Any]]:
    """A span with summaries of steps, each given as (id, ms)."""
    events = []
    for step_id, at_ms in steps:
        start_ns = MONOTONIC_NS + round(at_ms * 1e6) + mono_shift_ns
        values: Values = {"step.id": step_id, "step.ts_start_ns": start_ns, "step.ts_end_ns": start_ns}
        events.append(
            {
                "name": "step.BATCH_SUMMARY",
                "timeUnixNano": str(EPOCH_NS + round(at_ms * 1e6)),
                "attributes": attributes(values),
            }
        )
    return "vllm.scheduler.step", {
        "spanId": f"{number + 2**60:016x}",
        "name": f"scheduler_steps_{number}",
        "events": events,
    }


def read(folder: Path, *spans: tuple[str, dict[str, Any]]) -> tuple[TracesRead, RecordedFile]:
    """Each span on a line of its own."""
    file = recorded_file(folder, lines_of(*spans))
    return read_traces([file]), file


def lines_of(*spans: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(
        json.dumps({"resourceSpans": [{"scopeSpans": [{"scope": {"name": scope}, "spans": [span]}]}]})
        for scope, span in spans
    )


def only(found: TracesRead) -> dict[str, Any]:
    assert found.journeys is not None
    lifecycles, _events = on_zero(found.journeys, MONOTONIC_NS // 1000, Scratch())
    (row,) = lifecycles.frame().rows(named=True)
    return row


def test_the_two_spans_of_a_request_are_one_journey_whichever_comes_first(tmp_path: Path) -> None:
    core, api = whole(1)
    row = only(read(tmp_path, core, api)[0])
    assert row == only(read(tmp_path, api, core)[0])
    stamps = ("arrived_us", "queued_us", "scheduled_us", "first_token_us", "first_response_us", "finished_us")
    assert [row[name] for name in stamps] == [0, 5_000, 6_000, 26_000, 27_000, 56_000]
    assert (row["departed_us"], row["status"], row["output_tokens"]) == (58_000, "ok", 3)
    assert (row["queued_step"], row["scheduled_step"], row["finished_step"]) == (10, 11, 13)
    assert (row["api_request_id"], row["core_request_id"]) == ("cmpl-load-1", "cmpl-load-1-0-00000001")


def test_nothing_is_joined_by_cutting_ids(tmp_path: Path) -> None:
    core, api = whole(1)
    core[1]["parentSpanId"] = "ff" * 8
    found, _file = read(tmp_path, core, api)
    assert found.journeys is not None
    assert found.journeys.lifecycles.height == 2
    assert any("engine spans of 1 requests" in remark for remark in found.remarks)
    assert any("API spans of 1 requests" in remark for remark in found.remarks)


def test_a_request_without_its_api_span_arrives_when_queued_and_has_no_latencies(tmp_path: Path) -> None:
    found, _file = read(tmp_path, whole(1)[0])
    assert found.requests is not None
    row = found.requests.frame.row(0, named=True)
    assert row["sent_us"] == MONOTONIC_NS // 1000 + 5_000
    assert (row["ttft_us"], row["e2e_us"], row["queue_us"], row["status"]) == (None, None, 1_000, "ok")


def test_without_api_arrived_the_start_of_the_span_is_used_and_named(tmp_path: Path) -> None:
    core, api = whole(1)
    del api[1]["events"][0]
    api[1]["startTimeUnixNano"] = str(EPOCH_NS - 1_000_000)
    found, _file = read(tmp_path, core, api)
    row = only(found)
    assert row["arrived_us"] == -1_000
    assert any(remark.startswith("api.ARRIVED of 1 requests") for remark in found.remarks)


def test_an_api_span_alone_is_a_request_whose_engine_span_is_missing(tmp_path: Path) -> None:
    found, _file = read(tmp_path, api_span(1, event("api.ARRIVED", 0)))
    row = only(found)
    assert (row["status"], row["queued_us"], row["departed_us"]) == ("unfinished", None, None)
    assert found.requests is not None
    assert found.requests.frame.select("status", "error").row(0) == ("error", "unfinished")


def test_an_abort_comes_before_its_finish(tmp_path: Path) -> None:
    core, api = whole(1)
    core[1]["events"][-1] = event("journey.FINISHED", 45, scheduler__step=13, finish__status="aborted")
    api[1]["events"][-1] = event("api.ABORTED", 44, reason="client_disconnect")
    found, _file = read(tmp_path, core, api)
    row = only(found)
    assert (row["status"], row["departed_us"], row["finished_us"]) == ("aborted", 44_000, 45_000)
    assert not any("time order" in remark for remark in found.remarks)
    assert found.requests is not None
    request = found.requests.frame.row(0, named=True)
    assert (request["e2e_us"], request["error"]) == (44_000, "aborted: client_disconnect")


def test_a_request_given_up_in_the_queue_lost_no_admission(tmp_path: Path) -> None:
    core, api = whole(1)
    core[1]["events"][1:] = [event("journey.FINISHED", 45, scheduler__step=13, finish__status="aborted")]
    api[1]["events"][1:] = [event("api.ABORTED", 44)]
    found, _file = read(tmp_path, core, api)
    row = only(found)
    assert (row["status"], row["queued_us"], row["scheduled_us"], row["finished_us"]) == (
        "aborted",
        5_000,
        None,
        45_000,
    )
    assert found.remarks == ()


def test_a_preempted_request_whose_early_events_were_dropped_has_no_first_admission(tmp_path: Path) -> None:
    """The oldest events go first: QUEUED and the first SCHEDULED.  A resumption does not stand in for them."""
    core, api = whole(1)
    core[1]["events"][:2] = [
        event("journey.PREEMPTED", 30, scheduler__step=12, num_preemptions=60),
        event("journey.SCHEDULED", 40, scheduler__step=13, schedule__kind="RESUME", num_preemptions=60),
    ]
    core[1]["droppedEventsCount"] = 7
    found, _file = read(tmp_path, core, api)
    row = only(found)
    assert (row["queued_us"], row["scheduled_us"], row["preemptions"]) == (None, None, 60)
    assert any("events of 1 journeys that the tracing SDK discarded" in remark for remark in found.remarks)
    assert any("journey.QUEUED or the first" in remark for remark in found.remarks)


def test_stamps_out_of_order_are_counted(tmp_path: Path) -> None:
    core, api = whole(1)
    core[1]["events"][0] = event("journey.QUEUED", -3, scheduler__step=10)
    found, _file = read(tmp_path, core, api, *whole(2, 100))
    assert "time order in 1 journeys (a stamp before the one that it follows)" in found.remarks


def test_an_answer_before_the_arrival_is_out_of_order_without_any_stamp_of_the_engine(tmp_path: Path) -> None:
    """The request is kept with its negative TTFT, which check 6 finds."""
    _core, api = whole(1)
    api[1]["events"] = [event("api.ARRIVED", 5), event("api.FIRST_RESPONSE_FROM_CORE", 1), event("api.DEPARTED", 9)]
    found, _file = read(tmp_path, api)
    assert "time order in 1 journeys (a stamp before the one that it follows)" in found.remarks
    assert found.requests is not None and found.requests.frame["ttft_us"].to_list() == [-4_000]


def test_older_builds_have_the_monotonic_time_in_seconds_only(tmp_path: Path) -> None:
    core, api = whole(1)
    for recorded in core[1]["events"]:
        (stamp,) = [a for a in recorded["attributes"] if a["key"] == "ts.monotonic_ns"]
        seconds = int(stamp["value"]["intValue"]) / 1e9
        stamp.update(key="ts.monotonic", value={"doubleValue": seconds})
    assert only(read(tmp_path, core, api)[0]) == only(read(tmp_path, *whole(1))[0])


def test_an_event_without_a_monotonic_time_is_rejected(tmp_path: Path) -> None:
    core, api = whole(1)
    core[1]["events"][0]["attributes"] = attributes({"scheduler.step": 1, "ts.monotonic": float("1e300")})
    found, file = read(tmp_path, core, api)
    assert only(found)["queued_us"] is None
    assert file.tally.rejected == [("line 1, span 1, event 1", "an event without a usable monotonic time")]


def test_a_span_recorded_twice_is_one_span(tmp_path: Path) -> None:
    core, api = whole(1)
    longer = json.loads(json.dumps(core))
    longer[1]["events"].append(event("journey.PREEMPTED", 57))
    found, file = read(tmp_path, core, core, api, (longer[0], longer[1]))
    assert only(found)["preemptions"] == 0
    assert [place for place, reason in file.tally.rejected] == ["line 2, span 1", "line 4, span 1"]


def test_snapshots_tell_what_the_prefix_cache_had(tmp_path: Path) -> None:
    """Prompt of 100, effective 36: 64 tokens, four blocks of 16, were found by the first admission."""
    values: Values = {
        "step.id": 11,
        "request.id": "cmpl-load-1-0-00000001",
        "request.num_prompt_tokens": 100,
        "request.effective_prompt_len": 36,
    }
    snapshot = {"name": "step.REQUEST_SNAPSHOT", "timeUnixNano": str(EPOCH_NS), "attributes": attributes(values)}
    steps = ("vllm.scheduler.step", {"spanId": "aa" * 8, "name": "scheduler_steps_1", "events": [snapshot, snapshot]})
    found, file = read(tmp_path, steps, *whole(1))
    assert only(found)["cached_prompt_tokens"] == 64
    assert found.snapshots.height == 1
    assert file.tally.rejected == [("snapshot of step 11 and following", "the same snapshot of step again, identical")]


@pytest.mark.parametrize("reboot", [False, True])
def test_only_the_last_start_of_a_server_is_used(tmp_path: Path, reboot: bool) -> None:
    """Steps 1 to 3 and a request, from 10 s on steps 1, 2 and another; after a reboot monotonic time is 100 s less."""
    shift_ns = -100_000_000_000 if reboot else 0
    spans = [step_span(1, (1, 0), (2, 100), (3, 200)), step_span(2, (1, 10_000), (2, 10_100), mono_shift_ns=shift_ns)]
    found, file = read(tmp_path, *spans, *whole(1, 10), *whole(2, 10_020))
    assert found.steps["step_id"].to_list() == [1, 2]
    assert found.steps["ts_start_ns"][0] == MONOTONIC_NS + 10_000_000_000 + shift_ns
    assert only(found)["api_request_id"] == "cmpl-load-2"
    assert "3 steps and 2 journey spans of earlier starts of the server: not used, the last one is" in found.remarks
    assert file.tally.rejected_count == 0


def test_an_epoch_clock_set_back_a_little_is_no_restart(tmp_path: Path) -> None:
    scope, span = step_span(1, (1, 0), (2, 100), (3, 200))
    span["events"][2]["timeUnixNano"] = str(EPOCH_NS + 50_000_000)
    found, _file = read(tmp_path, (scope, span))
    assert found.steps["step_id"].to_list() == [1, 2, 3]


def test_the_clock_bridge_is_that_of_the_journeys(tmp_path: Path) -> None:
    found, _file = read(tmp_path, step_span(1, (1, 0), mono_shift_ns=-5_000_000), *whole(1))
    assert found.bridge_ns == EPOCH_NS - MONOTONIC_NS


def test_requests_of_the_client_are_found_by_id(tmp_path: Path) -> None:
    """The server prefixes the client's id; an id that occurs twice tells nothing."""
    found, _file = read(tmp_path, *whole(1), *whole(2, 100), *whole(3, 200))
    assert found.journeys is not None
    lifecycles, _events = on_zero(found.journeys, 0, Scratch())
    ids = ["load-3", "cmpl-load-1", "load-2", "load-2"]
    requests = rows_of(pl.DataFrame({"request_index": [0, 1, 2, 3], "request_id": ids}))
    told = with_request_indices(lifecycles, requests, Scratch())
    assert told["request_index"].to_list() == [1, None, 0]


def test_events_of_a_journey_stand_in_order_of_time(tmp_path: Path) -> None:
    found, _file = read(tmp_path, *whole(1))
    assert found.journeys is not None
    _lifecycles, events = on_zero(found.journeys, 0, Scratch())
    assert events.frame()["event"].to_list() == [
        "api.ARRIVED",
        "journey.QUEUED",
        "journey.SCHEDULED",
        "journey.FIRST_TOKEN",
        "api.FIRST_RESPONSE_FROM_CORE",
        "journey.FINISHED",
        "api.DEPARTED",
    ]


def ingested(directory: Path, lines: list[bytes]) -> None:
    """What ingest makes of these lines is a recording or one line of error."""
    (directory / "exp-config.yaml").write_text("model: m-7b\n")
    (directory / "traces.json").write_bytes(b"\n".join(lines))
    try:
        with read_recording(directory) as recording:
            assert recording.requests.height <= recording.lifecycles.height or recording.lifecycles.is_empty()
            assert recording.journey_events.frame()["journey"].is_sorted()
    except RecordingError as error:
        assert "\n" not in str(error)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(found=st.lists(documents, min_size=1, max_size=3))
def test_any_numbers_in_any_spans_are_a_recording_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, Any]]
) -> None:
    ingested(tmp_path_factory.mktemp("any"), [json.dumps(document).encode() for document in found])


@pytest.mark.heavy
@settings(max_examples=40, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_mutated_journeys_are_a_recording_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]
) -> None:
    content = bytearray(lines_of(*whole(1), *whole(2, 100), step_span(1, (1, 0), (2, 100))).encode())
    for position, byte in edits:
        content[position % len(content)] = byte
    ingested(tmp_path_factory.mktemp("mutated"), [bytes(content)])


def test_a_repeated_span_takes_back_no_more_than_was_counted(tmp_path: Path) -> None:
    """Its event has no monotonic time, so it was rejected both times and never counted as a record."""
    scope, span = api_span(1, {"name": "api.ARRIVED", "timeUnixNano": str(EPOCH_NS)})
    document = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": scope}, "spans": [span, span]}]}]}
    file = recorded_file(tmp_path, document)
    read_traces([file])
    assert (file.tally.records, file.tally.rejected_count) == (0, 3)


def test_a_start_that_is_no_epoch_time_is_no_arrival(tmp_path: Path) -> None:
    """2^63 - 1 ns less an offset below 0 (an epoch that stood at 1970) would come out before all times."""
    scope, span = api_span(1, event("api.HANDOFF_TO_CORE", 0))
    span |= {"startTimeUnixNano": str(2**63 - 1)}
    span["events"][0]["timeUnixNano"] = "1"
    journeys = read_traces([recorded_file(tmp_path, lines_of((scope, span)))]).journeys
    assert journeys is not None
    assert journeys.lifecycles["arrived_ns"].to_list() == [None]
