"""A synthetic experiment: how it is described, and the truth about it once it ran.

Times are int64 us from the experiment's zero, the send of its first request.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.blis.latency.models import Latency, LatencyModel, Lifecycle
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.ingest.recording import SharedPrefix, Stage

_SHARED_PREFIX = SharedPrefix(
    num_groups=10, num_prompts_per_group=10, system_prompt_tokens=100, question_tokens=400, output_tokens=24
)
_LATENCY = LatencyModel("blackbox", intercept_ns=8_000_000, per_prefill_token_ns=30_000, per_decode_token_ns=60_000)
_LIFECYCLE = Lifecycle(pre_queue_us=5_000, post_request_us=400)
_ENGINE = EngineConfig(
    max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=4096, async_scheduling=True, num_gpu_blocks=10_001
)


@dataclass(frozen=True)
class SyntheticExperiment:
    """An experiment to make: load, server, and how it is recorded.

    Load: ``stages`` are Poisson with exactly ``rate x duration`` requests, ``stage_gap_us`` apart;
    ``requests`` cuts the run off after that many.  Prompt p has system prompt + question tokens,
    within ``prompt_jitter_tokens``; request i carries prompt i modulo their number.  With
    ``ignore_eos`` all outputs have the configured length, else 1 to that.

    Server: ``latency`` and ``lifecycle`` are the true coefficients.  Without ``prefix_caching`` every prompt is
    computed whole.  ``cache``: how hits are found, from the order of the prompts in a cache that never evicts
    (``endless``), or by the engine from the identity of their blocks (``simulated``).

    Recording: ``inference_perf``: the version that recorded it.  0.2 stamps the data line of a token and the blank line
    after it, 0.4 the data line; 0.5 and 0.6 have other records, with the server's usage.
    ``retokenised_shortfall``: mean share by which re-tokenising undercounts.  ``failures``: requests whose client gives
    up after ``timeout_us``.  ``step_sample_rate``: share of the steps recorded.  ``phase_lag``: count a request as
    prefill in the step after its last chunk, as the recorder does under asynchronous scheduling.
    ``request_spans``: write upstream vLLM's ``llm_request`` spans too.  ``journeys``: write the instrumented vLLM's
    journeys (of runs without preemptions).  ``*_zero_ns``: clock readings at time zero.
    """

    slug: str = "20260301-120000-synthetic-1b-tp1-general"
    model: str = "synthetic/synthetic-1b"
    hardware: str = "H100-SXM-80GB"
    tensor_parallelism: int = 1
    stages: tuple[Stage, ...] = (Stage(0, 10.0, 15_000_000), Stage(1, 15.0, 10_000_000))
    stage_gap_us: int = 1_000_000
    requests: int | None = None
    shared_prefix: SharedPrefix = _SHARED_PREFIX
    prompt_jitter_tokens: int = 12
    ignore_eos: bool = True
    latency: Latency = _LATENCY
    lifecycle: Lifecycle = _LIFECYCLE
    engine: EngineConfig = _ENGINE
    prefix_caching: bool = True
    cache: Literal["endless", "simulated"] = "endless"
    inference_perf: Literal["0.2", "0.4", "0.5", "0.6"] = "0.2"
    retokenised_shortfall: float = 0.1
    failures: int = 0
    timeout_us: int = 100_000
    step_sample_rate: float = 0.1
    phase_lag: bool = True
    request_spans: bool = False
    journeys: bool = False
    client_zero_ns: int = 8_123_456_789_000
    epoch_zero_ns: int = 1_772_366_400_123_456_000
    step_zero_ns: int = 8_123_456_789_000
    seed: int = 1


@dataclass(frozen=True)
class SyntheticTruth:
    """A made experiment: what happened, exactly.  Arrays have one value per request, in send order.

    ``prompt`` / ``group``: which prompt it carried and the group whose system prompt that begins with.
    ``cached_prompt_tokens``: found in the prefix cache.  ``retokenised_tokens``: the count a client
    that re-tokenises text reports.  ``result``: the simulated run.
    """

    spec: SyntheticExperiment
    trace: RequestTrace
    result: SimResult
    stage: Int64s
    prompt: Int64s
    group: Int64s
    cached_prompt_tokens: Int64s
    retokenised_tokens: Int64s

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def ok(self) -> Bools:
        """bool[n]: requests that the client saw to the end."""
        return self.result.completed

    @property
    def taken_in_us(self) -> Int64s:
        """int64[n]: when the engine's loop took the request in, which is what the server records as queued.

        The loop looks at new requests between two steps, just before the next ``schedule()``.
        """
        calls_us = self.result.steps["scheduled_us"]
        queued_us = self.result.queued_us
        place = np.searchsorted(calls_us, queued_us)
        turn_us = np.where(place < len(calls_us), calls_us[np.minimum(place, len(calls_us) - 1)], queued_us)
        return np.where(turn_us < self.trace.abort_us, turn_us, queued_us)

    @property
    def client_end_us(self) -> Int64s:
        """int64[n]: when the client was done with it or gave up."""
        end_us = self.trace.arrival_us + self.result.e2e_us
        return np.where(self.ok, end_us, self.trace.abort_us)

    def token_steps(self, request: int) -> Int64s:
        """int64[tokens so far]: the row of ``result.steps`` that gave each token of a request."""
        segments = self.result.segments[self.result.segments[:, 0] == request]
        return np.concatenate([np.empty(0, np.int64), *(np.arange(first, first + rows) for _, first, rows in segments)])

    def token_times_us(self, request: int) -> Int64s:
        """int64[output tokens]: when the client had each token; empty if it gave up."""
        if not self.ok[request]:
            return np.empty(0, np.int64)
        steps = self.token_steps(request)
        # The post-token delay counts once a token, as in SimResult.e2e_us.
        delay_us = np.arange(1, len(steps) + 1) * self.result.post_token_us
        times_us: Int64s = self.result.step_end_us[steps] + delay_us
        return times_us

    def epoch_ns(self, time_us: int) -> int:
        """What the epoch clocks of client and server show at ``time_us``."""
        return self.spec.epoch_zero_ns + int(time_us) * 1000

    def client_s(self, time_us: int) -> float:
        """What the client's ``perf_counter`` shows at ``time_us``."""
        return (self.spec.client_zero_ns + int(time_us) * 1000) / 1e9


def step_records(truth: SyntheticTruth) -> dict[str, Int64s]:
    """int64[steps] by field: every step, numbered from 1 (``step_id``), before any sampling.

    ``start_us`` is when ``schedule()`` ran, ``duration_us`` the processor time it took: 60 us and
    2 a running request, which is neither the step's time nor its cycle.  With ``phase_lag``
    a request counts as prefill, with its one token, also in the step that was scheduled before its
    first token was in.
    """
    steps = truth.result.steps
    running = steps["running_depth"]
    lagging = _lagging(truth) if truth.spec.phase_lag else np.zeros(len(steps), np.int64)
    return {
        "step_id": np.arange(1, len(steps) + 1),
        "start_us": steps["scheduled_us"],
        "duration_us": 60 + 2 * running,
        "running_depth": running,
        "waiting_depth": steps["waiting_depth"],
        "prefill_requests": steps["prefill_requests"] + lagging,
        "decode_requests": steps["decode_tokens"] - lagging,
        "prefill_tokens": steps["prefill_tokens"] + lagging,
        "decode_tokens": steps["decode_tokens"] - lagging,
        "finished_requests": _finished(truth),
        "preempted_requests": steps["preempted"],
        "kv_blocks_free": steps["free_blocks"],
    }


def sampled(truth: SyntheticTruth) -> Int64s:
    """int64[k]: rows of the steps that the recorder drew, each with the sample rate."""
    random = np.random.Generator(np.random.PCG64([truth.spec.seed, 1]))
    return np.flatnonzero(random.random(len(truth.result.steps)) < truth.spec.step_sample_rate)


def _lagging(truth: SyntheticTruth) -> Int64s:
    """Requests whose first decode was scheduled before the token of their last chunk was in."""
    result = truth.result
    scheduled_at = result.steps["scheduled_us"]
    goes_on = (result.first_step >= 0) & (result.output_tokens > 1) & (result.first_step + 1 < len(scheduled_at))
    after = result.first_step[goes_on] + 1
    early = scheduled_at[after] < result.step_end_us[result.first_step[goes_on]]
    there = scheduled_at[after] < truth.trace.abort_us[goes_on]
    return np.bincount(after[early & there], minlength=len(scheduled_at))


def _finished(truth: SyntheticTruth) -> Int64s:
    """Requests that left between a step's schedule() and the one before, given up ones included."""
    scheduled_at = truth.result.steps["scheduled_us"]
    admitted_or_queued = truth.ok | (truth.trace.abort_us > truth.result.queued_us)
    left_us = np.where(truth.ok, truth.result.finished_us, truth.trace.abort_us)[admitted_or_queued]
    step = np.searchsorted(scheduled_at, left_us, side="left")
    return np.bincount(step[step < len(scheduled_at)], minlength=len(scheduled_at))


def hex_id(text: str, size: int) -> str:
    """Looks drawn at random, as a tracing SDK's ids do, and is the same every time; ``size`` in bytes."""
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def client_request_id(request: int) -> str:
    """The id that a client gives a request (``X-Request-Id``)."""
    return hex_id(f"request {request}", 8)


def api_request_id(request: int) -> str:
    """The id of a chat request at the API server: the client's, prefixed."""
    return f"chatcmpl-{client_request_id(request)}"


def core_request_id(request: int) -> str:
    """The id of a request in the engine: the API server's with a random suffix."""
    return f"{api_request_id(request)}-{hex_id(f'engine request {request}', 4)}"


def completion_id(request: int) -> str:
    """The id of a completion request whose client gave it none, as the response has it."""
    return f"cmpl-{request:032x}"
