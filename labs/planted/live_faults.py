"""Faults in recordings of a real vLLM, each with its right answer, and recordings in which nothing is wrong.

The list was written before any of it was run.  The recordings belong to the data pack: a fault is planted in a copy of
their files, in what ingest made of them, or in the simulator.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from blis_replay.fixtures.catalogue import RECORDED_FOLDER
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.registry import check_names
from blis_replay.ingest.readers.discovery import only_source
from blis_replay.ingest.recording import AGGREGATE_SCHEMA, Recording
from blis_replay.replay.engine import with_engine
from blis_replay_labs.planted import causes as c
from blis_replay_labs.planted.faults import NOTHING, REFUSED, Cause, Depth, Fault, Recorded, drawn, taken, with_requests

COLUMNS = "arrival=start_time:s,ttft=ttft:ms,e2e=latency:ms"
_CLIENT = "client.csv"
# By the config.json of the model, which the recording lacks.
_STATED = {"0.29/gemma3": {"kv_cache_groups": "window 256 x3, full"}}


def data_folder() -> Path:
    """Where the recordings of the data pack are: ``BLIS_REPLAY_DATA``, or beside the checkout."""
    return Path(os.environ.get("BLIS_REPLAY_DATA", Path(__file__).parents[3] / "shared" / "data"))


def _folder(load: str) -> Path:
    """``0.29/q8c`` of the data pack, or a recording that ships by its alias."""
    version, _, name = load.partition("/")
    return data_folder() / f"live-vllm-{version}" / name if name else RECORDED_FOLDER / load


def is_there(load: str) -> bool:
    """Whether a recording ships, or the data pack has it."""
    return _folder(load).is_dir()


@contextmanager
def read_live(load: str, causes: Sequence[Cause] = ()) -> Iterator[Recording]:
    """The recording of a real server, with what the causes change in a copy of its files."""
    with TemporaryDirectory(prefix="planted-") as scratch:
        folder = _folder(load)
        if any(cause.files for cause in causes):
            folder = Path(shutil.copytree(folder, Path(scratch) / folder.name, copy_function=shutil.copyfile))
        for cause in causes:
            if cause.files is not None:
                cause.files(folder)
        source = only_source(folder)
        if (folder / _CLIENT).exists():
            source = replace(source, columns=COLUMNS)
        with read_recording(source) as recording:
            yield with_engine(recording, _STATED.get(load, {}), "file")


# -- What is wrong in files ----------------------------------------------------------------------


def _rows(name: str, size: str, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Cause:
    """In the client's table."""

    def files(folder: Path) -> None:
        changed = change(pl.read_csv(folder / _CLIENT)).with_columns(request=pl.int_range(pl.len()))
        changed.write_csv(folder / _CLIENT, float_precision=6)

    return Cause(name, size, (), files=files)


def _columns(name: str, size: str, *changed: pl.Expr) -> Cause:
    return _rows(name, size, lambda rows: rows.with_columns(changed))


_SENT, _TTFT, _E2E = map(pl.col, ("start_time", "ttft", "latency"))
_PROMPT, _OUTPUT = map(pl.col, ("prompt_tokens", "completion_tokens"))


def _scaled(by: float, *counts: pl.Expr) -> Iterator[pl.Expr]:
    return ((count * by).round().cast(pl.Int64) for count in counts)


def counts(by: float) -> Cause:
    return _columns("counts of the client", f"x {by:g}", *_scaled(by, _PROMPT, _OUTPUT))


def in_words(counted: pl.Expr, what: str) -> Cause:
    return _columns(f"{what} in words", "x 0.75", *_scaled(0.75, counted))


def ahead(seconds: float) -> Cause:
    return _columns("client clock", f"{seconds:+g} s", _SENT + seconds)


def fast_clock(by: float) -> Cause:
    sent = _SENT.first() + (_SENT - _SENT.first()) * by
    return _columns("client clock drifts", f"x {by:g}", sent, _TTFT * by, _E2E * by)


def whole_seconds() -> Cause:
    return _columns("arrivals in whole seconds", "1 s", _SENT.floor())


def removed(share: float) -> Cause:
    """The rows are numbered anew."""
    return _rows("rows removed", f"{100 * share:g} %", lambda rows: rows.filter(~drawn(rows.height, share)))


def doubled(share: float) -> Cause:
    return _rows(
        "requests written twice",
        f"{100 * share:g} %",
        lambda rows: rows[np.repeat(np.arange(rows.height), 1 + drawn(rows.height, share))],
    )


def aborted(share: float) -> Cause:
    """The client gave up halfway through their stream, and wrote them down as finished."""

    def change(rows: pl.DataFrame) -> pl.DataFrame:
        given_up = pl.lit(pl.Series(drawn(rows.height, share)))
        return rows.with_columns(pl.when(given_up).then((_TTFT + _E2E) / 2).otherwise(_E2E).alias("latency"))

    return _rows("aborted requests as finished", f"{100 * share:g} %, half of the stream", change)


def log_lines(name: str, from_share: float, until_share: float) -> Cause:
    """Lines of the step log are missing."""

    def files(folder: Path) -> None:
        (path,) = folder.glob("steps-*")
        lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        first, last = (round(share * len(lines)) for share in (from_share, until_share))
        path.write_bytes(gzip.compress(b"".join(lines[:first] + lines[last:])))

    return Cause(name, f"{100 * from_share:g} to {100 * until_share:g} % of the step log", (), files=files)


def of_another_run(pattern: str, load: str) -> Cause:
    """The file of this pattern is that of another recording."""

    def files(folder: Path) -> None:
        (path,), (other,) = folder.glob(pattern), _folder(load).glob(pattern)
        path.unlink()
        shutil.copyfile(other, folder / other.name)

    return Cause("file of another run", f"{pattern} of {load}", (), files=files)


def bench(**said: Any) -> Cause:
    """What `vllm bench serve` says of its load."""

    def files(folder: Path) -> None:
        path = folder / "bench.json.gz"
        path.write_bytes(gzip.compress(json.dumps(json.loads(gzip.decompress(path.read_bytes())) | said).encode()))

    return Cause("load", ", ".join(f"{name} {value}" for name, value in said.items()), (), files=files)


# -- The list ------------------------------------------------------------------------------------


def _in(load: str, cause: Cause, right: str, depth: Depth = "full", *, decidable: bool = True) -> Fault:
    """``right``: instrument checks and components; any of them is a right answer."""
    names, checks = right.split(" | "), check_names()
    answer = replace(
        cause,
        blamed=tuple(name for name in names if name not in checks),
        checks=tuple(name for name in names if name in checks),
    )
    return Fault(f"live vLLM {load.partition('/')[0]}", (answer,), depth, load, decidable)


_PACE = f"{c.STEP_TIME} | {c.PACE}"
_LOG = "ledger | recorder | clocks | step_clock | step records"
_FEWER = "ledger | completeness | missing requests"
_TWICE = "ledger | completeness | repeated requests"
_FIRST = f"token_events | clocks | server_metrics | first-token stamps | {c.OUTPUT}"
_COUNTS = "ledger | output_length"
_ARRIVALS = "clocks | stationarity | arrivals | send stamps"
_LATE = f"clocks | server_metrics | {c.OUTPUT}"
_CLOCK = f"clocks | client clock | server clock | step clock | {NOTHING}"

LIVE_FAULTS: tuple[Fault, ...] = (
    # Engine arguments: the server has the first value, the recording says the second.
    _in("0.29/q8c", c.argument("max_num_seqs", 8, 2), "max_num_seqs"),
    _in("0.29/max-num-seqs-2", c.argument("max_num_seqs", 2, 8), "max_num_seqs"),
    _in("0.29/max-num-seqs-2", c.argument("max_num_seqs", 2, 8), "max_num_seqs", "client"),
    _in("0.32/A", c.argument("max_num_seqs", 32, 4), "max_num_seqs"),
    _in("0.32/A", c.argument("max_num_seqs", 32, 4), "max_num_seqs", "client"),
    _in("0.29/q8c", c.argument("max_num_batched_tokens", 512, 128), "max_num_batched_tokens"),
    _in("0.32/C", c.argument("max_num_batched_tokens", 1024, 256), "max_num_batched_tokens"),
    _in("0.32/C", c.argument("max_num_batched_tokens", 1024, 4096), "max_num_batched_tokens"),
    _in("0.32/C", c.argument("max_num_batched_tokens", 1024, 256), "max_num_batched_tokens", "client"),
    _in("0.29/again", c.blocks(128, 24), "KV blocks"),
    _in("0.32/A", c.blocks(512, 8), "KV blocks"),
    _in("0.29/q8c", c.scheduling(asynchronous=False), "scheduling mode"),
    _in("0.32/A", c.scheduling(asynchronous=False), "scheduling mode"),
    _in("0.32/C", c.scheduling(asynchronous=False), "scheduling mode", "client", decidable=False),
    _in("0.29/q8c", c.argument("block_size", 32, 16), f"block_size | KV blocks | {NOTHING}"),
    _in("0.29/again", c.argument("enable_chunked_prefill", True, False), f"enable_chunked_prefill | {REFUSED}"),
    _in("0.29/q8c", c.argument("long_prefill_token_threshold", 0, 64), "long_prefill_token_threshold"),
    _in("0.29/cold-bench", c.cache(on=True), f"prefix cache | {NOTHING}"),
    # Coefficients.
    _in("0.29/q8c", c.line(intercept=1.25), c.STEP_TIME),
    _in("0.32/A", c.line(intercept=0.8), c.STEP_TIME),
    _in("0.32/C", c.line(per_prefill_token=2.0), c.STEP_TIME),
    _in("0.32/C", c.line(per_prefill_token=0.3), c.STEP_TIME),
    _in("0.29/q8c", c.line(per_decode_token=4.0), c.STEP_TIME),
    _in("0.29/q8c", c.line(per_context_token=10.0), c.STEP_TIME),
    _in("0.29/again", c.every_step(1.15), _PACE),
    _in("0.29/max-num-seqs-2", c.every_step(0.85), _PACE),
    _in("0.29/cold", c.every_step(1.25), _PACE),
    _in("0.29/gemma3", c.every_step(1.2), _PACE),
    _in("0.29/client-only", c.every_step(1.3), _PACE),
    _in("0.32/A", c.every_step(1.25), _PACE, "client"),
    _in("0.29/q8c", c.delay(c.PRE_QUEUE, pre_queue_us=40_000), c.PRE_QUEUE),
    _in("0.32/A", c.delay(c.PRE_QUEUE, pre_queue_us=40_000), c.PRE_QUEUE),
    _in("0.29/client-only", c.delay(c.PRE_QUEUE, pre_queue_us=40_000), c.PRE_QUEUE, decidable=False),
    _in("0.32/A", c.delay(c.OUTPUT, post_token_us=3_000), c.OUTPUT),
    _in("0.29/q8c", c.delay(c.OUTPUT, post_request_us=200_000), c.OUTPUT),
    _in("0.32/C", c.delay(c.OUTPUT, post_request_us=200_000), c.OUTPUT, "client"),
    # What was recorded.
    _in("0.29/q8c", ahead(2), _CLOCK),
    _in("0.29/again", ahead(-3600), f"{_CLOCK} | ledger"),
    _in("0.29/q8c", fast_clock(1.02), f"{_CLOCK} | ledger"),
    _in("0.29/q8c", log_lines("steps lost", 0.5, 0.6), _LOG),
    _in("0.29/max-num-seqs-2", log_lines("steps lost", 0.3, 0.5), _LOG),
    _in("0.29/q8c", log_lines("half a step log", 0.5, 1.0), _LOG),
    _in("0.29/gemma3", log_lines("half a step log", 0.5, 1.0), _LOG),
    _in("0.29/q8c", of_another_run("steps-*", "0.29/again"), _LOG),
    _in("0.29/again", of_another_run("steps-*", "0.29/cold"), _LOG),
    _in("0.29/q8c", of_another_run("metrics-after.prom", "0.29/cold-bench"), "ledger | server_metrics"),
    _in("0.29/q8c", counts(1.25), _COUNTS),
    _in("0.29/gemma3", counts(1.25), _COUNTS),
    _in("0.29/client-only", counts(1.25), _COUNTS),
    _in("0.29/q8c", removed(0.1), _FEWER),
    _in("0.29/max-num-seqs-2", removed(0.1), _FEWER),
    _in("0.29/client-only", removed(0.1), _FEWER),
    _in("0.32/A", c.missing(0.1), _FEWER),
    _in("0.29/q8c", doubled(0.2), _TWICE),
    _in("0.29/client-only", doubled(0.2), _TWICE),
    _in("0.32/A", c.twice(0.2), _TWICE),
    _in("0.29/q8c", c.later_token_stamped(5), _FIRST),
    _in("0.29/client-only", c.later_token_stamped(5), _FIRST),
    _in("0.32/A", c.later_token_stamped(5), _FIRST),
    _in("0.32/A", c.role_chunk(1.0), _FIRST),
    _in("0.29/client-only", c.wrong_unit(), _FIRST),
    _in("0.29/q8c", c.think_time(500_000), _LATE),
    _in("0.29/client-only", c.think_time(500_000), _LATE),
    _in("0.29/q8c", whole_seconds(), _ARRIVALS),
    _in("0.29/client-only", whole_seconds(), _ARRIVALS),
    _in("0.29/q8c", in_words(_PROMPT, "prompts"), "ledger | prompt lengths"),
    _in("0.29/client-only", in_words(_PROMPT, "prompts"), "ledger | prompt lengths"),
    _in("0.29/again", in_words(_OUTPUT, "outputs"), f"{_COUNTS} | output lengths"),
    _in("0.29/client-only", in_words(_OUTPUT, "outputs"), f"{_COUNTS} | output lengths"),
    _in("0.29/q8c", aborted(0.1), _LATE),
    _in("0.29/client-only", aborted(0.1), f"{_LATE} | ledger | output lengths"),
    # What happened to the server, or between it and the client.
    _in("0.29/q8c", c.frozen(20_000_000, 3_000_000), "standstill"),
    _in("0.32/A", c.frozen(30_000_000, 3_000_000), "standstill"),
    _in("0.29/client-only", c.frozen(20_000_000, 3_000_000), "standstill"),
    _in("0.29/again", c.frozen(20_000, 5_000_000), "cold start | standstill"),
    _in("0.29/q8c", c.slower_from(25_000_000, 1.15), _PACE),
    _in("0.32/A", c.slower_from(30_000_000, 1.15), _PACE),
    _in("0.29/client-only", c.slower_from(25_000_000, 1.15), _PACE),
    _in("0.29/q8c", c.missing_between(6_000_000, 1_500_000), _FEWER),
    _in("0.32/A", c.missing_between(6_000_000, 1_500_000), _FEWER),
    _in("0.29/q8c", c.buffering_proxy(100_000), _FIRST),
    _in("0.29/client-only", c.buffering_proxy(100_000), _FIRST),
    _in("0.29/q8c", c.slow_client(3_000), _LATE),
    _in("0.32/A", c.slow_client(3_000), _LATE, "client", decidable=False),
    # What the load generator says of the load.
    _in("0.32/A", bench(request_rate=10.0), f"stationarity | completeness | {NOTHING}"),
    _in("0.32/A", bench(max_concurrency=2), f"stationarity | completeness | ledger | {NOTHING}"),
)


# -- Recordings without a fault ------------------------------------------------------------------


def _part(from_share: float, until_share: float) -> Cause:
    """A part of the run, as another client would have recorded it."""

    def instruments(recorded: Recorded) -> Recorded:
        n = recorded.recording.requests.height
        part = taken(recorded, np.arange(n)[round(from_share * n) : round(until_share * n)])
        begun = with_requests(part, pl.col("arrival_us") - pl.col("arrival_us").min())
        # A report counts the whole run.
        unreported = replace(begun.recording, aggregates=pl.DataFrame(schema=AGGREGATE_SCHEMA), stages=())
        return replace(begun, recording=unreported)

    return Cause("part", f"{100 * from_share:g} to {100 * until_share:g} %", (), instruments=instruments)


def _sound(load: str, depth: Depth, *part: float) -> Fault:
    return Fault("", (_part(*part),) if part else (), depth, load)


_RUNS = (
    *(f"0.29/{name}" for name in ("q8c", "again", "max-num-seqs-2", "cold", "cold-bench", "gemma3", "client-only")),
    *("0.32/A", "0.32/C"),
)
_HALVES = ((0, 0.5), (0.5, 1))
# Whole runs with their cold starts and another client's warm-ups; halves, bursts, and runs that end early.
LIVE_CONTROLS: tuple[Fault, ...] = (
    *(_sound(load, depth) for load in _RUNS for depth in ("full", "client")),
    *(_sound(load, "client", *half) for load in ("0.29/q8c", "0.29/client-only", "0.32/A") for half in _HALVES),
    *(_sound("0.32/A", "client", tenth / 10, tenth / 10 + 0.1) for tenth in (2, 5, 8)),
    *(_sound(f"0.29/{name}", "client", 0, 0.8) for name in ("again", "max-num-seqs-2", "cold", "cold-bench")),
    _sound("0.29/gemma3", "client", 0, 0.5),
)
