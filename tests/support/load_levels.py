"""Tables of load levels of a server whose coefficients are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
from blis_runs import small_recording

from blis_replay.blis.closed_loop import simulate_load
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.ingest.recording import AGGREGATE_SCHEMA, REQUEST_SCHEMA, STEP_SCHEMA, Recording
from blis_replay.ingest.rows import no_rows
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay

# 9 ms a step, 45 us a prefill token, 30 us a decode and 0.06 us a token of its context; 7 ms before the queue.
TRUE = {"intercept": 9_000.0, "per_prefill_token": 45.0, "per_decode_token": 30.0, "per_context_token": 0.06}
SERVER, DELAY = LatencyModel("blackbox", 9_000_000, 45_000, 30_000, 60), Lifecycle(pre_queue_us=7_000.0)


def level(clients: int, prompt: int, output: int, means_us: dict[str, float], each: float = 10.0) -> Recording:
    """A row of a table: so many clients, so many requests ``each``, mean lengths and mean latencies."""
    said = {"prompt_tokens": prompt, "output_tokens_reported": output, **means_us}
    rows = [(-1, name, "mean", float(value)) for name, value in said.items()]
    rows += [(-1, "concurrency", "asked", float(clients)), (-1, "requests", "sent", each * clients)]
    name, table = f"c{clients}-{prompt}", pl.DataFrame(rows, AGGREGATE_SCHEMA, orient="row")
    nothing = {"requests": no_rows(REQUEST_SCHEMA), "steps": no_rows(STEP_SCHEMA), "stages": ()}
    return replace(small_recording(), slug=name, alias=name, content_hash=name, aggregates=table, **nothing)


def measured(clients: int, prompt: int, output: int, noise: float = 1.0, each: float = 10.0) -> Recording:
    """The same with the latencies of that server."""
    plan = plan_replay(level(clients, prompt, output, {}, each), ReplayMode())
    result = simulate_load(plan.trace, plan.engine, SERVER, DELAY, plan.mode.loop)
    means_us = {"ttft": result.ttft_us.mean() * noise, "e2e": result.e2e_us.mean() * noise}
    return level(clients, prompt, output, means_us, each)


def table(
    shapes: Sequence[tuple[int, int]] = ((200, 60), (2_000, 60), (3_000, 200)), each: float = 10.0
) -> list[Recording]:
    """Levels of 1, 4 and 8 clients; each is off by a factor drawn from a normal distribution of 1 %."""
    noise = np.random.default_rng(7).normal(1.0, 0.01, 3 * len(shapes))
    asked = [(clients, *shape) for shape in shapes for clients in (1, 4, 8)]
    return [measured(*load, factor, each) for load, factor in zip(asked, noise.tolist(), strict=True)]
