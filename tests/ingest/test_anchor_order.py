"""Which anchors of a step clock stay, against the rule written out over all of them at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.ingest.steps.timeline import in_order

Anchors = list[tuple[int, bool]]


def ascending(anchors: Anchors, among: list[int]) -> list[int]:
    """Without those before which a later time stands, or those behind which an earlier one does."""
    early = [i for i in among if all(anchors[j][0] <= anchors[i][0] for j in among if j < i)]
    late = [i for i in among if all(anchors[j][0] >= anchors[i][0] for j in among if j > i)]
    return early if len(early) >= len(late) else late


def expected(anchors: Anchors) -> list[int]:
    """Sampled ones are believed first; of the others those stay that fit between them."""
    firsts = ascending(anchors, [i for i, (_, sampled) in enumerate(anchors) if sampled])
    fitting = [
        i
        for i, (start_us, _) in enumerate(anchors)
        if i in firsts
        or (
            all(anchors[j][0] <= start_us for j in firsts if j < i)
            and all(anchors[j][0] >= start_us for j in firsts if j > i)
            and not anchors[i][1]
        )
    ]
    return ascending(anchors, fitting)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=14))
def test_those_stay_against_which_time_does_not_run_backwards(anchors: Anchors) -> None:
    start_us = np.array([start_us for start_us, _ in anchors], np.int64)
    sampled = np.array([sampled for _, sampled in anchors], bool)
    assert np.flatnonzero(in_order(start_us, sampled)).tolist() == expected(anchors)
