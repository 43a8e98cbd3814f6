"""Means and p99s over drawn requests against the same numbers of repeated arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted import planted_recording

from blis_replay.blis.result import token_gaps
from blis_replay.replay.driver import replay
from blis_replay.validate.metrics.latency import pooled_quantiles, statistics
from blis_replay.validate.metrics.observed import simulated_samples
from blis_replay.validate.metrics.resampling import PooledGaps, draws, quantities, request_blocks


def test_each_draw_is_what_numpy_says_of_the_repeated_requests() -> None:
    """Row 0 counts every request once; row 1 is the first draw of the seed, checked against np.repeat."""
    planted = planted_recording(seed=5)
    run = replay(planted.recording, planted.release)
    chosen = run.simulated.completed
    samples = simulated_samples(run, chosen)
    times = draws(request_blocks(run.recording, chosen, [samples]), 3, seed=1)
    table = quantities(samples, times, PooledGaps(run.token_gaps(), np.flatnonzero(chosen)))
    assert times[0].tolist() == [1] * int(chosen.sum())
    for row, count in zip(table, times, strict=True):
        e2e_us, ttft_us, tokens = (
            np.repeat(v, count) for v in (samples.e2e_us, samples.ttft_us, samples.output_tokens)
        )
        drawn = replace(samples, e2e_us=e2e_us, ttft_us=ttft_us, output_tokens=tokens)
        assert row[[0, 1]] == pytest.approx([statistics(e2e_us)[name] for name in ("mean", "p99")])
        assert row[[2, 3]] == pytest.approx([statistics(ttft_us)[name] for name in ("mean", "p99")])
        assert row[4] == pytest.approx(drawn.itl_mean_us)
    assert table[0, 5] == pytest.approx(pooled_quantiles(*run.result.inter_token_gaps(chosen))["p99"])
    twice = [np.diff(run.result.token_times_us(r)) for r in np.repeat(np.flatnonzero(chosen), times[1])]
    delay_us = run.result.post_token_us
    assert table[1, 5] == pytest.approx(np.quantile(np.concatenate(twice), 0.99) + delay_us)


def test_gaps_by_stretch_count_as_the_gaps_themselves() -> None:
    """Request 0 has a token in rows 0 to 2 and in 5, request 1 in rows 2 to 4: from 2 to 5 is a gap of its own."""
    segments = np.array([[0, 0, 3], [1, 2, 3], [0, 5, 1]], np.int64)
    gaps = token_gaps(segments, np.array([10, 20, 35, 50, 70, 95, 120], np.int64), 0)
    shared, place = gaps.by_stretch()
    for times in (np.array([1, 0]), np.array([0, 1]), np.array([3, 2])):
        assert shared.counts(times)[place].tolist() == gaps.counts(times).tolist()
    assert gaps.counts(np.array([3, 2])).tolist() == [0, 3, 3, 2, 2, 0, 0, 3]
