"""What studies run on made-up loads: a cluster, and one server with one sequence at a time against M/M/1.

The queue is that of ``labs/verification/theory.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from blis_replay.base.document import Number, document_of
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.validate.metrics.latency import statistics
from blis_replay_labs.cluster.config import ClusterText
from blis_replay_labs.cluster.simulate import REFUSED, ClusterResult, simulate_cluster
from blis_replay_labs.studies.study import System
from blis_replay_labs.synthetic.generate import generate
from blis_replay_labs.synthetic.workload import Workload
from blis_replay_labs.verification.theory import CoefficientSet, calibrate, mm1_wait_us, simulate_waits, wait_interval

MEASURES = (
    *("requests", "admitted", "completed", "unserved", "ttft_mean_ms", "ttft_p99_ms", "e2e_mean_ms"),
    *("e2e_p99_ms", "decode_mean_ms", "output_tokens_per_s", "preemptions_per_request", "prefix_hit_share"),
    *("computed_prefill_tokens", "fetched_blocks", "jain_index", "gap_mean_ms", "gap_cv", "gap_ks_distance"),
    *("counted_completed", "counted_in_system", "counted_lost", "differing_arrays"),
)


def measures(trace: RequestTrace, result: ClusterResult, counted_at_s: float | None) -> dict[str, float]:
    """All of ``MEASURES`` by name; nan where a run does not give one.

    ``unserved``: admitted and not completed.  ``decode_mean_ms``: first to last token.  ``prefix_hit_share``: prompt
    tokens found in the cache at the first admission, of all admitted.  ``computed_prefill_tokens``: of all steps, what
    is computed again after a preemption included.  ``fetched_blocks``: from the CPU tier.
    ``jain_index``: ``(sum x)^2 / (n sum x^2)`` of the requests that each instance completed (Jain, Chiu, Hawe 1984).
    ``gap_*``: of arrivals: mean, standard deviation over mean, and the Kolmogorov-Smirnov distance from an
    exponential law of that mean.  ``counted_*``: see ``counted``.
    """
    done, admitted = result.completed, result.instance != REFUSED
    ttft, e2e = statistics(result.ttft_us[done]), statistics(result.e2e_us[done])
    cached = sum(int(run.cached_tokens[run.completed].sum()) for run in result.instances)
    prompts = int(trace.prompt_tokens[admitted].sum())
    last_us = int((trace.arrival_us + result.e2e_us)[done].max(initial=1))
    found = dict.fromkeys(MEASURES, float("nan"))
    found |= {
        "requests": float(len(trace)),
        "admitted": float(admitted.sum()),
        "completed": float(done.sum()),
        "unserved": float(admitted.sum() - done.sum()),
        "ttft_mean_ms": ttft["mean"] / 1000,
        "ttft_p99_ms": ttft["p99"] / 1000,
        "e2e_mean_ms": e2e["mean"] / 1000,
        "e2e_p99_ms": e2e["p99"] / 1000,
        "decode_mean_ms": float((result.e2e_us - result.ttft_us)[done].mean()) / 1000,
        "output_tokens_per_s": float(trace.output_tokens[done].sum() / (last_us - trace.arrival_us[0]) * 1e6),
        "preemptions_per_request": sum(int(run.preemptions.sum()) for run in result.instances) / int(admitted.sum()),
        "prefix_hit_share": cached / prompts,
        "computed_prefill_tokens": float(sum(int(run.steps["prefill_tokens"].sum()) for run in result.instances)),
        "fetched_blocks": float(sum(run.fetched_blocks for run in result.instances)),
        "jain_index": jain_index([int(run.completed.sum()) for run in result.instances]),
        **arrival_gaps(trace),
    }
    if counted_at_s is not None:
        found |= counted(result, int(counted_at_s * 1e6))
    return found


def jain_index(shares: list[int]) -> float:
    """1 if all are equal, 1 / n if one has everything."""
    values = np.array(shares, np.float64)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def arrival_gaps(trace: RequestTrace) -> dict[str, float]:
    """How far the gaps between arrivals are from those of a Poisson process."""
    gaps = np.sort(np.diff(trace.arrival_us, prepend=0)).astype(np.float64)
    law = 1 - np.exp(-gaps / gaps.mean())
    ranks = np.arange(len(gaps) + 1) / len(gaps)
    distance = max(float(np.abs(law - ranks[:-1]).max()), float(np.abs(law - ranks[1:]).max()))
    return {
        "gap_mean_ms": float(gaps.mean()) / 1000,
        "gap_cv": float(gaps.std() / gaps.mean()),
        "gap_ks_distance": distance,
    }


def counted(result: ClusterResult, at_us: int) -> dict[str, float]:
    """Where the requests are at a moment, counted in two ways.

    ``counted_completed``: requests whose last token is in.  ``counted_in_system``: queued or running, by the depths
    in the tables of steps.  ``counted_lost``: requests that have reached a queue and are neither of the two.
    """
    completed = in_system = lost = 0
    for run in result.instances:
        done = int((run.completed & (run.finished_us <= at_us)).sum())
        inside = in_system_by_steps(run, at_us)
        completed += done
        in_system += inside
        lost += abs(int((run.queued_us <= at_us).sum()) - done - inside)
    return {
        "counted_completed": float(completed),
        "counted_in_system": float(in_system),
        "counted_lost": float(lost),
    }


def in_system_by_steps(run: SimResult, at_us: int) -> int:
    """Requests queued or running: the depths after the last schedule(), plus arrivals and less finishes since."""
    begun = int(np.searchsorted(run.steps["scheduled_us"], at_us, side="right"))
    if begun == 0:
        return int((run.queued_us <= at_us).sum())
    last = run.steps[begun - 1]
    since_us = int(last["scheduled_us"])
    came = int(((run.queued_us > since_us) & (run.queued_us <= at_us)).sum())
    ended = run.steps[:begun]
    left: NDArray[np.bool_] = (ended["end_us"] > since_us) & (ended["end_us"] <= at_us)
    return int(last["waiting_depth"]) + int(last["running_depth"]) + came - int(ended["finished"][left].sum())


def differing_arrays(one: ClusterResult, other: ClusterResult) -> float:
    """How many arrays of two results are not equal to the byte."""
    pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [
        (one.instance, other.instance),
        (one.ttft_us, other.ttft_us),
        (one.e2e_us, other.e2e_us),
    ]
    pairs += [(a.steps, b.steps) for a, b in zip(one.instances, other.instances, strict=True)]
    pairs += [(a.segments, b.segments) for a, b in zip(one.instances, other.instances, strict=True)]
    return float(sum(a.tobytes() != b.tobytes() for a, b in pairs))


# BLIS has no limit of its own on the length of a request.
_MAX_MODEL_LEN = 16_384

Blocks = Annotated[int, Meta(ge=0, le=10_000_000)]
Positive = Annotated[int, Meta(ge=1, le=10_000_000)]


class EngineText(Struct, frozen=True):
    """Engine arguments of a study; those that are None are the system's, or ``EngineConfig``'s."""

    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive | None = None
    kv_blocks: Positive | None = None
    num_cpu_blocks: Blocks | None = None
    cpu_fetch_us_per_block: Blocks | None = None
    async_scheduling: bool = False
    enable_prefix_caching: bool | None = None
    scheduling_policy: Literal["fcfs", "sjf", "priority"] | None = None


class ClusterRun(ClusterText, frozen=True, kw_only=True):
    """A load, a cluster, and the engine arguments that are not the system's.

    ``counted_at_s``: when requests are counted.  ``twice``: whether it runs a second time, to compare.
    """

    workload: Workload
    engine: EngineText = EngineText()
    counted_at_s: Number | None = None
    twice: bool = False


def run(described: ClusterRun, system: System, seed: int) -> Mapping[str, float]:
    """Its measures with the coefficients of a system; the seed is that of the load."""
    trace = generate(described.workload, seed).trace
    engine, chosen = _engine(described.engine, system), system.coefficients
    result = simulate_cluster(trace, described.cluster(), engine, chosen.latency, chosen.lifecycle)
    found = measures(trace, result, described.counted_at_s)
    if described.twice:
        again = simulate_cluster(trace, described.cluster(), engine, chosen.latency, chosen.lifecycle)
        found["differing_arrays"] = differing_arrays(result, again)
    return found


def _engine(given: EngineText, system: System) -> EngineConfig:
    """Synchronous, as BLIS is; ``kv_blocks`` are those that requests can have."""
    arguments = {"max_num_batched_tokens": system.max_num_batched_tokens, **document_of(given)}
    blocks = arguments.pop("kv_blocks", system.kv_blocks)
    return EngineConfig(**arguments, max_model_len=_MAX_MODEL_LEN, num_gpu_blocks=blocks + 1)


QUEUE_MEASURES = (
    *("zero_load_e2e_ms", "step_total_ms", "wait_ms", "below_e2e_mm1_percent", "off_step_mm1_percent"),
    *("nominal_utilization", "effective_utilization", "late_starts"),
)


@dataclass(frozen=True)
class QueueRun:
    """A nominal utilisation (rate times zero-load E2E), coefficients scaled, and how much is simulated.

    ``surplus_step``: the latency at zero load bills one step more than there is, as published figures do.
    """

    nominal_utilization: Annotated[float, Meta(gt=0, lt=1)]
    beta_scale: Annotated[float, Meta(gt=0, le=1)]
    replications: Annotated[int, Meta(ge=2, le=10_000)]
    arrivals: Annotated[int, Meta(ge=100, le=1_000_000)]
    alpha: bool = False
    surplus_step: bool = False


def run_queue(described: QueueRun, system: System, seed: int) -> Mapping[str, float]:
    """All of ``QUEUE_MEASURES`` by name.

    ``step_total_ms``: the server's part of a request alone, of 128 outputs.  ``below_e2e_mm1_percent``: how far the
    mean wait is below M/M/1 with the mean time at the client as service time; ``off_step_mm1_percent``: how far it is
    from M/M/1 with the server's part.  ``effective_utilization``: arrival rate times the server's part.
    """
    chosen = _scaled(system.coefficients, described)
    calibration = calibrate(chosen)
    surplus_us = calibration.surplus_us if described.surplus_step else 0
    rate = described.nominal_utilization / (calibration.e2e_us + surplus_us)
    stream = [seed, round(described.nominal_utilization * 1000), round(described.beta_scale * 1000), described.alpha]
    waits = simulate_waits(chosen, rate, calibration.server_us, described.replications, described.arrivals, stream)
    wait_us, server_us = wait_interval(waits, rate).mean, float(waits.server_us.mean())
    believed_us = mm1_wait_us(rate, float(waits.e2e_less_wait_us.mean()) + surplus_us)
    return {
        "zero_load_e2e_ms": (calibration.e2e_us + surplus_us) / 1000,
        "step_total_ms": calibration.server_us / 1000,
        "wait_ms": wait_us / 1000,
        "below_e2e_mm1_percent": 100 * (1 - wait_us / believed_us),
        "off_step_mm1_percent": 100 * (wait_us / mm1_wait_us(rate, server_us) - 1),
        "nominal_utilization": described.nominal_utilization,
        "effective_utilization": rate * server_us,
        "late_starts": float(waits.late_starts),
    }


def _scaled(chosen: CoefficientSet, described: QueueRun) -> CoefficientSet:
    before, per_prefill, per_decode = (round(described.beta_scale * value, 3) for value in chosen.beta_us)
    alpha = chosen.alpha_us if described.alpha else (0.0, 0.0, 0.0)
    return CoefficientSet(chosen.name, alpha, (before, per_prefill, per_decode))
