"""Blocks of time: what is drawn together, and how often an interval then holds the truth."""

from __future__ import annotations

import numpy as np
import pytest

from blis_replay.validate.metrics.resampling import Blocks, resampled, time_blocks


def test_blocks_hold_four_residences_and_are_drawn_whole() -> None:
    """100 requests a second apart that take 2 s: blocks of 8 s, 12 of them (100 s / 8 s), 8 or 9 requests each."""
    arrival_us = np.arange(100) * 1_000_000
    blocks = time_blocks(arrival_us, 2_000_000, np.zeros(100, np.int64), [np.tile([1.0, -1.0], 50)])
    assert len(blocks.stratum) == 12
    assert set(np.bincount(blocks.number)) == {8, 9}
    for draw in resampled(blocks, 5):
        drawn = np.bincount(draw, minlength=100)
        assert all(len(np.unique(drawn[blocks.number == number])) == 1 for number in range(12))


def test_each_load_stage_keeps_its_number_of_blocks() -> None:
    """Which stages there are is no chance: 39 s make 9 blocks of 4 or 5 requests, so a draw has 36 to 45 of each."""
    arrival_us, stage = np.arange(80) * 1_000_000, np.repeat([0, 1], 40)
    blocks = time_blocks(arrival_us, 1_000_000, stage, [])
    for draw in resampled(blocks, 5):
        counts = np.bincount(blocks.stratum[blocks.number[draw]])
        assert all(36 <= count <= 45 for count in counts)


def test_few_blocks_are_widened_by_students_t_and_three_have_no_interval() -> None:
    """t of 9 degrees 2.262 over 1.960, and 10 blocks drawn scatter by 9/10 of the variance: 1.154 * 1.054 = 1.216."""
    assert Blocks(np.arange(10), np.zeros(10, np.int64), 1).widening == pytest.approx(1.216, abs=0.002)
    assert np.isnan(Blocks(np.arange(3), np.zeros(3, np.int64), 1).widening)
