"""Change points: planted changes in noise are found where they are, and none where there is none.

Rates over many series are measured by `blis-replay verify --changes` (labs); here are series whose answer is certain.
"""

from __future__ import annotations

import numpy as np
import pytest

from blis_replay.validate.metrics.change_points import changes


def series(seed: int, *levels: tuple[int, float], noise: float = 0.01) -> np.ndarray:
    """Normal noise around so many values at each level."""
    means = np.concatenate([np.full(count, level) for count, level in levels])
    return means + np.random.default_rng(seed).normal(0, noise, len(means))


@pytest.mark.parametrize("size", [0.05, 0.10, -0.05])
@pytest.mark.parametrize("count", [30, 100])
def test_a_change_of_five_standard_deviations_is_found_where_it_is(size: float, count: int) -> None:
    (found,) = changes(series(1, (count, 0.0), (count // 2, size)))
    assert found.at == count
    assert found.earliest <= count <= found.latest
    assert found.after - found.before == pytest.approx(size, abs=0.01)


def test_a_fault_and_its_remedy_are_two_changes() -> None:
    found = changes(series(2, (20, 0.01), (12, 0.08), (20, 0.01)))
    assert [one.at for one in found] == [20, 32]
    assert found[0].after == found[1].before


def test_the_same_values_give_the_same_answer() -> None:
    values = series(3, (40, 0.0), (20, 0.015))
    assert changes(values) == changes(values.tolist())


@pytest.mark.parametrize("values", [[], [0.1], [0.1, 0.9, 0.1], [0.02] * 50])
def test_too_few_values_and_equal_ones_have_no_change(values: list[float]) -> None:
    assert changes(values) == []


def test_without_noise_the_first_other_value_is_a_change() -> None:
    """A deterministic simulator on one recording: equal errors, then another one."""
    (found,) = changes([0.01] * 9 + [0.06])
    assert (found.at, found.earliest, found.latest) == (9, 9, 9)


def test_a_simulator_that_gives_one_of_two_answers_by_chance_does_not_change() -> None:
    """Of 100 series one may have a change by the test, and one in 10,000 looks like a simulator without noise."""
    answers = np.random.default_rng(7).choice([0.01, 0.03], (100, 60))
    assert sum(bool(changes(one)) for one in answers) <= 3


def test_a_change_below_half_a_point_is_not_reported() -> None:
    assert changes([0.01] * 10 + [0.0149] * 10) == []
    assert [one.at for one in changes([0.01] * 10 + [0.0151] * 10)] == [10]


def test_noise_alone_has_a_change_in_one_series_of_a_hundred() -> None:
    """One of 200 in expectation of 100 series; 4 or more come with a probability of 2 % (binomial, p = 0.01)."""
    assert sum(bool(changes(series(seed, (30, 0.0)))) for seed in range(100)) <= 3


def test_a_drift_is_cut_into_steps_of_one_direction() -> None:
    """Half a point per commit, over 30 commits: 15 points in all."""
    drift = np.concatenate([np.zeros(10), 0.005 * np.arange(1, 31)])
    found = changes(drift + np.random.default_rng(5).normal(0, 0.002, 40))
    assert len(found) >= 3
    assert all(one.after > one.before for one in found)
