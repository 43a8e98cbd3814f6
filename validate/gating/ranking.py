"""Whether the simulator puts the experiments into the order in which they were observed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from blis_replay.validate.gating.policy import Ranking
from blis_replay.validate.gating.verdicts import Check, Judgement, Ordered, Outcome
from blis_replay.validate.terminal import milliseconds


def ranking_checks(judgements: Sequence[Judgement], ranking: Ranking) -> list[Check]:
    """One check for each metric of the ranking over the p99s of the gated experiments.

    Two experiments have an order if their observed p99s differ by more than the tolerance
    and, where requests were recorded, the intervals of the p99s under resampling are apart.
    """
    gated = [judgement for judgement in judgements if judgement.standing == "gated"]
    return [_check(metric, gated, ranking.tolerance) for metric in ranking.metrics if gated]


def _check(metric: str, gated: Sequence[Judgement], tolerance: float) -> Check:
    p99s = {judgement.slug: judgement.ordered[metric] for judgement in gated}
    aliases = {judgement.slug: judgement.alias for judgement in gated}
    named = f"{metric.upper()} p99"
    unusable = [f"{aliases[slug]} ({p99.unusable})" for slug, p99 in p99s.items() if p99.unusable]
    pairs = [pair for pair in combinations(p99s, 2) if _have_order(p99s[pair[0]], p99s[pair[1]], tolerance)]
    inverted = [pair for pair in pairs if _inverted(p99s[pair[0]], p99s[pair[1]])]
    absent = sum(p99.observed_us is None and not p99.unusable for p99 in p99s.values())
    message = f"{named}: {len(inverted)} of {len(pairs)} pairs of experiments with an observed order are inverted"
    message += f"; {absent} experiments have no observed p99" if absent else ""
    message += "".join(
        f"; {' / '.join(aliases[slug] for slug in pair)}: {_said(p99s[pair[0]], p99s[pair[1]])}" for pair in inverted
    )
    message += f"; not to be used: {', '.join(unusable)}" if unusable else ""
    outcome: Outcome = "fail" if inverted else "not judged" if unusable else "pass"
    return Check("ranking", "", metric, "p99", outcome, message, float(len(inverted)), 0.0)


def _have_order(one: Ordered, other: Ordered, tolerance: float) -> bool:
    if one.observed_us is None or other.observed_us is None or None in (one.simulated_us, other.simulated_us):
        return False
    low_us, high_us = sorted((one.observed_us, other.observed_us))
    if high_us <= low_us * (1 + tolerance):
        return False
    if one.interval_us is None or other.interval_us is None:
        return True
    return one.interval_us[1] < other.interval_us[0] or other.interval_us[1] < one.interval_us[0]


def _inverted(one: Ordered, other: Ordered) -> bool:
    if one.observed_us is None or other.observed_us is None or one.simulated_us is None or other.simulated_us is None:
        return False
    return (one.observed_us - other.observed_us) * (one.simulated_us - other.simulated_us) < 0


def _said(one: Ordered, other: Ordered) -> str:
    seen = " / ".join(milliseconds(p99.observed_us) for p99 in (one, other))
    made = " / ".join(milliseconds(p99.simulated_us) for p99 in (one, other))
    return f"observed {seen} ms, simulated {made} ms"
