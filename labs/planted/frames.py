"""A synthetic experiment as :class:`Recording`, as ingest would read it of complete instruments, without its files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.identity import alias_of, workload_of
from blis_replay.ingest.readers.requests import NONE, RawPrompts
from blis_replay.ingest.recording import (
    AGGREGATE_SCHEMA,
    JOURNEY_EVENT_SCHEMA,
    LIFECYCLE_SCHEMA,
    ONE_CLOCK,
    RECORDED,
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    Clock,
    PromptTree,
    Recording,
    Setting,
    TokenEvents,
)
from blis_replay.ingest.rows import rows_of
from blis_replay_labs.planted.experiment import SyntheticTruth, api_request_id, core_request_id, sampled, step_records
from blis_replay_labs.planted.writers_inference_perf import declared_load

_ENGINE_ARGUMENTS = (
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_gpu_blocks"),
    *("async_scheduling",),
)
# Order of events with one stamp.
_SEQUENCE = (
    *("api.ARRIVED", "api.HANDOFF_TO_CORE", "journey.QUEUED", "journey.SCHEDULED", "journey.FIRST_TOKEN"),
    *("api.FIRST_RESPONSE_FROM_CORE", "journey.FINISHED", "api.DEPARTED"),
)


def recording_of(truth: SyntheticTruth, token_file: Path | None = None) -> Recording:
    """The experiment with requests, journeys, sampled steps and prompt identities, all on one clock.

    ``token_file``: where to keep a stamp for each token, which a store needs for ITL; without it token events are
    left out.  Raises ``ValueError`` where clients gave up: this is for whole journeys.
    """
    if not truth.ok.all():
        raise ValueError("some clients gave up: only experiments without failures can be had without files")
    spec = truth.spec
    workload = workload_of(spec.slug, None)
    return Recording(
        slug=spec.slug,
        alias=alias_of(spec.slug, spec.model, workload),
        workload=workload,
        model=spec.model,
        hardware=spec.hardware,
        tensor_parallelism=spec.tensor_parallelism,
        ground_truth=RECORDED,
        content_hash=hashlib.sha256(str(spec).encode()).hexdigest(),
        engine={name: Setting(getattr(spec.engine, name), "recorded", "truth") for name in _ENGINE_ARGUMENTS}
        | {"enable_prefix_caching": Setting(spec.prefix_caching, "recorded", "truth")},
        stages=spec.stages,
        shared_prefix=spec.shared_prefix,
        ignore_eos=spec.ignore_eos,
        prefix_hit_rate=None,
        requests=rows_of(_requests(truth)),
        token_events=None if token_file is None else _token_events(truth, token_file),
        steps=rows_of(_steps(truth)),
        aggregates=pl.DataFrame(schema=AGGREGATE_SCHEMA),
        clocks=(Clock("client", "relative", 0), Clock("step", "relative", 0, placed=ONE_CLOCK)),
        files=(),
        missing=() if token_file else ("token times",),
        prefix=prompt_identities(truth) if spec.prefix_caching else None,
        load_profile=declared_load(truth),
        lifecycles=rows_of(_lifecycles(truth)),
        journey_events=rows_of(_journey_events(truth)),
    )


def frame_of(schema: Mapping[str, type[pl.DataType]], columns: Mapping[str, object], height: int) -> pl.DataFrame:
    """A frame of the schema: arrays and lists as they are, other values repeated, null where nothing is given."""
    series = []
    for name, kind in schema.items():
        values = columns.get(name)
        cells = values if isinstance(values, (np.ndarray, list)) else [values] * height
        series.append(pl.Series(name, cells, dtype=kind))
    return pl.DataFrame(series)


def _requests(truth: SyntheticTruth) -> pl.DataFrame:
    result, n = truth.result, len(truth)
    columns = {
        "request_index": np.arange(n),
        "request_id": [api_request_id(i) for i in range(n)],
        "stage": truth.stage,
        "arrival_us": truth.trace.arrival_us,
        "prompt_tokens": truth.trace.prompt_tokens,
        "output_tokens": result.output_tokens,
        "output_tokens_source": "server usage",
        "output_tokens_reported": truth.retokenised_tokens,
        "max_tokens": truth.spec.shared_prefix.output_tokens,
        "ttft_us": result.ttft_us,
        "e2e_us": result.e2e_us,
        "queue_us": result.scheduled_us - truth.taken_in_us,
        "prefill_us": result.first_token_us - result.scheduled_us,
        "decode_us": result.finished_us - result.first_token_us,
        "status": "ok",
    }
    return frame_of(REQUEST_SCHEMA, columns, n)


def _steps(truth: SyntheticTruth) -> pl.DataFrame:
    drawn = sampled(truth)
    columns: dict[str, object] = {
        name: values[drawn] for name, values in step_records(truth).items() if name in STEP_SCHEMA
    }
    # The reserved block is not in the pool.
    total = (truth.spec.engine.num_gpu_blocks or 1) - 1
    free = truth.result.steps["free_blocks"][drawn]
    columns |= {"kv_blocks_total": total, "kv_blocks_free": free, "kv_usage": 1 - free / max(total, 1)}
    return frame_of(STEP_SCHEMA, columns, len(drawn))


def _lifecycles(truth: SyntheticTruth) -> pl.DataFrame:
    result, n, arrival_us = truth.result, len(truth), truth.trace.arrival_us
    columns = {
        "journey": np.arange(n),
        "request_index": np.arange(n),
        "api_request_id": [api_request_id(i) for i in range(n)],
        "core_request_id": [core_request_id(i) for i in range(n)],
        "arrived_us": arrival_us,
        "queued_us": truth.taken_in_us,
        "scheduled_us": result.scheduled_us,
        "first_token_us": result.first_token_us,
        "first_response_us": arrival_us + result.ttft_us,
        "finished_us": result.finished_us,
        "departed_us": truth.client_end_us,
        "queued_step": _step_begun(truth, truth.taken_in_us),
        "scheduled_step": result.scheduled_step + 1,
        "first_token_step": result.first_step + 1,
        "finished_step": result.last_step + 1,
        "preemptions": result.preemptions,
        "status": "ok",
        "prompt_tokens": truth.trace.prompt_tokens,
        "max_tokens": truth.spec.shared_prefix.output_tokens,
        "output_tokens": result.output_tokens,
        "cached_prompt_tokens": truth.cached_prompt_tokens,
    }
    return frame_of(LIFECYCLE_SCHEMA, columns, n)


def _step_begun(truth: SyntheticTruth, at_us: Int64s) -> Int64s:
    """int64[n]: the last step begun before a time, counted from 1."""
    return np.searchsorted(truth.result.steps["scheduled_us"], at_us).astype(np.int64)


def _journey_events(truth: SyntheticTruth) -> pl.DataFrame:
    """What happened to each request; the engine keeps no times of evictions."""
    result, n, arrival_us = truth.result, len(truth), truth.trace.arrival_us
    known: dict[str, dict[str, object]] = {
        "api.ARRIVED": {"time_us": arrival_us},
        "api.HANDOFF_TO_CORE": {"time_us": arrival_us},
        "journey.QUEUED": _of_engine(truth.taken_in_us, _step_begun(truth, truth.taken_in_us), 0),
        "journey.SCHEDULED": _of_engine(result.scheduled_us, result.scheduled_step + 1, 0),
        "journey.FIRST_TOKEN": _of_engine(result.first_token_us, result.first_step + 1, 1),
        "api.FIRST_RESPONSE_FROM_CORE": {"time_us": arrival_us + result.ttft_us},
        "journey.FINISHED": _of_engine(result.finished_us, result.last_step + 1, result.output_tokens)
        | {"finish_status": "length"},
        "api.DEPARTED": {"time_us": truth.client_end_us},
    }
    frames = [
        frame_of(JOURNEY_EVENT_SCHEMA, {"journey": np.arange(n), "event": event, **columns}, n)
        for event, columns in known.items()
    ]
    turn = pl.col("event").cast(pl.Enum(_SEQUENCE))
    return pl.concat(frames).sort(pl.col("journey"), pl.col("time_us"), turn)


def _of_engine(time_us: Int64s, step: Int64s, outputs: Int64s | int) -> dict[str, object]:
    return {"time_us": time_us, "step_id": step, "output_tokens": outputs}


def prompt_identities(truth: SyntheticTruth) -> PromptTree:
    """The prompts that were sent; those of a group hang on the first of them."""
    sent, first = np.unique(truth.prompt, return_index=True)
    group = truth.group[first]
    _, first_of_group, member = np.unique(group, return_index=True, return_inverse=True)
    parent = np.where(first_of_group[member] == sent, NONE, first_of_group[member])
    tokens = truth.trace.prompt_tokens[first]
    shared = np.where(parent == NONE, 0, np.minimum(truth.spec.shared_prefix.system_prompt_tokens, tokens))
    prompts = RawPrompts("prompt identities of the generator", truth.prompt, parent, shared, tokens)
    return prompts.in_order(np.arange(len(truth.prompt)))


def _token_events(truth: SyntheticTruth, path: Path) -> TokenEvents:
    """One stamp per token, as the client had them, written to ``path``."""
    times = [truth.token_times_us(request) for request in range(len(truth))]
    np.concatenate(times).astype(np.int64).tofile(path)
    counts = np.array([len(of_request) for of_request in times], np.int64)
    return TokenEvents(path, np.cumsum(counts) - counts, counts, 0)
