"""What the checks share: random workloads, each with an engine that it puts under strain, and the row of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.blis.engine import Engine
from blis_replay.blis.latency.models import BatchFeatures, LatencyModel, Lifecycle
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, RequestTrace

_GROUPS, _SHARED_BLOCKS = 5, 12
_MOST_PROMPT, _MOST_OUTPUT = 300, 60

LATENCY = LatencyModel("blackbox", 6_910_420, 17_670, 2_840, per_context_token_ns=310)
LIFECYCLE = Lifecycle(pre_queue_us=1601.35, pre_queue_per_prompt_token_us=3.51, post_token_us=1805.54)
ENGINE = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512, async_scheduling=False, num_gpu_blocks=400
)


@dataclass(frozen=True)
class VerificationRow:
    """What a check measured and what it should have been; ``check`` names the quantity and its unit.

    ``configuration``: what was run.  ``detail``: how much was checked, the tolerance or
    interval, and the first fault if there is one.
    """

    check: str
    configuration: str
    measured: float
    expected: float
    passed: bool
    detail: str


def row_of_faults(check: str, configuration: str, faults: Sequence[str], checked: str) -> VerificationRow:
    """A row that passes without faults; ``checked``: the number of things checked, in words."""
    detail = f"{checked}; first fault: {faults[0]}" if faults else checked
    return VerificationRow(f"{check}, faults", configuration, float(len(faults)), 0.0, not faults, detail)


@dataclass(frozen=True)
class Scenario:
    """A workload, an engine and the features that must show in the run, or it proves nothing.

    ``must_show``: of ``preemptions``, ``prefix hits``, ``aborts``.
    """

    name: str
    trace: RequestTrace
    engine: EngineConfig
    must_show: tuple[str, ...] = ()

    def start(self) -> Engine:
        """The engine before the first arrival."""
        return Engine(self.trace, self.engine, LIFECYCLE)


@dataclass(frozen=True)
class SlowLatency:
    """``LATENCY`` computed in Python, batch by batch: the same arithmetic a second time."""

    model: LatencyModel = LATENCY

    def step_time(self, batch: BatchFeatures) -> float:
        """Duration of the batch in whole us, rounded half up."""
        model = self.model
        sum_ns = (
            model.intercept_ns
            + model.per_prefill_token_ns * batch.prefill_tokens
            + model.per_decode_token_ns * batch.decode_tokens
            + model.per_context_token_ns * batch.context_tokens
        )
        return float((sum_ns + 500) // 1000)


def plain_trace(arrival_us: Int64s, prompt_tokens: Int64s, output_tokens: Int64s) -> RequestTrace:
    """Requests without cached prompt tokens, whose clients wait."""
    never_us = np.full(len(arrival_us), NEVER_US, np.int64)
    return RequestTrace(arrival_us, prompt_tokens, prompt_tokens, output_tokens, never_us)


def random_trace(rng: np.random.Generator, requests: int, mean_gap_us: float) -> RequestTrace:
    """Poisson arrivals, no two at one moment; prompts 1 to 300 and outputs 1 to 60 tokens, uniform."""
    arrival_us = np.cumsum(1 + rng.exponential(mean_gap_us, requests).astype(np.int64))
    prompt_tokens = rng.integers(1, _MOST_PROMPT + 1, requests)
    return plain_trace(arrival_us, prompt_tokens, rng.integers(1, _MOST_OUTPUT + 1, requests))


def scenarios(seed: int, requests: int) -> list[Scenario]:
    """Six workloads of ``requests`` each; equal seeds give equal workloads."""
    rng = np.random.default_rng([seed, 1])
    scarce = replace(ENGINE, num_gpu_blocks=48)
    urgent = replace(scarce, scheduling_policy="priority", async_scheduling=True)
    cached = replace(scarce, num_gpu_blocks=80)

    def trace() -> RequestTrace:
        return random_trace(rng, requests, 45_000.0)

    return [
        Scenario("synchronous", trace(), ENGINE),
        Scenario("asynchronous", trace(), replace(ENGINE, async_scheduling=True)),
        Scenario("scarce KV", trace(), scarce, ("preemptions",)),
        Scenario(
            "scarce KV, asynchronous, priority",
            replace(trace(), priority=rng.integers(0, 3, requests)),
            urgent,
            ("preemptions",),
        ),
        Scenario("prefix cache", _with_shared_prefixes(trace(), rng), cached, ("prefix hits",)),
        Scenario("clients give up", _with_aborts(trace(), rng), scarce, ("aborts",)),
    ]


def _with_shared_prefixes(trace: RequestTrace, rng: np.random.Generator) -> RequestTrace:
    """Each prompt begins like those of its group, for up to twelve blocks."""
    group = rng.integers(0, _GROUPS, len(trace))
    count = np.minimum(trace.prompt_tokens // ENGINE.block_size, _SHARED_BLOCKS)
    keys = np.arange(_GROUPS * _SHARED_BLOCKS, dtype=np.int32)
    return replace(trace, block_keys=BlockKeys(group * _SHARED_BLOCKS, count, keys, ENGINE.block_size))


def _with_aborts(trace: RequestTrace, rng: np.random.Generator) -> RequestTrace:
    """A third of the clients gives up within two seconds of sending."""
    gives_up = rng.random(len(trace)) < 1 / 3
    abort_us = trace.arrival_us + rng.integers(1, 2_000_000, len(trace))
    return replace(trace, abort_us=np.where(gives_up, abort_us, NEVER_US))
