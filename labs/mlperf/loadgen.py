"""Runs of MLPerf's LoadGen: read from its logs and from tables of results, and the arrivals rebuilt from the seed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.documents import finite, quoted_value
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.tables.records import table_of

PERCENTILES = ("50.00", "90.00", "95.00", "97.00", "99.00", "99.90")
STATISTICS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
METRICS = ("e2e", "ttft", "tpot")
MOST_QUERIES = 10_000_000  # more would not fit into memory; the largest published run has 589,824
_MOST_LOG_BYTES = 64 << 20  # the detail log of a performance run has 100 KB
_DETAIL, _SUMMARY = b":::MLLOG ", b"MLPerf Results Summary"
# Scenarios whose arrivals are a Poisson process.
PACED = ("server", "interactive")


@dataclass(frozen=True)
class Run:
    """One run: its load, and the latencies that were audited.

    ``facts``: submitter, system, model, framework, accelerator, per_node, nodes and path, as far as the file has them.
    ``rate_per_s``: that was asked for.  ``scheduled_per_s``: of the schedule.  ``tokens_per_s``: output of the server.
    ``audited_us``: by metric and statistic (``ttft``, ``p99.00``).
    """

    facts: Mapping[str, str]
    scenario: str
    rate_per_s: float
    queries: int
    scheduled_per_s: float | None
    schedule_seed: int
    tokens_per_s: float | None
    audited_us: Mapping[tuple[str, str], float]

    @property
    def path(self) -> str:
        """The name of its log."""
        return self.facts.get("path", "")

    @property
    def devices(self) -> int:
        """Accelerators of all nodes; 1 where the file does not say."""
        return int(self.facts.get("per_node") or 1) * int(self.facts.get("nodes") or 1)


def read_runs(path: Path) -> list[Run]:
    """The runs of a file: a detail log, a summary log, or a table with a row per run; plain or compressed.

    Raises ``RecordingError`` for any other file, and for a value that is missing or no number.
    """
    file = RecordedFile(path, path.name)
    head = file.head(1 << 12)
    if head.startswith(_DETAIL):
        return [_run(path, "", _detail_values(file), _DETAILED, {"path": str(path)})]
    if _SUMMARY in head:
        return [_run(path, "", _summary_values(file), _SUMMARISED, {"path": str(path)})]
    with TemporaryDirectory(prefix="blis-replay-") as scratch:
        rows = table_of(file, Path(scratch) / "rows").rows
        runs = [
            _run(path, place, row, _TABLE, {name: str(row.get(name) or "") for name in _FACTS}) for place, row in rows
        ]
    if not runs:
        raise RecordingError(path, "", "neither a log of LoadGen nor a table of runs", "name its detail log")
    return runs


def schedule_us(run: Run) -> Int64s:
    """int64[queries]: when LoadGen sends each query, from 0 on.

    LoadGen adds ``std::exponential_distribution`` draws of ``std::mt19937(seed mod 2^32)``.  In libstdc++ a draw takes
    two 32-bit numbers for one uniform number u, is -log(1 - u) / rate, and LoadGen cuts it to whole ns.
    """
    draws = np.random.RandomState(run.schedule_seed % 2**32)._bit_generator.random_raw(2 * run.queries - 2)
    low, high = draws.reshape(-1, 2).T.astype(np.float64)
    gaps_ns = (-np.log1p(-(low + high * 2.0**32) / 2.0**64) / run.rate_per_s * 1e9).astype(np.int64)
    return np.asarray(np.concatenate([[0], np.cumsum(gaps_ns)]) // 1_000, np.int64)


# -- Names of the values in each form -----------------------------------------------------------


def _names(mean: tuple[str, ...], percentile: tuple[str, ...], **loads: str) -> Mapping[str, str]:
    """What a form calls each value; ``mean``, ``percentile``: the names of a statistic of E2E, TTFT and TPOT."""
    latencies = {
        f"{metric}_{statistic}": (of_mean if statistic == "mean" else of_percentile).format(statistic[1:])
        for metric, of_mean, of_percentile in zip(METRICS, mean, percentile, strict=True)
        for statistic in STATISTICS
    }
    return latencies | loads


_FACTS = ("division", "submitter", "system", "model", "framework", "accelerator", "per_node", "nodes", "valid", "path")
_TABLE = _names(
    ("e2e_mean", "ttft_mean", "tpot_mean"),
    ("e2e_p{}", "ttft_p{}", "tpot_p{}"),
    scenario="scenario",
    rate="target_qps",
    queries="queries",
    scheduled="scheduled_qps",
    seed="schedule_seed",
    tokens="out_tok_s",
)
_DETAILED = _names(
    ("result_mean_latency_ns", "result_first_token_mean_latency_ns", "result_time_to_output_token_mean"),
    (
        "result_{}_percentile_latency_ns",
        "result_first_token_{}_percentile_latency_ns",
        "result_time_per_output_token_{}_percentile_ns",
    ),
    scenario="effective_scenario",
    rate="effective_target_qps",
    queries="result_query_count",
    scheduled="result_scheduled_samples_per_sec",
    seed="effective_schedule_rng_seed",
    tokens="result_completed_tokens_per_second",
)
_SUMMARISED = _names(
    ("Mean latency (ns)", "Mean First Token latency (ns)", "Mean Time to Output Token (ns)"),
    (
        "{} percentile latency (ns)",
        "{} percentile first token latency (ns)",
        "{} percentile time to output token (ns)",
    ),
    scenario="Scenario",
    rate="target_qps",
    queries="queries",
    scheduled="Scheduled samples per second",
    seed="schedule_rng_seed",
    tokens="Completed tokens per second",
)


def _detail_values(file: RecordedFile) -> dict[str, object]:
    values: dict[str, object] = {}
    for number, line in enumerate(file.content(_MOST_LOG_BYTES).split(b"\n"), 1):
        if not line.startswith(_DETAIL):
            continue
        try:
            entry = json.loads(line.removeprefix(_DETAIL))
            values[str(entry["key"])] = entry["value"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RecordingError(file.path, f"line {number}", "not an entry of LoadGen", "copy the log again") from None
    return values


def _summary_values(file: RecordedFile) -> dict[str, object]:
    """The ``name : value`` lines, and the number of queries, which they do not have.

    LoadGen sends the whole data set again and again until the shortest duration is over and the fewest queries are
    sent, and stops at the largest number of queries where there is one.
    """
    text = file.content(_MOST_LOG_BYTES).decode("utf-8", "replace")
    values: dict[str, object] = dict(re.findall(r"^\s*([^:\n]+?)\s*:\s*(\S+)$", text, re.MULTILINE))
    values.setdefault(_SUMMARISED["tpot_mean"], values.get("Mean Time per Output Token (ns)"))  # LoadGen 6
    names = ("target_qps", "performance_sample_count", "min_duration (ms)", "min_query_count", "max_query_count")
    said = [str(values.get(name, "")) for name in names]
    rate, each, ms, fewest, most = (float(value) if _NUMBER.fullmatch(value) else 0.0 for value in said)
    rounds = finite(max(ms / 1_000 * rate, fewest) / each) if each else None
    if rate and ms and rounds:
        values["queries"] = min(each * ceil(rounds), most or inf)
    return values


def _run(
    path: Path, place: str, values: Mapping[str, object], named: Mapping[str, str], facts: Mapping[str, str]
) -> Run:
    def number(name: str, *, needed: bool = False) -> float | None:
        value = values.get(named[name])
        found = finite(float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value)
        if (found is None and value not in (None, "")) or (found or 0) < 0 or (needed and not found):
            raise RecordingError(
                path, place, f"{named[name]} is {quoted_value(value)}, not a number above 0", "copy the file again"
            )
        return found

    scenario = str(values.get(named["scenario"]) or "").lower()
    if not scenario:
        raise RecordingError(path, place, f"no {named['scenario']}: not a run of LoadGen", "name its detail log")
    paced = scenario in PACED
    queries = number("queries", needed=paced)
    seed = str(values.get(named["seed"]) or "")
    if (queries or 0) > MOST_QUERIES or (paced and not re.fullmatch(r"[0-9]{1,20}", seed)):
        raise RecordingError(path, place, "a schedule that cannot be rebuilt", "check its seed and number of queries")
    audited = {
        (metric, statistic): value / 1_000
        for metric in METRICS
        for statistic in STATISTICS
        if (value := number(f"{metric}_{statistic}")) is not None
    }
    return Run(
        facts=facts,
        scenario=scenario,
        rate_per_s=number("rate", needed=paced) or 0.0,
        queries=int(queries or 0),
        scheduled_per_s=number("scheduled"),
        schedule_seed=int(seed) if seed.isdecimal() else 0,
        tokens_per_s=number("tokens"),
        audited_us=audited,
    )


_NUMBER = re.compile(r"[0-9]{1,30}(\.[0-9]{1,20})?(e[-+]?[0-9]{1,3})?")


def each_run(paths: tuple[Path, ...]) -> Iterator[Run]:
    """The runs of several files; a run that was submitted under two names of its model comes once."""
    seen: set[object] = set()
    for path in paths:
        for run in read_runs(path):
            same = (run.scenario, run.schedule_seed, run.queries, tuple(sorted(run.audited_us.items())))
            if same not in seen or not run.audited_us:
                seen.add(same)
                yield run
