"""Service level objectives: what users were promised, and who got it.

``ttft.p95=500ms,itl.p95=50ms``: at most 5 % of the first tokens come later than 500 ms, at most 5 % of the gaps are
longer than 50 ms.  *Goodput* is of requests: those that finish with their own TTFT, E2E and mean gap within the limits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Bools
from blis_replay.base.errors import UnknownNameError
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.latency import (
    METRICS,
    LatencySamples,
    Values,
    level_of,
    number,
    of_requests,
    values_of,
    weighted_quantiles,
)
from blis_replay.validate.metrics.observed import (
    Gaps,
    has_gaps,
    observed_requests,
    samples_of,
    simulated_samples,
    unusable_cells,
)

_TERM = re.compile(r"([a-z0-9]+)\.([a-z0-9]+)=([0-9]{1,9}(?:\.[0-9]{1,6})?)(us|ms|s)", re.ASCII)
_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
_EXAMPLE = "ttft.p95=500ms,itl.p95=50ms"


@dataclass(frozen=True)
class Objective:
    """``metric`` of ``METRICS``; ``statistic``: ``mean`` or ``p1`` to ``p99``, ``p99.9`` as ``p999``; ``limit_us``."""

    metric: str
    statistic: str
    limit_us: float

    @property
    def slug(self) -> str:
        """``ttft_p95``."""
        return f"{self.metric}_{self.statistic}"


Objectives = tuple[Objective, ...]


@dataclass(frozen=True)
class Attainment:
    """What came of objectives: ``values_us`` of each, None without a sample; ``good`` of ``requests``."""

    objectives: Objectives
    values_us: tuple[float | None, ...]
    good: int
    requests: int

    @property
    def met(self) -> bool:
        """Whether each objective is known to be met."""
        return not self.missed

    @property
    def missed(self) -> Objectives:
        """Those that are not, the furthest first."""
        over = {
            objective: float("inf") if value is None else value / objective.limit_us
            for objective, value in zip(self.objectives, self.values_us, strict=True)
        }
        return tuple(sorted((o for o, times in over.items() if times > 1), key=lambda o: -over[o]))

    @property
    def goodput(self) -> float | None:
        """Share of the requests that are good; None without requests."""
        return self.good / self.requests if self.requests else None

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON values, times in ms."""
        missed = self.missed
        return {
            "met": not missed,
            "goodput": self.goodput,
            "good_requests": self.good,
            "objectives": [
                {
                    "metric": objective.metric,
                    "statistic": objective.statistic,
                    "limit_ms": objective.limit_us / 1e3,
                    "value_ms": None if value is None else value / 1e3,
                    "met": objective not in missed,
                }
                for objective, value in zip(self.objectives, self.values_us, strict=True)
            ],
        }


def parse_objectives(text: str) -> Objectives:
    """Objectives from ``metric.statistic=time`` joined by commas.  Raises ``UnknownNameError`` with what to write."""
    objectives: list[Objective] = []
    for term in (part.strip() for part in text.split(",")):
        found = _TERM.fullmatch(term)
        if found is None or found[1] not in METRICS or not _is_statistic(found[2]) or float(found[3]) == 0:
            raise UnknownNameError(
                f"--slo {term!r} is not an objective; write for example {_EXAMPLE} with {', '.join(METRICS)}, "
                "mean or p1 to p99 (p999), and a time in us, ms or s"
            )
        objective = Objective(found[1], found[2], float(found[3]) * _US[found[4]])
        if any(objective.slug == other.slug for other in objectives):
            raise UnknownNameError(f"--slo: {objective.metric}.{objective.statistic} is given twice; keep one")
        objectives.append(objective)
    return tuple(objectives)


def attained(
    objectives: Objectives, samples: LatencySamples, gaps: tuple[Values, NDArray[np.int64]] | None, requests: int
) -> Attainment:
    """How requests did: ``samples`` of those that finished, of ``requests`` that were sent.

    ``gaps``: pooled gaps between tokens as ``(gap_us, count)``; None if not known, and no quantile of ITL is then.
    """
    within = np.ones(len(samples.e2e_us), np.bool_)
    for objective in objectives:  # the gaps of a request as its TPOT
        within &= ~(np.asarray(values_of(samples, objective.metric), np.float64) > objective.limit_us)
    values = tuple(_value_us(objective, samples, gaps) for objective in objectives)
    return Attainment(objectives, values, int(within.sum()), requests)


def simulated_attainment(run: ReplayRun, objectives: Objectives, chosen: Bools | None = None) -> Attainment:
    """What came of objectives in a replay, of the chosen requests (all if None); what was given up is not good."""
    asked = np.ones(len(run.simulated.completed), np.bool_) if chosen is None else chosen
    done = asked & run.simulated.completed
    counted = None if run.simulated.engine is None else run.pooled_gaps(done)
    return attained(objectives, simulated_samples(run, done), counted, int(asked.sum()))


def observed_attainment(
    recording: Recording, objectives: Objectives, gaps: Gaps | None = None, chosen: Bools | None = None
) -> Attainment | None:
    """What came of them on the server; ``gaps``: pooled, without which no quantile of the ITL is known.

    Numbers that an instrument check forbids are not known either.  None where no single request was recorded.
    """
    asked = np.ones(recording.requests.height, np.bool_) if chosen is None else chosen
    answered = asked & observed_requests(recording)
    if not answered.any():
        return None
    found = attained(objectives, samples_of(recording, answered), gaps, int(asked.sum()))
    forbidden = unusable_cells(recording.findings, token_times=has_gaps(gaps))
    # The checks name the statistics of the metric table, and forbid all quantiles of a metric or none.
    cells = ((o.metric, "mean" if o.statistic == "mean" else "p99") for o in objectives)
    values = (None if cell in forbidden else value for cell, value in zip(cells, found.values_us, strict=True))
    return replace(found, values_us=tuple(values))


def written(objectives: Sequence[Objective]) -> str:
    """As ``parse_objectives`` reads them."""
    return ",".join(f"{o.metric}.{o.statistic}={o.limit_us / 1e3:g}ms" for o in objectives)


def _is_statistic(name: str) -> bool:
    return name == "mean" or re.fullmatch(r"p[1-9][0-9]?|p99[1-9]", name) is not None


def _value_us(
    objective: Objective, samples: LatencySamples, gaps: tuple[Values, NDArray[np.int64]] | None
) -> float | None:
    cell = objective.metric, objective.statistic
    if of_requests(cell):
        value_us = number(samples, cell)
        return None if np.isnan(value_us) else value_us
    if gaps is None or gaps[1].sum() == 0:
        return None
    return float(weighted_quantiles(*gaps, np.array([level_of(objective.statistic)]))[0])
