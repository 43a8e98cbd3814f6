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

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import ExperimentError, SimulatorError
from blis_replay.blis.engine import Engine
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
            "vllm bench serve --dataset-name random --ignore-eos",
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
    coefficients = [] if record is None else _coefficients(latency, record)
    if record is None or not any(coefficient.is_fitted for coefficient in coefficients):
        return None
    try:
        plans = [plan_replay(recording, ReplayMode(), entry) for recording in recordings if recording.requests.height]
        fitted_on = [_shown(latency, coefficients, _steps(p.trace, p.engine, latency)) for p in plans]
    except ExperimentError:  # of fitted steps, whose requests cannot be replayed
        return None
    covariance = _covariance(record, coefficients)
    v = _variance([shown for shown, _mean in fitted_on], covariance, coefficients)
    if v is None:
        return None
    before = np.linalg.inv(covariance)
    weighed = []
    for load, steps in _loads(plans[0].engine, latency):
        shown, mean = _shown(latency, coefficients, steps)
        after = np.asarray(np.linalg.inv(before + shown * (MINUTES / _SIMULATED_MINUTES) / v), np.float64)
        weighed.append(_Weighed(load, after, mean, _of_forms(latency, record, steps)))
    if not weighed:
        return None
    least_certain = max(weighed, key=lambda one: one.half(covariance))
    now, then = least_certain.half(covariance), [least_certain.half(one.after) for one in weighed]
    # A load that takes other arguments must be worth the restart.
    effort = [half if not one.load.engine else half / _WORTH_A_RESTART for half, one in zip(then, weighed, strict=True)]
    best = int(np.argmin(effort))
    return NextRecording(weighed[best].load, least_certain.load, now, then[best])


@dataclass(frozen=True)
class _Weighed:
    """A load; ``after``: the covariance of the coefficients once it is recorded.

    ``mean``: float64[coefficients], derivatives of its mean step as a share of it; ``of_forms``: see ``_of_forms``.
    """

    load: Load
    after: Floats
    mean: Floats
    of_forms: float

    def half(self, covariance: Floats) -> float:
        """Half of the 95 % interval of its mean step, as a share of it."""
        return OF_95_PERCENT * float(np.sqrt(self.mean @ covariance @ self.mean + self.of_forms))


@dataclass(frozen=True)
class _Coefficient:
    """A coefficient of the step time: ``model`` has ``us`` more of it; ``deviation``: one standard deviation, us."""

    name: str
    model: Latency
    us: float
    deviation: float
    is_fitted: bool


def _coefficients(latency: Latency, record: FitRecord) -> list[_Coefficient]:
    """Those of the step time."""
    found = []
    for fit in record.coefficients:
        interval = fit.high_us - fit.low_us
        deviation = interval / 2 / OF_95_PERCENT if interval else _OF_PRIOR * fit.value_us
        # Far enough that rounding to whole microseconds does not matter.
        us = max(interval, fit.value_us / 10)
        model = moved(latency, {fit.name: us})
        if model != latency:
            found.append(_Coefficient(fit.name, model, us, deviation, fit.status == "fitted"))
    return found


def _covariance(record: FitRecord, coefficients: Sequence[_Coefficient]) -> Floats:
    """float64[coefficients, coefficients], us**2."""
    unsure = [fit for fit in record.coefficients if fit.high_us > fit.low_us]
    among = {fit.name: place for place, fit in enumerate(unsure)}
    known, matrix = correlation(record, unsure), np.eye(len(coefficients))
    for (i, one), (j, other) in product(enumerate(coefficients), repeat=2):
        if one.name in among and other.name in among:
            matrix[i, j] = known[among[one.name], among[other.name]]
    deviations = np.array([coefficient.deviation for coefficient in coefficients])
    return np.asarray(matrix * deviations * deviations[:, None], np.float64)


def _shown(latency: Latency, coefficients: Sequence[_Coefficient], steps: np.ndarray) -> tuple[Floats, Floats]:
    """What steps show of coefficients, float64[coefficients, coefficients], and the derivatives of their mean.

    The latter as a share of it.  What makes a step longer or shorter lasts for longer than a step: a second shows as
    much whatever it is full of, so steps count by the time they take.
    """
    some = steps[:: -(-len(steps) // _MOST_STEPS)]
    now_us = durations_us(latency, some)
    columns = [(durations_us(one.model, some) - now_us) / one.us for one in coefficients]
    derivatives = np.column_stack(columns)
    return derivatives.T @ derivatives * (now_us.mean() * len(steps) / len(some)), derivatives.mean(
        axis=0
    ) / now_us.mean()


def _variance(fitted_on: Sequence[Floats], covariance: Floats, coefficients: Sequence[_Coefficient]) -> float | None:
    """By which the recordings fitted on give the bounds of the fit; None if they show nothing."""
    shown = np.sum(fitted_on, axis=0)
    fitted = [place for place, one in enumerate(coefficients) if one.is_fitted and fitted_on and shown[place, place]]
    if not fitted:
        return None
    alone = np.linalg.pinv(shown[np.ix_(fitted, fitted)])
    return float(np.median(np.diag(covariance)[fitted] / np.diag(alone)))


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


def _loads(engine: EngineConfig, latency: Latency) -> Iterator[tuple[Load, np.ndarray]]:
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
        try:
            steps = _steps(_trace(load), server, latency)
        except SimulatorError:
            continue
        yield load, steps


def _rate(engine: EngineConfig, latency: Latency, prompt: int, output: int, in_flight: int) -> float:
    """Requests per second that keep ``in_flight`` running (Little's law), with prompts spread evenly over steps."""
    share = in_flight / output
    tokens = min(share * prompt, engine.max_num_batched_tokens - in_flight)
    context = in_flight * (prompt + output / 2)
    batch = {"decode_tokens": in_flight, "context_tokens": round(context), "prefill_tokens": round(tokens)}
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
