"""Moments of rows in parts against numpy's of all rows at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.ingest.checks.moments import moments_of

VALUES = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 10**6)), min_size=1, max_size=40)


@given(VALUES, st.lists(st.integers(0, 40), max_size=4))
def test_moments_are_those_of_all_rows_whatever_the_parts(values: list[tuple[int, int]], cuts: list[int]) -> None:
    rows = np.array(values, np.float64).T
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    found = moments_of((rows[:, first:last] for first, last in pairwise(edges)), 2)
    assert found.count == len(values)
    assert found.means == pytest.approx(rows.mean(axis=1))
    assert found.deviation(1) == pytest.approx(rows[1].std(), abs=1e-9)
    if all(rows.std(axis=1) > 0):
        assert found.correlation() == pytest.approx(np.corrcoef(rows)[0, 1], abs=1e-9)


def test_what_never_changes_correlates_with_nothing() -> None:
    assert moments_of([np.array([[1.0, 2.0], [5.0, 5.0]])], 2).correlation() is None
    assert moments_of([], 1).deviation(0) == 0.0
