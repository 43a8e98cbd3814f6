"""Check 5: rate, randomness and bias of the sampled steps; events that were dropped."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.checks.evidence import (
    Context,
    Measured,
    completed_requests,
    not_checked,
    recorded_requests,
    true_output_tokens,
)
from blis_replay.ingest.checks.pictures import Table
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.row_parts import PART_ROWS
from blis_replay.ingest.step_records import one_a_step

CHECK = "sampling"
MEASURES = "rate, randomness and bias of the sampled steps, and events that the tracing SDK dropped"
RULE = (
    "steps drawn one by one with chance p have gaps in their ids of coefficient of variation sqrt(1-p): more than 5 % "
    "and four standard errors away, the draw is no such one (below: every n-th step; above: stretches are lost); the "
    "rate of a tenth of the ids, or the correlation of gap and depth, more than 4.5 standard errors away favours some "
    "steps; decode tokens scaled by the rate must be within 5 % of what the requests decoded.  (The 0.44 and 4.2 "
    "published for the H100 runs are the coefficient of variation and largest over smallest of the number of sampled "
    "steps in 16 experiments: they say how long the runs were, and nothing of the gaps)"
)
_FEWEST = 30
_PARTS = 10
_NOISE = 4.5


def check(recording: Recording, context: Context) -> list[Finding]:
    """One finding on the sample of steps, with what is wrong with it in words."""
    ids = _step_ids(recording)
    if not len(ids):
        return [not_checked(CHECK, "", "no step records")]
    if len(ids) <= _FEWEST:
        return [not_checked(CHECK, "", f"no more than {_FEWEST} step records")]
    measured = {**_gaps(ids), **_favour(recording, ids), **_decoded(recording, ids)}
    measured["dropped_events"] = recording.dropped_step_events
    rate = len(ids) / (int(ids[-1]) - int(ids[0]) + 1)
    message = (
        "every step of the range was recorded"
        if rate == 1
        else f"{len(ids)} steps of ids {ids[0]} to {ids[-1]}: {100 * rate:.1f} % of all, {_draw(measured, len(ids))}"
    )
    remarks = [*_remarks(measured, rate, len(ids))]
    return [Finding(CHECK, "note", "", "; ".join([message, *remarks]), measured, RULE)]


def pictures(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Gaps between sampled ids beside those of a random draw of the same rate; the rate along the run."""
    ids = _step_ids(recording)
    if len(ids) <= _FEWEST:
        return ()
    gaps = np.diff(ids)
    rate = float(1 / gaps.mean())
    edges = np.unique(np.geomspace(1, int(gaps.max()) + 1, 16).astype(np.int64))
    counts = np.histogram(gaps, edges)[0]
    rows = []
    for (low, high), count in zip(pairwise(edges.tolist()), counts.tolist(), strict=True):
        expected = len(gaps) * ((1 - rate) ** (low - 1) - (1 - rate) ** (high - 1))
        rows.append((f"{low}" if high == low + 1 else f"{low} to {high - 1}", count, round(expected, 1)))
    tenths = tuple((f"{i + 1}", round(100 * share, 2)) for i, share in enumerate(_rates(ids)))
    return (
        Table("gaps between sampled step ids", ("gap", "observed", "random draw"), tuple(rows), bars="observed"),
        Table("steps sampled by tenth of the ids", ("tenth", "sampled %"), tenths, bars="sampled %"),
    )


def _step_ids(recording: Recording) -> NDArray[np.int64]:
    return one_a_step(recording.steps.whole(["step_id"]).drop_nulls())["step_id"].to_numpy()


def _gaps(ids: NDArray[np.int64]) -> Measured:
    gaps = np.diff(ids)
    rate = float(1 / gaps.mean())
    return {
        "steps": len(ids),
        "rate": len(ids) / (int(ids[-1]) - int(ids[0]) + 1),
        # A draw with chance p is followed by another with chance p; the few gaps that stretches leave do not matter.
        "rate_between_losses": float((gaps == 1).mean()),
        "gap_mean": float(gaps.mean()),
        "gap_variation": float(gaps.std() / gaps.mean()),
        "gap_variation_of_random_draw": math.sqrt(max(0.0, 1 - rate)),
        "gap_largest_over_smallest": float(gaps.max() / gaps.min()),
    }


def _rates(ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of steps sampled in each tenth of the id range."""
    edges = np.linspace(int(ids[0]), int(ids[-1]) + 1, _PARTS + 1)
    return np.asarray(np.histogram(ids, edges)[0] / np.diff(edges), np.float64)


def _favour(recording: Recording, ids: NDArray[np.int64]) -> Measured:
    """Whether some times or some depths were sampled more than others."""
    rates = _rates(ids)
    known = one_a_step(recording.steps.whole(["step_id", "running_depth"]).drop_nulls())
    gaps, depths = np.diff(known["step_id"].to_numpy()), known["running_depth"].to_numpy()[:-1]
    varied = len(gaps) > _FEWEST and gaps.min() < gaps.max() and depths.min() < depths.max()
    return {
        "rate_lowest_tenth": float(rates.min()),
        "rate_highest_tenth": float(rates.max()),
        "correlation_of_gap_and_depth": _correlation(depths, gaps) if varied else None,
    }


def _correlation(x: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """Pearson's, some at a time: as doubles and without their means all would be there twice more."""
    middle, sums = np.array([[x.mean()], [y.mean()]]), np.zeros((2, 2))
    for first in range(0, len(x), PART_ROWS):
        rows = slice(first, first + PART_ROWS)
        off = np.stack([x[rows], y[rows]]) - middle
        sums += off @ off.T
    return float(sums[0, 1] / math.sqrt(sums[0, 0] * sums[1, 1]))


def _decoded(recording: Recording, ids: NDArray[np.int64]) -> Measured:
    """Decode tokens a request by the steps, scaled by the rate, and by the requests' own lengths."""
    completed = completed_requests(recording)
    length = true_output_tokens(recording)
    sampled = one_a_step(recording.steps.whole(["step_id", "decode_tokens"]))["decode_tokens"]
    if length is None or not length > 1 or completed.height < max(1, recorded_requests(recording).height):
        return {}
    if sampled.null_count() or not sampled.sum():
        return {}
    scaled = int(sampled.sum()) * (int(ids[-1]) - int(ids[0]) + 1) / len(ids) / completed.height
    # The first output token comes from the prefill.
    return {"decode_tokens_per_request": scaled, "decode_tokens_expected": length - 1}


def _draw(measured: Measured, steps: int) -> str:
    seen, random = (float(measured[name] or 0) for name in ("gap_variation", "gap_variation_of_random_draw"))
    words = f"gaps of variation {seen:.3f} ({random:.3f} for a random draw)"
    margin = 0.05 * random + 4 / math.sqrt(steps)
    if seen < random - margin:
        return f"too regular for a random draw: {words}"
    return f"in clusters, stretches are lost: {words}" if seen > random + margin else f"drawn at random: {words}"


def _remarks(measured: Measured, rate: float, steps: int) -> list[str]:
    remarks = []
    spread = math.sqrt(max(rate * (1 - rate), 0.0) * _PARTS * rate / steps)
    lowest, highest = (float(measured[name] or 0) for name in ("rate_lowest_tenth", "rate_highest_tenth"))
    if max(rate - lowest, highest - rate) > _NOISE * spread + 1e-3:
        remarks.append(f"the rate varies along the run, from {100 * lowest:.1f} to {100 * highest:.1f} % by tenths")
    correlation = measured["correlation_of_gap_and_depth"]
    if correlation is not None and abs(float(correlation)) > _NOISE / math.sqrt(steps):
        remarks.append(f"how often a step was sampled depends on its depth (r {float(correlation):+.2f})")
    scaled, expected = measured.get("decode_tokens_per_request"), measured.get("decode_tokens_expected")
    if scaled is not None and expected and abs(float(scaled) / float(expected) - 1) > 0.05:
        remarks.append(
            f"scaled by the rate they decode {float(scaled):.1f} tokens a request, the requests had {expected:g}"
        )
    if dropped := int(measured["dropped_events"] or 0):
        kept = 100 * float(measured["rate_between_losses"] or 0)
        remarks.append(
            f"the tracing SDK dropped {dropped} events; between the losses {kept:.0f} % of steps were sampled"
        )
    return remarks
