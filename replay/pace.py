"""The pace of a recorded server: how long its steps took, beside what the coefficients say of the same batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.errors import ReplayError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import CorrectedModel, Latency, Lifecycle, ObservedCycles, durations_us
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.ingest.checks.stationarity import STALL_US
from blis_replay.ingest.recording import Recording
from blis_replay.replay.observed import observed_cycles, placed_anchors

# A step that took this many times as long as others like it, or STALL_US longer, was held up; no fit counts it either.
# With a bound of 3 eleven live runs are off from a fit to their own steps by 2.1 % in the mean, with this by 0.6 %.
HELD_UP = 10.0
# Parts of a run: of fewer no interval is made.
_FEWEST = 20
# Steps whose tokens differ by at most this share, or by one, have the same batch.
_SAME_TOKENS = 0.1
# Of fewer of its steps nothing is said; of sixteen live recordings 86 to 99 % had the same batch.
_MOST = 0.5
# If the numbers of steps of server and engine differ by more than this share, their batches differ.
_SAME_STEPS = 0.05
# Longer steps also serve more requests each, so a try goes this power of the way.  After six tries less than 1 % of the
# way is left, whether decode times grow by the pace or by its square.
_DAMPED, _TRIES = 0.65, 6


@dataclass(frozen=True)
class ForcedSteps:
    """Steps of a run with observed cycles, int64[steps] each.

    ``scheduled_us``, ``start_us``: asynchronously a step is scheduled while the one before runs; ``observed_us``,
    how long it took; ``modelled_us``, what the model would have it take; ``batch``: int64[steps, 3], prefill,
    decode and context tokens.
    """

    scheduled_us: Int64s
    start_us: Int64s
    observed_us: Int64s
    modelled_us: Int64s
    batch: Int64s


def forced_steps(
    trace: RequestTrace, engine: EngineConfig, lifecycle: Lifecycle, cycles: ObservedCycles, model: Latency
) -> ForcedSteps:
    """Serve ``trace`` in the step cycles that were observed, and ask ``model`` about every batch on the way.

    So the model is asked about the batches that the server had, as far as the trace is the server's.
    Raises ``TraceError`` as ``simulate`` does.
    """
    running = Engine(trace, engine, lifecycle)
    batches = running.advance_kept(cycles)
    steps = running.result().steps
    tokens = [batches[name] for name in ("prefill_tokens", "decode_tokens", "context_tokens")]
    modelled_us = durations_us(model, batches).astype(np.int64)
    observed_us = steps["end_us"] - steps["start_us"]
    return ForcedSteps(steps["scheduled_us"], steps["start_us"], observed_us, modelled_us, np.stack(tokens, axis=1))


def served_alike(recording: Recording, cycles: ObservedCycles, steps: ForcedSteps) -> Bools:
    """bool[steps]: whether the engine's step is the server's, in its tokens and its own cycle; none if most are not.

    A request that comes a moment earlier moves each admission behind it, while all slots are taken: then a prefill has
    the time of a step of decodes.  A step after which the server was idle has the cycle of another.  Where most steps
    have no record of their own, a cycle is the mean of many, and all count.
    """
    every, tied = np.ones(len(steps.scheduled_us), bool), placed_anchors(recording).frame
    counts = recording.steps.frame(["step_id", "start_us", "prefill_tokens", "decode_tokens"]).drop_nulls()
    counts = counts.join(tied, on=["step_id", "start_us"], how="semi").unique("start_us", maintain_order=True)
    if counts.is_empty():
        return every
    start_us, *tokens = counts.sort("start_us").select("start_us", "prefill_tokens", "decode_tokens").to_numpy().T
    near = _nearest(start_us, steps.scheduled_us)
    same = np.abs(start_us[near] - steps.scheduled_us) <= steps.observed_us / 2
    if same.mean() < _MOST:
        return every
    for count, own in zip(tokens, steps.batch.T, strict=False):
        same &= np.abs(count[near] - own) <= np.maximum(_SAME_TOKENS * own, 1)
    if cycles.begins is not None:
        same &= cycles.begins[_nearest(cycles.from_us, steps.start_us)]
    return same if same.mean() >= _MOST else ~every


def _nearest(times_us: Int64s, at_us: Int64s) -> Int64s:
    """int64: which of ascending times is nearest to each of the others."""
    behind = np.clip(np.searchsorted(times_us, at_us), 1, max(len(times_us) - 1, 1)) % len(times_us)
    return np.where(at_us - times_us[behind - 1] < times_us[behind] - at_us, behind - 1, behind)


@dataclass(frozen=True)
class Pace:
    """How long a server took for parts of its run, float64[parts] us each, in order of time.

    ``recorded_us``: as it was; ``modelled_us``: as the coefficients have it for the same batches.
    """

    recorded_us: Floats
    modelled_us: Floats

    @property
    def factor(self) -> float:
        """Recorded over modelled time: above 1, the server is slower than the one that was fitted."""
        return float(self.recorded_us.sum() / self.modelled_us.sum())


def at_pace(latency: Latency, factor: float) -> CorrectedModel:
    """A model in which every step takes that many times as long."""
    return replace(CorrectedModel.of(latency), pace=factor)


def recorded_pace(recording: Recording, trace: RequestTrace, engine: EngineConfig, entry: ModelEntry) -> Pace | None:
    """The pace of a server that recorded its steps or logged its iterations; None where it recorded too few."""
    if recording.steps.is_empty() and recording.iterations.is_empty():
        return None
    of = _by_requests if recording.steps.is_empty() else _by_steps
    pace = of(recording, trace, engine, entry)
    return pace if pace is not None and len(pace.recorded_us) >= _FEWEST else None


def _by_steps(recording: Recording, trace: RequestTrace, engine: EngineConfig, entry: ModelEntry) -> Pace | None:
    """By the steps between two that have a record, without those that were held up, or that had another batch."""
    try:
        cycles, _basis = observed_cycles(recording)
    except ReplayError:
        return None
    steps = forced_steps(trace, engine, entry.lifecycle, cycles, entry.latency)
    alike = served_alike(recording, cycles, steps)
    if not alike.any():
        return None
    _, part = np.unique(np.searchsorted(cycles.from_us, steps.start_us[alike], side="right"), return_inverse=True)
    recorded_us, modelled_us, count = (
        np.bincount(part, column).astype(np.float64)
        for column in (steps.observed_us[alike], steps.modelled_us[alike], np.ones(len(part)))
    )
    kept = ~held_up(recorded_us / count, modelled_us / count)
    return Pace(recorded_us[kept], modelled_us[kept])


def held_up(recorded_us: Floats, modelled_us: Floats) -> Bools:
    """bool[parts]: whether something else than their batches made steps long; both are the means of a part."""
    usual_us = np.median(recorded_us / modelled_us) * modelled_us
    return (recorded_us > HELD_UP * usual_us) | (recorded_us - usual_us > STALL_US)


def _by_requests(recording: Recording, trace: RequestTrace, engine: EngineConfig, entry: ModelEntry) -> Pace | None:
    """By what each request took from its first token to its last, where the engine has as many steps as were logged.

    A log has the wait for the model only, so no step has a time of its own.  Batches are those of the engine at the
    pace of the server, which is found by trying.
    """
    times = recording.requests.select(us=pl.col("e2e_us") - pl.col("ttft_us"))["us"].cast(pl.Float64)
    recorded_us = times.fill_null(np.nan).to_numpy() - entry.lifecycle.post_request_us
    factor = 1.0
    for _ in range(_TRIES):
        result = simulate(trace, engine, at_pace(entry.latency, factor), entry.lifecycle)
        kept = (result.first_step >= 0) & (result.last_step > result.first_step) & ~np.isnan(recorded_us)
        if not kept.any():
            return None
        ends_us = result.steps["end_us"]
        pace = Pace(recorded_us[kept], (ends_us[result.last_step] - ends_us[result.first_step])[kept] / factor)
        factor *= (pace.factor / factor) ** _DAMPED
    return pace if abs(len(result.steps) / recording.iterations.height - 1) <= _SAME_STEPS else None
