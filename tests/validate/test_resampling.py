"""Blocks of neighbouring rows: what is drawn together, and how far few of them are widened."""

from __future__ import annotations

import numpy as np
import pytest

from blis_replay.validate.metrics.resampling import Blocks, resampled, row_blocks


def test_blocks_grow_with_what_rows_share_and_are_drawn_whole() -> None:
    """104 rows of which 13 in a row are alike: blocks of 8 rows, 13 of them; of rows that alternate, single ones."""
    alike = np.repeat([1.0, -1.0, 2.0, -2.0, 1.0, -1.0, 2.0, -2.0], 13)
    blocks = row_blocks(np.zeros(104, np.int64), [alike])
    assert np.bincount(blocks.number).tolist() == [8] * 13
    for draw in resampled(blocks, 5):
        drawn = np.bincount(draw, minlength=104)
        assert all(len(np.unique(drawn[blocks.number == number])) == 1 for number in range(13))
    assert len(row_blocks(np.zeros(104, np.int64), [np.tile([1.0, -1.0], 52)]).stratum) == 104


def test_each_stratum_keeps_its_number_of_blocks() -> None:
    """Which strata there are is no chance: two of 40 single rows each."""
    blocks = row_blocks(np.repeat([0, 1], 40), [])
    for draw in resampled(blocks, 5):
        assert np.bincount(blocks.stratum[blocks.number[draw]]).tolist() == [40, 40]


def test_few_blocks_are_widened_by_students_t_and_three_have_no_interval() -> None:
    """t of 9 degrees 2.262 over 1.960, and 10 blocks drawn scatter by 9/10 of the variance: 1.154 * 1.054 = 1.216."""
    assert Blocks(np.arange(10), np.zeros(10, np.int64)).widening == pytest.approx(1.216, abs=0.002)
    assert np.isnan(Blocks(np.arange(3), np.zeros(3, np.int64)).widening)
