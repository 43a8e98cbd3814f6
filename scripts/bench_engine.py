"""Measure the engine alone, with more requests and load."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blis_replay.blis.latency.models import LatencyModel
    from blis_replay.blis.trace import EngineConfig, RequestTrace
    from blis_replay_labs.silicon.operators import OperatorModel


@dataclass(frozen=True)
class Row:
    """A line of the table: what, median seconds, peak memory in MB, a rate or remark."""

    what: str
    seconds: float
    peak_mb: float | None = None
    remark: str = ""


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a function over 20 calls, after one that is not counted."""
    work()
    durations = []
    for _ in range(20):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


def paired(work: Callable[[], object], beside: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of a function, and how many times those of ``beside``: medians of 20 pairs, after one to warm up."""

    def cpu_s(each: Callable[[], object]) -> float:
        begin = time.process_time()
        each()
        return time.process_time() - begin

    pairs = [(cpu_s(work), cpu_s(beside)) for _ in range(21)][1:]
    return statistics.median(mine for mine, _ in pairs), statistics.median(mine / other for mine, other in pairs)


def _operator_times() -> OperatorModel:
    """As large as of ``coefficients make --operators``: 13.6 ms a step, 40 us a prefill token, 25 us a decode."""
    from blis_replay_labs.silicon.operators import (
        DecodeAttention,
        OperatorModel,
        PrefillAttention,
        TokenTimes,
    )

    tokens = tuple(float(n) for n in sorted({round(2 ** (i / 8)) for i in range(121)}))
    few = tokens[::7]
    products = [tuple(13_600 + each * n for n in tokens) for each in (40, 25)]
    prefill = PrefillAttention(few, few, tuple(tuple(n * seen / 1e5 for seen in few) for n in few))
    decode = DecodeAttention(few, few, tuple(tuple(n * context * 0.03 for context in few) for n in few))
    return OperatorModel(TokenTimes(tokens, *products, (900.0,) * len(tokens)), prefill, decode)


def engine(folder: Path) -> Iterator[Row]:
    """The engine alone, KV accounting and prefix caching on, compiled and warm."""
    from blis_replay.blis.engine import simulate
    from blis_replay.blis.trace import KvCacheGroup
    from blis_replay.fixtures.bundled import bundled_recording
    from blis_replay.fixtures.catalogue import bundled_aliases, recorded_slugs
    from blis_replay.replay.mode import ReplayMode
    from blis_replay.replay.plan import plan_replay
    from blis_replay.replay.release_file import load_release

    release = load_release("h100-vllm-0.15.1")
    jobs = {}
    for alias, slug in bundled_aliases().items():
        if "reasoning" not in alias and slug not in recorded_slugs():
            recording = bundled_recording(slug)
            plan = plan_replay(recording, ReplayMode())
            entry = release.entry_for(recording.model, recording.tensor_parallelism, alias)
            jobs[alias] = (plan.trace, plan.engine, entry.latency, entry.lifecycle)
    trace, config, latency, lifecycle = jobs["34b-general"]
    result = simulate(trace, config, latency, lifecycle)  # compiles, or loads what is compiled

    def row(what: str, work: Callable[[], object], requests: int, steps: int) -> Row:
        seconds = timed(work)
        remark = f"{1e9 * seconds / steps:.0f} ns a step ({steps:,}), {1e6 * seconds / requests:.2f} us a request"
        return Row(what, seconds, remark=remark)

    steps = len(result.steps)
    yield row("engine, 34b-general", lambda: simulate(*jobs["34b-general"]), len(trace), steps)
    for what, change in (
        ("synchronous scheduling", {"async_scheduling": False}),
        ("prefix caching off, nothing to prefill again", {"enable_prefix_caching": False}),
        ("scarce blocks (5,000 instead of 26,603)", {"num_gpu_blocks": 5_000}),
    ):
        other = replace(config, **change)
        lean = replace(trace, block_keys=None, prefill_tokens=1 + trace.prompt_tokens % 16)
        chosen = lean if "prefix caching off" in what else trace
        count = len(simulate(chosen, other, latency, lifecycle).steps)
        work = partial(simulate, chosen, other, latency, lifecycle)
        yield row(f"the same, {what}", work, len(trace), count)
    for n, kind, size in (
        *((1, "window", 128), (1, "window", 1_024)),
        *((5, "window", 1_024), (5, "window", 512)),  # as Gemma 3 of 4B and of 1B
        *((3, "chunk", 8_192), (3, "state", 0)),  # as Llama 4 and Qwen3-Next
    ):
        one = replace(config, enable_prefix_caching=kind != "state")  # states share no prefixes
        groups = (KvCacheGroup("full"), *[KvCacheGroup(kind, size)] * n)
        several = replace(one, kv_cache_groups=groups, num_gpu_blocks=26_603 * (n + 1))
        cpu_s, ratio = paired(*(partial(simulate, trace, each, latency, lifecycle) for each in (several, one)))
        yield Row(f"the same, full attention and {n} x {kind} {size:,}", cpu_s, remark=f"{ratio:.2f} times one group")
    tables = partial(simulate, trace, config, _operator_times(), lifecycle)
    yield row("the same, tables of operator times", tables, len(trace), len(tables().steps))
    everything = sum(len(simulate(*job).steps) for job in jobs.values())
    requests = sum(len(job[0]) for job in jobs.values())
    yield row(
        f"engine, all {len(jobs)} experiments without overload",
        lambda: deque((simulate(*job) for job in jobs.values()), maxlen=0),  # results are not kept
        requests,
        everything,
    )


def growth(folder: Path) -> Iterator[Row]:
    """The engine with more requests, and with more load: each size in a process of its own."""
    sizes = [(requests, 14) for requests in (1_000, 10_000, 100_000, 1_000_000)]
    for requests, rate_per_s in (*sizes, (100_000, 5), (100_000, 20)):
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, __file__, str(requests), str(rate_per_s)], stdout=subprocess.PIPE, text=True
        )
        printed = process.stdout.read() if process.stdout else ""
        _, _, usage = os.wait4(process.pid, 0)
        seconds, remark = printed.strip().split("|")
        what = f"engine, {requests:,} requests at {rate_per_s}/s (process {time.perf_counter() - begin:.1f} s)"
        yield Row(what, float(seconds), usage.ru_maxrss / 1024, remark)


def grow(requests: int, rate_per_s: float) -> None:
    """Simulate requests like those of 34b-general and print ``seconds|remark``."""
    from blis_replay.blis.engine import simulate
    from blis_replay.blis.latency.models import Lifecycle

    trace, *job = plain_job(requests, rate_per_s)
    simulate(trace.part(slice(10)), *job, Lifecycle(9_300))  # loads the compiled code
    begin = time.perf_counter()
    result = simulate(trace, *job, Lifecycle(9_300))
    seconds = time.perf_counter() - begin
    hours = result.step_end_us[-1] / 3.6e9
    each = f"{1e6 * seconds / requests:.2f} us a request, {len(result.steps):,} steps"
    print(f"{seconds}|{each}, {hours:.1f} simulated hours")


def plain_job(requests: int, rate_per_s: float) -> tuple[RequestTrace, EngineConfig, LatencyModel]:
    """Requests like those of 34b-general, its engine, and about its step time."""
    import numpy as np

    from blis_replay.blis.latency.models import LatencyModel
    from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, RequestTrace

    gaps_us = np.random.default_rng(0).exponential(1e6 / rate_per_s, requests)
    prompts = np.full(requests, 575)
    prompt = np.arange(requests) % 100
    keys = BlockKeys(prompt * 35, np.full(requests, 35), np.arange(3500, dtype=np.int32), 16)
    arrival_us = np.cumsum(gaps_us).astype(np.int64)
    trace = RequestTrace(
        arrival_us, prompts, prompts, np.full(requests, 248), np.full(requests, NEVER_US), block_keys=keys
    )
    return trace, EngineConfig(128, 2048, 4096, True, 16, 26_603), LatencyModel("blackbox", 13_487_000, 41_900, 40_100)


if __name__ == "__main__":
    grow(int(sys.argv[1]), float(sys.argv[2]))
