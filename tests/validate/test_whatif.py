"""The same requests with other engine arguments, against hand calculation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from blis_runs import release_of, small_recording

from blis_replay.base.errors import NothingToJudgeError, ReplayError, UnknownNameError
from blis_replay.blis.closed_loop import sessions_of
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.fit import FitRecord, StepRange
from blis_replay.blis.trace import NEVER_US, BlockKeys, RequestTrace
from blis_replay.ingest.recording import (
    OVERLOAD_CHECK,
    PROMPT_SCHEMA,
    REQUEST_PROMPT_SCHEMA,
    UNKNOWN,
    Finding,
    PromptTree,
    Recording,
    Setting,
)
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import EngineOverrides
from blis_replay.validate.metrics.objectives import parse_objectives
from blis_replay.validate.what_if import (
    WhatIfPoint,
    grid,
    mode_with,
    parse_value,
    simulated_point,
    what_if,
    whatif_answer,
)

# Every step takes 10 ms, and nothing is added.
RELEASE = release_of(LatencyModel("blackbox", 10_000_000, 0, 0), Lifecycle())


def two_at_once() -> Recording:
    """Two requests at 0 with 100 prompt tokens and 5 output tokens each, a synchronous server of 128 places."""
    recording = small_recording(2, num_gpu_blocks=21)
    frame = recording.requests.frame().with_columns(arrival_us=0 * recording.requests["arrival_us"])
    return type(recording)(**{**vars(recording), "requests": rows_of(frame)})


def values_of(*overrides: tuple[str, int | bool]) -> dict[str, float | None]:
    (point,) = what_if(two_at_once(), RELEASE, [overrides], workers=1).points
    assert point.values is not None
    return point.values


def test_one_place_serves_one_after_the_other() -> None:
    """Five steps of 10 ms each: together both end at 50 ms, one after the other at 50 and 100 ms.

    The second then waits 50 of 100 ms: half a request on average.  A request needs 7 blocks of 16
    for 104 tokens, of 20.
    """
    found = what_if(two_at_once(), RELEASE, [(("max_num_seqs", 1),)], workers=1)
    together, (one,) = found.recorded.values, found.points
    assert together is not None
    assert one.values is not None
    assert [together["e2e_mean_ms"], one.values["e2e_mean_ms"]] == [50, 75]
    assert [together["ttft_mean_ms"], one.values["ttft_mean_ms"]] == [10, 35]
    assert [together["requests_per_s"], one.values["requests_per_s"]] == pytest.approx([40, 20])
    assert [together["output_tokens_per_s"], one.values["output_tokens_per_s"]] == pytest.approx([200, 100])
    assert [together["running"], one.values["running"]] == pytest.approx([2, 1])
    assert [together["waiting"], one.values["waiting"]] == pytest.approx([0, 0.5])
    assert [together["kv_peak"], one.values["kv_peak"]] == pytest.approx([14 / 20, 7 / 20])


def test_one_client_waits_for_its_answer() -> None:
    """A request takes 50 ms; the second is sent 100 ms after that: 2 requests in 200 ms, and nobody waits."""
    values = values_of(("concurrency", 1), ("think_time_ms", 100))
    assert [values["e2e_mean_ms"], values["waiting"]] == [50, 0]
    assert values["requests_per_s"] == pytest.approx(10)


def test_a_faster_load_arrives_sooner() -> None:
    """Requests 1 s apart arrive 0.25 s apart, and the last of two ends 50 ms later."""
    recording = small_recording(2, num_gpu_blocks=21)
    frame = recording.requests.frame().with_columns(arrival_us=pl.Series([0, 1_000_000]))
    recording = type(recording)(**{**vars(recording), "requests": rows_of(frame)})
    (point,) = what_if(recording, RELEASE, [(("rate", 4),)], workers=1).points
    assert point.values is not None
    assert point.values["requests_per_s"] == pytest.approx(2 / 0.3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rate=0", "such as rate=1.5"),
        ("concurrency=1.5", "such as concurrency=16"),
        ("ramp_s=-1", "such as ramp_s=10"),
        ("sessions=8", "give sessions=prompts"),
    ],
)
def test_a_load_that_is_none_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UnknownNameError, match=problem):
        parse_value(*text.split("="))


def test_limits_are_held_against_the_server_too() -> None:
    """Recorded: first token after 20 ms, 4 gaps of 10 ms; simulated 10 ms each.  E2E p50 of 60 and 50 ms.

    Times of single tokens are in the store: without them the ITL of the server is not known.
    """
    objectives = parse_objectives("ttft.p95=15ms,e2e.p50=55ms,itl.p95=15ms")
    found = what_if(two_at_once(), RELEASE, [(("max_num_seqs", 64),)], objectives=objectives, workers=1)
    assert found.observed is not None
    assert found.recorded.attained is not None
    assert found.observed.values_us == (20_000.0, 60_000.0, None)
    assert found.recorded.attained.values_us == (10_000.0, 50_000.0, 10_000.0)
    assert (found.observed.goodput, found.recorded.attained.goodput) == (0, 1)
    assert "the server itself: SLO missed: TTFT p95 20 of 15 ms, E2E p50 60 of 55 ms" in str(whatif_answer(found))


@pytest.mark.parametrize(
    ("gaps_us", "said"),
    [
        ([], "the server itself: SLO not known: ITL p95 unknown of 15 ms; goodput 100.0%"),
        ([9_000] * 8, "the server itself: SLO met: TTFT p95 20 of 30 ms, ITL p95 9 of 15 ms; goodput 100.0%"),
        ([9_000] * 6 + [40_000] * 2, "the server itself: SLO missed: ITL p95 40 of 15 ms; goodput 100.0%"),
    ],
)
def test_gaps_of_the_server_are_those_in_the_store(gaps_us: list[int], said: str) -> None:
    """TTFT 20 ms and mean gaps of 10 ms are recorded; 2 of 8 gaps of 40 ms are more than 5 %."""
    objectives, change = parse_objectives("ttft.p95=30ms,itl.p95=15ms"), (("max_num_seqs", 64),)
    gaps = (np.array(gaps_us), np.ones(len(gaps_us), np.int64)) if gaps_us else None
    found = what_if(two_at_once(), RELEASE, [change], objectives=objectives, token_gaps=gaps, workers=1)
    text = " ".join(str(whatif_answer(found)).split())
    assert said in text
    assert ("no usable times of single tokens were recorded" in text) == (not gaps_us)


def test_what_a_check_forbids_is_not_known_of_the_server() -> None:
    """The recorded E2E of 60 ms is within the limit, but its clock is not to be trusted."""
    recording = replace(two_at_once(), findings=(Finding("clocks", "unusable", "e2e", "no E2E"),))
    objectives = parse_objectives("e2e.p95=70ms")
    found = what_if(recording, RELEASE, [(("max_num_seqs", 64),)], objectives=objectives, workers=1)
    assert "the server itself: SLO not known: E2E p95 unknown of 70 ms" in str(whatif_answer(found))


def test_an_engine_that_does_not_keep_up_is_called_saturated() -> None:
    """With one place 100 requests, 50 ms each, come ever faster within a second: the last ones wait 4 s.

    No client with a limit in flight sends like that.  100 clients that wait for their answers make no queue that grows,
    and 128 places none at all.
    """
    recording = small_recording(100)
    sent_us = pl.Series(np.rint(1e5 * np.sqrt(np.arange(100))).astype(np.int64))
    frame = recording.requests.frame().with_columns(arrival_us=sent_us)
    recording = replace(recording, requests=rows_of(frame))
    changes: list[EngineOverrides] = [(("max_num_seqs", 1),), (("max_num_seqs", 1), ("concurrency", 100))]
    found = what_if(recording, RELEASE, changes, workers=1)
    since_s = [(point.values or {})["saturated_from_s"] for point in (found.recorded, *found.points)]
    assert (since_s[0], since_s[2]) == (None, None)
    # Request i waits 50 (i + 1) - 100 sqrt(i) ms; request 10 is the last within the 250 ms that count as at once.
    assert since_s[1] == pytest.approx(0.316, abs=0.001)
    assert " ".join(str(whatif_answer(found)).split()).count("its queue grows to the end") == 1


def conversations() -> RequestTrace:
    """Blocks of 16: request 2 goes on from 0 (48 tokens, 2 of them an answer), 3 from 1; 4 repeats the prompt of 1."""
    rows = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 3, 5, 6], [0, 3]]
    prompts = np.array([46, 34, 70, 66, 34])
    count = np.array([len(row) for row in rows])
    keys = BlockKeys(np.cumsum(count) - count, count, np.concatenate(rows).astype(np.int32), 16)
    never = np.full(5, NEVER_US)
    return RequestTrace(np.zeros(5, np.int64), prompts, prompts, np.full(5, 2), never, block_keys=keys)


def test_a_prompt_that_goes_on_where_a_request_ended_is_its_next_turn() -> None:
    """All begin with one block, which no request ends with; who only repeats a prompt begins a session."""
    assert sessions_of(conversations(), "x")[0].tolist() == [0, 1, 0, 1, 4]
    first_turns = conversations().part(slice(2))
    with pytest.raises(ReplayError, match="x: no prompt goes on where another request ended; leave out sessions=pro"):
        sessions_of(first_turns, "x")


def test_turns_of_a_session_wait_for_each_other() -> None:
    """Two clients, each with its own session: the second turns are sent after the answers to the first ones.

    Without sessions request 2 is sent by who is first answered.  Of one client they are all sent in turn, 0 2 1 3.
    """
    lengths = pl.Series([96, 96, 112, 112])  # full blocks of 16; an answer has 5 tokens
    recording = small_recording(4, num_gpu_blocks=99)
    requests = rows_of(recording.requests.frame().with_columns(prompt_tokens=lengths))
    prompts = pl.DataFrame(
        [(0, None, 0, 96), (1, None, 0, 96), (2, 0, 96, 112), (3, 1, 96, 112)], PROMPT_SCHEMA, orient="row"
    )
    of_each = pl.DataFrame([(i, i) for i in range(4)], REQUEST_PROMPT_SCHEMA, orient="row")
    recording = replace(recording, requests=requests, prefix=PromptTree("a test", prompts, of_each))
    run = replay(recording, RELEASE, mode_with((("concurrency", 1), ("sessions", "prompts"))))
    assert np.argsort(run.result.arrival_us).tolist() == [0, 2, 1, 3]
    assert run.plan.basis["sessions"].startswith("4 requests in 2 sessions: a prompt that goes on where")
    plain = replay(recording, RELEASE, mode_with((("concurrency", 1),)))
    assert np.argsort(plain.result.arrival_us).tolist() == [0, 1, 2, 3]


def test_sessions_need_prompts_that_are_known() -> None:
    recording = small_recording(2, num_gpu_blocks=21)
    with pytest.raises(NothingToJudgeError, match="identities of its prompts are not known; leave out sessions=promp"):
        what_if(recording, RELEASE, [(("concurrency", 1), ("sessions", "prompts"))], workers=1)


def test_half_a_closed_loop_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="give rate or concurrency"):
        mode_with((("concurrency", 1), ("rate", 2)))


def test_a_smaller_memory_preempts() -> None:
    """Prompts take 7 blocks of 16 each, and 110 + 5 - 1 > 112 tokens an eighth: 15 are needed of 14."""
    recording = two_at_once()
    longer = recording.requests.frame().with_columns(prompt_tokens=10 + recording.requests["prompt_tokens"])
    recording = type(recording)(**{**vars(recording), "requests": rows_of(longer)})
    found = what_if(recording, RELEASE, [(("num_gpu_blocks", 15),)], workers=1)
    assert found.recorded.values is not None
    assert found.points[0].values is not None
    assert (found.recorded.values["preemptions"], found.points[0].values["preemptions"]) == (0, 1)
    assert found.points[0].values["kv_peak"] == 1


def test_outputs_that_no_longer_fit_are_counted() -> None:
    """102 tokens leave 2 of the 5 output tokens."""
    values = values_of(("max_model_len", 102))
    assert (values["completed"], values["cut_short"], values["e2e_mean_ms"]) == (2, 2, 20)


def test_unbound_memory_has_no_peak() -> None:
    found = what_if(small_recording(2), RELEASE, [(("max_num_seqs", 1),)], workers=1)
    assert found.recorded.values is not None
    assert found.recorded.values["kv_peak"] is None


def test_a_grid_is_every_combination_the_last_running_fastest() -> None:
    changes = grid((("async_scheduling", True),), {"max_num_seqs": [1, 2], "block_size": [16, 32]})
    assert changes == [
        (("async_scheduling", True), ("max_num_seqs", seqs), ("block_size", block))
        for seqs in (1, 2)
        for block in (16, 32)
    ]
    assert grid((("max_num_seqs", 1),), {}) == [(("max_num_seqs", 1),)]


def unservable_and_servable() -> list[EngineOverrides]:
    """100 prompt tokens do not fit into 100, and 7 blocks not into 6."""
    return [(("max_model_len", 100),), (("num_gpu_blocks", 7),), (("max_num_seqs", 4096),), (("max_num_seqs", 2),)]


def test_asimulated_point_that_cannot_be_served_is_named_with_its_reason() -> None:
    found = what_if(two_at_once(), RELEASE, unservable_and_servable(), workers=1)
    *without, served = found.points
    assert [point.values for point in without] == [None] * 3
    reasons = [str(point.reason) for point in without]
    assert "a prompt of 100 tokens leaves no room in max_model_len 100" in reasons[0]
    assert "needs 7 KV blocks and the engine has 6" in reasons[1]
    assert "max_num_batched_tokens (2048) is below max_num_seqs (4096)" in reasons[2]
    assert served.values == found.recorded.values
    text = " ".join(str(whatif_answer(found)).split())
    assert "cannot be served with max_model_len=100: request 0: a prompt of 100 tokens" in text


def test_if_nothing_can_be_served_there_is_nothing_to_judge() -> None:
    with pytest.raises(NothingToJudgeError, match=r"some-test: nothing could be simulated: request 0: a prompt of 100"):
        what_if(two_at_once(), RELEASE, unservable_and_servable()[:2], workers=1)


def test_tables_fit_the_terminal_and_say_what_was_observed() -> None:
    many = [(("max_num_seqs", seqs), ("max_num_batched_tokens", 4096)) for seqs in range(1, 13)]
    for changes in (many, many[:1]):
        text = str(whatif_answer(what_if(two_at_once(), RELEASE, changes, workers=1)))
        assert max(map(len, text.splitlines())) <= 81  # one more with two digits of points
        # In a table, the arguments as recorded are a row of their own, without the change that the others share.
        assert ("all but the first row with max_num_batched_tokens=4096" in " ".join(text.split())) == (
            len(changes) > 1
        )
        assert "observed with its own arguments only (max_num_batched_tokens=2048, max_n" in " ".join(text.split())


def test_an_argument_that_was_only_assumed_is_called_so() -> None:
    """Nobody recorded the 128 places; the synchronous scheduling is recorded."""
    recording = two_at_once()
    engine = recording.engine | {"max_num_seqs": Setting(128, UNKNOWN, "assumed; 128 on a CPU")}
    changes = [(("async_scheduling", True), ("max_num_seqs", 64))]
    answer = whatif_answer(what_if(replace(recording, engine=engine), RELEASE, changes, workers=1))
    text = " ".join(str(answer).split())
    assert "its own arguments only (async_scheduling=false, max_num_seqs=128 assumed);" in text
    assert answer.document["recorded"]["assumed"] == ["max_num_seqs"]  # type: ignore[index]


def test_json_has_changes_as_fractions() -> None:
    document = whatif_answer(what_if(two_at_once(), RELEASE, [(("max_num_seqs", 1),)], workers=1)).document
    (point,) = document["points"]  # type: ignore[misc]  # a list
    assert point["overrides"] == {"max_num_seqs": 1}
    assert point["change"]["e2e_mean_ms"] == pytest.approx(0.5)  # 75 for 50 ms
    assert document["recorded"]["engine"] == {"max_num_seqs": 128}  # type: ignore[index]
    assert WhatIfPoint((), document["recorded"]["values"]).values == document["recorded"]["values"]  # type: ignore[index]


def test_a_change_has_an_interval_of_its_own() -> None:
    """75 for 50 ms; 24 draws whose changed side is 2 % off; a side reaches 1.5 times its farthest draw: 3 % of 1.5."""
    whatif = what_if(two_at_once(), RELEASE, [(("max_num_seqs", 1),)], workers=1)
    (point,), values = whatif.points, whatif.recorded.values or {}
    scaled = [
        {name: value and value * (0.98 + 0.04 * (i % 2)) for name, value in (point.values or {}).items()}
        for i in range(24)
    ]
    recorded = replace(whatif.recorded, drawn=(values,) * 24)
    answer = whatif_answer(replace(whatif, recorded=recorded, points=(replace(point, drawn=tuple(scaled)),)))
    (line,) = (line for line in str(answer).splitlines() if line.startswith("E2E mean"))
    assert line.split("+50.0 %")[1].split() == ["+45", "..", "+55", "%"]


@pytest.mark.parametrize(
    ("known", "change", "served", "sure"),
    [
        ({}, ("enable_prefix_caching", False), False, False),
        ({}, ("enable_prefix_caching", True), True, True),  # as it was
        ({}, ("max_num_batched_tokens", 256), True, False),
        ({}, ("max_num_seqs", 1), True, True),
        ({"prefix_hit_rate": 0.0}, ("enable_prefix_caching", False), True, True),
        ({"prefix_hit_rate": 0.0}, ("max_num_batched_tokens", 256), True, True),
        ({"off": True}, ("max_num_batched_tokens", 256), True, True),
        ({"off": True, "prefix_hit_rate": 0.0}, ("enable_prefix_caching", True), False, False),
    ],
)
def test_what_a_cache_held_is_not_guessed(
    known: dict[str, float], change: tuple[str, int | bool], served: bool, sure: bool
) -> None:
    """A server that had cached 1,200 of each prompt took 37 % longer without; this said 0.0 %, and was sure of it.

    Nobody can say so without hits of the server.  Of one that cached nothing none tell what it would have found.
    """
    recording = replace(two_at_once(), prefix_hit_rate=known.get("prefix_hit_rate"))
    if "off" in known:
        recording = replace(recording, engine=recording.engine | {"enable_prefix_caching": Setting(False, "recorded")})
    point = simulated_point(recording, RELEASE, (), (change,))
    assert (point.values is not None) == served
    assert (served and "intervals" not in point.basis) == sure


def test_an_answer_names_what_is_not_simulated() -> None:
    """As ``validate`` does: 14 blocks of 20 are held, and four groups would hold four times as many."""
    recording = two_at_once()
    recording = replace(recording, engine=recording.engine | {"kv_cache_groups": Setting("4", "recorded")})
    found = what_if(recording, RELEASE, [(("max_num_seqs", 64),)], workers=1)
    assert [len(point.not_simulated) for point in (found.recorded, *found.points)] == [1, 1]
    document = whatif_answer(found).document
    assert document["points"][0]["not_simulated"][0].startswith("kv_cache_groups 4")  # type: ignore[index]


def test_each_side_says_which_of_its_steps_are_extrapolated() -> None:
    """Fitted on steps of one decode: two requests at once are beyond that, one after the other they are not."""
    seen = StepRange(decodes=(1, 1), context_tokens=(1, 1_000), prefill_tokens=(1, 1_000))
    record = FitRecord("line", 1.0, 1.0, "synchronous", "synchronous", "-", (), (), seen)
    fitted = replace(RELEASE, models=tuple(replace(entry, fit=record) for entry in RELEASE.models))
    told = what_if(two_at_once(), fitted, [(("max_num_seqs", 1),)], workers=1)
    assert "with 2 decodes" in told.recorded.basis["extrapolated"]
    assert "extrapolated" not in told.points[0].basis


def test_latencies_of_a_server_that_was_overloaded_have_no_change() -> None:
    """Its queue grew to the end, so the length of the run made them, whatever the simulator says of its own queue."""
    recorded = replace(two_at_once(), findings=(Finding(OVERLOAD_CHECK, "note", "", "its queue grew"),))
    answer = whatif_answer(what_if(recorded, RELEASE, [(("max_num_seqs", 1),)], workers=1))
    (point,) = answer.document["points"]  # type: ignore[misc]
    assert (point["change"]["ttft_mean_ms"], point["change"]["e2e_p99_ms"]) == (None, None)
    assert point["change"]["itl_mean_ms"] is not None
    assert str(answer).count("OVERLOADED") == 1
