"""The check of the step clock, on small recordings made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import recording, steps
from engine_journeys import journeys, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.steps.admissions import admissions_of

ENGINE = settings_of(max_num_batched_tokens=100, async_scheduling=False, enable_prefix_caching=False)


def finding_of(made: Recording, check: str) -> Finding:
    (finding,) = (finding for finding in run_checks(made)[0] if finding.check == check)
    return finding


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
        "3 of 12 steps (25.0 %) have a recorded time; the largest gap is 10 steps, the longest 1.500 s after step 2: "
        "an idle engine or a stall in it would not be seen"
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


def drawn(chance: float, count: int = 20_000, seed: int = 1) -> list[int]:
    return (np.flatnonzero(np.random.default_rng(seed).random(count) < chance) + 1).tolist()


def sampled(ids: list[int], **others: Any) -> Finding:
    return finding_of(replace(recording(steps=steps([i * 20_000 for i in ids], ids)), **others), "step_clock")


@pytest.mark.parametrize("chance", [0.02, 0.1, 0.5, 0.9])
def test_a_random_draw_is_recognised_at_any_rate(chance: float) -> None:
    finding = sampled(drawn(chance))
    assert "drawn at random" in finding.message
    assert finding.measured["coverage"] == pytest.approx(chance, rel=0.1)


def test_every_tenth_step_is_too_regular_for_a_random_draw() -> None:
    """All gaps are 10: variation 0 against sqrt(0.9) = 0.949."""
    finding = sampled(list(range(1, 5001, 10)))
    assert "too regular for a random draw: gaps of variation 0.000 (0.949" in finding.message


def test_lost_stretches_make_clusters() -> None:
    """Of 20,000 steps, every tenth at random, those from 4,000 to 12,000 are gone."""
    assert "in clusters: gaps" in sampled([i for i in drawn(0.1) if not 4_000 < i < 12_000]).message


def test_dropped_events_do_not_hide_the_rate_of_the_draw() -> None:
    """The last 40 steps of every 100, all that an SDK left of a span: 39 of 40 gaps are 1."""
    finding = sampled([i for i in range(1, 10_001) if i % 100 >= 60], dropped_step_events=6_000)
    assert finding.measured["coverage"] == pytest.approx(0.4, abs=0.005)
    assert finding.measured["coverage_between_losses"] == pytest.approx(39 / 40, abs=0.001)
    assert finding.message.endswith("dropped 6000 events; between the losses 98 % of steps were sampled")


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
    findings = run_checks(made)[0]
    (finding,) = (finding for finding in findings if finding.check == "step_clock")
    assert finding.message
    admissions_of(made)


@pytest.mark.slow
def test_without_records_nothing_is_claimed() -> None:
    assert finding_of(recording(), "step_clock").message.startswith("not checked: ")
