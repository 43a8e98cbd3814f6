"""Synthetic servers in memory: any step time, any load, noise of several kinds; their coefficients are known.

What they are for is to ask many of them: whether a calibration finds the coefficients again, and how often a printed
interval holds the truth.  ``files`` writes experiments as files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import CorrectedModel, LatencyModel, Lifecycle, Regime, RegimeModel
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay.ingest.recording import (
    AGGREGATE_SCHEMA,
    RECORDED,
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    Recording,
    Setting,
    Stage,
)
from blis_replay.ingest.rows import Rows, no_rows, rows_of
from blis_replay_labs.planted.frames import frame_of

Noise = Literal["none", "steps", "drift", "stalls", "clients"]
# Step times besides a line in prefill, decode and context tokens: without one of these columns; never below a floor,
# as a memory-bound one; longer with what prefill tokens attend to; with another intercept where there is a prefill.
Form = Literal["line", "without context", "without decodes", "floor", "attended", "two intercepts"]

# How far step times stray, as a share of an empty step; how long a drift lasts; how often a step stalls, and how long.
_STEP_NOISE, _DRIFT, _DRIFT_US = 0.10, 0.03, 3_000_000
_STALL_EVERY_US, _STALL = 1_000_000, 5.0
_CLIENT_NOISE_US = 4_000.0
_WORKLOAD = "synthetic-general"


# The largest share of a step that grows with the number of requests: beyond it a step time 1 % longer makes more than
# 4 % of E2E, and no test tells the one from the other.
_MOST_BUSY = 0.75
# The fewest residences of a run: a shorter one only fills up.
_RESIDENCES = 8


@dataclass(frozen=True)
class Server:
    """A server and its load: ``depth`` requests are served at a time, on average.

    ``prompt_tokens``, ``output_tokens``: means of their lengths; ``alike``: all requests have these.  ``steps``: the
    share of the steps that is recorded.
    """

    latency: LatencyModel | RegimeModel
    lifecycle: Lifecycle
    depth: float
    requests: int = 600
    prompt_tokens: int = 300
    output_tokens: int = 100
    alike: bool = False
    noise: Noise = "none"
    asynchronous: bool = True
    seed: int = 1
    steps: float = 0.0
    max_num_batched_tokens: int = 2048

    @property
    def engine(self) -> EngineConfig:
        """Engine arguments: room for four times the mean depth."""
        return EngineConfig(
            max_num_seqs=max(int(4 * self.depth), 64),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=32_768,
            async_scheduling=self.asynchronous,
        )


def bent(intercept_us: float, prefill_us: float, context_us: float, slopes_us: Floats, bends: Int64s) -> RegimeModel:
    """A step time that bends at some numbers of decodes: ``slopes_us`` per decode below, between and above them."""
    regimes, low, base_us = [], 0.0, intercept_us
    for i, slope_us in enumerate(map(float, slopes_us)):
        last = i == len(bends)
        line = (
            ("prefill_tokens", prefill_us),
            ("decode_tokens", slope_us + context_us),
            ("kv_sum", context_us),
        )
        condition = None if last else ("decode_tokens", "<=", float(bends[i]))
        regimes.append(Regime(f"above {low:g}", base_us - slope_us * low, line, condition=condition))
        if not last:
            base_us, low = base_us + slope_us * (float(bends[i]) - low), float(bends[i])
    return RegimeModel(tuple(regimes))


def any_server(
    seed: int, bends: tuple[int, ...] = (), requests: int = 600, noise: Noise = "none", form: Form = "line"
) -> Server:
    """A server of that form with coefficients, lengths and depth that ``seed`` draws; only a line bends."""
    rng = np.random.default_rng([seed, len(bends), *bends])
    intercept = rng.uniform(4_000, 20_000)
    prefill, context = intercept * rng.uniform(1e-3, 6e-3), intercept * rng.uniform(2e-6, 2e-5)
    slopes = intercept * rng.uniform(1e-3, 1e-2, len(bends) + 1)
    depth = float(rng.uniform(20, 100) if bends else np.exp(rng.uniform(np.log(2), np.log(100))))
    prompt, output = int(rng.uniform(60, 900)), int(np.exp(rng.uniform(np.log(20), np.log(300))))
    per_request = max(slopes) + context * (prompt + output / 2) + prefill * prompt / output
    latency: LatencyModel | RegimeModel = bent(intercept, prefill, context, slopes, np.array(bends))
    if not bends:
        in_ns = [round(1000 * float(us)) for us in (intercept, prefill, slopes[0], context)]
        latency = _formed(LatencyModel("blackbox", in_ns[0], in_ns[1], in_ns[2], in_ns[3]), form)
    return Server(
        latency=latency,
        lifecycle=Lifecycle(pre_queue_us=float(rng.integers(2_000, 12_000))),
        depth=min(depth, requests / _RESIDENCES, _MOST_BUSY / (1 - _MOST_BUSY) * intercept / per_request),
        requests=requests,
        prompt_tokens=prompt,
        output_tokens=output,
        alike=bool(rng.random() < 0.3),
        noise=noise,
        asynchronous=bool(rng.random() < 0.7),
        seed=seed,
    )


def _formed(line: LatencyModel, form: Form) -> LatencyModel | RegimeModel:
    """The line in another form, so that an empty step and a full one take about as long."""
    if form == "without context":
        return replace(line, per_context_token_ns=0)
    if form == "without decodes":
        return replace(line, per_decode_token_ns=0)
    if form == "floor":
        # Reading the weights takes as long as computing a dozen decodes.
        return replace(line, kind="floor", floor_ns=line.intercept_ns + 12 * line.per_decode_token_ns)
    if form == "attended":
        return replace(line, per_1000_attended_ns=round(0.3 * line.per_prefill_token_ns))
    if form == "two intercepts":
        costs = (("prefill_tokens", line.per_prefill_token_ns), ("decode_tokens", line.per_decode_token_ns))
        in_us = tuple((name, ns / 1000) for name, ns in costs)
        context_us = line.per_context_token_ns / 1000
        columns = (in_us[0], ("decode_tokens", in_us[1][1] + context_us), ("kv_sum", context_us))
        alone_us = line.intercept_ns / 1000
        alone = Regime("alone", alone_us, columns, condition=("prefill_tokens", "==", 0.0))
        return RegimeModel((alone, Regime("mixed", 1.1 * alone_us, columns)))
    return line


def run_of(server: Server, *, draw: int = 0) -> Recording:
    """A recording of the server; ``draw`` draws other arrivals, lengths and noise of the same kind."""
    rng = np.random.default_rng([server.seed, draw, 7])
    trace = load_of(server, rng)
    result = _served(server, trace, rng)
    late_us = np.rint(rng.gamma(1.0, _CLIENT_NOISE_US, len(trace))) if server.noise == "clients" else 0
    late_us = np.asarray(late_us - (_CLIENT_NOISE_US if server.noise == "clients" else 0), np.int64)
    n, done = len(trace), result.completed
    columns = {
        "request_index": np.arange(n),
        "arrival_us": trace.arrival_us,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        "ttft_us": np.maximum(result.ttft_us + late_us, 1),
        "e2e_us": np.maximum(result.e2e_us + late_us, 2),
        "output_tokens_source": "server usage",
        "status": "ok",
        "request_id": [str(i) for i in range(n)],
    }
    frame = frame_of(REQUEST_SCHEMA, columns, n).filter(done)
    engine = vars(server.engine) | {"scheduling_policy": "fcfs"}
    return Recording(
        slug=f"20260301-{server.seed % 1_000_000:06d}-synthetic-1b-tp1-{_WORKLOAD}-{draw}",
        alias=f"1b-{_WORKLOAD}-{draw}",
        workload=_WORKLOAD,
        model="synthetic/synthetic-1b",
        hardware="H100",
        tensor_parallelism=1,
        ground_truth=RECORDED,
        content_hash=f"{server.seed:032x}{draw:032x}",
        engine={key: Setting(value, "recorded") for key, value in engine.items() if value is not None},
        stages=(Stage(0, float(n / trace.arrival_us[-1] * 1e6), int(trace.arrival_us[-1]) + 1),),
        shared_prefix=None,
        ignore_eos=True,
        prefix_hit_rate=None,
        requests=rows_of(frame),
        token_events=None,
        steps=_recorded_steps(server, result, rng),
        aggregates=pl.DataFrame(schema=AGGREGATE_SCHEMA),
        clocks=(),
        files=(),
        missing=(),
    )


def _recorded_steps(server: Server, result: SimResult, rng: np.random.Generator) -> Rows:
    """The share of the steps that is recorded, drawn one by one."""
    drawn = np.flatnonzero(rng.random(len(result.steps)) < server.steps) if server.steps else np.zeros(0, np.int64)
    if not len(drawn):
        return no_rows(STEP_SCHEMA)
    steps = result.steps[drawn]
    columns = {
        "step_id": drawn + 1,
        "start_us": steps["scheduled_us"],
        "duration_us": 60 + 2 * steps["running_depth"],
        "decode_requests": steps["decode_tokens"],
    }
    same = ("running_depth", "waiting_depth", "prefill_requests", "prefill_tokens", "decode_tokens")
    return rows_of(frame_of(STEP_SCHEMA, columns | {name: steps[name] for name in same}, len(drawn)))


def load_of(server: Server, rng: np.random.Generator) -> RequestTrace:
    """A draw of its load."""
    n = server.requests
    prompts, outputs = (_lengths(server, mean, rng) for mean in (server.prompt_tokens, server.output_tokens))
    gaps_us = rng.exponential(residence_us(server) / server.depth, n)
    arrival_us = np.cumsum(gaps_us).astype(np.int64)
    return RequestTrace(arrival_us - arrival_us[0], prompts, prompts, outputs, np.full(n, NEVER_US))


def _lengths(server: Server, mean: int, rng: np.random.Generator) -> Int64s:
    """int64[requests]: all alike, or a gamma distribution of shape 2 up to six times the mean."""
    lengths = np.full(server.requests, float(mean))
    if not server.alike:
        lengths = np.clip(rng.gamma(2.0, mean / 2, server.requests), 2, 6 * mean)
    return lengths.astype(np.int64)


def residence_us(server: Server) -> float:
    """About how long a request is served at the mean depth: its steps, each with its share of others' prefills."""
    return server.output_tokens * step_us(server)


def step_us(server: Server) -> float:
    """About how long a step takes at the mean depth."""
    context = server.depth * (server.prompt_tokens + server.output_tokens / 2)
    prefill = server.depth / server.output_tokens * server.prompt_tokens
    return _line_us(server.latency, prefill, server.depth, context)


def _line_us(latency: LatencyModel | RegimeModel, prefill: float, decode: float, context: float) -> float:
    if isinstance(latency, LatencyModel):
        per = (latency.per_prefill_token_ns, latency.per_decode_token_ns, latency.per_context_token_ns)
        return (
            max(latency.intercept_ns + per[0] * prefill + per[1] * decode + per[2] * context, latency.floor_ns) / 1000
        )
    regime = next(r for r in latency.regimes if r.condition is None or decode <= r.condition[2])
    values = {"prefill_tokens": prefill, "decode_tokens": decode, "kv_sum": context - decode}
    return regime.intercept_us + sum(cost * values[name] for name, cost in regime.coefficients)


def _served(server: Server, trace: RequestTrace, rng: np.random.Generator) -> SimResult:
    if server.noise in ("none", "clients"):
        return simulate(trace, server.engine, server.latency, server.lifecycle)
    end_us = int(1.5 * trace.arrival_us[-1] + 20 * residence_us(server))
    intercept_us = _line_us(server.latency, 0, 0, 0)
    every_us = int(_DRIFT_US / 20) if server.noise == "drift" else int(intercept_us / 2)
    at_us = np.arange(0, end_us, every_us)
    extra_us = intercept_us * _disturbance(server.noise, at_us, every_us, rng)
    noisy = CorrectedModel(server.latency, (0, 0, 0, 0), at_us, np.rint(extra_us).astype(np.int64))
    return simulate(trace, server.engine, noisy, server.lifecycle)


def between_stalls_us(server: Server) -> float:
    """What an empty step takes where nothing stalls; the mean of all steps is what the latency model says."""
    intercept_us = _line_us(server.latency, 0, 0, 0)
    stalled = int(intercept_us / 2) / _STALL_EVERY_US if server.noise == "stalls" else 0.0
    return intercept_us * (1 - _STALL * stalled)


def _disturbance(noise: Noise, at_us: Int64s, every_us: int, rng: np.random.Generator) -> Floats:
    """float64[times]: what steps take longer, as a share of an empty step; 0 on average."""
    white = rng.normal(size=len(at_us))
    if noise == "steps":
        return _STEP_NOISE * white
    if noise == "stalls":
        stalled = rng.random(len(at_us)) < every_us / _STALL_EVERY_US
        return np.asarray(_STALL * (stalled - every_us / _STALL_EVERY_US), np.float64)
    keep = float(np.exp(-every_us / _DRIFT_US))
    drift = np.empty(len(at_us))
    level = white[0]
    for i, shock in enumerate(white):
        level = keep * level + np.sqrt(1 - keep**2) * shock
        drift[i] = level
    # A slow second has fewer steps: their mean disturbance would be below 0 by its variance.
    return _DRIFT * drift + _DRIFT**2
