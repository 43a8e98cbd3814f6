"""Measure blis-replay: start-up, ingest, validate, the engine, the collector; warm and cold apart.

    python scripts/bench.py            # everything, a Markdown table on standard output
    python scripts/bench.py engine     # one part: startup, ingest, validate, report, large, engine, growth, ...

Whole commands run as processes of their own; their times and peak memory are the
operating system's.  "Cold" is the first run with an empty cache of compiled code.
Ratios within one run say more than single times on a shared machine.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import large_recordings

if TYPE_CHECKING:
    from blis_replay.blis.latency import LatencyModel
    from blis_replay.blis.trace import EngineConfig, RequestTrace

REPEATS = 5
INGEST_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Row:
    """A line of the table: what, median seconds, peak memory in MB, a rate or remark."""

    what: str
    seconds: float
    peak_mb: float | None = None
    remark: str = ""


def command(*arguments: str, env: dict[str, str] | None = None) -> tuple[float, float]:
    """Seconds and peak memory (MB) of a blis-replay command run as a process."""
    seconds, peak_mb, _user_s = usage_of(*arguments, env=env)
    return seconds, peak_mb


def usage_of(*arguments: str, env: dict[str, str] | None = None) -> tuple[float, float, float]:
    """The same, and its seconds of CPU time in user mode."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "blis_replay.validate.cli.main", *arguments],
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        sys.exit(f"blis-replay {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - begin, usage.ru_maxrss / 1024, usage.ru_utime


def median_of(*arguments: str, env: dict[str, str] | None = None) -> tuple[float, float]:
    """Medians over the repeats of a command."""
    runs = [command(*arguments, env=env) for _ in range(REPEATS)]
    return statistics.median(s for s, _ in runs), max(mb for _, mb in runs)


def startup(folder: Path) -> Iterator[Row]:
    """How long help takes: it must import nothing heavy."""
    yield Row("blis-replay --help", *median_of("--help"))


def ingest(folder: Path) -> Iterator[Row]:
    """MB/s of the large kinds of file at 1 GB, on one core; the first ingest of all compiles the scan."""
    # In a process of its own: a child's peak memory is never below that of its parent.
    maker = multiprocessing.get_context("spawn").Process(target=large_recordings.write, args=(folder, INGEST_BYTES))
    maker.start()
    maker.join()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    fresh = {"NUMBA_CACHE_DIR": str(folder / "numba")}
    for kind in large_recordings.KINDS:
        (directory,) = (folder / kind).iterdir()
        size_mb = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6
        for what in ("first ever", "again, into a new store", "again, unchanged"):
            store = folder / ("first.duckdb" if what == "first ever" else "again.duckdb")
            seconds, peak, user_s = usage_of("ingest", str(directory), "--store", str(store), env=fresh)
            rates = f"{size_mb / seconds:.0f} MB/s, {size_mb / user_s:.0f} MB/s of user CPU"
            yield Row(f"ingest, {kind}, {size_mb:.0f} MB, {what}", seconds, peak, rates)
        (folder / "again.duckdb").unlink()
    os.sched_setaffinity(0, cores)


def validate(folder: Path) -> Iterator[Row]:
    """The main job as a whole process, bundled ground truth: cold, start-up cached, and all."""
    fresh = {"NUMBA_CACHE_DIR": str(folder / "numba"), "BLIS_REPLAY_STORE": str(folder / "validate.duckdb")}
    yield Row(
        "validate 34b-general, first ever (compiles, fills the store)",
        *command("validate", "--experiment", "34b-general", env=fresh),
    )
    yield Row("validate 34b-general, again", *median_of("validate", "--experiment", "34b-general", env=fresh))
    yield Row("validate --all, first (fills the store)", *command("validate", "--all", env=fresh))
    yield Row("validate --all, again (16 experiments)", *median_of("validate", "--all", env=fresh))


def report(folder: Path) -> Iterator[Row]:
    """The page of one experiment and of all that ship, compiled code loaded; its size is that of the file."""
    env = {"BLIS_REPLAY_STORE": str(folder / "report.duckdb")}
    page = folder / "report.html"
    command("validate", "--all", env=env)  # brings in what ships
    for what, asked in (("34b-general", ("--experiment", "34b-general")), ("--all (16 experiments)", ("--all",))):
        seconds, peak = command("report", *asked, "--out", str(page), env=env)
        yield Row(f"report {what}", seconds, peak, f"{page.stat().st_size / 1e6:.2f} MB")


def large(folder: Path) -> Iterator[Row]:
    """100 recordings of 15,000 requests in one store, validated with the progress that a terminal sees."""
    import bench_large

    for row in bench_large.large(folder):
        yield Row(*row)


def engine(folder: Path) -> Iterator[Row]:
    """The engine alone, KV accounting and prefix caching on, compiled and warm."""
    from blis_replay.blis.engine import simulate
    from blis_replay.fixtures.bundled import bundled_recording
    from blis_replay.fixtures.catalogue import bundled_aliases
    from blis_replay.replay.mode import ReplayMode
    from blis_replay.replay.plan import plan_replay
    from blis_replay.replay.release_file import load_release

    release = load_release("h100-vllm-0.15.1")
    jobs = {}
    for alias, slug in bundled_aliases().items():
        if "reasoning" not in alias:
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
    for requests, rate_per_s in (
        (1_000, 14),
        (10_000, 14),
        (100_000, 14),
        (1_000_000, 14),
        (100_000, 5),
        (100_000, 20),
    ):
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, __file__, f"grow={requests}@{rate_per_s}"], stdout=subprocess.PIPE, text=True
        )
        said = process.stdout.read() if process.stdout else ""
        _, _, usage = os.wait4(process.pid, 0)
        seconds, remark = said.strip().split("|")
        what = f"engine, {requests:,} requests at {rate_per_s}/s (process {time.perf_counter() - begin:.1f} s)"
        yield Row(what, float(seconds), usage.ru_maxrss / 1024, remark)


def grow(requests: int, rate_per_s: float) -> None:
    """Simulate requests like those of 34b-general and print ``seconds|remark``."""
    from blis_replay.blis.engine import simulate
    from blis_replay.blis.latency import Lifecycle

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

    from blis_replay.blis.latency import LatencyModel
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


def cluster(folder: Path) -> Iterator[Row]:
    """Eight instances and 100,000 requests at 14/s an instance, by router, compiled and warm."""
    from blis_replay.blis.cluster.config import ClusterConfig, LeastLoaded, RoundRobin, Snapshots, Weighted
    from blis_replay.blis.cluster.simulate import simulate_cluster

    requests, instances = 100_000, 8
    job = plain_job(requests, 14 * instances)
    for what, config in (
        ("round-robin", ClusterConfig(instances, RoundRobin())),
        ("least-loaded, every decision sees the moment", ClusterConfig(instances, LeastLoaded())),
        ("weighted, every decision sees the moment", ClusterConfig(instances, Weighted())),
        ("weighted, snapshots of 50 ms", ClusterConfig(instances, Weighted(), snapshots=Snapshots(50_000))),
    ):
        trace, engine, latency = job
        steps = sum(len(run.steps) for run in simulate_cluster(trace, config, engine, latency).instances)
        seconds = timed(partial(simulate_cluster, trace, config, engine, latency))
        remark = f"{1e9 * seconds / steps:.0f} ns a step ({steps:,}), {1e6 * seconds / requests:.2f} us a request"
        yield Row(f"cluster of {instances}, {requests:,} requests, {what}", seconds, remark=remark)


def machine() -> str:
    """What this runs on, in words."""
    cpus = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{cpus[0]}, {len(cpus)} processors, {memory_gb:.0f} GB, Python {platform.python_version()}"


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a function over 20 calls, after one that is not counted."""
    work()
    durations = []
    for _ in range(20):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


def collect(folder: Path) -> Iterator[Row]:
    """Spans per second that the live collector takes on one core, and what it does beyond that."""
    import bench_collect

    for row in bench_collect.collect(folder):
        yield Row(*row)


PARTS = {
    "startup": startup,
    "ingest": ingest,
    "validate": validate,
    "report": report,
    "large": large,
    "engine": engine,
    "growth": growth,
    "cluster": cluster,
    "collect": collect,
}


def main(names: list[str]) -> None:
    """Run the named parts, or all."""
    if len(names) == 1 and names[0].startswith("grow="):
        requests, rate_per_s = names[0].removeprefix("grow=").split("@")
        return grow(int(requests), float(rate_per_s))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"no such part: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    print(f"{machine()}; `python scripts/bench.py{''.join(f' {name}' for name in names)}`.\n")
    print("| what | seconds | peak MB | |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or PARTS:
            for row in PARTS[name](Path(folder)):
                peak = "" if row.peak_mb is None else f"{row.peak_mb:.0f}"
                print(f"| {row.what} | {row.seconds:.4f} | {peak} | {row.remark} |", flush=True)
    print("\nOthers, for a trace like 34b-general, whole process, 2 cores, as published or measured by us before:")
    print("the real vLLM scheduler 0.60 s of CPU per 1,000 steps at 43 running requests (46 s for 76,500 steps);")
    print("BLIS 3.6 s with fast flags, 67 s with its defaults, 13 s on its older branch; NVIDIA Dynamo replay 1.8 s.")
    print(f"\npeak memory of this script: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
