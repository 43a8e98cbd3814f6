"""Batches reconstructed from the journeys of random simulated runs equal the engine's own table of steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from engine_journeys import serve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blis_replay.blis.latency.models import BatchFeatures
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace, intern_blocks
from blis_replay.ingest.checks import reconstruction as checked
from blis_replay.ingest.checks.reconstruction import reconstruct_by_stretches, totals_of_steps
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.reconstruction import (
    TOTALS_SCHEMA,
    reconstruct,
    reconstructed_steps,
)
from blis_replay.ingest.steps.reconstruction import reconstruction_of as made_of
from blis_replay_labs.planted.experiment import SyntheticExperiment
from blis_replay_labs.planted.frames import recording_of
from blis_replay_labs.planted.generate import generate

pytestmark = pytest.mark.slow

# Prompts are paths in a tree of blocks of 4 tokens, so that some share their beginning.
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 60_000),  # arrival, us
        st.lists(st.integers(0, 1), min_size=1, max_size=9),  # contents of its blocks
        st.integers(1, 3),  # tokens in its last block
        st.integers(1, 14),  # output
        st.integers(0, 2),  # priority
        st.one_of(st.none(), st.integers(0, 60_000)),  # gives up after, us
    ),
    min_size=1,
    max_size=16,
)
ENGINES = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 40),
    max_model_len=st.just(64),
    async_scheduling=st.booleans(),
    block_size=st.just(4),
    num_gpu_blocks=st.integers(17, 40),  # one request takes up to 13: preemptions
    enable_prefix_caching=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 0, 3, 8]),
    scheduling_policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
)
COUNTS = ("running", "prefill_requests", "decode_requests")
TOKENS = ("prefill_tokens", "decode_context_tokens")
Rows = list[tuple[int, list[int], int, int, int, int | None]]


def trace_of(rows: Rows) -> RequestTrace:
    rows = sorted(rows, key=lambda row: row[0])
    arrival_us = np.array([row[0] for row in rows], np.int64) + np.arange(len(rows))
    prompts = [np.repeat(blocks, 4)[: 4 * len(blocks) - 4 + last] for _, blocks, last, *_ in rows]
    prompt_tokens = np.array([len(prompt) for prompt in prompts], np.int64)
    give_up_us = [NEVER_US if row[5] is None else int(at) + row[5] for row, at in zip(rows, arrival_us, strict=True)]
    return RequestTrace(
        arrival_us,
        prompt_tokens,
        prompt_tokens,
        np.array([row[3] for row in rows], np.int64),
        np.array(give_up_us, np.int64),
        np.array([row[4] for row in rows], np.int64),
        intern_blocks(prompts, 4),
    )


def step_us(batch: BatchFeatures) -> int:
    return 900 + 20 * batch.prefill_tokens + 30 * batch.decode_tokens


def compared(recording: Recording, truth: pl.DataFrame) -> pl.DataFrame:
    """Steps of the engine beside the reconstructed ones (``_right``)."""
    return truth.join(reconstructed_steps(reconstruct(recording), truth["step_id"].to_numpy()), on="step_id")


def differing(steps: pl.DataFrame, names: tuple[str, ...]) -> list[dict[str, int]]:
    return steps.filter(pl.any_horizontal(pl.col(name) != pl.col(f"{name}_right") for name in names)).to_dicts()


# Step 2 has 9 tokens for 5 and 12: the second gets 4, so it still has 5 in step 4, and leaves 4 to a whole chunk of 8.
SHORT_OF_BUDGET = [(0, [0] * blocks, 1, 1, 0, None) for blocks in (4, 5, 1, 3)]
NINE_TOKENS = EngineConfig(
    max_num_seqs=2,
    max_num_batched_tokens=9,
    max_model_len=64,
    async_scheduling=False,
    block_size=4,
    num_gpu_blocks=17,
    enable_prefix_caching=False,
    long_prefill_token_threshold=8,
)


@given(REQUESTS, ENGINES)
@example(SHORT_OF_BUDGET, NINE_TOKENS)
@settings(max_examples=60, deadline=None)
def test_whatever_is_certain_is_what_the_engine_ran(rows: Rows, engine: EngineConfig) -> None:
    recording, truth = serve(trace_of(rows), engine, step_us)
    if recording.journey_events.frame()["event"].is_in(["journey.SCHEDULED"]).any():
        steps = compared(recording, truth)
        assert differing(steps.filter(pl.col("certain")), COUNTS + TOKENS) == []


@given(REQUESTS, ENGINES)
@settings(max_examples=60, deadline=None)
def test_first_come_first_served_without_hits_is_certain_altogether(rows: Rows, engine: EngineConfig) -> None:
    """With no hit in a prefix cache and no threshold nothing has to be assumed, through preemptions and chunks."""
    engine = replace(engine, enable_prefix_caching=False, scheduling_policy="fcfs", long_prefill_token_threshold=0)
    recording, truth = serve(trace_of(rows), engine, step_us)
    if recording.journey_events.frame()["event"].is_in(["journey.SCHEDULED"]).any():
        steps = compared(recording, truth)
        assert differing(steps, COUNTS) == differing(steps.filter(pl.col("certain")), TOKENS) == []
        # A client that gives up in the middle of a prefill leaves open whether that had ended.
        assert steps["certain"].all() or (recording.journey_events.frame()["finish_status"] == "aborted").any()


@pytest.mark.heavy
@given(REQUESTS, ENGINES, st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_stretch_by_stretch_the_batches_are_those_of_all_at_once(rows: Rows, engine: EngineConfig, few: int) -> None:
    """Requests of every step, and tokens unless a prefill goes on from one stretch to the next."""
    recording, _truth = serve(trace_of(rows), replace(engine, enable_prefix_caching=False), step_us)
    if not recording.journey_events.frame()["event"].is_in(["journey.SCHEDULED"]).any():
        return
    whole, stretches = reconstruct(recording), [*reconstruct_by_stretches(recording, few)]
    ends = [(stretch.first_step, stretch.last_step) for stretch in stretches]
    assert (ends[0][0], ends[-1][1]) == whole.step_range()
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ends))
    built = pl.concat(
        reconstructed_steps(stretch.built, np.arange(stretch.first_step, stretch.last_step + 1))
        for stretch in stretches
    )
    admissions = whole.admissions.frame.with_columns(
        pl.coalesce("prefill_end_step", pl.col("last_step") + 1).alias("end")
    )
    cut = any(((admissions["start_step"] < first) & (admissions["end"] >= first)).any() for first, _last in ends[1:])
    names = [*COUNTS] if cut else [*TOTALS_SCHEMA]
    assert built.select(names).equals(reconstructed_steps(whole).select(names))
    assert [stretch.built.admissions.remarks for stretch in stretches] == [whole.admissions.remarks] * len(stretches)


def test_a_stretch_ends_with_the_last_prefill_before_the_next_admission() -> None:
    """Eight requests of one step of prefill each, 20 ms apart: of two admissions a stretch is cut before the second."""
    rows: Rows = [(20_000 * i, [i % 2] * 3, 1, 4, 0, None) for i in range(8)]
    recording, _truth = serve(trace_of(rows), EngineConfig(4, 40, 64, False, 4, 40), step_us)
    starts = reconstruct(recording).admissions.frame["start_step"].to_list()
    found = [stretch.first_step for stretch in reconstruct_by_stretches(recording, 1)]
    assert found == starts and len(starts) == 8


def test_of_many_journeys_only_stretches_with_wanted_steps_are_reconstructed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 300 requests in 2,700 steps, some 20 steps about the middle are the same from 50 admissions as from all."""
    recording = recording_of(generate(replace(SyntheticExperiment(), step_sample_rate=1.0)))
    steps = np.arange(1_300, 1_320)
    whole = totals_of_steps(recording, steps)
    built: list[pl.DataFrame] = []
    monkeypatch.setattr(checked, "ADMISSIONS_A_STRETCH", 50)
    monkeypatch.setattr(checked, "reconstruction_of", lambda part, of: built.append(of.frame) or made_of(part, of))
    assert totals_of_steps(recording, steps).equals(whole) and whole.height == 20
    assert 0 < sum(frame.height for frame in built) < 150
