"""The check of the step clock, on small recordings made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from builders import recording, steps
from engine_journeys import journeys, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.checks.registry import CHECKS, run_checks
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.steps.admissions import admissions_of
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
    (finding,) = (finding for finding in findings if finding.check == "step_clock")
    assert finding.message
    (chosen,) = (known for known in CHECKS if known.name == "step_clock")
    chosen.evidence_tables(made, Context(measured, None, ()))
    admissions_of(made)


@pytest.mark.slow
def test_without_records_nothing_is_claimed() -> None:
    assert finding_of(recording(), "step_clock").message.startswith("not checked: ")
    assert evidence_tables_of(recording(), "step_clock") == ()
