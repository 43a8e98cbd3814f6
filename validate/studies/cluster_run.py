"""A run of a cluster on a made-up load, as a study describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from blis_replay.blis.cluster.config import ClusterConfig
from blis_replay.blis.cluster.read import cluster_of
from blis_replay.blis.cluster.simulate import simulate_cluster
from blis_replay.blis.release_fields import Fields
from blis_replay.blis.trace import EngineConfig
from blis_replay.blis.workloads.generate import generate
from blis_replay.blis.workloads.read import workload_of
from blis_replay.blis.workloads.workload import Workload
from blis_replay.validate.studies.cluster_measures import MEASURES, differing_arrays, measures
from blis_replay.validate.studies.study import Run
from blis_replay.validate.studies.systems import System

__all__ = ["MEASURES", "ClusterRun", "read", "run"]

_POLICIES: tuple[Literal["fcfs", "sjf", "priority"], ...] = ("fcfs", "sjf", "priority")
# BLIS has no limit of its own on the length of a request.
_MAX_MODEL_LEN = 16_384


@dataclass(frozen=True)
class ClusterRun:
    """A load, a cluster, and the engine arguments that are not the system's.

    ``counted_at_s``: when who is where is counted.  ``twice``: whether it runs a second time, to compare.
    """

    workload: Workload
    cluster: ClusterConfig
    engine: Mapping[str, Any] = field(default_factory=dict)
    counted_at_s: float | None = None
    twice: bool = False


def read(fields: Fields) -> Run:
    """The run that a mapping describes."""
    described = ClusterRun(
        workload=workload_of(fields.mapping("workload"), 0),
        cluster=cluster_of(fields),
        engine=_engine_arguments(fields.mapping("engine", optional=True)),
        counted_at_s=fields.number("counted_at_s") if "counted_at_s" in fields.values else None,
        twice=fields.flag("twice"),
    )
    fields.refuse_unknown()
    return partial(run, described)


def run(described: ClusterRun, system: System | None, seed: int) -> Mapping[str, float]:
    """Its measures with the coefficients of a system; the seed is that of the load."""
    if system is None:
        raise ValueError("a cluster needs the coefficients of a system")
    load = generate(replace(described.workload, seed=seed))
    engine, coefficients = _engine(described, system), system.coefficients
    result = simulate_cluster(load.trace, described.cluster, engine, coefficients.latency, coefficients.lifecycle)
    found = measures(load.trace, result, described.counted_at_s)
    if described.twice:
        again = simulate_cluster(load.trace, described.cluster, engine, coefficients.latency, coefficients.lifecycle)
        found["differing_arrays"] = differing_arrays(result, again)
    return found


def _engine(described: ClusterRun, system: System) -> EngineConfig:
    """Synchronous, as BLIS is; ``kv_blocks`` are those that requests can have."""
    arguments = {"max_num_batched_tokens": system.max_num_batched_tokens, **described.engine}
    blocks = int(arguments.pop("kv_blocks", system.kv_blocks))
    defaults: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": _MAX_MODEL_LEN, "async_scheduling": False}
    return EngineConfig(**{**defaults, **arguments, "num_gpu_blocks": blocks + 1})


def _engine_arguments(fields: Fields) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in ("max_num_seqs", "max_num_batched_tokens", "kv_blocks"):
        if name in fields.values:
            arguments[name] = fields.count(name, 1, 10_000_000)
    for name in ("num_cpu_blocks", "cpu_fetch_us_per_block"):
        if name in fields.values:
            arguments[name] = fields.count(name, 0, 10_000_000)
    for name in ("async_scheduling", "enable_prefix_caching"):
        if name in fields.values:
            arguments[name] = fields.flag(name)
    if "scheduling_policy" in fields.values:
        arguments["scheduling_policy"] = fields.choice("scheduling_policy", _POLICIES)
    fields.refuse_unknown()
    return arguments
