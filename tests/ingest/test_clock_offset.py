"""The offset of the step clock, from running depth against requests in flight."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from builders import in_database, requests, run_of_steps, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.steps.clock_offset import estimate_offset


@pytest.mark.heavy
@settings(max_examples=25, deadline=None)
@given(
    later_us=st.integers(-200_000_000, 200_000_000),
    seed=st.integers(0, 1000),
    pre_us=st.integers(0, 15_000),
    post_us=st.integers(0, 15_000),
    every=st.sampled_from([1, 3, 10]),
)
def test_a_planted_offset_is_found_to_its_stated_uncertainty(
    later_us: int, seed: int, pre_us: int, post_us: int, every: int
) -> None:
    """60 s of 10 requests/s, 3,000 to 300 sampled steps; the interval is the delays and what sampling adds."""
    sent, sampled = run_of_steps(10.0, 60, later_us, seed=seed, pre_us=pre_us, post_us=post_us, every=every)
    found, why = estimate_offset(rows_of(sampled), sent)
    assert found is not None, why
    assert abs(found.offset_us - later_us) <= found.uncertainty_us
    assert found.uncertainty_us <= 40_000
    assert found.explained > 0.99


@pytest.mark.slow
def test_the_interval_is_as_wide_as_the_delays_on_both_sides() -> None:
    """9 ms before the queue and 6 ms after the last token: sends match at -9 ms, ends at +6 ms, to 3 ms."""
    sent, sampled = run_of_steps(20.0, 120, 500_000, pre_us=9_000, post_us=6_000)
    found, _why = estimate_offset(rows_of(sampled), sent)
    assert found is not None
    assert found.low_us == pytest.approx(491_000, abs=3_000)
    assert found.high_us == pytest.approx(506_000, abs=3_000)
    assert found.low_us <= 500_000 <= found.high_us


@pytest.mark.slow
def test_clocks_that_drift_apart_have_halves_that_do_not_meet() -> None:
    """A step clock that gains 0.5 per thousand: 30 ms after 60 s in mid of the first half, 90 ms in the second's."""
    sent, sampled = run_of_steps(20.0, 120, 0)
    fast = sampled.with_columns((pl.col("start_us") * 1.0005).cast(pl.Int64))
    found, _why = estimate_offset(rows_of(fast), sent)
    assert found is not None
    assert found.late_us[1] < found.early_us[0]
    steady, _why = estimate_offset(rows_of(sampled), sent)
    assert steady is not None
    assert steady.late_us[1] >= steady.early_us[0]


@pytest.mark.slow
@pytest.mark.parametrize("part_rows", [701, 10_000])
@pytest.mark.parametrize("ordered", [True, False])
def test_steps_in_parts_are_laid_as_steps_at_once(part_rows: int, ordered: bool) -> None:
    """25,000 steps, of which every second is looked at; the order of parts is that of time, or is not."""
    sent, sampled = run_of_steps(10.0, 500, 250_000)
    assert sampled.height > 20_000
    if not ordered:
        sampled = sampled.sample(fraction=1, shuffle=True, seed=1)
    assert estimate_offset(in_database(sampled, part_rows), sent) == estimate_offset(rows_of(sampled), sent)


@pytest.mark.slow
def test_a_full_batch_hides_no_arrival() -> None:
    """With at most 8 running and the others waiting, the sum is what the clients have in flight."""
    sent, sampled = run_of_steps(20.0, 60, 0)
    full = sampled.with_columns(
        pl.min_horizontal("running_depth", pl.lit(8)).alias("running_depth"),
        (pl.col("running_depth") - 8).clip(0).alias("waiting_depth"),
    )
    found, why = estimate_offset(rows_of(full), sent)
    assert found is not None, why
    assert abs(found.offset_us) <= found.uncertainty_us


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps": 40}, "fewer than 50 steps with a running depth"),
        ({"requests": 10}, "fewer than 20 requests with a recorded end"),
        ({"depth": 7}, "the running depth never changes"),
        ({"steps": 190}, "the steps cover too short a time"),  # 3.8 s
    ],
)
def test_too_little_to_go_by_is_said(change: dict[str, int], why: str) -> None:
    sent, sampled = run_of_steps(10.0, 60, 0)
    sent, sampled = sent.head(change.get("requests", 600)), sampled.head(change.get("steps", 3000))
    if depth := change.get("depth"):
        sampled = sampled.with_columns(pl.lit(depth, pl.Int64).alias("running_depth"))
    assert estimate_offset(rows_of(sampled), sent) == (None, why)


def test_unfinished_requests_without_an_end_are_said() -> None:
    sent, sampled = run_of_steps(10.0, 60, 0)
    lost = sent.with_columns(pl.when(pl.col("request_index") % 20 > 0).then("e2e_us"))
    assert estimate_offset(rows_of(sampled), lost) == (None, "more than 1 % of the requests have no recorded end")


def test_a_load_that_repeats_itself_fits_at_several_offsets() -> None:
    """A request of half a second every second, and the engine's record is of some seconds in between."""
    sent = requests(300, arrival_us=[i * 1_000_000 for i in range(300)], e2e_us=500_000)
    starts_us = list(range(100_000_000, 140_000_000, 20_000))
    sampled = steps(starts_us, running_depth=[int(t % 1_000_000 < 500_000) for t in starts_us])
    assert estimate_offset(rows_of(sampled), sent) == (None, "several offsets fit the running depth equally well")


def test_steps_of_another_run_do_not_fit() -> None:
    sent, _sampled = run_of_steps(10.0, 60, 0, seed=1)
    _sent, other = run_of_steps(10.0, 60, 0, seed=2)
    found, why = estimate_offset(rows_of(other), sent)
    assert found is None
    assert why


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_times_break_it(data: st.DataObject) -> None:
    """Whatever a reader lets through: the whole range of the columns, ends before sends, depths of any size."""

    def drawn(count: int) -> list[int]:
        bound = data.draw(st.sampled_from([2**62, 10**12, 10**9, 100]))
        least = data.draw(st.sampled_from([-bound, 0]))
        return data.draw(st.lists(st.integers(least, bound), min_size=count, max_size=count))

    count = data.draw(st.integers(20, 60))
    arrival_us, e2e_us, starts_us, depth = drawn(count), drawn(count), drawn(60), drawn(60)
    sent = requests(count, arrival_us=arrival_us, e2e_us=e2e_us)
    found, why = estimate_offset(rows_of(steps(starts_us, running_depth=depth)), sent)
    assert (found is None) == bool(why)


@pytest.mark.parametrize(
    ("slug", "later_s"),
    [
        ("20260218-150304-codellama-34b-tp2-general", 0.89),
        ("20260217-202857-llama-2-70b-tp4-general", 0.78),
        ("20260217-203421-llama-2-70b-hf-tp4-codegen", 0.11),
    ],
)
def test_the_constructed_stamps_of_the_h100_records_are_too_early(data_pack: Path, slug: str, later_s: float) -> None:
    """NOTES, layout: about 0.89, 0.78 and 0.11 s, which were matched by eye; the interval is of 30 ms at most."""
    with read_recording(data_pack / "h100" / slug) as recording:
        (clock,) = [clock for clock in recording.clocks if clock.name == "step"]
        first_us = recording.steps["start_us"][0]
        found, _why = estimate_offset(recording.steps, recording.requests)
        assert not [line for line in recording.missing if "clock" in line]
    assert clock.placed == "estimated from depth"
    assert clock.stamped_zero_us is not None
    assert clock.uncertainty_us is not None
    assert (clock.stamped_zero_us - clock.zero_us) / 1e6 == pytest.approx(later_s, abs=0.02)
    assert first_us / 1e6 == pytest.approx(later_s, abs=0.02)
    assert clock.uncertainty_us <= 15_000
    assert found is not None
    assert abs(found.offset_us) <= 1  # once placed, nothing is left to correct
    assert found.explained > 0.9999
    # One offset serves both load stages: the clocks do not drift.
    assert max(found.early_us[0], found.late_us[0]) < min(found.early_us[1], found.late_us[1])
