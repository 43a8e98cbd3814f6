"""How an error changes from one replay to another of the same requests, and a latency from one server to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import hypot, inf, isfinite, sqrt

import numpy as np

from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.metrics.latency import LatencySamples, MetricStatistic, number
from blis_replay.validate.metrics.observed import observed_requests, samples_of, simulated_samples
from blis_replay.validate.metrics.uncertainty import (
    CONFIDENCE,
    Estimate,
    TimeOrder,
    Weighted,
    half_width,
    of_requests_alone,
    of_runs,
    request_order,
    student_t,
    with_single_events,
)


def error_changes(
    candidate: Comparison, baseline: ReplayRun, cells: Iterable[MetricStatistic], confidence: float = CONFIDENCE
) -> dict[MetricStatistic, Estimate]:
    """The change of each absolute error against the baseline, as ``change_estimates``; of numbers with an error."""
    run, recording = candidate.run, candidate.run.recording
    recorded = observed_requests(recording)
    chosen = run.simulated.completed & baseline.simulated.completed & (recording.requests["status"] == "ok").to_numpy()
    chosen = chosen & recorded if recorded.any() else chosen
    known = {cell: candidate.estimates[cell] for cell in cells if cell in candidate.estimates}
    observed = samples_of(recording, chosen) if recorded.any() else None
    sides = simulated_samples(run, chosen), simulated_samples(baseline, chosen), observed
    return change_estimates(request_order(recording, chosen, (observed or sides[0]).e2e_us), *sides, known, confidence)


def change_estimates(
    order: TimeOrder,
    candidate: LatencySamples,
    baseline: LatencySamples,
    observed: LatencySamples | None,
    errors: Mapping[MetricStatistic, Estimate],
    confidence: float = CONFIDENCE,
) -> dict[MetricStatistic, Estimate]:
    """The change of each absolute error from the baseline to the candidate, fractions of the observed value.

    ``candidate``, ``baseline``: simulated latencies of the same requests.  ``observed``: recorded ones, None if
    missing.  ``errors``: of the candidate.  ``confidence``: of the intervals.

    In ``c - b`` of the signed errors c and b the noise of the recording cancels, in ``c + b`` it counts twice; the
    change |c| - |b| is one or the other, and never more than |c - b|.  So its sign is that of ``c + b`` times that of
    ``c - b``, and as sure as one error is: the middle of the two, not their difference, is held against 0.  A stall in
    the recording moves both errors, so one stretch of the run alone does not make the middle sure.
    """
    sides = candidate, baseline, observed
    return {cell: _change(cell, error.sampled, sides, order, confidence) for cell, error in errors.items()}


def _change(
    cell: MetricStatistic,
    error: Estimate,
    sides: tuple[LatencySamples, LatencySamples, LatencySamples | None],
    order: TimeOrder,
    confidence: float,
) -> Estimate:
    candidate, baseline, observed = sides
    # What one stretch of the recording did to an error it did to both.
    by_requests = observed is not None and error.parts.keys() <= {"requests", "one stretch"}
    c = error.error if by_requests else (error.low + error.high) / 2
    unit = (1 + error.error) / number(candidate, cell)
    b = (1 + c) * number(baseline, cell) / number(candidate, cell) - 1
    halves = []
    for sign in (-1.0, 1.0):
        total = 1 + c + sign * (1 + b)
        of: Weighted = [(unit, candidate), (sign * unit, baseline)]
        if observed is not None and by_requests:
            half = half_width(cell, [*of, (-total / number(observed, cell), observed)], order, confidence)[0]
        else:
            narrower = student_t(error.blocks - 1, confidence) / student_t(error.blocks - 1)
            whole = total / (1 + error.error) * error.half * narrower
            half = hypot(half_width(cell, of, order, confidence)[0], whole)
        halves.append(half if total else 0.0)
    apart, together = halves
    middle = of_requests_alone((c + b) / 2, together / 2, error.blocks)
    if observed is not None and by_requests:
        both = _mean_of(candidate, baseline)
        middle = with_single_events(middle, cell, (observed, both), order, confidence=confidence, of_change=True)

    def change(off: int) -> float:
        """The largest over signs s of the smallest over signs t of ``s c - t b``, each end of its interval."""
        sums = 2 * middle.low, -2 * middle.high
        sums = sums if off < 0 else (-sums[1], -sums[0])
        return max(min(s * (c - b) + off * apart, of_both) for s, of_both in zip((1, -1), sums, strict=True))

    most = abs(c - b) + apart
    low, high = (max(change(-1), -most), min(change(1), most)) if isfinite(together) else (-most, most)
    parts = {part: 2 * half for part, half in middle.parts.items()} if by_requests else error.parts
    return Estimate(abs(c) - abs(b), low, high, error.blocks, parts)


def _mean_of(one: LatencySamples, other: LatencySamples) -> LatencySamples:
    """Latencies halfway between those of two replays."""
    return LatencySamples((one.ttft_us + other.ttft_us) / 2, (one.e2e_us + other.e2e_us) / 2, one.output_tokens)


def change_of_runs(once: Estimate, a: Sequence[float], b: Sequence[float], apart: float) -> Estimate:
    """The change between two servers with several recorded runs: mean of b over mean of a, less one.

    ``once``: the change from the first of a to the first of b, by their requests.  ``a``, ``b``: what each run
    observed.  How far the runs of a side differ counts for both.  ``apart``: how far two runs are, ``RUNS_APART`` or 0;
    it counts where there is one of each.
    """
    free = len(a) + len(b) - 2
    if not free:
        if not apart:
            return once
        between = apart * (1 + once.error)
        half = hypot(once.half, between)
        return replace(once, low=once.error - half, high=once.error + half, parts={**once.parts, "assumed": between})
    middles = float(np.mean(a)), float(np.mean(b))
    ratio = middles[1] / middles[0]
    offs = np.concatenate([np.array(side) / middle - 1 for side, middle in zip((a, b), middles, strict=True)])
    degrees = once.blocks - 1
    within = (once.half / student_t(degrees) / (1 + once.error)) ** 2 / 2 if isfinite(once.half) else inf
    variance, degrees = of_runs(within, degrees, float((offs**2).sum()) / free, free)
    half = ratio * student_t(degrees) * sqrt(variance * (1 / len(a) + 1 / len(b)))
    return Estimate(ratio - 1, ratio - 1 - half, ratio - 1 + half, degrees + 1, {"repeats": half})
