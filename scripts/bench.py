"""Measure blis-replay: start-up, ingest, validate, the engine; warm and cold apart.

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
import pty
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import large_recordings
from bench_engine import Row, cluster, engine, growth

REPEATS = 5
INGEST_BYTES = 1_000_000_000
_COMMAND = (sys.executable, "-m", "blis_replay.validate.cli.main")
_LARGE_STORE = Path(__file__).with_name("large_store.py")


def command(*arguments: str, env: dict[str, str] | None = None) -> tuple[float, float]:
    """Seconds and peak memory (MB) of a blis-replay command run as a process."""
    seconds, peak_mb, _user_s = usage_of(*arguments, env=env)
    return seconds, peak_mb


def usage_of(*arguments: str, env: dict[str, str] | None = None) -> tuple[float, float, float]:
    """The same, and its seconds of CPU time in user mode."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*_COMMAND, *arguments],
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        sys.exit(f"blis-replay {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - begin, usage.ru_maxrss / 1024, usage.ru_utime


_READING = """
import sys, time
from pathlib import Path
from blis_replay.ingest.assemble import read_recording

begin = time.perf_counter()
with read_recording(Path(sys.argv[1])):
    print(time.perf_counter() - begin)
"""


def reading_s(directory: Path, env: dict[str, str]) -> float:
    """Seconds from the files of a recording to its requests, steps and journeys in columns, in a process of its own."""
    run = [sys.executable, "-c", _READING, str(directory)]
    return float(subprocess.run(run, stdout=subprocess.PIPE, check=True, env={**os.environ, **env}).stdout)


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
        seconds = reading_s(directory, fresh)
        rates = f"{size_mb / seconds:.0f} MB/s without start-up, checks and store"
        yield Row(f"read, {kind}, {size_mb:.0f} MB", seconds, None, rates)
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
    yield Row("validate --all, again (17 experiments)", *median_of("validate", "--all", env=fresh))


def report(folder: Path) -> Iterator[Row]:
    """The page of one experiment and of all that ship, compiled code loaded; its size is that of the file."""
    env = {"BLIS_REPLAY_STORE": str(folder / "report.duckdb")}
    page = folder / "report.html"
    command("validate", "--all", env=env)  # brings in what ships
    for what, options in (("34b-general", ("--experiment", "34b-general")), ("--all (17 experiments)", ("--all",))):
        seconds, peak = command("report", *options, "--out", str(page), env=env)
        yield Row(f"report {what}", seconds, peak, f"{page.stat().st_size / 1e6:.2f} MB")


def large(folder: Path) -> Iterator[Row]:
    """100 recordings of 15,000 requests in one store: the first validation, which stores the runs, and another."""
    store = folder / "large.duckdb"
    begin = time.perf_counter()
    experiments, requests = 100, 15_000
    subprocess.run([sys.executable, _LARGE_STORE, store, str(experiments), str(requests)], check=True)
    made = f"; store made in {time.perf_counter() - begin:.0f} s, {store.stat().st_size / 1e6:.0f} MB"
    for run, remark in (("first", made), ("again", "")):
        seconds, peak_mb, progress = watched("validate", "--all", "--store", str(store))
        yield Row(f"validate --all, {experiments * requests:,} requests, {run}", seconds, peak_mb, progress + remark)


def watched(*arguments: str) -> tuple[float, float, str]:
    """Seconds and peak MB of a blis-replay command with a terminal as its standard error, and its progress there."""
    ours, theirs = pty.openpty()
    begin = time.perf_counter()
    process = subprocess.Popen([*_COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    written_s = []
    while _more(ours):
        written_s.append(time.perf_counter() - begin)
    _, status, usage = os.wait4(process.pid, 0)
    os.close(ours)
    if os.waitstatus_to_exitcode(status) not in (0, 1) or not written_s:
        sys.exit(f"blis-replay {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    seconds = time.perf_counter() - begin
    silent_s = max((later - sooner for sooner, later in pairwise([*written_s, seconds])), default=0.0)
    progress = (
        f"{usage.ru_utime + usage.ru_stime:.0f} s of CPU; first progress after {written_s[0]:.1f} s, never silent for "
        f"more than {silent_s:.1f} s"
    )
    return seconds, usage.ru_maxrss / 1024, progress


def _more(terminal: int) -> bool:
    """Whether something was written; False once nobody can write any more."""
    select.select([terminal], [], [])
    try:
        return bool(os.read(terminal, 1 << 16))
    except OSError:  # how a terminal says so
        return False


def machine() -> str:
    """What this runs on, in words."""
    cpus = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{cpus[0]}, {len(cpus)} processors, {memory_gb:.0f} GB, Python {platform.python_version()}"


def studies(folder: Path) -> Iterator[Row]:
    """All studies that need no recording, on the processors there are, compiled code loaded."""
    env = {"BLIS_REPLAY_STORE": str(folder / "studies.duckdb")}
    command("study", "run", "sjf", env=env)
    yield Row("study run --all", *command("study", "run", "--all", env=env))


_COVERAGE = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from test_resampling import covers_zero
noise, depth, servers = sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
print(np.mean([covers_zero(seed, noise, depth) for seed in range(servers)]))
"""


def coverage(folder: Path) -> Iterator[Row]:
    """How often a 95 % interval of the paired error of mean E2E holds 0, on noisy servers with true coefficients."""
    tests = Path(__file__).parents[1] / "tests" / "validate"
    for noise in ("steps", "drift", "stalls", "clients"):
        for depth in (3, 10, 30):
            begin = time.perf_counter()
            run = [sys.executable, "-c", _COVERAGE, str(tests), noise, str(depth), "60"]
            share = float(subprocess.run(run, stdout=subprocess.PIPE, check=True).stdout)
            what = f"coverage, noise of {noise}, {depth} requests at a time, 60 servers"
            yield Row(what, time.perf_counter() - begin, None, f"{share:.0%}")


PARTS = {
    "coverage": coverage,
    "startup": startup,
    "ingest": ingest,
    "validate": validate,
    "report": report,
    "large": large,
    "engine": engine,
    "growth": growth,
    "cluster": cluster,
    "studies": studies,
}


def main(names: list[str]) -> None:
    """Run the named parts, or all."""
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
