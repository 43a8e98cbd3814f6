"""Check 5: rate, randomness and bias of the sampled steps; events that were dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.ingest.checks.evidence import Context, Measured, not_checked, true_output_tokens
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.served import recorded_requests
from blis_replay.ingest.steps.records import gaps_by_id, steps_by_id
from blis_replay.ingest.tables import Table, columns_named

CHECK = "sampling"
MEASURES = "rate, randomness and bias of the sampled steps, and events that the tracing SDK dropped"
RULE = (
    "Steps drawn one by one with chance p have gaps in their ids with a coefficient of variation of sqrt(1-p). Where "
    "it is more than 5 % and four standard errors away, the steps were not drawn so (below: every n-th step; above: "
    "stretches are lost). The rate of a tenth of the ids, or the correlation of gap and depth, more than 4.5 standard"
    " errors away favours some steps. Decode tokens scaled by the rate must be within 5 % of what the requests "
    "decoded. (The 0.44 and 4.2 published for the H100 runs describe the number of sampled steps in 16 experiments. "
    "They measure how long the runs were, not the gaps)"
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


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Gaps between sampled ids beside those of a random draw of the same rate; the rate along the run."""
    sample = _Sample.of(recording.steps)
    if sample.steps <= _FEWEST:
        return ()
    rate = 1 / sample.gap_mean
    edges = np.unique(np.geomspace(1, sample.largest_gap + 1, 16).astype(np.int64))
    counts = np.zeros(len(edges) - 1, np.int64)
    for batch in gaps_by_id(recording.steps).where("gap IS NOT NULL").batches(["gap"]):
        counts += np.histogram(batch["gap"].to_numpy(), edges)[0]
    rows = []
    for (low, high), count in zip(pairwise(edges.tolist()), counts.tolist(), strict=True):
        expected = (sample.steps - 1) * ((1 - rate) ** (low - 1) - (1 - rate) ** (high - 1))
        rows.append((f"{low}" if high == low + 1 else f"{low} to {high - 1}", count, round(expected, 1)))
    tenths = tuple((f"{i + 1}", round(100 * share, 2)) for i, share in enumerate(_rates(recording.steps, sample)))
    return (
        Table(
            "gaps between sampled step ids",
            columns_named("gap", "observed", "random draw"),
            tuple(rows),
            bars="observed",
        ),
        Table(
            "steps sampled by tenth of the ids",
            columns_named("tenth", "sampled %"),
            tenths,
            bars="sampled %",
        ),
    )


_OF_SAMPLE = {
    **{"steps": "count(*)", "first": "coalesce(min(step_id), 0)", "last": "coalesce(max(step_id), 0)"},
    **{"smallest_gap": "coalesce(min(gap), 0)", "largest_gap": "coalesce(max(gap), 0)"},
    **{"gaps_of_one": "count(*) FILTER (gap = 1)", "gap_mean": "coalesce(avg(gap), 0)"},
    "gap_deviation": "coalesce(stddev_pop(gap), 0)",
}


@dataclass(frozen=True)
class _Sample:
    """The ids of the steps that were sampled, ``first`` to ``last``, and the gaps from one to the next."""

    steps: int
    first: int
    last: int
    smallest_gap: int
    largest_gap: int
    gaps_of_one: int
    gap_mean: float
    gap_deviation: float

    @staticmethod
    def of(steps: Rows) -> _Sample:
        return _Sample(**gaps_by_id(steps).aggregate(**_OF_SAMPLE))

    @property
    def rate(self) -> float:
        return self.steps / (self.last - self.first + 1)

    def measured(self) -> Measured:
        return {
            "steps": self.steps,
            "rate": self.rate,
            # A draw with chance p is followed by another with chance p; the few gaps that stretches leave do not
            # matter.
            "rate_between_losses": self.gaps_of_one / (self.steps - 1),
            "gap_mean": self.gap_mean,
            "gap_variation": self.gap_deviation / self.gap_mean,
            "gap_variation_of_random_draw": math.sqrt(max(0.0, 1 - 1 / self.gap_mean)),
            "gap_largest_over_smallest": self.largest_gap / self.smallest_gap,
        }


def _rates(steps: Rows, sample: _Sample) -> Floats:
    """Share of steps sampled in each tenth of the id range."""
    # Ids are whole: as many in each part as it is wide.
    edges = np.linspace(sample.first, sample.last + 1, _PARTS + 1).round()
    counts = np.zeros(_PARTS)
    for batch in steps_by_id(steps).batches():
        counts += np.histogram(batch["step_id"].to_numpy(), edges)[0]
    return counts / np.diff(edges)


def _favour(steps: Rows, sample: _Sample) -> Measured:
    """Whether some times or some depths were sampled more than others."""
    rates = _rates(steps, sample)
    # Null where the depth, or the gap, is the same in all rows.
    known = gaps_by_id(steps, "running_depth").aggregate(count="count(gap)", correlation="corr(running_depth, gap)")
    correlation = known["correlation"] if known["count"] > _FEWEST else None
    return {
        "rate_lowest_tenth": float(rates.min()),
        "rate_highest_tenth": float(rates.max()),
        "correlation_of_gap_and_depth": None if correlation is None or math.isnan(correlation) else correlation,
    }


def _decoded(recording: Recording, sample: _Sample) -> Measured:
    """Decode tokens per request by the steps, scaled by the rate, and by the requests' own lengths."""
    requests = recorded_requests(recording)
    completed = int((requests["status"] == "ok").sum())
    length = true_output_tokens(recording)
    if length is None or not length > 1 or completed < max(1, requests.height):
        return {}
    decoded = steps_by_id(recording.steps, "decode_tokens").aggregate(steps="count(*)", tokens="sum(decode_tokens)")
    steps, tokens = decoded["steps"], int(decoded["tokens"] or 0)
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
            f"scaled by the rate they decode {float(scaled):.1f} tokens per request, the requests had {expected:g}"
        )
    if dropped := int(measured["dropped_events"] or 0):
        kept = 100 * float(measured["rate_between_losses"] or 0)
        remarks.append(
            f"the tracing SDK dropped {dropped} events; between the losses {kept:.0f} % of steps were sampled"
        )
    return remarks
