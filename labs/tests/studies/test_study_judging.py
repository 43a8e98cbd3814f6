"""How effects over seeds become verdicts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blis_replay_labs.studies.study import (
    Check,
    Effect,
    EffectKind,
    Measured,
    Published,
    Study,
    Verdict,
    effect_by_seed,
    judge,
    judge_check,
    overall,
    seed_interval,
)

MEASURED: Measured = {
    "one": {"ms": np.array([10.0, 12.0, 14.0])},
    "two": {"ms": np.array([20.0, 24.0, 28.0])},
    "four": {"ms": np.array([40.0, 36.0, 56.0])},
}
RATIO = Check("two over one", Effect("ratio", "ms", ("two", "one")), None, 2.5)
STUDY = Study(
    name="example",
    title="An example",
    family="examples",
    hypothesis="Two is at most two and a half times one.",
    systems=("A",),
    seeds=(1, 2, 3),
    configurations={},
    shown=("ms",),
    checks=(RATIO,),
    evidence=(),
    source="nowhere",
    published={"A": Published("confirmed", "2.0")},
    recorded={"A": "confirmed"},
    explanation="",
)


def test_the_interval_is_students() -> None:
    """Of 10, 12, 14: mean 12, deviation 2; t(0.975, 2) = 4.3027, so 12 -+ 4.3027 x 2 / sqrt(3)."""
    mean, low, high = seed_interval(np.array([10.0, 12.0, 14.0]))
    assert mean == 12.0
    assert (low, high) == pytest.approx((12 - 4.9683, 12 + 4.9683), abs=1e-4)


def test_seeds_that_do_not_differ_have_no_interval() -> None:
    assert seed_interval(np.array([3.0, 3.0])) == (3.0, 3.0, 3.0)
    assert seed_interval(np.array([3.0])) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("kind", "configurations", "at", "effect"),
    [
        ("value", ("one",), (), [10, 12, 14]),
        ("ratio", ("two", "one"), (), [2, 2, 2]),
        ("difference", ("two", "one"), (), [10, 12, 14]),
        ("largest", ("one", "two", "four"), (), [40, 36, 56]),
        ("least_step", ("one", "two", "four"), (), [10, 12, 14]),
        ("slope", ("one", "two"), (1, 2), [10, 12, 14]),
        ("r2", ("one", "two"), (1, 2), [1, 1, 1]),
    ],
)
def test_effects_seed_by_seed(
    kind: EffectKind, configurations: tuple[str, ...], at: tuple[float, ...], effect: list[float]
) -> None:
    """Steps from one to two are 10, 12, 14, those to four 20, 12, 28."""
    assert effect_by_seed(Effect(kind, "ms", configurations, at), MEASURED).tolist() == pytest.approx(effect)


@pytest.mark.parametrize(
    ("least", "most", "verdict"),
    [
        (7.0, None, "confirmed"),  # the interval of `one` is 7.03 to 16.97
        (8.0, None, "inconclusive"),
        (17.0, None, "refuted"),
        (None, 7.0, "refuted"),
        (None, 12.0, "inconclusive"),
        (7.0, 17.0, "confirmed"),
        (11.0, 13.0, "inconclusive"),  # the mean is right, the interval too wide
    ],
)
def test_a_check_asks_for_the_whole_interval(least: float | None, most: float | None, verdict: Verdict) -> None:
    assert judge_check(Check("one", Effect("value", "ms", ("one",)), least, most), MEASURED).verdict == verdict


def test_bounds_belong_to_what_is_right() -> None:
    """No fault is 0 faults: a bound of 0 is met by exactly 0."""
    faults: Measured = {"run": {"faults": np.zeros(3)}}
    assert judge_check(Check("", Effect("value", "faults", ("run",)), None, 0.0), faults).verdict == "confirmed"
    assert judge_check(Check("", Effect("value", "faults", ("run",)), 0.001, None), faults).verdict == "refuted"


def test_what_was_not_measured_is_not_confirmed() -> None:
    nothing: Measured = {"run": {"ms": np.full(3, np.nan)}}
    assert judge_check(Check("", Effect("value", "ms", ("run",)), None, 1.0), nothing).verdict == "refuted"


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (["confirmed", "confirmed"], "confirmed"),
        (["confirmed", "inconclusive"], "inconclusive"),
        (["inconclusive", "refuted"], "refuted"),
    ],
)
def test_a_study_is_as_good_as_its_worst_check(verdicts: list[Verdict], verdict: Verdict) -> None:
    assert overall(verdicts) == verdict


def test_agreement_with_what_was_published() -> None:
    judged = judge(STUDY, "A", MEASURED)
    assert (judged.verdict, judged.agreement, judged.passed) == ("confirmed", "agrees", True)
    silent = judge(replace(STUDY, published={}), "A", MEASURED)
    assert (silent.agreement, silent.passed) == ("-", True)


def test_a_difference_counts_as_explained_only_with_evidence_that_comes_out() -> None:
    refuted = replace(STUDY, published={"A": Published("refuted", "3.1")}, explanation="Another rule.")
    good = replace(RATIO, says="with that rule")
    bad = replace(RATIO, most=1.0)
    assert judge(refuted, "A", MEASURED).agreement == "differs"
    assert judge(replace(refuted, evidence=(good,)), "A", MEASURED).agreement == "explained"
    assert judge(replace(refuted, evidence=(good, bad)), "A", MEASURED).agreement == "differs"
    assert judge(replace(refuted, evidence=(good,), explanation=""), "A", MEASURED).agreement == "differs"
    assert not judge(refuted, "A", MEASURED).passed


def test_another_verdict_than_the_one_on_record_does_not_pass() -> None:
    judged = judge(replace(STUDY, recorded={"A": "refuted"}), "A", MEASURED)
    assert (judged.as_recorded, judged.passed) == (False, False)


def test_a_check_may_be_of_one_system_only() -> None:
    other = replace(RATIO, systems=("B",), most=1.0)
    assert len(judge(replace(STUDY, checks=(RATIO, other)), "A", MEASURED).checks) == 1
