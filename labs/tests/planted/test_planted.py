"""Planted causes: the true release replays a planted recording exactly, and a cause changes what it is about only."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import (
    CAUSES,
    PLANTED,
    Planted,
    WrongSimulator,
    planted_recording,
    wrong_simulator,
)

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import open_store
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import parse_mode
from blis_replay.validate.comparison.validated import compare_experiment
from blis_replay_labs.planted.files import write_experiment


@pytest.fixture(scope="module")
def planted() -> Planted:
    return planted_recording()


def simulated(wrong: WrongSimulator) -> ReplayRun:
    return replay(wrong.recording, wrong.release, parse_mode(wrong.replay))


def equal_to_recording(run: ReplayRun, recording: Recording) -> bool:
    columns = recording.requests
    return run.ttft_us.tolist() == columns["ttft_us"].to_list() and run.e2e_us.tolist() == columns["e2e_us"].to_list()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_true_release_replays_the_recording_to_the_microsecond(seed: int) -> None:
    made = planted_recording(seed)
    run = simulated(wrong_simulator(made))
    assert equal_to_recording(run, made.recording)
    gap_us, count = run.result.inter_token_gaps(run.simulated.completed)
    assert [gap_us.tolist(), count.tolist()] == [part.tolist() for part in made.token_gaps]


def test_it_is_a_moderate_load_with_hits_and_without_evictions(planted: Planted) -> None:
    """(4 + 11) x 40 = 600 requests; all but the first round of 30 prompts find 24 blocks or so of 400 tokens."""
    result = planted.truth.result
    assert planted.recording.requests.height == 600
    assert result.preemptions.sum() == 0
    assert 10 < result.steps["running_depth"].max() < PLANTED.engine.max_num_seqs / 2
    assert np.median(result.cached_tokens) == 384


def test_journeys_and_steps_are_complete_and_in_order(planted: Planted) -> None:
    lives = planted.recording.lifecycles.frame()
    stamps = ("arrived_us", "queued_us", "scheduled_us", "first_token_us", "finished_us", "departed_us")
    for earlier, later in itertools.pairwise(stamps):
        assert (lives[earlier] <= lives[later]).all()
    # The delays of PLANTED: 5 ms before the queue; 150 us a token and 400 us a request on the way out.
    # The loop takes a request in when the step under way has ended, so up to a step later.
    waited_us = lives["queued_us"] - lives["arrived_us"] - 5_000
    assert waited_us.min() == 0 < waited_us.max() <= planted.truth.result.steps["end_us"].max()
    assert (lives["first_response_us"] - lives["first_token_us"]).unique().to_list() == [150]
    assert (lives["departed_us"] - lives["finished_us"]).unique().to_list() == [160 * 150 + 400]
    assert planted.recording.steps["step_id"].to_list() == list(range(1, len(planted.truth.result.steps) + 1))
    sampled = planted_recording(spec=replace(PLANTED, step_sample_rate=0.1)).recording.steps
    assert 0.08 < sampled.height / planted.recording.steps.height < 0.12


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_makes_the_simulator_wrong(planted: Planted, cause: str) -> None:
    wrong = wrong_simulator(planted, cause)
    run = simulated(wrong)
    assert not equal_to_recording(run, planted.recording)
    # Nothing else is changed: where the cause lies elsewhere, release, engine and mode are the true ones.
    told = wrong.recording.engine != planted.recording.engine
    places = (wrong.release != planted.release, told, wrong.replay != "exact")
    assert sum(places) == 1


def test_delays_are_wrong_by_exactly_what_was_planted(planted: Planted) -> None:
    """No delay blocks the server, so each output-processing delay shifts a request by itself: 160 x 400 + 5,000 us."""
    run = simulated(wrong_simulator(planted, "output_processing"))
    requests = planted.recording.requests
    assert np.unique(run.ttft_us - requests["ttft_us"].to_numpy()).tolist() == [400]
    assert np.unique(run.e2e_us - requests["e2e_us"].to_numpy()).tolist() == [160 * 400 + 5_000]


def test_halved_blocks_evict_requests(planted: Planted) -> None:
    wrong = wrong_simulator(planted, "kv_blocks")
    assert wrong.recording.engine["num_gpu_blocks"].value == 650
    assert simulated(wrong).result.preemptions.sum() > 0


def test_two_causes_are_planted_together(planted: Planted) -> None:
    wrong = wrong_simulator(planted, "prefix", "lengths", "step_time")
    assert wrong.replay == "prefix=none,lengths=re-tokenised"
    latency = wrong.release.models[0].latency
    assert latency == replace(PLANTED.latency, intercept_ns=10_000_000)


@pytest.mark.slow
def test_a_store_keeps_it_and_the_true_release_has_no_error(tmp_path: Path) -> None:
    # A mean ITL that comes from E2E and TTFT is that of the tokens where nothing follows the last of them.
    spec = replace(PLANTED, lifecycle=replace(PLANTED.lifecycle, post_request_us=0))
    made = planted_recording(spec=spec, token_file=tmp_path / "tokens.int64")
    with open_store(tmp_path / "store.duckdb") as store:
        ingest_recording(store, made.recording)
        comparison = compare_experiment(store, made.recording.slug, made.release, parse_mode("exact"))
    errors = {
        (metric, statistic): cell.error
        for metric, cells in comparison.metrics.items()
        for statistic, cell in cells.items()
    }
    assert errors.keys() >= {(metric, "p99") for metric in ("e2e", "ttft", "itl", "tpot")}
    assert set(errors.values()) == {0.0}


@pytest.mark.slow
def test_the_files_of_it_are_read_as_the_same_recording(planted: Planted, tmp_path: Path) -> None:
    directory = tmp_path / planted.truth.spec.slug
    write_experiment(planted.truth, directory)
    with read_recording(directory) as read:
        run = replay(read, planted.release)
    assert equal_to_recording(run, planted.recording)
    made = planted.recording
    assert read.load_profile == made.load_profile
    assert read.steps.frame().equals(made.steps.frame())
    assert read.journey_events.frame().equals(made.journey_events.frame())
    # Ids of the client are others than those of the server, and hits are not in the files.
    unread = ["request_index", "cached_prompt_tokens"]
    assert read.lifecycles.frame().drop(unread).equals(made.lifecycles.frame().drop(unread))


def test_clients_that_gave_up_are_refused() -> None:
    with pytest.raises(ValueError, match="without failures"):
        planted_recording(spec=replace(PLANTED, failures=3))
