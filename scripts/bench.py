"""Measure blis-replay: start-up, ingest, validate and the engine; warm and cold apart.

    python scripts/bench.py            # everything, a Markdown table on standard output
    python scripts/bench.py engine     # one part: startup, ingest, validate, engine

Whole commands run as processes of their own; their times and peak memory are the
operating system's.  "Cold" is the first run with an empty cache of compiled code.
Ratios within one run say more than single times on a shared machine.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

REPEATS = 5
LARGE_FILES = {"per-request JSON": "results/per_request_lifecycle_metrics.json", "OTLP JSON": "traces.json"}


@dataclass(frozen=True)
class Row:
    """A line of the table: what, median seconds, peak memory in MB, a rate or remark."""

    what: str
    seconds: float
    peak_mb: float | None = None
    remark: str = ""


def command(*arguments: str, env: dict[str, str] | None = None) -> tuple[float, float]:
    """Seconds and peak memory (MB) of a blis-replay command run as a process."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "blis_replay.validate.cli.main", *arguments],
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        sys.exit(f"blis-replay {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - begin, usage.ru_maxrss / 1024


def median_of(*arguments: str, env: dict[str, str] | None = None) -> tuple[float, float]:
    """Medians over the repeats of a command."""
    runs = [command(*arguments, env=env) for _ in range(REPEATS)]
    return statistics.median(s for s, _ in runs), max(mb for _, mb in runs)


def startup(folder: Path) -> Iterator[Row]:
    """How long help takes: it must import nothing heavy."""
    yield Row("blis-replay --help", *median_of("--help"))


def ingest(folder: Path) -> Iterator[Row]:
    """MB/s of the two large kinds of file, on generated experiments."""
    # In a process of its own: a child's peak memory is never below that of its parent.
    maker = multiprocessing.get_context("spawn").Process(target=make_recordings, args=(folder,))
    maker.start()
    maker.join()
    for kind in LARGE_FILES:
        (directory,) = (folder / kind).iterdir()
        size_mb = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6
        store = str(folder / "ingest.duckdb")
        for what in (f"ingest, {kind}, {size_mb:.0f} MB", f"the same again ({kind}, unchanged)"):
            seconds, peak = command("ingest", str(directory), "--store", store)
            yield Row(what, seconds, peak, f"{size_mb / seconds:.0f} MB/s")


def make_recordings(folder: Path) -> None:
    """A directory for each kind of large file, with that file and the configuration only."""
    from blis_replay.fixtures.synthetic import generate, write_experiment
    from blis_replay.fixtures.truth import SyntheticExperiment
    from blis_replay.ingest.recording import SharedPrefix, Stage

    stages, prefix = (Stage(0, 12.0, 700_000_000),), SharedPrefix(10, 10, 100, 400, 248)
    truth = generate(SyntheticExperiment(stages=stages, shared_prefix=prefix, step_sample_rate=1.0))
    for kind, wanted in LARGE_FILES.items():
        directory = folder / kind / truth.spec.slug
        write_experiment(truth, directory)
        for path in [path for path in directory.rglob("*") if path.is_file()]:
            if not str(path.relative_to(directory)).startswith((wanted, "exp-config", "results/config")):
                path.unlink()
        expand(directory)


def expand(directory: Path) -> None:
    """Unpack gzip files, so that rates are those of the plain format."""
    import gzip
    import shutil

    for path in directory.rglob("*.gz"):
        with gzip.open(path) as packed, path.with_suffix("").open("wb") as plain:
            shutil.copyfileobj(packed, plain)
        path.unlink()


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


def engine(folder: Path) -> Iterator[Row]:
    """The engine alone, compiled and warm, on all experiments without overload."""
    from blis_replay.blis.engine import simulate
    from blis_replay.fixtures.bundled import bundled_recording
    from blis_replay.fixtures.catalogue import bundled_aliases
    from blis_replay.replay.driver import replay
    from blis_replay.replay.mode import ReplayMode
    from blis_replay.replay.plan import plan_replay
    from blis_replay.replay.release_file import load_release

    release = load_release("h100-vllm-0.15.1")
    names = {alias: slug for alias, slug in bundled_aliases().items() if "reasoning" not in alias}
    jobs = []
    for alias, slug in names.items():
        recording = bundled_recording(slug)
        plan = plan_replay(recording, ReplayMode())
        entry = release.entry_for(recording.model, recording.tensor_parallelism, alias)
        jobs.append((alias, plan, entry))
    replay(bundled_recording(names["34b-general"]), release)  # compiles

    def run_all(chosen: list[tuple]) -> Callable[[], None]:
        return lambda: [simulate(p.trace, p.engine, e.latency, e.lifecycle) for _, p, e in chosen]

    one = [job for job in jobs if job[0] == "34b-general"]
    steps = simulate(one[0][1].trace, one[0][1].engine, one[0][2].latency, one[0][2].lifecycle).steps.shape[1]
    seconds = timed(run_all(one))
    yield Row(
        "engine, 34b-general (16,800 requests)",
        seconds,
        remark=f"{1e9 * seconds / steps:.0f} ns a step ({steps:,} steps), {1e6 * seconds / 16_800:.2f} us a request",
    )
    both = replace(one[0][1].engine, async_scheduling=False)
    sync = timed(lambda: simulate(one[0][1].trace, both, one[0][2].latency, one[0][2].lifecycle))
    yield Row("the same with synchronous scheduling", sync, remark=f"{sync / seconds:.2f} of asynchronous")
    yield Row(f"engine, all {len(jobs)} experiments without overload", timed(run_all(jobs)))


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a function over 20 calls, after one that is not counted."""
    work()
    durations = []
    for _ in range(20):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


PARTS = {"startup": startup, "ingest": ingest, "validate": validate, "engine": engine}


def main(names: list[str]) -> None:
    """Run the named parts, or all."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"no such part: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    print("| what | seconds | peak MB | |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or PARTS:
            for row in PARTS[name](Path(folder)):
                peak = "" if row.peak_mb is None else f"{row.peak_mb:.0f}"
                print(f"| {row.what} | {row.seconds:.4f} | {peak} | {row.remark} |", flush=True)
    print(f"\npeak memory of this script: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
