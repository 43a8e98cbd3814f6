"""The step recorder of the generator against the real one, on schedules whose truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.blis.kernel import state as kernel
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, RequestTrace
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth, step_records


def us(frame: pl.DataFrame, column: str) -> np.ndarray:  # type: ignore[type-arg]
    return frame[column].cast(pl.Int64).to_numpy()


def as_truth(requests: pl.DataFrame, steps: pl.DataFrame) -> SyntheticTruth:
    """A recorded schedule in the form of a simulated one."""
    rows = np.zeros(steps.height, kernel.STEP)
    rows["start_us"] = us(steps, "exec_start_us")
    rows["end_us"] = us(steps, "update_us")
    rows["scheduled_us"] = us(steps, "sched_start_us")
    rows["prefill_tokens"] = us(steps, "prefill_tokens")
    rows["decode_tokens"] = us(steps, "decode_tokens")
    rows["running_depth"] = us(steps, "running")
    rows["waiting_depth"] = us(steps, "waiting")
    rows["prefill_requests"] = us(steps, "prefill_reqs")
    ids = us(steps, "step_id")
    prompt_tokens, cached = us(requests, "prompt_tokens"), us(requests, "cached_tokens")
    arrival_us, n = us(requests, "core_arrival_us"), requests.height
    trace = RequestTrace(
        arrival_us, prompt_tokens, prompt_tokens - cached, us(requests, "output_tokens"), np.full(n, NEVER_US)
    )
    nothing = np.zeros(n, np.int64)
    result = SimResult(
        arrival_us=arrival_us,
        queued_us=us(requests, "queued_us"),
        scheduled_us=us(requests, "first_scheduled_us"),
        scheduled_step=nothing,
        first_step=np.searchsorted(ids, us(requests, "first_token_step")),
        last_step=np.searchsorted(ids, us(requests, "finished_step")),
        status=np.full(n, kernel.COMPLETED),
        output_tokens=us(requests, "output_tokens"),
        preemptions=nothing,
        cached_tokens=cached,
        resume_cached_tokens=nothing,
        steps=rows,
        segments=np.zeros((0, 3), np.int64),
        lifecycle=Lifecycle(),
    )
    return SyntheticTruth(SyntheticExperiment(), trace, result, nothing, nothing, nothing, cached, nothing)


def test_a_step_is_recorded_as_by_the_real_recorder(data_pack: Path) -> None:
    # steps.csv has the true split of 5,356 batches (asynchronous, all sampled) beside the one that the recorder of the
    # instrumented vLLM writes.
    folder = data_pack / "vllm-traces" / "shared-prefix-async"
    steps = pl.read_csv(folder / "steps.csv").filter(pl.col("scheduled_tokens") > 0)
    truth = as_truth(pl.read_csv(folder / "requests.csv").sort("core_arrival_us"), steps)
    recorded = step_records(truth)
    assert steps.height == 5356
    assert recorded["prefill_requests"].tolist() == steps["labelled_prefill_reqs"].to_list()
    assert recorded["prefill_tokens"].tolist() == steps["labelled_prefill_tokens"].to_list()
    assert recorded["decode_requests"].tolist() == steps["labelled_decode_reqs"].to_list()
    exact = step_records(replace(truth, spec=replace(truth.spec, phase_lag=False)))
    assert exact["prefill_requests"].tolist() == steps["prefill_reqs"].to_list()
    # What finished is counted by the next call; an empty call in between takes it away from the next batch.
    after_a_batch = (steps["step_id"].diff() == 1).fill_null(False).to_numpy()
    assert (
        recorded["finished_requests"][after_a_batch].tolist()
        == steps["num_finished"].to_numpy()[after_a_batch].tolist()
    )
