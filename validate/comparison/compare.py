"""Two sides beside each other: every number of both, and how single requests agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from blis_replay.base.arrays import Bools
from blis_replay.base.errors import NothingToJudgeError
from blis_replay.ingest.recording import PUBLISHED
from blis_replay.ingest.served import NO_STEP_US, refused
from blis_replay.replay.driver import ReplayRun, replay, without_rows
from blis_replay.replay.simulator import Simulator
from blis_replay.validate.comparison.arguments import open_arguments
from blis_replay.validate.comparison.comparison import NO_SERVER, WITHOUT_LATENCIES, Comparison, MetricCell, Pairing
from blis_replay.validate.comparison.held_out import use_of_run
from blis_replay.validate.comparison.sides import Side, recording_side, replay_side
from blis_replay.validate.comparison.spread import (
    draw_errors,
    drawn_estimates,
    drawn_samples,
    load_is_known,
    numbers_us,
    predicted_us,
    server_pace,
    unsure_of,
)
from blis_replay.validate.metrics.latency import (
    METRICS,
    STATISTICS,
    LatencySamples,
    MetricStatistic,
    correlation,
    of_requests,
    paired_mape,
    relative_error,
)
from blis_replay.validate.metrics.observed import (
    Gaps,
    Number,
    Selection,
    observed_requests,
    samples_of,
    simulated_samples,
)
from blis_replay.validate.metrics.uncertainty import (
    Estimate,
    error_estimates,
    error_trend,
    half_width,
    of_requests_alone,
    request_order,
)

if TYPE_CHECKING:
    from blis_replay.validate.comparison.repeats import Repeats
    from blis_replay.validate.metrics.objectives import Objectives
    from blis_replay.validate.metrics.skill import Skill


def compare(a: Side, b: Side, selection: Selection | None = None) -> Comparison:
    """Compare two sides over the requests that both have, if they are of one recording; else each over its own.

    Beside published numbers, which are over successes, only requests that succeeded count.  Raises
    ``ValidateError`` for a window of published aggregates.
    """
    selection = selection or Selection()
    both = requests_of_both(a, b, selection)
    chosen = tuple(_chosen(side, other, selection) if both is None else both for side, other in ((a, b), (b, a)))
    one, other = (None if part is None else side.latencies(part) for side, part in zip((a, b), chosen, strict=True))
    of_a, of_b = a.measure(chosen[0], one, selection), b.measure(chosen[1], other, selection)
    metrics = {m: {s: _cell(of_a[m][s], of_b[m][s]) for s in STATISTICS} for m in METRICS}
    return Comparison(
        recording=a.recording,
        replay=b.run,
        selection=selection,
        recorded=a.recording.requests.height,
        compared=(_count(a, chosen[0]), _count(b, chosen[1])),
        metrics=metrics,
        paired={} if both is None or one is None or other is None else _pairings(one, other, metrics),
        excluded={} if b.run is None else _excluded(a, b.run, selection),
    )


def compare_replay(
    run: ReplayRun, token_gaps: Gaps | None = None, selection: Selection | None = None, *, queues: bool = False
) -> Comparison:
    """Compare a replay with its recording, over the requests that both finished.

    ``token_gaps``: observed pooled inter-token gaps of the selection, where recorded.  ``queues``: say what
    queues there are, and how far the schedule is the recorded one.  Raises ``NothingToJudgeError`` if no request is
    left to compare, ``ValidateError`` for a window of published aggregates.
    """
    selection = selection or Selection()
    observed, simulated = recording_side(run.recording, token_gaps), replay_side(run)
    succeeded = (run.recording.requests["status"] == "ok").to_numpy()
    left = selection.of(run.recording.requests) & run.simulated.completed & succeeded
    if observed.requests is not None:
        left &= observed.requests
    if not left.any() or (observed.requests is None and not run.recording.is_summed_up):
        raise NothingToJudgeError(
            f"{run.recording.slug}: no request that succeeded with recorded latencies in the selection, "
            "nothing to judge"
        )
    comparison = compare(observed, simulated, selection)
    comparison = replace(
        comparison,
        estimates=_of_summary(comparison, left) if observed.requests is None else _estimates(comparison, left),
        open_arguments=open_arguments(run),
        use=use_of_run(run),
    )
    if not queues:
        return replace(comparison, skill=_skill(comparison, left, []))
    warming, schedule = None, None
    if run.recording.ground_truth != PUBLISHED:
        from blis_replay.validate.comparison.warm_up import warm_up

        warming = warm_up(run, selection)
    if not run.recording.steps.is_empty():
        from blis_replay.validate.schedule import schedule_verdict  # a sixth of all modules, which few runs need

        schedule = schedule_verdict(run.recording, run.plan.engine)
    trend = None if observed.requests is None else _trend(run, left)
    comparison = replace(comparison, warming=warming, pace=server_pace(run, selection), trend=trend)
    comparison = _with_capacity(comparison)
    drawn = drawn_samples(run, left)
    between_us, skill = predicted_us(run, left, drawn), _skill(comparison, left, drawn)
    return replace(comparison, schedule=schedule, predicted_us=between_us, skill=skill)


def _skill(comparison: Comparison, chosen: Bools, drawn: Sequence[LatencySamples]) -> dict[str, Skill]:
    """Over the chosen requests (bool[n]), of the metrics that were recorded; ``drawn``: as ``drawn_samples``."""
    run, usable = comparison.run, observed_requests(comparison.recording)
    if not usable.any() or comparison.overloaded:
        return {}
    from blis_replay.validate.metrics.skill import skills  # of published numbers no request is known

    predicted = drawn or [simulated_samples(run, chosen)]
    found = skills(run.plan.trace.prompt_tokens[chosen], samples_of(run.recording, chosen), predicted)
    return {metric: skill for metric, skill in found.items() if comparison.metrics[metric]["mean"].a_us is not None}


def _estimates(comparison: Comparison, chosen: Bools) -> dict[MetricStatistic, Estimate]:
    """The errors with their intervals, over the chosen requests (bool[n])."""
    run = comparison.run
    known = {cell: number.error for cell, number in comparison.cells.items() if of_requests(cell)}
    errors = {cell: error for cell, error in known.items() if error is not None}
    sides = samples_of(run.recording, chosen), simulated_samples(run, chosen)
    order = request_order(run.recording, chosen, sides[0].e2e_us)
    estimates = error_estimates(order, *sides, errors)
    unsure = unsure_of(run)
    return {(m, s): e.beyond(unsure) if s == "mean" else e for (m, s), e in estimates.items()}


def _trend(run: ReplayRun, chosen: Bools) -> Estimate | None:
    """How the error changes over the run, by the chosen requests (bool[n])."""
    sides = samples_of(run.recording, chosen), simulated_samples(run, chosen)
    order = request_order(run.recording, chosen, sides[0].e2e_us)
    return error_trend(order, run.recording.requests["arrival_us"].to_numpy()[chosen], *sides)


def _of_summary(comparison: Comparison, chosen: Bools) -> dict[MetricStatistic, Estimate]:
    """The errors of means that a summary states of the chosen requests (bool[n]), with their intervals.

    Its requests are not known: the means of the server are taken to be as sure as those of the replay.
    """
    run = comparison.run
    simulated = simulated_samples(run, chosen)
    order = request_order(run.recording, chosen, simulated.e2e_us)
    estimates: dict[MetricStatistic, Estimate] = {}
    for metric in METRICS:
        cell = comparison.metrics[metric]["mean"]
        if cell.a_us is not None and cell.error is not None:
            half, blocks = half_width((metric, "mean"), [(sqrt(2) / cell.a_us, simulated)], order)
            estimates[metric, "mean"] = of_requests_alone(cell.error, half, blocks).beyond(unsure_of(run))
    return estimates


def _with_capacity(comparison: Comparison) -> Comparison:
    """With what there is to say of queues; and, of an overloaded run, with what is judged instead of latencies."""
    if not (observed_requests(comparison.recording).any() or comparison.overloaded):
        return comparison
    from blis_replay.validate.comparison.saturation import capacity, saturation  # of aggregates no queue is seen

    found = saturation(comparison.run)
    comparison = replace(comparison, saturation=found)
    if not comparison.overloaded:
        return comparison
    itl = comparison.metrics["itl"]["mean"]
    measures = capacity(comparison.run, found, comparison.requests, (itl.a_us, itl.b_us), comparison.refused())
    known = {(m.slug, "mean"): m.estimate.beyond(unsure_of(comparison.run)) for m in measures if m.estimate is not None}
    return replace(comparison, capacity=measures, estimates={**comparison.estimates, **known})


def with_draws(comparison: Comparison, simulator: Simulator) -> Comparison:
    """With the errors of many reconstructions, where the requests of a whole run are reconstructed.

    Of a summary that does not say how lengths vary, those with equal ones: a closed loop of these goes in step.
    """
    run = comparison.run
    if not comparison.selection.everything or comparison.recording.ground_truth != PUBLISHED:
        return comparison
    published_us = {cell: number.a_us for cell, number in comparison.cells.items()}
    draws = draw_errors(run.recording, run.release, run.mode, simulator, published_us)
    if draws is None:
        from blis_replay.replay.summary import with_equal_lengths  # few recordings are a summary

        equal = with_equal_lengths(comparison.recording)
        return comparison if equal is None else _or_of(comparison, replay(equal, run.release, run.mode, simulator))
    known = load_is_known(comparison.slug, comparison.recording.ground_truth)
    return replace(comparison, draws=draws, estimates=drawn_estimates(draws, unsure_of(run)) if known else {})


def _or_of(comparison: Comparison, other: ReplayRun) -> Comparison:
    """With the intervals of errors stretched to those that another replay of the same recording may have."""
    others_us = numbers_us(other, other.simulated.completed, list(comparison.estimates))
    estimates = {}
    for (cell, estimate), us in zip(comparison.estimates.items(), others_us, strict=True):
        error = relative_error(comparison.cells[cell].a_us, us)
        off = 0.0 if error is None else error - estimate.error
        low, high = estimate.low + min(off, 0.0), estimate.high + max(off, 0.0)
        estimates[cell] = replace(estimate, low=low, high=high, parts={**estimate.parts, "reconstructions": abs(off)})
    return replace(comparison, estimates=estimates)


def with_repeats(comparison: Comparison, repeats: Repeats | None) -> Comparison:
    """The mean errors over all recordings of one load, which make the intervals narrower or wider.

    ``a_us`` is then what was observed in the mean: what is simulated over the mean error.
    """
    if repeats is None:
        return comparison
    metrics, estimates = {m: dict(of) for m, of in comparison.metrics.items()}, dict(comparison.estimates)
    for metric, statistic in estimates.keys() & repeats.numbers_us.keys():
        of_all = estimates[metric, statistic].repeated(repeats.numbers_us[metric, statistic])
        estimates[metric, statistic], cell = of_all, metrics[metric][statistic]
        metrics[metric][statistic] = replace(cell, a_us=cell.b_us and cell.b_us / (1 + of_all.error))
    skill = {m: replace(one, of_repeats_us=repeats.apart_us.get(m)) for m, one in comparison.skill.items()}
    return replace(comparison, repeats=repeats, metrics=metrics, estimates=estimates, skill=skill)


def with_objectives(comparison: Comparison, objectives: Objectives, gaps: Gaps | None) -> Comparison:
    """With what came of objectives on both sides, over all requests of the selection; ``gaps``: as recorded."""
    if not objectives:
        return comparison
    from blis_replay.validate.metrics.objectives import Attainment, observed_attainment, simulated_attainment

    run = comparison.run
    chosen = comparison.selection.of(run.recording.requests)
    simulated = simulated_attainment(run, objectives, chosen)
    observed = observed_attainment(run.recording, objectives, gaps, chosen)
    if observed is None:
        cells = (comparison.metrics[o.metric].get(o.statistic) for o in objectives)
        observed = Attainment(objectives, tuple(None if cell is None else cell.a_us for cell in cells), 0, 0)
    return replace(comparison, promised={"observed": observed, "simulated": simulated})


def light(comparison: Comparison) -> Comparison:
    """The same without the requests and steps of recording and replay, small enough to keep hundreds."""
    run = without_rows(comparison.run)
    return replace(comparison, recording=run.recording, replay=run)


def requests_of_both(a: Side, b: Side, selection: Selection) -> Bools | None:
    """bool[n]: requests of the selection that both sides have; None without any, or for different recordings."""
    if a.requests is None or b.requests is None or a.recording.content_hash != b.recording.content_hash:
        return None
    both = a.requests & b.requests & selection.of(a.recording.requests)
    return both if both.any() else None


def _chosen(side: Side, other: Side, selection: Selection) -> Bools | None:
    if side.requests is None:
        return None
    chosen = side.requests & selection.of(side.recording.requests)
    if other.requests is None:
        chosen &= (side.recording.requests["status"] == "ok").to_numpy()
    return chosen


def _count(side: Side, chosen: Bools | None) -> int:
    return side.recording.requests.height if chosen is None else int(chosen.sum())


def _cell(a: Number, b: Number) -> MetricCell:
    missing = {number.reason for number in (a, b) if number.value_us is None and number.reason}
    unusable = a.unusable or b.unusable
    return MetricCell(a.value_us, b.value_us, "; ".join(sorted(missing)) or None, a.between_us, unusable, a.derived)


def _pairings(
    a: LatencySamples, b: LatencySamples, metrics: Mapping[str, Mapping[str, MetricCell]]
) -> dict[str, Pairing]:
    """How the same requests agree on two sides, by metric."""
    # What came all at once was held back (``token_events`` counts it), and would divide by next to nothing.
    own = (a.tpot_us >= NO_STEP_US) & (b.tpot_us >= NO_STEP_US)
    pairs = {"e2e": (a.e2e_us, b.e2e_us), "ttft": (a.ttft_us, b.ttft_us), "tpot": (a.tpot_us[own], b.tpot_us[own])}
    return {
        metric: Pairing(None, None)
        if metrics[metric]["mean"].unusable
        else Pairing(paired_mape(*pair), correlation(*pair))
        for metric, pair in pairs.items()
    }


def _excluded(observed: Side, run: ReplayRun, selection: Selection) -> dict[str, int]:
    selected = selection.of(run.recording.requests)
    failed = (run.recording.requests["status"] != "ok").to_numpy()
    recorded = np.zeros(len(failed), np.bool_) if observed.requests is None else observed.requests
    unfinished = ~(run.simulated.completed & ~failed)
    unserved = refused(run.recording)
    counts = {
        NO_SERVER: int((selected & unserved).sum()),
        "failed in the recording": int((selected & failed & ~unserved).sum()),
        "outside the selection": int((~selected).sum()),
        WITHOUT_LATENCIES: int((selected & ~failed & ~recorded).sum()) if recorded.any() else 0,
        "not finished by the simulator": int((selected & recorded & unfinished).sum()),
    }
    return {reason: count for reason, count in counts.items() if count}
