"""Measure blis-replay: ingest, validate, the engine; warm and cold apart.

    python scripts/bench.py            # everything, a Markdown table on standard output
    python scripts/bench.py engine     # one part: ingest, validate, report, large, engine, growth, ...

Whole commands run as processes of their own; their times and peak memory are the
operating system's.  "Cold" is the first run with an empty cache of compiled code.
Ratios within one run say more than single times on a shared machine.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import large_recordings
from bench_engine import Row, engine, growth

REPEATS = 5
INGEST_BYTES = 1_000_000_000
_COMMAND = (sys.executable, "-m", "blis_replay.validate.cli.main")
_LARGE_STORE = Path(__file__).with_name("large_store.py")


@dataclass(frozen=True)
class Usage:
    """What a command used: seconds of the clock and of user CPU and system CPU, peak memory in MB."""

    seconds: float
    user_s: float
    system_s: float
    peak_mb: float


def usage_of(*arguments: str, env: dict[str, str] | None = None) -> Usage:
    """What a blis-replay command used as a process; ends this script where the command fails."""
    begin = time.perf_counter()
    environment = {**os.environ, **(env or {})}
    process = subprocess.Popen([*_COMMAND, *arguments], stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1, 3, 4):  # verdicts; `--all` has some that cannot be judged
        sys.exit(f"blis-replay {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    return Usage(time.perf_counter() - begin, usage.ru_utime, usage.ru_stime, usage.ru_maxrss / 1024)


def command(*arguments: str, env: dict[str, str] | None = None) -> tuple[float, float]:
    """Seconds and peak memory (MB) of a blis-replay command."""
    usage = usage_of(*arguments, env=env)
    return usage.seconds, usage.peak_mb


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
            usage = usage_of("ingest", str(directory), "--store", str(store), env=fresh)
            rates = f"{size_mb / usage.seconds:.0f} MB/s, {size_mb / usage.user_s:.0f} MB/s of user CPU"
            yield Row(f"ingest, {kind}, {size_mb:.0f} MB, {what}", usage.seconds, usage.peak_mb, rates)
        seconds = reading_s(directory, fresh)
        rates = f"{size_mb / seconds:.0f} MB/s without start-up, checks and store"
        yield Row(f"read, {kind}, {size_mb:.0f} MB", seconds, None, rates)
        (folder / "again.duckdb").unlink()
    os.sched_setaffinity(0, cores)


def validate(folder: Path) -> Iterator[Row]:
    """The main job as a whole process, bundled ground truth: cold, start-up cached, and all."""
    fresh = {"NUMBA_CACHE_DIR": str(folder / "numba"), "BLIS_REPLAY_STORE": str(folder / "validate.duckdb")}
    yield Row("blis-replay --help", *median_of("--help"))  # it must import nothing heavy
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
    """100 recordings of 15,000 requests in one store: the first validation, and another."""
    store = folder / "large.duckdb"
    begin = time.perf_counter()
    experiments, requests = 100, 15_000
    subprocess.run([sys.executable, _LARGE_STORE, store, str(experiments), str(requests)], check=True)
    made = f"; store made in {time.perf_counter() - begin:.0f} s, {store.stat().st_size / 1e6:.0f} MB"
    for run, remark in (("first", made), ("again", "")):
        usage = usage_of("validate", "--all", "--store", str(store))
        remark = f"{usage.user_s + usage.system_s:.0f} s of CPU{remark}"
        yield Row(f"validate --all, {experiments * requests:,} requests, {run}", usage.seconds, usage.peak_mb, remark)


def machine() -> str:
    """What this runs on, in words."""
    cpus = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{cpus[0]}, {len(cpus)} processors, {memory_gb:.0f} GB, Python {platform.python_version()}"


PARTS = {part.__name__: part for part in (ingest, validate, report, large, engine, growth)}


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


if __name__ == "__main__":
    main(sys.argv[1:])
