"""Coefficients from a stock server's log: a planted line comes out of counts, and that of a real server's step log."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from logged import ENGINE, LATENCY, WAY_US, recorded
from steplog import events

from blis_replay.ingest.assemble import read_recording
from blis_replay.validate.fit.every_step import STEP_COSTS, fit_steps, logged_steps, measure


def test_the_line_of_a_server_is_measured_from_its_log() -> None:
    """5 ms per step, 100 us a prompt token, 200 us a decode; the log leaves 300 us of each step out."""
    recording = recorded(requests=120)
    found = measure([recording], (0.0, 1.0))
    assert found is not None
    costs = {fit.name: fit.value_us for fit in found.coefficients}
    ns = (LATENCY.intercept_ns, LATENCY.per_prefill_token_ns, LATENCY.per_decode_token_ns)
    assert [costs[name] for name in STEP_COSTS[:3]] == pytest.approx([value / 1000 for value in ns], rel=0.01)
    assert [costs[name] for name in STEP_COSTS[3:]] == pytest.approx([0, 0], abs=0.05)
    # No request waits before it is queued but for the engine's turn; a token is 900 us on its way to the client.
    way = next(fit for fit in found.coefficients if fit.name == "pre_queue")
    assert way.low_us <= WAY_US <= way.high_us < 10_000
    assert found.total == pytest.approx(0, abs=0.001)


def test_a_log_that_does_not_tell_every_step_is_not_taken_for_one() -> None:
    """Under asynchronous scheduling the wait is not the step; without durations of requests, the rest is not known."""
    assert logged_steps(recorded(replace(ENGINE, async_scheduling=True))) is None
    assert logged_steps(recorded(requests=10)) is None


@pytest.mark.realdata
@pytest.mark.slow
def test_the_log_of_vllm_0_32_gives_the_line_of_its_step_log(data_pack: Path, tmp_path: Path) -> None:
    """Two runs of a real server: within 3 % of what the starts of its steps, from inside the engine core, give."""
    parts, truth = [], []
    for name in ("A", "C"):
        source = data_pack / "live-vllm-0.32" / name
        folder = shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("steplog.jsonl.gz"))
        with read_recording(folder) as recording:
            log = logged_steps(recording)
        assert log is not None
        parts.append((log.batch, log.cycle_us))
        truth.append(_cycles(data_pack / "live-vllm-0.32" / name, log.batch))
    lines = [
        fit_steps(np.vstack([batch for batch, _ in of]), np.concatenate([cycle_us for _, cycle_us in of]))
        for of in (parts, truth)
    ]
    assert lines[0] == pytest.approx(lines[1], rel=0.03)


def _cycles(folder: Path, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start to start of the steps after each of which the next one began at once."""
    starts_us, ends_us = [], []
    for event in events(folder):
        if event["e"] == "s" and event["n"]:
            starts_us.append(event["t0"] / 1e3)
        elif event["e"] == "u":
            ends_us.append(event["t1"] / 1e3)
    cycle_us, idle_us = np.diff(starts_us), np.array(starts_us[1:]) - ends_us[: len(starts_us) - 1]
    busy = idle_us < 1_500
    return batch[:-1][busy], cycle_us[busy]
