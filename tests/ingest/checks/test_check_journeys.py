"""The checks of the step clock and of reconstructed batches, on small recordings made by hand."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from builders import recording, steps
from engine_journeys import journeys, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.checks.registry import CHECKS, run_checks
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.tables import Table

ENGINE = settings_of(max_num_batched_tokens=100, async_scheduling=False, enable_prefix_caching=False)


def finding_of(made: Recording, check: str) -> Finding:
    (finding,) = (finding for finding in run_checks(made)[0] if finding.check == check)
    return finding


def evidence_tables_of(made: Recording, check: str) -> tuple[Table, ...]:
    (chosen,) = (known for known in CHECKS if known.name == check)
    return chosen.evidence_tables(made, Context(run_checks(made)[1], None, ()))


def three_steps(**recorded: Any) -> Recording:
    """One request of 30 tokens that gets its tokens in steps 1, 2 and 3, and the records of those steps."""
    story = (("SCHEDULED", 1, 0), ("FIRST_TOKEN", 1, 1), ("FINISHED", 3, 3))
    rows = [
        {"journey": 0, "event": f"journey.{name}", "step_id": step, "time_us": 1000 * step, "output_tokens": tokens}
        for name, step, tokens in story
    ]
    records = {
        "running_depth": 1,
        "prefill_requests": [1, 0, 0],
        "decode_requests": [0, 1, 1],
        "prefill_tokens": [30, 0, 0],
        "decode_tokens": [0, 1, 1],
    }
    lifecycles = [{"journey": 0, "core_request_id": "r0", "prompt_tokens": 30, "max_tokens": 3}]
    return journeys(rows, lifecycles=lifecycles, engine=ENGINE, steps=steps([1000, 2000, 3000], **records | recorded))


def test_coverage_and_the_largest_gap_are_measured() -> None:
    """Steps 1, 2 and 12 of 12 were sampled, 10 steps and 1.5 s apart."""
    finding = finding_of(recording(steps=steps([0, 100_000, 1_600_000], [1, 2, 12])), "step_clock")
    assert (finding.severity, finding.metric) == ("note", "step_time")
    assert finding.measured["coverage"] == 3 / 12
    assert (finding.measured["largest_gap_steps"], finding.measured["largest_gap_us"]) == (10, 1_500_000)
    assert finding.message == (
        "3 of 12 steps (25.0 %) have a recorded time, 3 of them from step records; the largest gap is 10 steps, the "
        "longest 1.500 s after step 2: an idle engine or a stall in it would not be seen"
    )


def test_an_idle_engine_between_two_recorded_steps_is_no_gap() -> None:
    finding = finding_of(recording(steps=steps([0, 100_000, 9_000_000])), "step_clock")
    assert finding.measured["largest_gap_us"] is None
    assert "gap" not in finding.message


def test_mixed_clocks_make_the_step_time_unusable() -> None:
    """Every other step stands an hour later: time would run backwards against half of them."""
    starts = [i * 1000 + (i % 2) * 3_600_000_000 for i in range(100)]
    finding = finding_of(recording(steps=steps(starts)), "step_clock")
    assert finding.severity == "unusable"
    assert finding.measured["out_of_order"] == 49


def test_batches_that_agree() -> None:
    finding = finding_of(three_steps(), "reconstruction")
    assert (finding.severity, finding.metric) == ("note", "batch_composition")
    assert finding.message == "3 of 3 recorded steps are reconstructed from 1 journeys as recorded"


@pytest.mark.slow
def test_a_disagreement_comes_with_examples() -> None:
    """Step 2 is recorded with 7 decode tokens."""
    finding = finding_of(three_steps(decode_tokens=[0, 7, 1]), "reconstruction")
    assert finding.severity == "unusable"
    assert finding.measured["disagree"] == 1
    assert finding.measured["example_1"] == "step 2: recorded (1, 0, 1, 0, 7), reconstructed (1, 0, 1, 0, 1)"
    (example,) = evidence_tables_of(three_steps(decode_tokens=[0, 7, 1]), "reconstruction")[1].rows
    assert example == (2, "(1, 0, 1, 0, 7)", "(1, 0, 1, 0, 1)")


@pytest.mark.slow
def test_requests_of_no_journey_are_counted_and_a_sample_of_journeys_is_a_lower_bound() -> None:
    """20 steps with one request each; in the last, two run.  Then ten run throughout."""
    story = [("SCHEDULED", 1, 0), ("FIRST_TOKEN", 1, 1), ("FINISHED", 20, 20)]
    rows = [
        {"journey": 0, "event": f"journey.{name}", "step_id": step, "time_us": 1000 * step, "output_tokens": tokens}
        for name, step, tokens in story
    ]
    lifecycles = [{"journey": 0, "core_request_id": "r0", "prompt_tokens": 30, "max_tokens": 20}]
    split: dict[str, Any] = {
        "prefill_requests": [1] + [0] * 19,
        "decode_requests": [0] + [1] * 18 + [2],
        "prefill_tokens": [30] + [0] * 19,
        "decode_tokens": [0] + [1] * 18 + [2],
    }
    starts = range(1000, 21_000, 1000)
    made = journeys(
        rows, lifecycles=lifecycles, engine=ENGINE, steps=steps(starts, running_depth=[1] * 19 + [2], **split)
    )
    finding = finding_of(made, "reconstruction")
    assert (finding.severity, finding.measured["equal"]) == ("note", 19)
    assert "1 hold requests of no journey" in finding.message
    sampled = journeys(rows, lifecycles=lifecycles, engine=ENGINE, steps=steps(starts, running_depth=10, **split))
    finding = finding_of(sampled, "reconstruction")
    assert "1 journeys hold 10.0 % of the recorded running requests" in finding.message
    assert "equal" not in finding.measured


@pytest.mark.slow
def test_several_tokens_a_step_are_named() -> None:
    made = three_steps()
    several = pl.col("output_tokens") * 4
    made = journeys(
        made.journey_events.frame().with_columns(several).to_dicts(),
        lifecycles=made.lifecycles.frame().to_dicts(),
        engine=ENGINE,
    )
    finding = finding_of(made, "reconstruction")
    assert finding.severity == "unusable"
    assert "speculative decoding" in finding.message
    assert evidence_tables_of(made, "reconstruction") == ()


# Any order, any number, none at all: the readers let every count through that a double can hold.
numbers = st.one_of(st.none(), st.integers(0, 12), st.sampled_from([2**31, 2**40, 2**53]))
odd_events = st.lists(
    st.fixed_dictionaries(
        {
            "journey": st.integers(0, 2),
            "event": st.sampled_from([f"journey.{n}" for n in ("SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "FINISHED")]),
            "time_us": st.integers(0, 20_000),
            "step_id": numbers,
            "schedule_kind": st.sampled_from([None, "FIRST", "RESUME"]),
            "output_tokens": numbers,
            "preemptions": numbers,
            "finish_status": st.sampled_from([None, "length", "stopped", "aborted", "error"]),
        }
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.heavy
@given(
    odd_events, st.lists(st.tuples(numbers, numbers), min_size=3, max_size=3), st.booleans(), st.sampled_from([0, 7])
)
@settings(max_examples=30, deadline=None)
def test_no_journey_breaks_a_check(
    events: list[dict[str, Any]], lengths: list[tuple[int | None, int | None]], asynchronous: bool, threshold: int
) -> None:
    """Each either says what it found or why it did not look; never more than one finding."""
    lifecycles = [
        {"journey": i, "core_request_id": f"r{i}", "prompt_tokens": prompt, "max_tokens": most}
        for i, (prompt, most) in enumerate(lengths)
    ]
    engine = settings_of(
        max_num_batched_tokens=9, async_scheduling=asynchronous, long_prefill_token_threshold=threshold
    )
    made = journeys(events, lifecycles=lifecycles, engine=engine, steps=steps([1000, 2000, 3000]))
    findings, measured = run_checks(made)
    for check in ("step_clock", "reconstruction"):
        (finding,) = (finding for finding in findings if finding.check == check)
        assert finding.message
        (chosen,) = (known for known in CHECKS if known.name == check)
        chosen.evidence_tables(made, Context(measured, None, ()))


@pytest.mark.slow
def test_a_prefill_that_ended_before_it_began_breaks_no_check() -> None:
    """Scheduled first, so it says, with 2^31 tokens behind it: its prefill would have begun long before step 1."""
    odd = {"journey": 0, "event": "journey.SCHEDULED", "time_us": 0, "step_id": 1, "output_tokens": 2**31}
    again = {**odd, "output_tokens": None}
    made = journeys(
        [{**again, "step_id": None}] * 3 + [again, odd],
        lifecycles=[{"journey": 0, "core_request_id": "r0", "prompt_tokens": 0}],
        engine=settings_of(max_num_batched_tokens=9, async_scheduling=False),
        steps=steps([1000, 2000, 3000]),
    )
    assert finding_of(made, "reconstruction").message


def test_a_prefill_without_end_is_not_made_up_for_by_one_that_ended_before_it_began() -> None:
    """Journey 2 prefills for 2^40 steps, and 2^31 tokens later would have begun as long before: 10 TB of chunks."""
    scheduled = {"journey": 2, "event": "journey.SCHEDULED", "time_us": 0, "step_id": 1, "output_tokens": None}
    first_token = {**scheduled, "event": "journey.FIRST_TOKEN", "step_id": 2**40}
    again = {**scheduled, "step_id": 2**31, "output_tokens": 2**40}
    made = journeys(
        [scheduled, first_token, again],
        lifecycles=[{"journey": 2, "core_request_id": "r2", "prompt_tokens": 0}],
        engine=settings_of(max_num_batched_tokens=9, async_scheduling=False),
        steps=steps([1000, 2000, 3000]),
    )
    assert "prefill chunks: their steps are mistaken" in finding_of(made, "reconstruction").message


@pytest.mark.slow
@pytest.mark.parametrize("check", ["step_clock", "reconstruction"])
def test_without_records_nothing_is_claimed(check: str) -> None:
    assert finding_of(recording(), check).message.startswith("not checked: ")
    assert evidence_tables_of(recording(), check) == ()
