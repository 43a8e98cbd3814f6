"""What can be judged of a run that had more load than its server could serve.

While requests come faster than they are served, E2E and TTFT measure how long that has lasted: a step 5 % longer can
double them.  How much was served meanwhile does not grow like that, nor does the gap between two tokens, nor do the
latencies of the time without a queue.  Those are held against the thresholds instead.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from blis_replay.compiled.arrays import Bools, Int64s
from blis_replay.fixtures.catalogue import published_failures
from blis_replay.ingest.checks.overload import FEWEST
from blis_replay.ingest.recording import PUBLISHED, GroundTruth
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.comparison.saturation import Saturation
from blis_replay.validate.metrics.latency import THRESHOLDS
from blis_replay.validate.metrics.observed import on_both_sides

# With more failures than this a reconstruction, which does not know whose they were, is not the load that was served.
_MOST_FAILED = 0.01


@dataclass(frozen=True)
class Measure:
    """One number of both sides; ``metric`` is the one whose threshold it shares (a rate is one over a time).

    ``slug``: ``tokens_per_s``, ``requests_per_s``, ``makespan``, ``itl``, ``e2e_outside`` or ``ttft_outside``.
    """

    slug: str
    name: str
    metric: str
    observed: float
    simulated: float
    unit: str

    @property
    def error(self) -> float:
        """Simulated over observed less one."""
        return self.simulated / self.observed - 1

    @property
    def limit(self) -> float:
        """The largest absolute error that passes."""
        return THRESHOLDS[self.metric]

    @property
    def beyond(self) -> bool:
        """Whether the error is larger."""
        return abs(self.error) > self.limit


def capacity(
    run: ReplayRun,
    found: Saturation | None,
    requests: int,
    itl_us: tuple[float | None, float | None],
    unusable: Collection[str],
) -> tuple[Measure, ...]:
    """What of a run beyond its capacity can be judged; empty if nothing can.

    ``itl_us``: its mean, observed and simulated, over so many ``requests``.  ``unusable``: metrics that instrument
    checks forbid.
    """
    if requests < FEWEST:
        return ()
    measures = [] if "e2e" in unusable else [*_served(found, "ttft" in unusable), *_makespan(run)]
    observed_us, simulated_us = itl_us
    known = load_is_known(run.recording.slug, run.recording.ground_truth) and "itl" not in unusable
    if known and observed_us is not None and simulated_us is not None:
        measures.append(Measure("itl", "ITL", "itl", observed_us / 1000, simulated_us / 1000, "ms"))
    return tuple(measure for measure in measures if measure.observed > 0)


def _served(found: Saturation | None, no_first_tokens: bool) -> list[Measure]:
    if found is None or no_first_tokens:
        return []
    measures = []
    if found.served is not None:
        growing, of = "while the queue grows", found.served
        measures.append(Measure("tokens_per_s", f"output tokens/s {growing}", "e2e", *of.tokens_per_s, "tokens/s"))
        if of.requests_per_s is not None:
            measures.append(Measure("requests_per_s", f"requests/s {growing}", "e2e", *of.requests_per_s, "requests/s"))
    for metric, sides_us in found.outside_us.items():
        observed_ms, simulated_ms = (us / 1000 for us in sides_us)
        name = f"{metric.upper()} outside the queue"
        measures.append(Measure(f"{metric}_outside", name, metric, observed_ms, simulated_ms, "ms"))
    return measures


def _makespan(run: ReplayRun) -> list[Measure]:
    """From the first arrival to the last end of a request that both finished."""
    requests = run.recording.requests
    both = on_both_sides(run)
    if both.sum() < FEWEST:
        return []
    arrival_us, e2e_us = (requests[name].to_numpy() for name in ("arrival_us", "e2e_us"))
    sides = _last_end_s(arrival_us, e2e_us, both), _last_end_s(run.plan.trace.arrival_us, run.e2e_us, both)
    return [Measure("makespan", "makespan", "e2e", *sides, "s")]


def _last_end_s(arrival_us: Int64s, e2e_us: Int64s, both: Bools) -> float:
    return float((arrival_us[both] + e2e_us[both]).max() - arrival_us[0]) / 1e6


def load_is_known(slug: str, ground_truth: GroundTruth) -> bool:
    """Whether a replay can serve what was served: a reconstruction does not know who gave up, and when."""
    return ground_truth != PUBLISHED or published_failures(slug) <= _MOST_FAILED
