"""Batches from journeys, by hand: chunks, preemption, cancelled and incomplete journeys, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from builders import steps
from engine_journeys import journeys, prefills_of, settings_of

from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.recording import SNAPSHOT_SCHEMA, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.steps.prefill import ASSUMED, CACHING_OFF, DEALT_OUT, SNAPSHOT, STEP_TOTALS
from blis_replay.ingest.steps.reconstruction import reconstruct, reconstructed_steps

Story = list[tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, str]]


def told(
    stories: dict[int, Story],
    prompts: dict[int, int],
    fields: dict[str, Any] | None = None,
    cached: dict[int, int] | None = None,
    **engine: Any,
) -> Recording:
    """A recording of journeys.  A story: events ``(name, step, output tokens, finish status)``; 1 ms per step."""
    rows = []
    for journey, story in stories.items():
        for name, step, *more in story:
            row = {"journey": journey, "event": f"journey.{name}", "step_id": step, "time_us": 1000 * step}
            row["output_tokens"] = more[0] if more else 0
            row["finish_status"] = (more[1] if len(more) > 1 else "length") if name == "FINISHED" else None
            rows.append(row)
    lifecycles = [
        {
            "journey": journey,
            "core_request_id": f"r{journey}",
            "prompt_tokens": prompt,
            "max_tokens": 100,
            "cached_prompt_tokens": (cached or {}).get(journey),
        }
        for journey, prompt in prompts.items()
    ]
    arguments = {"max_num_batched_tokens": 100, "async_scheduling": False, "enable_prefix_caching": False} | engine
    return journeys(rows, lifecycles=lifecycles, engine=settings_of(**arguments), **(fields or {}))


def totals(recording: Recording, *columns: str) -> list[tuple[Any, ...]]:
    return reconstructed_steps(reconstruct(recording)).select(columns).rows()


SPLIT = ("running", "prefill_tokens", "decode_tokens", "decode_context_tokens")


def test_a_long_prompt_takes_what_the_decodes_and_the_earlier_prompt_leave() -> None:
    """Budget 100.  A: prompt 30, tokens in steps 1 to 4.  B: prompt 210 from step 2 on, behind A's decodes: 99, 99, 12.

    A decodes in steps 2, 3, 4 with its prompt of 30 and 1, 2, 3 tokens.
    """
    a: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 4, 4)]
    b: Story = [("SCHEDULED", 2), ("FIRST_TOKEN", 4, 1), ("FINISHED", 5, 2)]
    made = told({0: a, 1: b}, {0: 30, 1: 210})
    assert totals(made, *SPLIT) == [(1, 30, 0, 0), (2, 99, 1, 31), (2, 99, 1, 32), (2, 12, 1, 33), (1, 0, 1, 211)]
    rows = prefills_of(reconstruct(made))
    assert rows.filter(pl.col("journey") == 1).drop("journey", "certain").rows() == [
        (2, 99, 99),
        (3, 99, 198),
        (4, 12, 210),
    ]
    assert rows["certain"].all()


def test_the_prompt_that_is_cut_was_admitted_last_in_its_step() -> None:
    """B and C are admitted in step 1, with 60 and 80 tokens: C ends there, so B, which arrived first, is cut to 20."""
    b: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 2, 1), ("FINISHED", 2, 1)]
    c: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 1, 1)]
    rows = prefills_of(reconstruct(told({0: b, 1: c}, {0: 60, 1: 80})))
    assert rows.select("step_id", "journey", "tokens").rows() == [(1, 1, 80), (1, 0, 20), (2, 0, 40)]


def test_a_preempted_request_computes_prompt_and_output_again() -> None:
    """Prompt 30; tokens in steps 1, 2, 3; preempted in step 4, resumed in step 6 with 33 tokens; done with 5 in step 7.

    It recomputes all 33 in step 6 (its fourth token) and decodes in step 7 with 34 in its context.  The
    recorder labels the recompute decode: 33 decode tokens.
    """
    story: Story = [
        ("SCHEDULED", 1),
        ("FIRST_TOKEN", 1, 1),
        ("PREEMPTED", 4, 3),
        ("SCHEDULED", 6, 3),
        ("FINISHED", 7, 5),
    ]
    made = told({0: story}, {0: 30})
    assert totals(made, *SPLIT) == [
        (1, 30, 0, 0),
        (1, 0, 1, 31),
        (1, 0, 1, 32),
        (0, 0, 0, 0),
        (0, 0, 0, 0),
        (1, 33, 0, 0),
        (1, 0, 1, 34),
    ]
    labelled = totals(made, "labelled_prefill_tokens", "labelled_decode_tokens")
    assert labelled == [(30, 0), (0, 1), (0, 1), (0, 0), (0, 0), (0, 33), (0, 1)]


def test_preempted_in_the_middle_of_its_prompt() -> None:
    """Prompt 250, budget 100: two chunks of 100, preempted in step 3, from the start in steps 5 to 7."""
    story: Story = [("SCHEDULED", 1), ("PREEMPTED", 3), ("SCHEDULED", 5), ("FIRST_TOKEN", 7, 1), ("FINISHED", 7, 1)]
    tokens = [(100,), (100,), (0,), (0,), (100,), (100,), (50,)]
    assert totals(told({0: story}, {0: 250}), "prefill_tokens") == tokens


def test_asynchronous_scheduling_labels_the_first_decode_prefill_and_holds_a_request_longer() -> None:
    """One request, prompt 30, tokens in steps 1 to 3: the record of step 2 says one prefill of one token."""
    story: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 3, 3)]
    built = reconstruct(told({0: story}, {0: 30}, async_scheduling=True))
    found = reconstructed_steps(built, step_ids=pl.Series([1, 2, 3, 4, 5]).to_numpy())
    assert found["running"].to_list() == [1, 1, 1, 1, 0]
    assert found.select("prefill_tokens", "decode_tokens").rows() == [(30, 0), (0, 1), (0, 1), (0, 0), (0, 0)]
    split = found.select("labelled_prefill_requests", "labelled_prefill_tokens", "labelled_decode_tokens")
    assert split.rows() == [(1, 30, 0), (1, 1, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize(("status", "decodes"), [("length", 2), ("stopped", 3), ("aborted", 2)])
def test_a_request_that_stops_by_itself_has_one_decode_too_many_asynchronously(status: str, decodes: int) -> None:
    story: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 3, 3, status)]
    built = reconstruct(told({0: story}, {0: 30}, async_scheduling=True))
    assert reconstructed_steps(built, pl.Series([1, 2, 3, 4]).to_numpy())["decode_tokens"].sum() == decodes


def test_a_request_given_up_in_its_prompt_and_one_given_up_in_the_queue() -> None:
    """Prompt 250: chunks in steps 1 and 2, then its client is gone.  The other was never admitted."""
    made = told(
        {0: [("SCHEDULED", 1), ("FINISHED", 2, 0, "aborted")], 1: [("FINISHED", 2, 0, "aborted")]}, {0: 250, 1: 9}
    )
    assert totals(made, *SPLIT) == [(1, 100, 0, 0), (1, 100, 0, 0)]
    assert reconstruct(made).admissions.remarks == {}


def test_hits_come_from_snapshots_and_from_the_tokens_of_recorded_steps() -> None:
    """Prompts of 50.  r0: its snapshot says 16 were cached.  r1 shares step 1 with it, where 60 prefill tokens are
    recorded: 34 are r0's, so 26 r1's.  r2 and r3 share step 2: 41 of 100 tokens, which are theirs together.  r4:
    not known, in step 4, without a record; taken to have found as much as the others, 99 of 200 (50 * 99 // 200 = 24).
    """
    stories: dict[int, Story] = {
        journey: [("SCHEDULED", step), ("FIRST_TOKEN", step, 1), ("FINISHED", step, 1)]
        for journey, step in enumerate((1, 1, 2, 2, 4))
    }
    snapshot = {"step_id": 1, "request_id": "r0", "computed_tokens": 16}
    counts = {"running_depth": 2, "prefill_requests": 2, "decode_requests": 0, "decode_tokens": 0}
    fields = {
        "snapshots": rows_of(pl.DataFrame([snapshot], schema=SNAPSHOT_SCHEMA)),
        "steps": steps([1000, 2000], prefill_tokens=[60, 41], **counts),
    }
    made = told(stories, dict.fromkeys(range(5), 50), fields, enable_prefix_caching=True)
    built = reconstruct(made)
    assert built.hit_sources.to_list() == [SNAPSHOT, STEP_TOTALS, DEALT_OUT, DEALT_OUT, ASSUMED]
    rows = prefills_of(built)
    assert rows["tokens"].to_list() == [34, 26, 20, 21, 26]
    assert rows["certain"].to_list() == [True, True, False, False, False]
    # The sum of step 2 is certain, its parts are not.
    found = reconstructed_steps(built)
    assert found.select("prefill_tokens", "certain").rows() == [(60, True), (41, True), (0, True), (26, False)]


def test_the_hit_of_the_first_admission_is_not_that_of_the_second() -> None:
    """20 of 60 tokens were cached at first; the budget of 30 was not enough.  After the preemption all is taken to be
    computed again, in two steps: of the first of them the budget is certain, whatever was cached then.
    """
    story: Story = [("SCHEDULED", 1), ("PREEMPTED", 2), ("SCHEDULED", 3), ("FIRST_TOKEN", 4, 1), ("FINISHED", 4, 1)]
    made = told({0: story}, {0: 60}, cached={0: 20}, enable_prefix_caching=True, max_num_batched_tokens=30)
    again = (pl.col("event") == "journey.SCHEDULED") & (pl.col("step_id") == 3)
    resumed = made.journey_events.frame().with_columns(pl.when(again).then(1).otherwise(0).alias("preemptions"))
    made = replace(made, journey_events=rows_of(resumed))
    assert reconstruct(made).hit_sources.to_list() == [SNAPSHOT, ASSUMED]
    assert totals(made, "prefill_tokens", "certain") == [(30, True), (0, True), (30, True), (30, False)]


def test_a_threshold_makes_chunks_of_one_length() -> None:
    """At most 40 tokens per request and step: 40, 40, 10."""
    story: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 3, 1), ("FINISHED", 3, 1)]
    made = told({0: story}, {0: 90}, long_prefill_token_threshold=40)
    assert totals(made, "prefill_tokens", "certain") == [(40, True), (40, True), (10, True)]
    # Three of them do not fit into one step: who was cut is not worked out.
    crowd = told(dict.fromkeys(range(3), story), dict.fromkeys(range(3), 90), long_prefill_token_threshold=40)
    assert [certain for (certain,) in totals(crowd, "certain")] == [False, False, False]


def test_a_journey_whose_beginning_was_dropped_counts_from_its_first_token_on() -> None:
    made = told({0: [("FIRST_TOKEN", 3, 1), ("FINISHED", 5, 3)]}, {0: 30})
    built = reconstruct(made)
    (remark,) = built.admissions.remarks
    assert remark.startswith("the first journey.SCHEDULED is not recorded")
    found = reconstructed_steps(built)
    assert found.select("step_id", "decode_tokens").rows() == [(3, 0), (4, 1), (5, 1)]
    assert not found["certain"].any()


def test_journeys_without_an_end_and_with_a_gap_are_told_apart() -> None:
    """The first ends in no event; the second was preempted and finished without having been resumed."""
    stories: dict[int, Story] = {
        0: [("SCHEDULED", 1), ("FIRST_TOKEN", 2, 1)],
        1: [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("PREEMPTED", 3, 2), ("FINISHED", 9, 5)],
    }
    remarks = reconstruct(told(stories, {0: 150, 1: 20})).admissions.remarks
    assert remarks == {
        "they have no end: they count to their last recorded step": 1,
        "their steps contradict each other": 1,
    }


def test_speculative_decoding_is_refused_by_name() -> None:
    """Six tokens in three steps."""
    made = told({0: [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 3, 6)]}, {0: 30})
    with pytest.raises(ReconstructionError, match=r"1 of 1 requests got more tokens .* speculative decoding"):
        reconstruct(made)


def test_what_cannot_be_reconstructed_is_refused_in_one_line() -> None:
    with pytest.raises(ReconstructionError, match="no journeys were recorded"):
        reconstruct(told({}, {}))
    far = told({0: [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 2**40, 2**40)]}, {0: 30})
    built = reconstruct(far)
    with pytest.raises(ReconstructionError, match="more than 5000000: name the steps"):
        reconstructed_steps(built)
    assert reconstructed_steps(built, pl.Series([2**39]).to_numpy())["decode_tokens"].to_list() == [1]
    endless: Story = [("SCHEDULED", 1), ("FIRST_TOKEN", 2**40, 1), ("FINISHED", 2**40, 1)]
    with pytest.raises(ReconstructionError, match="prefill chunks: their steps are mistaken"):
        reconstruct(told({0: endless}, {0: 2**41}))


def test_caching_that_is_off_leaves_nothing_to_assume() -> None:
    built = reconstruct(told({0: [("SCHEDULED", 1), ("FIRST_TOKEN", 1, 1), ("FINISHED", 1, 1)]}, {0: 30}))
    assert built.hit_sources.to_list() == [CACHING_OFF]
