"""Hypotheses on inputs: which apply to a recording, which its records prove wrong, and which a check proves right."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import polars as pl
import pytest
from logged import ENGINE, logged, workload
from planted import planted_recording

from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.steps.placed import place
from blis_replay.ingest.steps.records import detected_async
from blis_replay.replay.driver import replay
from blis_replay.replay.engine import with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.explain import inputs
from blis_replay.validate.explain.candidates import counted_alike
from blis_replay.validate.explain.hypothesis import PROVED_RIGHT, Replayed
from blis_replay.validate.explain.inputs import ARGUMENTS, LENGTHS, Argument, contradicted, stated_as, to_try
from blis_replay.validate.explain.parts import DECISIONS, OUTPUT, PRE_QUEUE, PROMPTS, STEP_TIME, parts_of
from blis_replay.validate.explain.rule import best_first, explains, worsens
from blis_replay.validate.explain.schedule import said_by_schedule
from blis_replay.validate.explain.search import best_input
from blis_replay.validate.explain.trial import trial_of
from blis_replay_labs.planted.causes import argument, line, scheduling
from blis_replay_labs.planted.faults import Cause, Fault, planted_case, with_steps


@pytest.fixture(scope="module")
def recording() -> Recording:
    return planted_recording(seed=3).recording


def test_a_new_argument_is_one_entry(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the entry: its values are tried, and the sentence and the remedy come from it."""
    entry = Argument("kv_offload_blocks", "the server's start-up log", lambda *_: (8, 16), default=8)
    monkeypatch.setattr(inputs, "ARGUMENTS", (*ARGUMENTS, entry))
    first, _last = to_try(recording, ReplayMode())
    (found,) = [one for one in first if one.name == "kv_offload_blocks"]
    assert found.engine == {"kv_offload_blocks": 16}
    assert (found.why, found.decides) == ("the simulator has kv_offload_blocks 8, and the server 16", entry.decides)


def test_counted_prefix_hits_leave_nothing_to_try_of_the_cache(recording: Recording) -> None:
    """A server that counts cached tokens of every request has said what its cache held."""

    def tried(cached: int | None) -> int:
        rows = recording.requests.frame().with_columns(pl.lit(cached, pl.Int64).alias("cached_prompt_tokens"))
        groups = to_try(replace(recording, requests=rows_of(rows)), ReplayMode(), may_be_warm=True)
        return sum(one.name == "prefix cache" for group in groups for one in group)

    assert [tried(cached) for cached in (None, 0, 16)] == [2, 2, 0]


def every_step_logged() -> Recording:
    made = logged(workload(4, rate_per_s=20.0), ENGINE)
    found = Finding("iterations", "note", "", "every step is logged")
    return replace(made, iterations=place(made, Scratch()).iterations, findings=(found,))


def test_a_schedule_that_is_equal_in_every_step_is_a_proof() -> None:
    recording = every_step_logged()
    mode = ReplayMode(engine=(("block_size", ENGINE.block_size),))
    proof, wrong = said_by_schedule(recording, mode)
    assert proof.startswith("the engine's schedule is equal to the recorded one in all ")
    assert wrong is None
    assert said_by_schedule(replace(recording, findings=()), mode) == ("", None)


def test_an_argument_that_makes_the_schedule_equal_is_a_hypothesis() -> None:
    mode = ReplayMode(engine=(("block_size", ENGINE.block_size), ("long_prefill_token_threshold", 64)))
    proof, wrong = said_by_schedule(every_step_logged(), mode)
    assert proof == ""
    assert wrong is not None
    assert (wrong.name, dict(wrong.engine)) == ("long_prefill_token_threshold", {"long_prefill_token_threshold": 0})


def test_what_is_proved_right_is_not_blamed() -> None:
    """A proof takes one part out and leaves the others; decisions follow from the others in a replay without queues."""
    planted = planted_recording(seed=3)
    replayed = Replayed(planted.recording, ReplayMode(), planted.release.models[0], planted.release)
    parts, standings = parts_of(replayed, {})
    names = {one.name for one in parts}
    assert names == {STEP_TIME, PRE_QUEUE, OUTPUT}
    assert [(one.name, one.state) for one in standings] == [(DECISIONS, PROVED_RIGHT)]
    for proved in (PRE_QUEUE, DECISIONS):
        parts, _standings = parts_of(replayed, {proved: "equal in all 100 steps"})
        assert {one.name for one in parts} == names - {proved}


def test_lengths_that_the_server_counts_alike_are_proved_right(recording: Recording) -> None:
    """Its journeys have the tokens of the client's requests; with a quarter more at the client they do not."""
    assert set(counted_alike(recording)) == {LENGTHS, PROMPTS}
    frame = recording.requests.frame()
    more = replace(recording, requests=rows_of(frame.with_columns(pl.col("output_tokens") * 5 // 4)))
    assert set(counted_alike(more)) == {PROMPTS}


def test_a_step_time_by_latencies_alone_says_what_would_look_the_same() -> None:
    """Steps of 1.25 times the length; wrong counts of tokens look so, if nothing proves the client's counts right."""
    case = planted_case(Fault("", (line(intercept=1.25),), "client", "tiny"))
    replayed = Replayed(case.recording, ReplayMode(), case.release.models[0], case.release)
    for proved, said in (({}, True), (dict.fromkeys((LENGTHS, PROMPTS), "as many at the server"), False)):
        (step_time,) = (one for one in parts_of(replayed, proved)[0] if one.name == STEP_TIME)
        assert ("wrong token counts" in step_time.basis) == said


def test_a_limit_that_the_load_never_reaches_is_that_or_more() -> None:
    """The simulator has 2 requests at once, and the server 128, of which this load takes a few."""
    case = planted_case(Fault("", (argument("max_num_seqs", 128, 2),), "client", "tiny"))
    stated = trial_of(Replayed(case.recording, ReplayMode(), case.release.models[0], case.release))
    assert stated is not None
    found = best_input(stated, to_try(case.recording, ReplayMode()))
    assert found is not None
    server = replay(with_engine(case.recording, {"max_num_seqs": 128}, "server"), case.release).simulated.engine
    assert server is not None
    most = int((server.steps["decode_tokens"] + (server.steps["prefill_tokens"] > 0)).max())
    value = int(found.hypothesis.engine["max_num_seqs"])
    assert 2 < most <= value <= 1.5 * most  # of the values that are tried
    assert found.hypothesis.remedy == f"look it up and {stated_as('max_num_seqs', value, at_least=True)}"


def test_coarse_stamps_of_steps_prove_no_scheduling_mode() -> None:
    """Steps of some 9 ms stamped to whole 10 ms, of a server that schedules synchronously, as is stated.

    The client's first send, from which all times count, is at any time between two stamps.
    """
    stamps = pl.col("start_us") // 10_000 * 10_000 - 3_217
    coarse = Cause("stamps", "10 ms", (), instruments=lambda one: with_steps(one, stamps))
    case = planted_case(Fault("", (scheduling(asynchronous=False), coarse), "full", "tiny"))
    sync = with_engine(case.recording, {"async_scheduling": False}, "stated")
    assert detected_async(sync.steps, sync.journey_events) is None
    assert contradicted(sync, ReplayMode()) == []


def test_nobody_is_sent_to_calibrate_to_an_overloaded_recording(recording: Recording) -> None:
    planted = planted_recording(seed=3)
    queue = replace(recording, findings=(Finding("overloaded", "note", "", "the queue grows"),))
    ways = [
        Replayed(one, ReplayMode(), planted.release.models[0], planted.release).calibrate()
        for one in (recording, queue)
    ]
    assert [command.split()[1] for _remedy, command in ways] == ["calibrate", "explain"]


def test_one_rule_says_what_explains_an_error_and_what_explains_it_as_well() -> None:
    assert explains(0.10, 0.06)
    assert not explains(0.10, 0.07)  # more than 60 % is left
    assert not explains(0.012, 0.004)  # less than 1 % is gained
    assert not worsens(0.01, 0.0125)  # a step caught or missed makes as much
    assert worsens(0.01, 0.0126)
    scored = [SimpleNamespace(left=left) for left in (0.02, 0.01, 0.017, 0.03)]
    assert [one.left for one in best_first(scored, 0.05)] == [0.01, 0.017]
    assert [one.left for one in best_first(scored, 0.05, exact=True)] == [0.01]
    assert best_first(scored, 0.005) == []
