"""Requests generated from a load profile: arrivals, lengths and identities as declared, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import make_recording

from blis_replay.base.errors import ReplayError
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.recording import LoadProfile, Recording, SharedPrefix, Stage
from blis_replay.replay.declared import declared_requests
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.prefix_estimate import cached_tokens
from blis_replay_labs.synthetic.declared import stage_counts

STAGES = (Stage(0, 2.0, 3_000_000), Stage(1, 4.0, 2_000_000))
# Of two users in one group: system prompt of two blocks, a question of one, half a block answered.
PROMPTS = SharedPrefix(1, 2, system_prompt_tokens=32, question_tokens=16, output_tokens=8)
PROFILE = LoadProfile("profile.yaml", "constant", STAGES, 1_000_000, PROMPTS, multi_turn=False)


def declared(
    profile: LoadProfile | None,
    requests: int = 14,
    stage: Sequence[int | None] | None = None,
    max_model_len: int = 4096,
) -> Recording:
    """A recording of ``requests`` 0.1 s apart, 6 of them in stage 0, with this profile."""
    columns: dict[str, Sequence[object]] = {
        "arrival_us": [i * 100_000 for i in range(requests)],
        "stage": stage or [0] * min(6, requests) + [1] * max(requests - 6, 0),
        "prompt_tokens": [50] * requests,
        "output_tokens": [5] * requests,
    }
    return replace(make_recording(columns, engine={"max_model_len": max_model_len}), load_profile=profile)


def test_constant_arrivals_have_the_declared_gaps_and_stages() -> None:
    """6 requests every 0.5 s, the second stage 3 s + the pause of 1 s later, 8 requests every 0.25 s."""
    arrival_us, basis = declared_requests("profile", declared(PROFILE)).arrivals()
    first, second = np.arange(6) * 500_000, 4_000_000 + np.arange(8) * 250_000
    assert arrival_us.tolist() == [*first, *second]
    assert basis.startswith("constant at 2 and 4 requests/s as profile.yaml declares, 1 s between stages;")
    # The recorded ones are 0.1 s apart throughout.
    assert basis.endswith("recorded gaps vary by 0.00 of their mean (constant 0, Poisson 1), stages 0.1 s apart")


def test_poisson_arrivals_fill_their_stages_and_are_seeded() -> None:
    recording = declared(replace(PROFILE, arrivals="poisson"))
    arrival_us, _ = declared_requests("profile", recording).arrivals()
    again, _ = declared_requests("profile", recording).arrivals()
    assert arrival_us.tolist() == again.tolist()
    gaps_us = np.diff(arrival_us[:6])
    assert arrival_us[0] == 0
    assert arrival_us[5] < 3_000_000 < arrival_us[6]
    assert gaps_us.std() > 0.3 * gaps_us.mean()


def test_as_many_requests_a_stage_as_recorded_and_the_declared_number_is_told() -> None:
    """5 of 6 and 9 of 8; the ninth of stage 1 is sent at 4 + 8 x 0.25 s."""
    arrival_us, basis = declared_requests("profile", declared(PROFILE, stage=[0] * 5 + [1] * 9)).arrivals()
    assert (arrival_us[4], arrival_us[5], arrival_us[13]) == (2_000_000, 4_000_000, 6_000_000)
    assert "; 5 and 9 requests per stage as recorded, not the 6 and 8 declared; " in basis


def test_unknown_stages_are_dealt_out_as_declared() -> None:
    """28 requests in the proportion 6 to 8."""
    assert stage_counts(declared(PROFILE, 28, stage=[None] * 28), STAGES).tolist() == [12, 16]


@pytest.mark.parametrize(
    ("profile", "mode", "complaint"),
    [
        (None, "spec", "some-test: no load profile is recorded, so no requests can be generated from it; ingest"),
        (None, "blis-spec", "no load profile is recorded"),
        (replace(PROFILE, stages=(Stage(0, 1e-300, 1_000_000),)), "arrivals=profile", "profile.yaml last for decades"),
        (replace(PROFILE, stages=(Stage(0, 1e-300, 1_000_000),)), "blis-spec", "profile.yaml last for decades"),
        (replace(PROFILE, shared_prefix=replace(PROMPTS, num_groups=1 << 30)), "prefix=profile", "different blocks"),
        (replace(PROFILE, stages=()), "arrivals=profile", "profile.yaml declares no load stages"),
        (replace(PROFILE, arrivals="trace"), "arrivals=profile", "profile.yaml declares trace arrivals; only constant"),
        (replace(PROFILE, arrivals=None), "arrivals=profile", "declares no arrivals"),
        (replace(PROFILE, shared_prefix=None), "lengths=profile", "declares no shared-prefix prompts"),
        (replace(PROFILE, shared_prefix=None), "prefix=profile", "declares no shared-prefix prompts"),
        (replace(PROFILE, shared_prefix=None), "blis-spec", "no stages of shared-prefix prompts, which is what BLIS"),
    ],
)
def test_what_is_not_declared_is_one_line(profile: LoadProfile | None, mode: str, complaint: str) -> None:
    with pytest.raises(ReplayError) as refused:
        plan_replay(declared(profile), parse_mode(mode))
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_conversations_need_to_know_what_the_model_can_hold() -> None:
    recording = declared(replace(PROFILE, multi_turn=True))
    unknown = {name: setting for name, setting in recording.engine.items() if name != "max_model_len"}
    with pytest.raises(ReplayError, match="max_model_len is not known"):
        plan_replay(replace(recording, engine=unknown), parse_mode("spec"))


def test_prompts_without_turns_have_one_length() -> None:
    prompts, outputs, basis = declared_requests("profile", declared(PROFILE)).lengths()
    assert prompts.tolist() == [48] * 14
    assert outputs.tolist() == [8] * 14
    assert basis == (
        "8 as profile.yaml declares, prompts of 32 + 16; 48 prompt tokens per request, 50 in the recording"
    )


def test_conversations_grow_until_the_next_turn_would_not_fit() -> None:
    """A turn adds 16 + 8 tokens: 48 + 8, 72 + 8 and 96 + 8 = 104 fit in 110 tokens, 120 + 8 do not."""
    recording = declared(replace(PROFILE, multi_turn=True), max_model_len=110)
    prompts, _outputs, basis = declared_requests("profile", recording).lengths()
    users_turns = np.repeat([48, 72, 96, 48, 72, 96, 48], 2)
    assert prompts.tolist() == users_turns.tolist()
    assert "growing over 3 turns, sent whether or not the turn before was answered" in basis


def found(recording: Recording, prompts: Sequence[int]) -> list[int]:
    """Cached prompt tokens of each request in a cache that never forgets."""
    lengths = np.array(prompts, np.int64)
    return cached_tokens(declared_requests("profile", recording).blocks(lengths)[0], lengths).tolist()


def test_prompts_of_a_group_share_the_system_prompt_and_those_sent_again_all_but_the_last_block() -> None:
    """The last prompt token is always computed, so 32 of 48 tokens are found by the whole prompt, too."""
    assert found(declared(PROFILE, 5), [48] * 5) == [0, 32, 32, 32, 32]
    longer = replace(PROFILE, shared_prefix=replace(PROMPTS, question_tokens=40))
    assert found(declared(longer, 5), [72] * 5) == [0, 32, 64, 64, 64]


def test_a_turn_finds_what_was_said_before_and_a_new_conversation_its_first_question() -> None:
    """User 0: of 72 tokens the 3 blocks of 48 + 8, of 96 the 5 of 72 + 8, then 48 tokens again; user 1 between."""
    recording = declared(replace(PROFILE, multi_turn=True), 10, max_model_len=110)
    prompts = declared_requests("profile", recording).lengths()[0].tolist()
    assert found(recording, prompts) == [0, 32, 48, 48, 80, 80, 32, 32, 48, 48]


def test_each_of_the_three_is_substituted_by_itself() -> None:
    recording = declared(replace(PROFILE, multi_turn=True))
    exact = plan_replay(recording, ReplayMode()).trace
    arrivals = plan_replay(recording, parse_mode("arrivals=profile")).trace
    lengths = plan_replay(recording, parse_mode("lengths=profile")).trace
    prefix = plan_replay(recording, parse_mode("prefix=profile")).trace
    every = plan_replay(recording, parse_mode("spec")).trace
    assert every.arrival_us.tolist() == arrivals.arrival_us.tolist() != exact.arrival_us.tolist()
    assert every.prompt_tokens.tolist() == lengths.prompt_tokens.tolist() != exact.prompt_tokens.tolist()
    assert lengths.arrival_us.tolist() == prefix.arrival_us.tolist() == exact.arrival_us.tolist()
    assert arrivals.output_tokens.tolist() == prefix.output_tokens.tolist() == [5] * 14
    assert prefix.block_keys is not None
    assert (exact.block_keys, lengths.block_keys) == (None, None)


def test_recorded_hits_stay_where_only_lengths_are_declared() -> None:
    """The server found 40 tokens of each prompt: 48 - 40 are left; and at least one, however short the prompt."""
    columns: dict[str, Sequence[object]] = {
        "arrival_us": [0, 10],
        "prompt_tokens": [90, 50],
        "output_tokens": [5, 5],
        "cached_prompt_tokens": [80, 40],
    }
    recording = replace(make_recording(columns), load_profile=PROFILE)
    trace = plan_replay(recording, parse_mode("lengths=profile")).trace
    assert trace.prefill_tokens.tolist() == [1, 8]


def test_the_recorded_cycle_of_prompts_stays_where_only_lengths_are_declared() -> None:
    """Three prompts in turn as recorded; the declared lengths of four users would not look like a cycle of three."""
    ran = SharedPrefix(3, 1, system_prompt_tokens=32, question_tokens=18, output_tokens=5)
    profile = replace(PROFILE, multi_turn=True, shared_prefix=replace(PROMPTS, num_prompts_per_group=4))
    recording = replace(declared(profile), shared_prefix=ran)
    trace = plan_replay(recording, parse_mode("lengths=profile")).trace
    assert trace.block_keys is not None
    rows = trace.block_keys.start.tolist()
    assert rows[:3] == rows[3:6]
    assert len(set(rows)) == 3


@pytest.mark.slow
@given(
    rates=st.lists(st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False), min_size=1, max_size=3),
    duration_us=st.integers(1, (1 << 61) - 1),
    gap_us=st.integers(-(1 << 61), 1 << 61),
    mode=st.sampled_from(["arrivals=profile", "blis-spec"]),
)
@settings(max_examples=100, deadline=None)
def test_any_stages_give_arrivals_in_order_or_one_line(
    rates: list[float], duration_us: int, gap_us: int, mode: str
) -> None:
    stages = tuple(Stage(i, rate, duration_us) for i, rate in enumerate(rates))
    recording = declared(replace(PROFILE, stages=stages, stage_gap_us=gap_us), stage=[None] * 14)
    try:
        arrival_us = plan_replay(recording, parse_mode(mode)).trace.arrival_us
    except ReplayError as error:
        assert "\n" not in str(error)
    else:
        assert arrival_us[0] == 0
        assert (np.diff(arrival_us) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 4),
    per_group=st.integers(1, 4),
    system=st.integers(1, 70),
    question=st.integers(1, 70),
    output=st.integers(1, 40),
    multi_turn=st.booleans(),
    requests=st.integers(1, 40),
    mode=st.sampled_from(["spec", "blis-spec", "prefix=profile", "lengths=profile", "arrivals=blis-spec"]),
)
def test_any_profile_gives_a_trace_of_as_many_requests_that_fits_the_model(
    groups: int, per_group: int, system: int, question: int, output: int, multi_turn: bool, requests: int, mode: str
) -> None:
    prompts = SharedPrefix(groups, per_group, system, question, output)
    recording = declared(replace(PROFILE, shared_prefix=prompts, multi_turn=multi_turn), requests, max_model_len=200)
    plan = plan_replay(recording, parse_mode(mode))
    assert len(plan.trace) == requests
    assert plan.trace.arrival_us[0] == 0
    assert (plan.trace.prompt_tokens + plan.trace.output_tokens <= 200).all()


def test_blis_expands_each_arrival_to_five_turns_half_a_second_apart() -> None:
    """14 requests in 5 s of two stages are 2.8/s; each arrival sends 16, 40, 64, ... tokens 500,008 us apart."""
    plan = plan_replay(declared(replace(PROFILE, multi_turn=True)), parse_mode("blis-spec"))
    trace, basis = plan.trace, plan.basis
    assert basis["arrivals"] == (
        "profile.yaml as BLIS expands it: 2.8 arrivals/s throughout, 5 turns each at once, so 14 requests/s"
    )
    first = int(np.argmax(trace.prompt_tokens == 40))
    assert trace.arrival_us[first] == 500_008
    assert set(trace.prompt_tokens.tolist()) <= {16 + 24 * turn for turn in range(5)}
    assert trace.block_keys is not None
    assert trace.block_keys.start[first] == trace.block_keys.start[0]


def test_blis_cuts_prompts_that_do_not_fit() -> None:
    plan = plan_replay(declared(replace(PROFILE, multi_turn=True), max_model_len=60), parse_mode("blis-spec"))
    cut = int((plan.trace.prompt_tokens == 52).sum())
    assert cut > 0
    assert f"; {cut} prompts cut to fit max_model_len" in plan.basis["output tokens"]


def test_a_bundled_experiment_tells_what_was_declared_beside_what_ran() -> None:
    recording = bundled_recording(bundled_aliases()["34b-general"])
    assert recording.load_profile is not None
    assert recording.shared_prefix is not None
    assert (recording.load_profile.arrivals, recording.load_profile.multi_turn) == ("constant", True)
    basis = plan_replay(recording, parse_mode("spec")).basis
    assert "reconstructed gaps vary by 1.00 of their mean" in basis["arrivals"]
    assert "1,932 prompt tokens per request, 574 in the recording" in basis["output tokens"]
    assert basis["prefix cache"].endswith("membership drawn; 10 groups of 10 ran")
