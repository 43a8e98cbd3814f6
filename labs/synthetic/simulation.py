"""Simulating a request table: engine arguments and coefficients in, tables per request and step out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.errors import ReplayError, TraceError, UnknownNameError
from blis_replay.base.files import whole_file, whole_files
from blis_replay.blis.closed_loop import ClosedLoop, simulate_load
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.blis.speculation import speculation_of
from blis_replay.blis.trace import NEVER_US, EngineConfig, release_arguments
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.server.engine_settings import read_engine_file
from blis_replay.ingest.recording import Recording
from blis_replay.replay.engine import cache_groups, not_simulated, with_captured_sizes, with_engine
from blis_replay.replay.mode import ReplayMode, captured_sizes
from blis_replay.replay.plan import request_trace
from blis_replay_labs.cluster.config import ClusterConfig
from blis_replay_labs.cluster.simulate import simulate_cluster
from blis_replay_labs.synthetic.request_table import RequestTable

_REQUIRED = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "async_scheduling")
_OF_THE_ENGINE = frozenset(field.name for field in fields(EngineConfig))

_STEPS_A_PART = 500_000

_STEP_COLUMNS = (
    *("start_us", "end_us", "prefill_tokens", "decode_tokens", "context_tokens", "prefill_requests"),
    *("running_depth", "waiting_depth", "admitted", "preempted", "finished", "free_blocks"),
)
_RESULT_COLUMNS = ("preemptions", "queued_us", "scheduled_us", "first_token_us", "finished_us", "ttft_us", "e2e_us")


@dataclass(frozen=True)
class EngineFile:
    """Engine arguments of a file; tensor parallelism and the sizes of captured CUDA graphs, if it names them."""

    engine: EngineConfig
    tensor_parallelism: int | None
    captured_sizes: tuple[int, ...] | None = None

    def entry(self, release: CoefficientRelease, model: str | None) -> ModelEntry:
        """As ``choose_entry``, with its tensor parallelism and on its CUDA graphs."""
        entry = choose_entry(release, model, self.tensor_parallelism)
        return replace(entry, latency=with_captured_sizes(entry.latency, self.captured_sizes))


@dataclass(frozen=True)
class Simulation:
    """A finished simulation and what went into it; ``result`` is in the order of ``table.trace``."""

    table: RequestTable
    engine: EngineConfig
    release: CoefficientRelease
    entry: ModelEntry
    result: SimResult


def read_engine(path: Path, overrides: Mapping[str, Any] | None = None) -> EngineFile:
    """Engine arguments from a YAML file, under vLLM's names, as ``ingest --engine`` takes them.

    ``max_num_seqs``, ``max_num_batched_tokens``, ``max_model_len`` and ``async_scheduling`` are needed; the others
    have vLLM's defaults, and without ``num_gpu_blocks`` memory never binds.  What changes no schedule is read over.
    ``overrides``: arguments in place of the file's.  Raises ``RecordingError`` for an unknown argument or a value of
    the wrong type, ``ReplayError`` for a missing one and for one that is not simulated, ``TraceError`` for what the
    engine cannot be.
    """
    return engine_of({**read_engine_file(RecordedFile(path, path.name)), **(overrides or {})}, path)


def engine_of(given: Mapping[str, Any], path: Path) -> EngineFile:
    """As ``read_engine``, of arguments that were read from ``path``."""
    missing = [name for name in _REQUIRED if given.get(name) is None]
    if missing:
        raise ReplayError(f"{path}: {', '.join(missing)} missing; add a line for each, such as `max_num_seqs: 128`")
    if refused := not_simulated(given):
        raise ReplayError(f"{path}: not simulated: {refused[0]}; remove it to simulate without")
    arguments: dict[str, Any] = {name: value for name, value in given.items() if name in _OF_THE_ENGINE}
    arguments |= {"speculation": speculation_of(given), "kv_cache_groups": cache_groups(given)}
    tensor_parallelism = given.get("tensor_parallel_size")
    try:
        engine = EngineConfig(**arguments | release_arguments(arguments | {"vllm_version": given.get("vllm_version")}))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    parallelism = int(str(tensor_parallelism)) if tensor_parallelism else None
    sizes = given.get("cudagraph_capture_sizes")
    return EngineFile(engine, parallelism, None if sizes is None else captured_sizes(sizes))


def choose_entry(release: CoefficientRelease, model: str | None, tensor_parallelism: int | None) -> ModelEntry:
    """The coefficients of a model by its name, the name's last part, or an ``applies_to`` pattern.

    Without a name the release must have one model only.  Raises ``UnknownNameError`` if none
    or several fit, ``ReleaseError`` if the release is invalid.
    """
    release.refuse_if_invalid()
    fitting = [
        entry
        for entry in release.models
        if (model is None or model.lower() in _names(entry)) and tensor_parallelism in (None, entry.tensor_parallelism)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        problem = "has several models"
    else:
        parallelism = "" if tensor_parallelism is None else f" tp {tensor_parallelism}"
        problem = f"has no coefficients for {model or 'any model'}{parallelism}; it has"
    entries = ", ".join(_label(entry) for entry in fitting or release.models)
    raise UnknownNameError(
        f"release {release.name} {problem}: {entries}; choose one with --model, and tensor_parallel_size of the engine"
    )


def recorded_table(recording: Recording, engine: EngineConfig) -> RequestTable:
    """The requests of a recording as they came, for an engine of the caller's.

    Raises ``ReplayError`` if it has none, or does not say how long they were.
    """
    trace, _basis = request_trace(with_engine(recording, {"block_size": engine.block_size}, "file"), ReplayMode())
    rows = np.arange(len(trace))
    names = recording.requests["request_id"]
    ids = None if names.null_count() else names.to_list()
    return RequestTable(trace, rows, ids, (), Path(recording.alias), "request", rows)


def simulate_table(
    table: RequestTable,
    engine: EngineConfig,
    release: CoefficientRelease,
    entry: ModelEntry,
    loop: ClosedLoop | None = None,
) -> Simulation:
    """Simulate requests (of ``read_request_table`` or ``recorded_table``) on an engine.

    ``loop``: clients that send them in their order, and never give up, in the place of their arrivals; the turns of a
    session one after the other.
    Raises ``RecordingError`` for a request that this engine can never serve, ``TraceError``
    for an engine that cannot run, ``ReleaseError`` for a model that gives no step time.
    """
    refuse_unservable(table, engine)
    never = np.full(len(table.trace), NEVER_US)
    trace = table.trace if loop is None else replace(table.trace, abort_us=never)
    result = simulate_load(trace, engine, entry.latency, entry.lifecycle, loop, table.sessions)
    return Simulation(table, engine, release, entry, result)


def refuse_unservable(table: RequestTable, engine: EngineConfig) -> None:
    """Raise ``RecordingError``, with its line, for the first request that the engine can never serve."""
    trace = table.trace
    too_long = trace.prompt_tokens >= engine.max_model_len
    if too_long.any():
        i = int(np.argmax(too_long))
        problem = f"a prompt of {trace.prompt_tokens[i]} tokens leaves no room in max_model_len {engine.max_model_len}"
        table.refuse(i, problem, "raise it or drop the request")
    if engine.num_gpu_blocks is None:
        return
    total = np.minimum(trace.prompt_tokens + trace.output_tokens, engine.max_model_len)
    blocks = -(-np.maximum(total - 1, 1) // engine.block_size)
    if int(blocks.max()) > engine.num_gpu_blocks - 1:
        i = int(np.argmax(blocks))
        problem = f"needs {blocks[i]} KV blocks, and the engine has {engine.num_gpu_blocks - 1}"
        table.refuse(i, problem, "raise num_gpu_blocks or drop the request")


def request_frame(simulation: Simulation) -> pl.DataFrame:
    """One row per request, in the order of the file.

    Times are us of the run; ``ttft_us`` and ``e2e_us`` are the client's, ``cached_tokens`` the
    prefix-cache hit of the first admission.
    """
    table, result = simulation.table, simulation.result
    place = np.empty(len(table.rows), np.int64)
    place[table.rows] = np.arange(len(table.rows))
    known = table.trace.prompt_tokens - table.trace.prefill_tokens
    columns = {
        "arrival_us": result.arrival_us,
        "prompt_tokens": table.trace.prompt_tokens,
        "output_tokens": result.output_tokens,
        "cached_tokens": np.maximum(result.cached_tokens, known),
        **{name: getattr(result, name) for name in _RESULT_COLUMNS},
    }
    names = table.request_ids or [str(row) for row in range(len(place))]
    ids = pl.Series(names, dtype=pl.String)  # also of no request
    return pl.DataFrame({"request_id": ids, **{name: values[place] for name, values in columns.items()}})


def step_frame(simulation: Simulation, first: int = 0, rows: int | None = None) -> pl.DataFrame:
    """One row per step: start and end (us), tokens, depths after scheduling, free KV blocks after allocation.

    ``first``, ``rows``: the part of the run, all of it if not given.
    """
    steps = simulation.result.steps[first : None if rows is None else first + rows]
    numbers = np.arange(first, first + len(steps))
    return pl.DataFrame({"step": numbers, **{name: steps[name] for name in _STEP_COLUMNS}})


def write_tables(parts: Sequence[Simulation], folder: Path, *, numbered: bool = False) -> None:
    """Write ``requests.parquet`` and ``steps.parquet`` of these simulations into a folder: both, or none.

    ``numbered``: with the number of each as the first column, ``instance``.  Raises ``OSError`` if the folder cannot be
    written.
    """

    def frames(of: Callable[[Simulation], Iterator[pl.DataFrame]]) -> Iterator[pl.DataFrame]:
        for i, part in enumerate(parts):
            number = [pl.lit(i).alias("instance")] if numbered else []
            yield from (frame.select(*number, "*") for frame in of(part))

    with whole_files(folder) as scratch:
        write_frame(scratch / "requests.parquet", frames(lambda part: iter([request_frame(part)])))
        write_frame(scratch / "steps.parquet", frames(_step_frames))


def _step_frames(simulation: Simulation) -> Iterator[pl.DataFrame]:
    """A long run has more steps than should be in memory twice."""
    for first in range(0, max(len(simulation.result.steps), 1), _STEPS_A_PART):
        yield step_frame(simulation, first, _STEPS_A_PART)


def write_frame(path: Path, parts: Iterator[pl.DataFrame]) -> None:
    """Write the parts of a table, one at least, as Parquet."""
    from pyarrow.parquet import ParquetWriter

    head = next(parts)
    table = head.to_arrow()
    with whole_file(path) as file, ParquetWriter(file, table.schema, compression="zstd") as parquet:
        for part in chain([head], parts):
            parquet.write_table(part.to_arrow())


def _names(entry: ModelEntry) -> set[str]:
    model = entry.model.lower()
    return {model, model.split("/")[-1], *(pattern.lower() for pattern in entry.applies_to)}


def _label(entry: ModelEntry) -> str:
    patterns = f" for {' '.join(entry.applies_to)}" if entry.applies_to else ""
    return f"{entry.model} tp {entry.tensor_parallelism}{patterns}"


@dataclass(frozen=True)
class ClusterSimulation:
    """A finished simulation of a cluster: as if it were one engine, and what each of its instances served alone."""

    whole: Simulation
    cluster: ClusterConfig
    instances: tuple[Simulation, ...]


def simulate_on_cluster(
    table: RequestTable, cluster: ClusterConfig, engine: EngineConfig, release: CoefficientRelease, entry: ModelEntry
) -> ClusterSimulation:
    """Simulate requests on a cluster of engines; raises as ``simulate_table`` and ``simulate_cluster`` do."""
    refuse_unservable(table, engine)
    result = simulate_cluster(table.trace, cluster, engine, entry.latency, entry.lifecycle)
    instances = tuple(
        Simulation(_part(table, np.flatnonzero(result.instance == i)), engine, release, entry, run)
        for i, run in enumerate(result.instances)
    )
    return ClusterSimulation(Simulation(table, engine, release, entry, result.whole), cluster, instances)


def _part(table: RequestTable, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> RequestTable:
    """Some requests of a table, by their place in its trace, with the names that they have in the file."""
    rows = table.rows[chosen]
    names = table.request_ids or [str(row) for row in range(len(table.rows))]
    mask = np.zeros(len(table.rows), np.bool_)
    mask[chosen] = True
    return replace(
        table,
        trace=table.trace.part(mask),
        rows=np.argsort(np.argsort(rows)),
        request_ids=[names[row] for row in np.sort(rows)],
        numbers=table.numbers[np.sort(rows)],
    )
