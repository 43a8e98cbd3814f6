"""The first thing of an experiment's section: what it is, and four errors beside their limits."""

from __future__ import annotations

from dataclasses import dataclass

from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.metrics.latency import METRIC_NAMES, TAIL_LIMITS, THRESHOLDS
from blis_replay.validate.text.cells import cell_text, percent_brief, time_text

# Statistic and limit of each card; a p99 is reported and never gated.
_SHOWN = (
    *((metric, "mean", limit) for metric, limit in THRESHOLDS.items()),
    ("ttft", "p99", TAIL_LIMITS["ttft"]),
)


@dataclass(frozen=True)
class Card:
    """One error: its text, and its bar in % of a track that reaches from one limit to the other.

    ``state``: ``within``, ``beyond`` its limit, or ``absent`` (no error: ``numbers`` has what there is).
    """

    title: str
    error: str
    state: str
    limit: str
    numbers: str
    start: float
    length: float


def cards_of(comparison: Comparison) -> tuple[Card, ...]:
    """The means that are judged, and p99 of TTFT."""
    return tuple(_card(comparison, metric, statistic, limit) for metric, statistic, limit in _SHOWN)


def basis_of(comparison: Comparison) -> str:
    """What was compared: requests, what the coefficients were fitted on, and with what it was replayed."""
    run = comparison.run
    requests = "request" if comparison.requests == 1 else "requests"
    parts = (
        f"{comparison.requests:,} {requests}",
        {"held out": "held out", "not stated": "fitted on unknown runs"}.get(comparison.uses, "fitted on this run"),
        comparison.ground_truth,
        run.release.name,
        f"replay {run.mode.name}",
    )
    return " · ".join(parts)


def _card(comparison: Comparison, metric: str, statistic: str, limit: float) -> Card:
    cell = comparison.metrics[metric][statistic]
    error = cell.error
    reach = 0.0 if error is None else 50 * min(abs(error) / limit, 1.0)
    return Card(
        title=f"{METRIC_NAMES[metric]} {statistic}{'' if statistic == 'mean' else ' (not gated)'}",
        error="not available" if error is None else percent_brief(error),
        state="absent" if error is None else "beyond" if abs(error) > limit else "within",
        limit=cell_text(limit, "limit"),
        numbers=f"{time_text(cell.a_us)} → {time_text(cell.b_us)}",
        start=50 - reach if (error or 0.0) < 0 else 50.0,
        length=reach,
    )
