"""Vidur: the package of PyPI, in this process.

It gets the model, the GPU, tensor parallelism, block_size, num_gpu_blocks, max_num_seqs, max_num_batched_tokens (as the
chunk size of its Sarathi scheduler) and max_model_len; arrivals and lengths; step times: its own, or (vidur-fitted)
those of the coefficients.
"""

from __future__ import annotations

import bisect
import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blis_replay_labs.board.adapters.contract import (
    US_PER_MS,
    Adapter,
    AdapterError,
    Answer,
    Inputs,
    step_times,
)

_DEVICES = (("h100", "h100"), ("a100", "a100"), ("a40", "a40"))
_ORGANISATION = "project-vajra/dev-staging-"
NODES = {"h100": "h100_dgx", "a100": "a100_dgx", "a40": "a40_pairwise_nvlink"}
# Its defaults for the range of its interpolation.
_TOKENS, _BATCH = 4096, 128
_DATE = "all"  # newer versions select rows by date


def profiles_folder(model: str) -> Path:
    """Cache of the package for fetched profiles and what it fits to them.

    One folder per model: its cached fits of a network do not say which model's sizes they are for.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "blis-replay" / "vidur" / model.lower().replace("/", "-")


def data_sets(model: str, device: str) -> tuple[str, str]:
    """Names of the data sets with the profiles of a model and of its network, assumed to follow its defaults."""
    named = model.lower().replace("/", "-")
    return f"{_ORGANISATION}{named}-{device}", _ORGANISATION + NODES[device].replace("_", "-")


def _answers(inputs: Inputs, option: str) -> Iterator[Answer]:
    """Run the package, which writes a table of times in s per request."""
    _run(inputs, fitted=option == "fitted")
    tables = list(inputs.folder.glob("vidur/**/request_metrics.csv"))
    if not tables:
        raise AdapterError("vidur wrote no request_metrics.csv")
    with tables[0].open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ttft_us, e2e_us, waited_us = (
                1e6 * float(row[name]) for name in ("prefill_e2e_time", "request_e2e_time", "request_scheduling_delay")
            )
            yield Answer(int(float(row["Request Id"])), ttft_us, max(e2e_us, ttft_us), waited_us)


def _trace(inputs: Inputs) -> str:
    """Write the requests as a file: arrivals in s and lengths, under the names of older and newer versions."""
    trace = inputs.folder / "vidur.csv"
    header = "arrived_at,num_prefill_tokens,num_decode_tokens,Date,Time,PromptTokenCount,CompletionTokenCount"
    rows = ((f"{r['arrival_us'] / 1e6:.6f}", r["prompt_tokens"], r["output_tokens"]) for r in inputs.requests)
    lines = (",".join(map(str, (*row, _DATE, *row))) for row in rows)
    trace.write_text("\n".join([header, *lines, ""]), "utf-8")
    return str(trace)


def _run(inputs: Inputs, *, fitted: bool) -> None:
    """Simulate; ``fitted``: each batch takes as long as the coefficients say.

    Sarathi's chunks are what vLLM V1 does with chunked prefill.  Vidur needs the model only for its own step times and
    the size of the KV cache, so with our step times it gets none.
    """
    import vidur.config as config  # type: ignore[import-not-found,unused-ignore]
    from vidur.simulator import Simulator  # type: ignore[import-not-found,unused-ignore]

    given = inputs.arguments
    predictor = config.LinearRegressionExecutionTimePredictorConfig
    replica: dict[str, Any] = {"tensor_parallel_size": 1}
    profiles: dict[str, Any] = {"cache_dir": str(inputs.folder / "cache")}
    if fitted:
        _give_step_times(inputs)
    else:
        device = inputs.gpu_of(_DEVICES)
        node, model = NODES[device], str(inputs.served["model"])
        replica = {"tensor_parallel_size": inputs.served["tensor_parallelism"] or 1, "model_name": model}
        replica |= {"device": device, "network_device": node}
        predictor = config.RandomForrestExecutionTimePredictorConfig
        compute, network = data_sets(model, device)
        profiles = {"model_profiling_dataset": compute, "network_profiling_dataset": network}
        # Keep what it fetched and fitted.  Its default grid of forests with ten folds takes half an hour of a core per
        # operator; we use one point of that grid.
        profiles |= {"cache_dir": str(profiles_folder(model)), "no_cache": False, "k_fold_cv_splits": 2}
        profiles |= {"upload_predictions": False}
        profiles |= {"num_estimators": [250], "max_depth": [16], "min_samples_split": [2]}
        tokens, longest = given["max_num_batched_tokens"], given["max_model_len"]
        profiles |= {"prediction_max_prefill_chunk_size": max(tokens, _TOKENS)}
        profiles |= {"prediction_max_batch_size": max(given["max_num_seqs"], _BATCH)}
        profiles |= {"prediction_max_tokens_per_request": max(tokens, longest, _TOKENS)}
    blocks = given.get("num_gpu_blocks") or (1_000_000 if fitted else None)
    cluster = config.ClusterConfig(
        replica_config=config.ReplicaConfig(num_pipeline_stages=1, **replica),
        # vLLM V1 keeps no blocks back.
        cache_config=config.CacheConfig(block_size=given["block_size"], num_blocks=blocks, watermark_blocks_fraction=0),
        replica_scheduler_config=config.SarathiSchedulerConfig(
            batch_size_cap=given["max_num_seqs"], chunk_size=given["max_num_batched_tokens"]
        ),
    )
    trace = config.TraceRequestGeneratorConfig(
        trace_file=_trace(inputs),
        date=_DATE,
        prefill_scale_factor=1,
        time_scale_factor=1,
        max_tokens=given["max_model_len"],
    )
    metrics = {"store_plots": False, "enable_chrome_trace": False, "output_dir": str(inputs.folder / "vidur")}
    simulator = Simulator(
        config.SimulationConfig(
            cluster_config=cluster,
            request_generator_config=trace,
            execution_time_predictor_config=predictor(**profiles),
            metrics_config=config.MetricsConfig(**metrics),
        )
    )
    try:
        simulator.run()
    except AssertionError:
        raise AdapterError("its own check of a request's tokens fails, as where one is preempted") from None


def _give_step_times(inputs: Inputs) -> None:
    """Replace its regression by the step times of the coefficients.

    A batch takes the time of its decodes plus what its prompt tokens add to a step, without its fixed part.
    """
    from vidur._native.entities import ExecutionTime  # type: ignore[import-not-found,unused-ignore]
    from vidur.execution_time_predictor import (  # type: ignore[import-not-found,unused-ignore]
        ExecutionTimePredictorRegistry,
    )
    from vidur.types import ExecutionTimePredictorType  # type: ignore[import-not-found,unused-ignore]

    times = step_times(inputs)

    class OurStepTimes:
        def __init__(self, **settings: object) -> None:
            del settings

        def get_execution_time(self, batch: Any, stage: int) -> Any:
            del stage
            # Its numbers of KV tokens are those after the batch.
            asked = list(zip(batch.requests, batch.num_q_tokens, batch.num_kv_tokens, strict=True))
            held = [kept for request, _, kept in asked if request.is_prefill_complete]
            chunks = [(tokens, kept - tokens) for request, tokens, kept in asked if not request.is_prefill_complete]
            mean = sum(held) / len(held) if held else 0
            step_us = _by_pair(mean, len(held), times.contexts, times.decodes, times.decode_us)
            step_us += _by_pair(*_as_one(chunks), times.prefill_contexts, times.prefill_tokens, times.prefill_us)
            # One layer whose attention takes the whole step, in ms; its other eleven operators take no time.
            return ExecutionTime(1, 0.0, 0.0, step_us / US_PER_MS, *([0.0] * 11))

    kind = ExecutionTimePredictorType.LINEAR_REGRESSION
    ExecutionTimePredictorRegistry.unregister(kind)
    ExecutionTimePredictorRegistry.register(kind, OurStepTimes)


def _as_one(chunks: Sequence[tuple[int, int]]) -> tuple[float, int]:
    """Prompt chunks as one chunk with the same tokens and attention: tokens before it, and its own tokens."""
    tokens = sum(count for count, _ in chunks)
    attended = sum(count * before + count * (count + 1) / 2 for count, before in chunks)
    return (max(attended / tokens - (tokens + 1) / 2, 0.0) if tokens else 0.0), tokens


def _by_pair(
    row: float, column: float, rows: Sequence[float], columns: Sequence[float], values: Sequence[Sequence[float]]
) -> float:
    """Bilinear interpolation in a table with two ascending grids, clamped at their ends."""
    (at_row, part_row), (at, part) = _place(row, rows), _place(column, columns)
    fewer, more = (line[at] + part * (line[at + 1] - line[at]) for line in values[at_row : at_row + 2])
    return fewer + part_row * (more - fewer)


def _place(value: float, grid: Sequence[float]) -> tuple[int, float]:
    """The interval of a grid and the place in it, 0 to 1."""
    at = min(max(bisect.bisect_right(grid, value) - 1, 0), len(grid) - 2)
    return at, min(max((value - grid[at]) / (grid[at + 1] - grid[at]), 0.0), 1.0)


VIDUR = Adapter(
    "vidur",
    "vidur",
    "0.0.26",
    (
        "prefix caching: every prompt is computed whole",
        "asynchronous scheduling",
        "delays outside of the engine",
        "clients that give up",
        "preemptions: a run that needs one ends with an error",
        "models and GPUs that it has no profile of, without ours",
    ),
    _answers,
    fitted="fitted",
)
