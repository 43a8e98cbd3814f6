"""Check 5: rate, randomness and bias of the sampled steps; events that were dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from blis_replay.ingest.checks.evidence import (
    Context,
    Measured,
    not_checked,
    recorded_requests,
    true_output_tokens,
)
from blis_replay.ingest.checks.moments import Floats, Moments, moments_of
from blis_replay.ingest.checks.pictures import Table
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.row_parts import RowParts
from blis_replay.ingest.step_records import gaps_by_id, steps_by_id

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
    sample = _Sample.of(recording.steps)
    if not sample.steps:
        return [not_checked(CHECK, "", "no step records")]
    if sample.steps <= _FEWEST:
        return [not_checked(CHECK, "", f"no more than {_FEWEST} step records")]
    measured = {**sample.measured(), **_favour(recording.steps, sample), **_decoded(recording, sample)}
    measured["dropped_events"] = recording.dropped_step_events
    message = (
        "every step of the range was recorded"
        if sample.rate == 1
        else f"{sample.steps} steps of ids {sample.first} to {sample.last}: {100 * sample.rate:.1f} % of all, "
        f"{_draw(measured, sample.steps)}"
    )
    remarks = [*_remarks(measured, sample.rate, sample.steps)]
    return [Finding(CHECK, "note", "", "; ".join([message, *remarks]), measured, RULE)]


def pictures(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Gaps between sampled ids beside those of a random draw of the same rate; the rate along the run."""
    sample = _Sample.of(recording.steps)
    if sample.steps <= _FEWEST:
        return ()
    rate = 1 / float(sample.gaps.means[0])
    edges = np.unique(np.geomspace(1, sample.largest_gap + 1, 16).astype(np.int64))
    counts = np.zeros(len(edges) - 1, np.int64)
    for part in gaps_by_id(recording.steps):
        counts += np.histogram(part["gap"].drop_nulls().to_numpy(), edges)[0]
    rows = []
    for (low, high), count in zip(pairwise(edges.tolist()), counts.tolist(), strict=True):
        expected = sample.gaps.count * ((1 - rate) ** (low - 1) - (1 - rate) ** (high - 1))
        rows.append((f"{low}" if high == low + 1 else f"{low} to {high - 1}", count, round(expected, 1)))
    tenths = tuple((f"{i + 1}", round(100 * share, 2)) for i, share in enumerate(_rates(recording.steps, sample)))
    return (
        Table("gaps between sampled step ids", ("gap", "observed", "random draw"), tuple(rows), bars="observed"),
        Table("steps sampled by tenth of the ids", ("tenth", "sampled %"), tenths, bars="sampled %"),
    )


@dataclass(frozen=True)
class _Sample:
    """The ids of the steps that were sampled, ``first`` to ``last``, and the gaps from one to the next."""

    steps: int
    first: int
    last: int
    smallest_gap: int
    largest_gap: int
    gaps_of_one: int
    gaps: Moments

    @staticmethod
    def of(steps: RowParts) -> _Sample:
        gap, step = pl.col("gap"), pl.col("step_id")
        of_part = {
            **{"steps": pl.len().cast(pl.Int64), "gaps_of_one": (gap == 1).sum()},
            **{"first": step.min(), "smallest_gap": gap.min(), "last": step.max(), "largest_gap": gap.max()},
        }
        sums = pl.concat(part.select(**of_part) for part in gaps_by_id(steps))
        counts = sums.select(
            *(pl.col(name).sum() for name in ("steps", "gaps_of_one")),
            *(pl.col(name).min().fill_null(0) for name in ("first", "smallest_gap")),
            *(pl.col(name).max().fill_null(0) for name in ("last", "largest_gap")),
        ).row(0, named=True)
        gaps = moments_of((_rows(part, "gap") for part in gaps_by_id(steps)), 1)
        return _Sample(**counts, gaps=gaps)

    @property
    def rate(self) -> float:
        return self.steps / (self.last - self.first + 1)

    def measured(self) -> Measured:
        mean = float(self.gaps.means[0])
        return {
            "steps": self.steps,
            "rate": self.rate,
            # A draw with chance p is followed by another with chance p; the few gaps that stretches leave do not
            # matter.
            "rate_between_losses": self.gaps_of_one / self.gaps.count,
            "gap_mean": mean,
            "gap_variation": self.gaps.deviation(0) / mean,
            "gap_variation_of_random_draw": math.sqrt(max(0.0, 1 - 1 / mean)),
            "gap_largest_over_smallest": self.largest_gap / self.smallest_gap,
        }


def _rows(part: pl.DataFrame, *columns: str) -> Floats:
    """float64[columns, n]: of the steps that another follows."""
    return part.drop_nulls("gap").select(columns).cast(pl.Float64).to_numpy().T


def _rates(steps: RowParts, sample: _Sample) -> Floats:
    """Share of steps sampled in each tenth of the id range."""
    edges = np.linspace(sample.first, sample.last + 1, _PARTS + 1)
    counts = np.zeros(_PARTS)
    for part in steps_by_id(steps):
        counts += np.histogram(part["step_id"].to_numpy(), edges)[0]
    return counts / np.diff(edges)


def _favour(steps: RowParts, sample: _Sample) -> Measured:
    """Whether some times or some depths were sampled more than others."""
    rates = _rates(steps, sample)
    known = moments_of((_rows(part, "running_depth", "gap") for part in gaps_by_id(steps, "running_depth")), 2)
    return {
        "rate_lowest_tenth": float(rates.min()),
        "rate_highest_tenth": float(rates.max()),
        "correlation_of_gap_and_depth": known.correlation() if known.count > _FEWEST else None,
    }


def _decoded(recording: Recording, sample: _Sample) -> Measured:
    """Decode tokens a request by the steps, scaled by the rate, and by the requests' own lengths."""
    requests = recorded_requests(recording)
    completed = int((requests["status"] == "ok").sum())
    length = true_output_tokens(recording)
    if length is None or not length > 1 or completed < max(1, requests.height):
        return {}
    steps = tokens = 0
    for part in steps_by_id(recording.steps, "decode_tokens"):
        steps, tokens = steps + part.height, tokens + int(part["decode_tokens"].sum())
    if steps < sample.steps or not tokens:
        return {}
    scaled = tokens / sample.rate / completed
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
