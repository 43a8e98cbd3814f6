"""Requests that the engine serves, as a client and a stock server with iteration lines would have recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from recordings import make_recording

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.checks.server import check_iterations as iterations_check
from blis_replay.ingest.recording import ITERATION_SCHEMA, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.steps.placed import place
from blis_replay.ingest.stream import NO_EVENTS

CONTEXT = Context(NO_EVENTS, None, ())

ENGINE = EngineConfig(32, 1024, 4096, async_scheduling=False, block_size=16, num_gpu_blocks=1000)
# 5 ms per step, 100 us per prompt token, 200 us per decode.
LATENCY = LatencyModel("blackbox", 5_000_000, 100_000, 200_000)
OVERHEAD_US, WAY_US = 300, 900  # of a step that is not waited for; of a token to the client

# Arrival in us, prompt, tokens of it that the prefix cache holds, output.
Request = tuple[int, int, int, int]


def workload(
    seed: int, requests: int = 60, rate_per_s: float = 8.0, prompts: tuple[int, int] = (20, 900)
) -> list[Request]:
    """Poisson arrivals, lengths drawn evenly; of each tenth request the prefix cache holds some blocks."""
    rng = np.random.default_rng(seed)
    arrivals = np.floor(np.cumsum(rng.exponential(1e6 / rate_per_s, requests))).astype(int)
    rows = []
    for i, arrival in enumerate(arrivals.tolist()):
        prompt = int(rng.integers(*prompts))
        held = int(rng.integers(0, (prompt - 1) // 16 + 1)) * 16 if i % 10 == 9 else 0
        rows.append((arrival - int(arrivals[0]), prompt, held, int(rng.integers(2, 60))))
    return rows


def served(
    requests: Sequence[Request], engine: EngineConfig = ENGINE, aborts: dict[int, int] | None = None
) -> SimResult:
    """What the engine makes of them; ``aborts``: when clients gave up, us."""
    arrival, prompt, held, output = (np.array(column, np.int64) for column in zip(*requests, strict=True))
    gone = np.array([(aborts or {}).get(i, NEVER_US) for i in range(len(requests))], np.int64)
    return simulate(RequestTrace(arrival, prompt, prompt - held, output, gone), engine, LATENCY)


def logged(
    requests: Sequence[Request], engine: EngineConfig = ENGINE, aborts: dict[int, int] | None = None
) -> Recording:
    """The recording: a client's requests with the durations of the server's spans, and the iterations of its log."""
    result = served(requests, engine, aborts)
    arrival, prompt, _held, output = (list(column) for column in zip(*requests, strict=True))
    first, last = result.first_token_us, result.finished_us
    # The engine takes requests in, and stamps them as queued, right before it calls schedule().
    called_us = result.steps["scheduled_us"]
    queued_us = called_us[np.searchsorted(called_us, result.queued_us)]
    columns: dict[str, Any] = {
        "arrival_us": arrival,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "ttft_us": first - arrival + WAY_US,
        "e2e_us": last - arrival + WAY_US,
        "queue_us": result.scheduled_us - queued_us,
        "prefill_us": first - result.scheduled_us,
        "decode_us": last - first,
    }
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "async_scheduling")
    settings = {name: getattr(engine, name) for name in names} | {"num_gpu_blocks": engine.num_gpu_blocks or 0}
    recorded = make_recording({name: list(values) for name, values in columns.items()}, engine=settings)
    if not engine.num_gpu_blocks:
        del recorded.engine["num_gpu_blocks"]
    return replace(recorded, iterations=rows_of(iterations(result, engine)))


def recorded(engine: EngineConfig = ENGINE, **load: Any) -> Recording:
    """Such a recording with its iterations placed in time, and what the check of them finds."""
    made = logged(workload(3, **load), engine)
    made = replace(made, iterations=place(made, Scratch()).iterations)
    return replace(made, findings=tuple(iterations_check(made, CONTEXT)))


def iterations(result: SimResult, engine: EngineConfig) -> pl.DataFrame:
    """``ITERATION_SCHEMA`` of a run in which nobody was preempted; usage with one decimal of a per cent."""
    steps, count = result.steps, len(result.steps)
    usable = (engine.num_gpu_blocks or 2**30) - 1
    columns = {
        "engine": np.zeros(count),
        "iteration": np.arange(count),
        "prefill_requests": steps["prefill_requests"],
        "prefill_tokens": steps["prefill_tokens"],
        "decode_requests": steps["decode_tokens"],
        "decode_tokens": steps["decode_tokens"],
        "elapsed_us": steps["end_us"] - steps["start_us"] - OVERHEAD_US,
        "kv_usage": np.round(1 - steps["free_blocks_end"] / usable, 3),
        "dummy": np.zeros(count, np.bool_),
        "logged_us": (steps["end_us"] // 1_000_000 - steps["end_us"][0] // 1_000_000) * 1_000_000,
    }
    nothing = pl.Series([None] * count)
    return pl.DataFrame(
        {name: pl.Series(columns.get(name, nothing)).cast(kind) for name, kind in ITERATION_SCHEMA.items()}
    )
