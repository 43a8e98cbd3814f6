"""When iterations began, worked out from requests: bounds that hold, against the engine and against a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from logged import ENGINE, logged, served, workload
from steplog import events

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.steps.placed import place


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_true_start_lies_within_the_stated_uncertainty(seed: int, asynchronous: bool) -> None:
    engine = replace(ENGINE, async_scheduling=asynchronous)
    requests = workload(seed)
    recorded = logged(requests, engine)
    placed = place(recorded, Scratch())
    assert placed.missing == recorded.missing
    frame, truth_us = placed.iterations.frame(), served(requests, engine).steps["scheduled_us"]
    off_us = np.abs(frame["start_us"].to_numpy() - truth_us)
    assert (off_us <= frame["uncertainty_us"].to_numpy()).all()
    assert np.diff(frame["start_us"].to_numpy()).min() >= 0
    assert np.median(off_us) < 5_000


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (pl.col("engine") + pl.col("iteration") % 2, "2 engines served the requests"),
        ((pl.col("iteration") + 7).alias("iteration"), "the log begins with iteration 7"),
    ],
)
def test_requests_that_cannot_be_followed_leave_steps_without_a_time(changed: pl.Expr, why: str) -> None:
    recorded = logged(workload(1, 10))
    frame = recorded.iterations.frame().with_columns(changed)
    placed = place(replace(recorded, iterations=rows_of(frame)), Scratch())
    assert placed.missing[-1].startswith(f"when iterations began: {why}")
    assert placed.iterations["start_us"].null_count() == frame.height


def test_steps_from_the_first_that_is_not_explained_on_have_no_time() -> None:
    """Request 5 of 10 is in no file: the steps before it are placed, the others are not."""
    recorded = logged(workload(1, 10))
    requests = recorded.requests.frame().filter(pl.col("request_index") != 5)
    placed = place(replace(recorded, requests=rows_of(requests)), Scratch())
    admitted = int(served(workload(1, 10)).scheduled_step[5])
    assert f"at iteration {admitted:,} of" in placed.missing[-1]
    assert placed.iterations["start_us"].is_not_null().to_list() == [
        i < admitted for i in range(placed.iterations.height)
    ]


@pytest.mark.parametrize(("name", "half_us"), [("A", 1_000), ("C", 2_000)])
def test_every_step_of_vllm_0_32_began_within_the_stated_uncertainty(
    data_pack: Path, tmp_path: Path, name: str, half_us: int
) -> None:
    """The truth is the step log, on the client's clock; half of the steps are placed to a millisecond or two."""
    folder = data_pack / "live-vllm-0.32" / name
    began_ns = [event["t0"] for event in events(folder) if event["e"] == "s"]
    with read_recording(folder) as recorded:
        frame = recorded.iterations.frame()
        truth_us = np.array(began_ns) // 1000 - recorded.clocks[0].zero_us
    off_us = np.abs(frame["start_us"].to_numpy() - truth_us)
    assert (off_us <= frame["uncertainty_us"].to_numpy()).all()
    assert np.median(off_us) < half_us
