"""Two published tables of the step-model studies, reproduced."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from blis_replay.ingest.store import Store, read_stored
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import parse_mode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.experiment import find_experiment

EXPERIMENTS = ["34b-general", "34b-codegen", "70b-general", "70b-hf-codegen", "mixtral-general", "mixtral-codegen"]
FLOORS = "round3/idea-1-trace-replay/h1-trace-replay/trace_replay_results.csv"
DIRECT = "round4/idea-3-hybrid-calibration/h1-principled-base/output/blis_validation.csv"


def published_e2e_ms(data_pack: Path, table: str, slug: str) -> float:
    with (data_pack / "stepml" / table).open(newline="") as file:
        return next(float(row["blis_e2e_ms"]) for row in csv.DictReader(file) if row["experiment"] == slug)


# How these two studies replayed: the requests of round 3 were recorded ones, those of round 4 a flat stream.
FLOORS_MODE = "lengths=re-tokenised,prefix=none,scheduling=synchronous"
DIRECT_MODE = "arrivals=flat,prefix=none,scheduling=synchronous"


def replayed(store: Store, name: str, coefficients: str, mode: str) -> ReplayRun:
    release = load_release(coefficients)
    recording = read_stored(store, find_experiment(store, name))
    return replay(recording, release, parse_mode(mode))


def reported_e2e_ms(run: ReplayRun) -> float:
    """The mean E2E as BLIS reported it before March 2026: each request ends one step late (blis-semantics 1.7)."""
    return float((run.e2e_us + run.result.last_step_us + run.result.post_token_us).mean()) / 1000


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize(
    ("release", "mode", "published", "within"),
    [
        # Round 3: recorded arrivals, re-tokenised lengths, synchronous, one surplus step.
        ("stepml-overhead-floor", FLOORS_MODE, FLOORS, 0.002),
        # Round 4: Poisson at the mean rate, requested lengths, no prefix sharing.
        ("stepml-direct", DIRECT_MODE, DIRECT, 0.01),
    ],
)
def test_a_published_round_comes_out(
    real_store: Store, data_pack: Path, name: str, release: str, mode: str, published: str, within: float
) -> None:
    run = replayed(real_store, name, release, mode)
    expected = published_e2e_ms(data_pack, published, run.recording.slug)
    assert reported_e2e_ms(run) == pytest.approx(expected, rel=within)


def test_direct_calibration_was_no_exact_replay(real_store: Store, data_pack: Path) -> None:
    """With the recorded arrivals 70b-general is about 4 % away from the published number."""
    run = replayed(real_store, "70b-general", "stepml-direct", "prefix=none,scheduling=synchronous")
    expected = published_e2e_ms(data_pack, DIRECT, run.recording.slug)
    assert reported_e2e_ms(run) / expected - 1 == pytest.approx(0.042, abs=0.005)
