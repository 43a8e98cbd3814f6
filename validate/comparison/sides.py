"""One side of a comparison: a recording, or a replay of one."""

from __future__ import annotations

from dataclasses import dataclass

from blis_replay.base.arrays import Bools
from blis_replay.base.errors import ValidateError
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.latency import (
    METRICS,
    LatencySamples,
    MetricStatistic,
    latency_statistics,
)
from blis_replay.validate.metrics.observed import (
    Gaps,
    Numbers,
    Selection,
    has_gaps,
    numbers_from_aggregates,
    numbers_from_requests,
    observed_requests,
    plain_numbers,
    samples_of,
    simulated_samples,
    without_unusable,
)

_REQUESTS_ONLY = "the simulator reports requests only, no times of single tokens"


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a recording, or a ``run`` that replays it.

    ``requests``: bool[n], which requests of ``recording`` have latencies here, None where only aggregates are known.
    ``token_gaps``: of a recording, pooled gaps between the output tokens of the requests to be compared.
    """

    name: str
    recording: Recording
    requests: Bools | None
    token_gaps: Gaps | None = None
    run: ReplayRun | None = None

    @property
    def what(self) -> str:
        """In words."""
        if self.run is None:
            return f"recording {self.recording.alias}"
        return f"{self.recording.alias} replayed by {self.run.simulator} with {self.run.release.name}"

    def latencies(self, chosen: Bools) -> LatencySamples:
        """Those of the chosen requests, bool[n]."""
        return samples_of(self.recording, chosen) if self.run is None else simulated_samples(self.run, chosen)

    @property
    def numbers_us(self) -> dict[MetricStatistic, float]:
        """What it has over all of its requests; absent without a number that may be used."""
        samples = None if self.requests is None else self.latencies(self.requests)
        numbers = self.measure(self.requests, samples, Selection())
        return {(m, s): number.value_us for m, of in numbers.items() for s, number in of.items() if number.value_us}

    def measure(self, chosen: Bools | None, samples: LatencySamples | None, selection: Selection) -> Numbers:
        """The numbers of all metrics over the chosen requests with these latencies (None: as published)."""
        if self.run is not None:
            return _simulated(self.run, chosen, samples)
        if samples is not None:
            numbers = numbers_from_requests(self.recording, samples, selection, self.token_gaps)
            return without_unusable(numbers, self.recording.findings, token_times=has_gaps(self.token_gaps))
        if selection.window != (0.0, 1.0):
            raise ValidateError(
                f"{self.recording.slug}: published aggregates cover whole stages; use --by-stage, not --window"
            )
        numbers = numbers_from_aggregates(self.recording, selection.stage)
        return without_unusable(numbers, self.recording.findings, token_times=False)


def recording_side(recording: Recording, token_gaps: Gaps | None, name: str = "recording") -> Side:
    """A recording; ``token_gaps``: see ``Side``."""
    requests = observed_requests(recording)
    return Side(name, recording, requests if requests.any() else None, token_gaps)


def replay_side(run: ReplayRun, name: str = "replay") -> Side:
    """A replay that was just made."""
    return Side(name, run.recording, run.simulated.completed, run=run)


def _simulated(run: ReplayRun, chosen: Bools | None, samples: LatencySamples | None) -> Numbers:
    if chosen is None or samples is None:
        raise ValueError("a replay has single requests")
    has_steps = run.simulated.engine is not None
    values_us = latency_statistics(samples, run.pooled_gaps(chosen) if has_steps else None)
    known = {metric: values_us.get(metric, {}) for metric in METRICS}
    return {
        metric: plain_numbers(of, _REQUESTS_ONLY) if metric == "itl" and not has_steps else plain_numbers(of)
        for metric, of in known.items()
    }
