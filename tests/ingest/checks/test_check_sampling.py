"""Check 5: rate, randomness and bias of the sampled steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from builders import recording, requests, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.checks.sampling import check, evidence_tables
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.stream import NO_EVENTS

CONTEXT = Context(NO_EVENTS, None, ())


def sampled(ids: list[int], **columns: object) -> Recording:
    return recording(steps=steps([i * 20_000 for i in ids], ids, **columns))


def finding_of(made: Recording) -> Finding:
    (finding,) = check(made, CONTEXT)
    return finding


def drawn(chance: float, count: int = 20_000, seed: int = 1) -> list[int]:
    return (np.flatnonzero(np.random.default_rng(seed).random(count) < chance) + 1).tolist()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.floats(0.02, 0.9), st.integers(0, 10**6))
def test_a_random_draw_is_recognised_at_any_rate(chance: float, seed: int) -> None:
    finding = finding_of(sampled(drawn(chance, seed=seed)))
    assert "drawn at random" in finding.message
    assert finding.measured["rate"] == pytest.approx(chance, rel=0.3)
    assert finding.severity == "note"


def test_every_tenth_step_is_too_regular_for_a_random_draw() -> None:
    """All gaps are 10: variation 0 against sqrt(0.9) = 0.949, largest over smallest 1."""
    finding = finding_of(sampled(list(range(1, 5001, 10))))
    assert "too regular for a random draw" in finding.message
    assert finding.measured["gap_variation"] == 0
    assert finding.measured["gap_variation_of_random_draw"] == pytest.approx(0.9487, abs=1e-4)
    assert finding.measured["gap_largest_over_smallest"] == 1


def test_lost_stretches_make_clusters_and_an_uneven_rate() -> None:
    """Of 20,000 steps, every tenth at random, those from 4,000 to 12,000 are gone."""
    finding = finding_of(sampled([i for i in drawn(0.1) if not 4_000 < i < 12_000]))
    assert "in clusters, stretches are lost" in finding.message
    assert "the rate varies along the run, from 0.0 to" in finding.message


def test_all_steps_are_said_to_be_all() -> None:
    """100 steps of 4 decodes are 40 requests of 11 tokens, the first of which needs no decode."""
    made = recording(requests=requests(40), steps=steps(range(0, 2_000_000, 20_000)))
    assert finding_of(made).message == "every step of the range was recorded"


def test_all_steps_have_one_rate_where_their_number_is_no_multiple_of_ten() -> None:
    """4,667 steps: a tenth of the ids has 466 or 467 of them, which is all of them (was 99.9 to 100.1 %)."""
    finding = finding_of(sampled(list(range(1, 4668))))
    assert "the rate varies" not in finding.message
    assert finding.measured["rate_lowest_tenth"] == finding.measured["rate_highest_tenth"] == 1


def test_few_steps_or_none_are_not_checked() -> None:
    assert finding_of(recording()).message == "not checked: no step records"
    assert finding_of(sampled(list(range(1, 31)))).message == "not checked: no more than 30 step records"


def test_a_sample_that_prefers_deep_steps_is_reported() -> None:
    """The chance of a step is 5 or 40 %, as its depth is 1 or 9; depths alternate in stretches of ten steps."""
    rng, depth = np.random.default_rng(3), np.where(np.arange(20_000) // 10 % 2, 9, 1)
    ids = np.flatnonzero(rng.random(20_000) < np.where(depth == 9, 0.4, 0.05))
    finding = finding_of(sampled((ids + 1).tolist(), running_depth=depth[ids].tolist()))
    assert "how often a step was sampled depends on its depth" in finding.message


def test_dropped_events_do_not_hide_the_rate_of_the_draw() -> None:
    """The last 40 steps of every 100, all that an SDK left of a span: 39 of 40 gaps are 1."""
    kept = [i for i in range(1, 10_001) if i % 100 >= 60]
    finding = finding_of(Recording(**(vars(sampled(kept)) | {"dropped_step_events": 6_000})))
    assert finding.measured["rate"] == pytest.approx(0.4, abs=0.005)
    assert finding.measured["rate_between_losses"] == pytest.approx(39 / 40, abs=0.001)
    assert finding.message.endswith(
        "the tracing SDK dropped 6000 events; between the losses 98 % of steps were sampled"
    )


@pytest.mark.parametrize(("decode", "said"), [(4, False), (5, True)])
def test_scaled_decode_tokens_are_held_against_the_requests(decode: int, said: bool) -> None:
    """1,000 steps, every other one recorded, of 4 decodes: 4,000 tokens, for 400 requests of 11 tokens 10 each."""
    ids = list(range(1, 1001, 2))
    made = sampled(ids, decode_tokens=decode)
    finding = finding_of(Recording(**(vars(made) | {"requests": rows_of(requests(400))})))
    assert finding.measured["decode_tokens_expected"] == 10
    assert finding.measured["decode_tokens_per_request"] == pytest.approx(decode * 2.5, rel=0.01)
    assert ("the requests had 10" in finding.message) == said


def test_the_tables_have_every_gap_and_every_step() -> None:
    ids = drawn(0.1)
    gaps, tenths = evidence_tables(sampled(ids), CONTEXT)
    assert sum(int(row[1] or 0) for row in gaps.rows) == len(ids) - 1
    assert sum(float(row[2] or 0) for row in gaps.rows) == pytest.approx(len(ids) - 1, rel=0.01)
    assert len(tenths.rows) == 10


def test_the_check_is_run_with_the_others() -> None:
    assert [f.check for f in run_checks(recording())[0]].count("sampling") == 1


@pytest.mark.parametrize(
    ("slug", "count", "rate", "largest"),
    [
        ("20260218-150304-codellama-34b-tp2-general", 7441, 0.0972, 94),
        ("20260217-202857-llama-2-70b-tp4-general", 5992, 0.0999, 94),
        ("20260217-203421-llama-2-70b-hf-tp4-codegen", 6679, 0.1000, 77),
    ],
)
def test_the_h100_steps_are_a_random_tenth(data_pack: Path, slug: str, count: int, rate: float, largest: int) -> None:
    """Numbers of steps as in NOTES, section 2; its decode tokens per request are 243.5 to 245.3 of 246 to 247."""
    with read_recording(data_pack / "h100" / slug) as made:
        finding = finding_of(made)
    measured = finding.measured
    assert measured["steps"] == count
    assert measured["rate"] == pytest.approx(rate, abs=1e-4)
    assert measured["gap_variation"] == pytest.approx(measured["gap_variation_of_random_draw"], abs=0.012)
    assert measured["gap_largest_over_smallest"] == largest
    assert measured["decode_tokens_per_request"] == pytest.approx(244.4, abs=1.0)
    assert "drawn at random" in finding.message
    assert ";" not in finding.message  # and nothing else is amiss


def test_steps_of_which_an_sdk_dropped_some_were_all_sampled(data_pack: Path) -> None:
    """kv-tight-sync: every step was sampled, and spans of 100 kept their last 128 events (README of vllm-traces)."""
    with read_recording(data_pack / "vllm-traces" / "kv-tight-sync") as made:
        finding = finding_of(made)
    assert finding.measured["rate_between_losses"] == pytest.approx(1, abs=0.02)
    assert "in clusters, stretches are lost" in finding.message
    assert "between the losses 99 % of steps were sampled" in finding.message


def test_the_published_gap_variation_is_that_of_run_lengths(data_pack: Path) -> None:
    """0.44 and 4.2 (sampling gate of the step-model study) are over the numbers of sampled steps of 16 experiments."""
    path = data_pack / "stepml/round1/i2-analytical/h1-features/output/per_experiment_correlations.csv"
    counts = pl.read_csv(path).group_by("experiment_id").agg(pl.col("n_steps").max())["n_steps"]
    assert (counts.len(), counts.sum()) == (16, 122_752)
    assert float(counts.std(ddof=0) / counts.mean()) == pytest.approx(0.44, abs=0.005)  # type: ignore[operator]
    assert counts.max() / counts.min() == pytest.approx(4.2, abs=0.05)  # type: ignore[operator]
