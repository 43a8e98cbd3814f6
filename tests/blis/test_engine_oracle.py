"""The engine against the real vLLM 0.15.1 scheduler, on its recorded schedules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from blis_replay.blis import kernel
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency import LatencyModel
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

# The scenarios without KV pressure; what their prefix caches held is given, as recorded.
SCENARIOS = ["A_steady", "D_shared_prefix", "D_async", "F_edge", "F_async"]


@pytest.mark.realdata
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equal_to_the_microsecond(data_pack: Path, scenario: str) -> None:
    folder = data_pack / "vllm-oracle" / scenario
    config = json.loads((folder / "config.json").read_text())
    requests = pl.read_csv(folder / "requests.csv").sort("arrival_us", maintain_order=True)
    arguments = config["engine_args"]
    engine = EngineConfig(
        max_num_seqs=arguments["max_num_seqs"],
        max_num_batched_tokens=arguments["max_num_batched_tokens"],
        max_model_len=arguments["max_model_len"],
        async_scheduling=arguments["async_scheduling"],
    )
    columns = requests.select(
        "arrival_us",
        "prompt_tokens",
        (pl.col("prompt_tokens") - pl.col("num_cached_tokens")).alias("prefill_tokens"),
        "output_tokens",
        pl.lit(NEVER_US, pl.Int64),
    )
    trace = RequestTrace(*(np.ascontiguousarray(column) for column in columns.to_numpy().T))
    result = simulate(trace, engine, LatencyModel("blackbox", *config["step_time"]["b_ns"]))

    assert result.first_token_us.tolist() == requests["first_token_us"].to_list()
    assert result.finished_us.tolist() == requests["finished_us"].to_list()
    assert result.output_tokens.tolist() == requests["emitted_tokens"].to_list()
    assert_steps_equal(folder, result.steps)


def assert_steps_equal(folder: Path, steps: np.ndarray) -> None:
    """Batch composition, depths and times of every step that has tokens."""
    recorded = pl.read_csv(folder / "steps.csv.gz").filter(pl.col("scheduled_tokens") > 0)
    for row, name in [
        (kernel.STEP_START, "t_start_us"),
        (kernel.STEP_END, "t_end_us"),
        (kernel.STEP_SCHEDULED_AT, "t_sched_us"),
        (kernel.STEP_PREFILL, "prefill_tokens"),
        (kernel.STEP_DECODE, "num_decode_reqs"),
        (kernel.STEP_CONTEXT, "decode_context_tokens"),
        (kernel.STEP_RUNNING, "running"),
        (kernel.STEP_WAITING, "waiting"),
    ]:
        assert steps[row].tolist() == recorded[name].to_list(), name
