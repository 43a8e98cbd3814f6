"""Calibration on made recordings whose coefficients are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blis_replay.blis.latency import LatencyModel
from blis_replay.blis.release import parse_release
from blis_replay.blis.release_text import format_release
from blis_replay.fixtures.synthetic import generate, write_experiment
from blis_replay.fixtures.truth import SyntheticExperiment
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.recording import Finding, Recording, SharedPrefix, Stage
from blis_replay.validate.calibration.calibrate import PUBLISHED_PRE_QUEUE_US, DataChoice, calibrate, fit_line
from blis_replay.validate.calibration.cycle_rows import CycleRows
from blis_replay.validate.errors import ValidateError

# A busy server: 8 and 16 requests/s of 100 tokens at 9 to 11 ms a step.
BUSY = SyntheticExperiment(
    stages=(Stage(0, 8.0, 60_000_000), Stage(1, 16.0, 60_000_000)),
    shared_prefix=SharedPrefix(10, 10, 100, 400, 100),
    latency=LatencyModel("blackbox", 8_000_000, 30_000, 60_000),
)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    directory = tmp_path_factory.mktemp("busy") / BUSY.slug
    write_experiment(generate(BUSY), directory)
    with read_recording(directory) as recording:
        return replace(recording, token_events=None)


def test_step_records_give_the_coefficients_back(busy: Recording) -> None:
    """True: 8000 us, 30 us a prefill token, 60 us a decode.

    The slopes come out a few per cent low: a 10 % sample of steps is a noisy measure of
    a window's batch, and noise in a regressor flattens its slope.
    """
    release, (fit,) = calibrate([busy], "fit", "steps")
    latency = release.models[0].latency
    assert fit.data == "steps"
    assert latency.intercept_ns == pytest.approx(8_000_000, rel=0.01)
    assert latency.per_prefill_token_ns == pytest.approx(30_000, rel=0.15)
    assert latency.per_decode_token_ns == pytest.approx(60_000, rel=0.10)


def test_latencies_give_the_coefficients_back(busy: Recording) -> None:
    """Requests are alike, so the 60 us a decode come out as context: 60 / (504 + 50) us a token."""
    release, (fit,) = calibrate([busy], "fit", "latencies")
    latency = release.models[0].latency
    assert fit.data == "latencies"
    assert latency.intercept_ns == pytest.approx(8_000_000, rel=0.01)
    assert latency.per_prefill_token_ns == pytest.approx(30_000, rel=0.05)
    assert latency.per_decode_token_ns == 0
    assert latency.per_context_token_ns == pytest.approx(60_000 / 554, rel=0.05)


def test_a_delay_that_no_stamp_shows_is_named_with_its_source(busy: Recording) -> None:
    entry = calibrate([busy], "fit")[0].models[0]
    assert entry.lifecycle.pre_queue_us == PUBLISHED_PRE_QUEUE_US == 9_300
    assert "not identified from these recordings" in (entry.sources or {})["pre_queue"]


def test_the_release_remembers_what_it_was_fitted_on(busy: Recording) -> None:
    release, _ = calibrate([busy], "fit", "steps")
    assert [(f.experiment, f.data) for f in release.fitted_on] == [(BUSY.slug, "steps")]
    assert parse_release(format_release(release), "fit").models == release.models
    assert calibrate([busy], "fit", "steps")[0] == release  # equal input, equal output


def test_two_deployments_of_a_model_get_an_entry_each(busy: Recording) -> None:
    other = replace(busy, alias="1b-hf-general", slug="other")
    release, _ = calibrate([busy, other], "fit", "steps")
    assert [entry.applies_to for entry in release.models] == [("1b-hf-*",), ("1b-*",)]


def test_no_coefficient_is_negative() -> None:
    """Cycles that fall with the batch: the slope stops at 0, the intercept is the mean."""
    batch = np.column_stack([np.ones(50), np.zeros(50), np.arange(50.0), np.zeros(50)])
    coefficients, _ = fit_line([CycleRows(batch, 10_000 - np.arange(50.0), context_known=False)])
    assert (coefficients >= 0).all()
    assert coefficients[2] == pytest.approx(0, abs=0.1)
    assert coefficients[0] == pytest.approx(10_000 - 24.5, rel=1e-3)


def test_a_stall_does_not_bend_the_line() -> None:
    """One cycle of 200 that takes a second: the robust loss leaves 5000 + 10 * decodes alone."""
    decodes = np.linspace(1, 100, 200)
    cycle_us = 5_000 + 10 * decodes
    cycle_us[150] = 1_000_000
    batch = np.column_stack([np.ones(200), np.zeros(200), decodes, np.zeros(200)])
    coefficients, _ = fit_line([CycleRows(batch, cycle_us, context_known=False)])
    assert coefficients[[0, 2]] == pytest.approx([5_000, 10], rel=0.02)


def test_without_steps_or_latencies_there_is_nothing_to_fit(busy: Recording) -> None:
    import polars as pl

    empty = replace(busy, steps=busy.steps.clear(), requests=busy.requests.with_columns(ttft_us=pl.lit(None, pl.Int64)))
    with pytest.raises(ValidateError, match="no latencies to fit"):
        calibrate([empty], "fit")


@pytest.mark.parametrize(("data", "metric"), [("latencies", "e2e"), ("latencies", "ttft"), ("steps", "step_time")])
def test_what_a_check_calls_unusable_is_not_fitted_to(busy: Recording, data: DataChoice, metric: str) -> None:
    broken = replace(busy, findings=(Finding("clocks", "unusable", metric, "3 requests end before they begin"),))
    with pytest.raises(ValidateError, match=f"{metric} unusable \\(clocks: 3 requests end before they begin"):
        calibrate([broken], "fit", data)
    other: DataChoice = "steps" if data == "latencies" else "latencies"
    assert calibrate([broken], "fit", other)[1][0].data == other
