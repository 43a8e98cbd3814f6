"""One side of a comparison: a recording, or a replay of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import polars as pl

from blis_replay.base.arrays import Bools
from blis_replay.base.errors import ValidateError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import RunRecord
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, LatencySamples, latency_statistics
from blis_replay.validate.metrics.observed import (
    Gaps,
    Number,
    Numbers,
    Selection,
    has_gaps,
    numbers_from_aggregates,
    numbers_from_requests,
    observed_requests,
    samples_of,
    simulated_samples,
    without_unusable,
)

_REQUESTS_ONLY = "the simulator reports requests only, no times of single tokens"


@dataclass(frozen=True)
class StoredRun:
    """A run as the store has it: what it is, and a row per request (``RUN_REQUEST_SCHEMA``)."""

    record: RunRecord
    requests: pl.DataFrame


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    ``what``: in words.  ``requests``: bool[n], which requests of ``recording`` have latencies here, None where
    only aggregates are known.  ``latencies``: those of some of them.  ``measure``: the numbers of all metrics over
    the requests whose latencies are given (None: as published).  ``run``: the replay, if it is one that was just made.
    ``stored``: the run, if it was read from the store.
    """

    name: str
    what: str
    recording: Recording
    requests: Bools | None
    latencies: Callable[[Bools], LatencySamples]
    measure: Callable[[Bools | None, LatencySamples | None, Selection], Numbers]
    run: ReplayRun | None = None
    stored: StoredRun | None = None


def recording_side(recording: Recording, token_gaps: Gaps | None, name: str = "recording") -> Side:
    """A recording; ``token_gaps``: pooled gaps between the output tokens of the requests to be compared."""
    requests = observed_requests(recording)
    known = bool(requests.any())
    return Side(
        name=name,
        what=f"recording {recording.alias}",
        recording=recording,
        requests=requests if known else None,
        latencies=partial(samples_of, recording),
        measure=partial(_observed, recording, token_gaps),
    )


def _observed(
    recording: Recording,
    token_gaps: Gaps | None,
    _chosen: Bools | None,
    samples: LatencySamples | None,
    selection: Selection,
) -> Numbers:
    if samples is not None:
        numbers = numbers_from_requests(recording, samples, selection, token_gaps)
        return without_unusable(numbers, recording.findings, token_times=has_gaps(token_gaps))
    if selection.window != (0.0, 1.0):
        raise ValidateError(f"{recording.slug}: published aggregates cover whole stages; use --by-stage, not --window")
    numbers = numbers_from_aggregates(recording, selection.stage)
    return without_unusable(numbers, recording.findings, token_times=False)


def replay_side(run: ReplayRun, name: str = "replay") -> Side:
    """A replay that was just made."""
    return Side(
        name=name,
        what=f"{run.recording.alias} replayed by {run.simulator} with {run.release.name}",
        recording=run.recording,
        requests=run.simulated.completed,
        latencies=partial(simulated_samples, run),
        measure=partial(_simulated, run),
        run=run,
    )


def _simulated(run: ReplayRun, chosen: Bools | None, samples: LatencySamples | None, _selection: Selection) -> Numbers:
    if chosen is None or samples is None:
        raise ValueError("a replay has single requests")
    if run.simulated.engine is None:
        return numbers_or_reason(latency_statistics(samples, None), "no such request", _REQUESTS_ONLY)
    return numbers_or_reason(latency_statistics(samples, run.pooled_gaps(chosen)), "no such request")


def numbers_or_reason(values_us: dict[str, dict[str, float]], absent: str, no_token_times: str = "") -> Numbers:
    """The values, with the reason where one is absent."""
    return {
        metric: {
            name: Number(value_us)
            if (value_us := values_us.get(metric, {}).get(name)) is not None
            else Number(None, no_token_times or absent if metric == "itl" else absent)
            for name in STATISTICS
        }
        for metric in METRICS
    }
