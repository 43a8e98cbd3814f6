"""Which load to record next: the one that narrows the least certain prediction of fitted step times most.

A load shows how long each of its steps takes.  With ``J`` the derivatives of its step times by the coefficients, ``C``
the covariance of these and ``v`` the variance of a step, their covariance after recording it is
``(C^-1 + J'J/v)^-1``.  ``v`` is the one by which the recordings fitted on give the bounds that the fit has.  The mean
step of another load, with mean derivatives ``g``, is uncertain by ``1.96 sqrt(g'Cg)``.  Among loads that the server
can carry, the least certain one is sought, and then the one that narrows it most (as a G-optimal design does: Kiefer
and Wolfowitz 1960).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from blis_replay.base.arrays import Bools, Floats
from blis_replay.base.errors import ExperimentError, SimulatorError
from blis_replay.blis.engine import Engine
from blis_replay.blis.grouping import attended_by
from blis_replay.blis.latency.models import Latency, durations_us
from blis_replay.blis.releases.draws import OF_95_PERCENT, correlation, moved
from blis_replay.blis.releases.fit import FitRecord
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay

MINUTES = 5
# Simulated part of these minutes; the rest is alike.
_SIMULATED_MINUTES = 2
_SEED = 1
# Mean tokens of prompts and outputs, and requests in flight, of the loads that are weighed up.
_PROMPTS, _OUTPUTS, _IN_FLIGHT = (32, 512, 4_096), (16, 256, 1_024), (1, 16, 128)
# Lengths are uniform up to this share around their mean, as `vllm bench serve --random-range-ratio` draws them.
SPREAD = 0.5
_FEWEST_REQUESTS = 20
# Times that a mean request stays, for which the last ones of a load may be served behind its last send.
_STAYS = 1 + SPREAD + 0.1
# Steps of a load by which its derivatives are known, evenly from all of it.
_MOST_STEPS = 2_000
# One standard deviation of a coefficient that no recording determines, as a share of it.
_OF_PRIOR = 1.0
# Another argument of the server must leave at most this share of what the best load without one leaves.
_WORTH_A_RESTART = 0.8
_FEWER_BATCHED_TOKENS = 256


@dataclass(frozen=True)
class Load:
    """Poisson arrivals of requests; ``engine``: arguments of the server that differ from now."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    requests: int
    engine: Mapping[str, int]

    @property
    def command(self) -> tuple[str, ...]:
        """A command that sends it, in parts of a line each."""
        return (
            "vllm bench serve --base-url http://HOST:PORT --model MODEL",
            "--dataset-name random --ignore-eos",
            f"--random-input-len {self.prompt_tokens} --random-output-len {self.output_tokens}",
            f"--random-range-ratio {SPREAD} --num-prompts {self.requests} --request-rate {self.requests_per_s:g}",
            "--save-result --save-detailed",
        )


@dataclass(frozen=True)
class NextRecording:
    """The load to record next, and what it narrows.

    ``least_certain``: the load whose mean step is least certain.  ``now``, ``then``: half of the 95 % interval of that
    mean as a share of it, before and after ``load`` is recorded.
    """

    load: Load
    least_certain: Load
    now: float
    then: float

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"command": " ".join(self.load.command)}


def next_recording(entry: ModelEntry, recordings: Sequence[Recording]) -> NextRecording | None:
    """What to record next on the server of ``recordings``, to which ``entry`` was fitted.

    None where no recording determined a coefficient, none can be replayed, or no load that is weighed up fits the
    server.
    """
    latency, record = entry.latency, entry.fit
    costs = None if record is None else _costs(latency, record)
    if record is None or costs is None or not costs.fitted.any():
        return None
    try:
        plans = [plan_replay(recording, ReplayMode(), entry) for recording in recordings if recording.requests.height]
        fitted_on = [_shown(latency, costs, _steps(p.trace, p.engine, latency)) for p in plans]
    except ExperimentError:  # of fitted steps, whose requests cannot be replayed
        return None
    v = _variance([shown for shown, _mean in fitted_on], costs)
    if v is None:
        return None
    weighed = [
        (load, *_shown(latency, costs, steps), _of_forms(latency, record, steps))
        for load, steps in loads_for(plans[0].engine, latency)
    ]
    if not weighed:
        return None
    loads, *weights = zip(*weighed, strict=True)
    shown, mean, of_forms = map(np.array, weights)
    after = np.linalg.inv(np.linalg.inv(costs.covariance) + shown * (MINUTES / _SIMULATED_MINUTES) / v)
    now = OF_95_PERCENT * np.sqrt(np.einsum("li,ij,lj->l", mean, costs.covariance, mean) + of_forms)
    least_certain = int(np.argmax(now))
    unsure = np.einsum("i,lij,j->l", mean[least_certain], after, mean[least_certain])
    then = OF_95_PERCENT * np.sqrt(unsure + of_forms[least_certain])
    # A load that takes other arguments must be worth the restart.
    best = int(np.argmin(np.where([bool(load.engine) for load in loads], then / _WORTH_A_RESTART, then)))
    return NextRecording(loads[best], loads[least_certain], float(now[least_certain]), float(then[best]))


@dataclass(frozen=True)
class _Costs:
    """The coefficients of the step time: ``models`` have ``us`` more of each.

    ``fitted``: bool[coefficients], whether a recording determined it; ``covariance``: float64[coefficients,
    coefficients], us**2.
    """

    models: Sequence[Latency]
    us: Floats
    fitted: Bools
    covariance: Floats


def _costs(latency: Latency, record: FitRecord) -> _Costs:
    fits = record.coefficients
    value_us, interval_us = (np.array(of) for of in ([f.value_us for f in fits], [f.high_us - f.low_us for f in fits]))
    # Far enough that rounding to whole microseconds does not matter.
    us = np.maximum(interval_us, value_us / 10)
    models = [moved(latency, {fit.name: more}) for fit, more in zip(fits, us.tolist(), strict=True)]
    deviation = np.where(interval_us > 0, interval_us / 2 / OF_95_PERCENT, _OF_PRIOR * value_us)
    unsure, known = np.flatnonzero(interval_us > 0), np.eye(len(fits))
    known[np.ix_(unsure, unsure)] = correlation(record, [fits[i] for i in unsure])
    of_steps = [i for i, model in enumerate(models) if model != latency]
    fitted = np.array([fits[i].status == "fitted" for i in of_steps], bool)
    covariance = (known * deviation * deviation[:, None])[np.ix_(of_steps, of_steps)]
    return _Costs([models[i] for i in of_steps], us[of_steps], fitted, covariance)


def _shown(latency: Latency, costs: _Costs, steps: np.ndarray) -> tuple[Floats, Floats]:
    """What steps show of coefficients, float64[coefficients, coefficients], and the derivatives of their mean.

    The latter as a share of it.  What makes a step longer or shorter lasts for longer than a step: a second shows as
    much whatever it is full of, so steps count by the time they take.
    """
    some = steps[:: -(-len(steps) // _MOST_STEPS)]
    now_us = durations_us(latency, some)
    derivatives = np.column_stack([durations_us(model, some) - now_us for model in costs.models]) / costs.us
    shown = derivatives.T @ derivatives * (now_us.mean() * len(steps) / len(some))
    return shown, derivatives.mean(axis=0) / now_us.mean()


def _variance(fitted_on: Sequence[Floats], costs: _Costs) -> float | None:
    """By which the recordings fitted on give the bounds of the fit; None if they show nothing."""
    shown = np.sum(fitted_on, axis=0) if fitted_on else np.zeros_like(costs.covariance)
    fitted = np.flatnonzero(costs.fitted & (np.diag(shown) != 0))
    alone = np.linalg.pinv(shown[np.ix_(fitted, fitted)])
    return float(np.median(np.diag(costs.covariance)[fitted] / np.diag(alone))) if len(fitted) else None


def _of_forms(latency: Latency, record: FitRecord, steps: np.ndarray) -> float:
    """The variance of the mean step, as a share of it, by other forms that the recordings do not tell apart.

    Whether another recording tells them apart is not foreseen.
    """
    mean_us = durations_us(latency, steps).mean()
    apart = [(other.weight, durations_us(other.latency, steps).mean() / mean_us - 1) for other in record.other_forms]
    return float(sum(weight * by**2 for weight, by in apart))


def _steps(trace: RequestTrace, engine: EngineConfig, latency: Latency) -> np.ndarray:
    """The batches of a run (``kernel.state.BATCH``)."""
    return Engine(trace, engine).advance_kept(latency)


def loads_for(engine: EngineConfig, latency: Latency) -> Iterator[tuple[Load, np.ndarray]]:
    """Loads that a server can carry for ``MINUTES``, each with its steps."""
    now, cut = engine.max_num_batched_tokens, max(_FEWER_BATCHED_TOKENS, engine.max_num_seqs)
    budgets = (now, cut) if cut < now else (now,)
    for budget, prompt, output, in_flight in product(budgets, _PROMPTS, _OUTPUTS, _IN_FLIGHT):
        longest = (1 + SPREAD) * (prompt + output)
        room = np.inf if engine.num_gpu_blocks is None else engine.num_gpu_blocks * engine.block_size
        if longest > engine.max_model_len or in_flight > engine.max_num_seqs or in_flight * longest > room:
            continue
        if budget != now and prompt < budget:  # changes hardly a step
            continue
        server = replace(engine, max_num_batched_tokens=budget)
        per_s = _rate(server, latency, prompt, output, in_flight)
        requests = round(per_s * 60 * MINUTES)
        if requests < _FEWEST_REQUESTS:
            continue
        load = Load(
            float(f"{per_s:.2g}"), prompt, output, requests, {} if budget == now else {"max_num_batched_tokens": budget}
        )
        trace = _trace(load)
        try:
            steps = _steps(trace, server, latency)
        except SimulatorError:
            continue
        # A queue that grows is served for longer than it was sent, by more than the last requests stay.
        if durations_us(latency, steps).sum() <= int(trace.arrival_us[-1]) + _STAYS * 1e6 * in_flight / per_s:
            yield load, steps


def _rate(engine: EngineConfig, latency: Latency, prompt: int, output: int, in_flight: int) -> float:
    """Requests per second that keep ``in_flight`` running (Little's law), with prompts spread evenly over steps."""
    share = in_flight / output
    tokens = min(share * prompt, engine.max_num_batched_tokens - in_flight)
    context = in_flight * float(attended_by(engine.kv_cache_groups, prompt + output / 2 - 1, 1))
    batch = {"decode_tokens": in_flight, "context_tokens": round(context), "prefill_tokens": round(tokens)}
    # The i-th token of a prompt attends to i tokens.
    batch["attended_tokens"] = round(tokens / prompt * float(attended_by(engine.kv_cache_groups, 0, prompt)))
    batch["prefill_requests"] = min(max(round(share), 1), round(tokens))
    step_us = float(durations_us(latency, [batch])[0])
    return min(share, tokens / prompt) / step_us * 1e6


def _trace(load: Load) -> RequestTrace:
    requests = max(round(load.requests * _SIMULATED_MINUTES / MINUTES), 1)
    random = np.random.default_rng(_SEED)
    gaps_us = random.exponential(1e6 / load.requests_per_s, requests)
    prompt, output = (
        np.maximum(random.integers(round((1 - SPREAD) * mean), round((1 + SPREAD) * mean) + 1, requests), 1)
        for mean in (load.prompt_tokens, load.output_tokens)
    )
    arrival_us = np.cumsum(gaps_us).astype(np.int64)
    return RequestTrace(arrival_us, prompt, prompt, output, np.full(requests, NEVER_US))
