"""The numbers that are drawn: each against what it is by definition, or against what was planted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_pages import PlantedPage

from blis_replay.blis.latency.models import LatencyModel
from blis_replay.ingest.checks.registry import check_evidence, check_names, named_check
from blis_replay.ingest.recording import ITERATION_SCHEMA, STEP_SCHEMA
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store import open_store
from blis_replay.replay.driver import replay
from blis_replay.validate.explain.attribute import QUANTITIES
from blis_replay.validate.metrics.latency import LatencySamples
from blis_replay.validate.report.charts import depth_chart
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.latency_charts import errors_chart, falls
from blis_replay.validate.report.series import (
    ErrorsOverTime,
    depth_over_time,
    errors_over_time,
    quantile_curve,
    recorded_cycles,
    stage_starts,
    step_cycles,
)
from blis_replay.validate.text.cells import cell_text

pytestmark = pytest.mark.slow


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 5)), min_size=1, max_size=60))
def test_a_curve_has_the_quantiles_of_the_sample_written_out(pairs: list[tuple[int, int]]) -> None:
    values, counts = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    curve, sample = quantile_curve(values, counts), np.repeat(values, counts)
    if not len(sample):
        assert curve is None
        return
    assert curve is not None
    assert curve.level[-1] <= 1 - 1 / len(sample) + 1e-9, "a sample of n tells nothing beyond 1 - 1/n"
    np.testing.assert_allclose(curve.value_us, np.quantile(sample, curve.level), rtol=1e-12, atol=1e-6)


def test_the_tail_of_a_curve_has_as_many_points_as_the_rest() -> None:
    """45 levels below p90, 41 from there to p99.9, of a sample that is large enough."""
    curve = quantile_curve(np.arange(10_000))
    assert curve is not None
    assert (int((curve.level < 0.899).sum()), int((curve.level >= 0.899).sum())) == (45, 41)


def test_errors_over_time_are_those_of_the_requests_sent_then() -> None:
    """40 requests: the first 20 simulated 10 % long, the others 25 % short; two bins of 20."""
    arrival_us = np.arange(40) * 1_000_000
    observed = LatencySamples(np.full(40, 100_000), np.full(40, 1_100_000), np.full(40, 11))
    factor = np.where(arrival_us < 20_000_000, 1.1, 0.75)
    simulated = LatencySamples(observed.ttft_us * factor, observed.e2e_us * factor, observed.output_tokens)
    errors = errors_over_time(arrival_us, observed, simulated)
    assert errors.requests.tolist() == [20, 20]
    for metric in ("e2e", "ttft", "itl"):
        np.testing.assert_allclose(errors.errors[metric], [0.1, -0.25])
    np.testing.assert_allclose(errors.ttft_us, [[100_000, 100_000], [110_000, 75_000]])


def test_depth_from_clients_is_the_time_requests_are_there(wrong_evidence: Evidence) -> None:
    """Little's law, exactly: the depth integrated over the run is the sum of the times of all requests."""
    run = wrong_evidence.run
    no_steps = rows_of(run.recording.steps.frame().clear())

    clients_only = replace(run, recording=replace(run.recording, steps=no_steps))
    depth = depth_over_time(clients_only, wrong_evidence.compared)
    assert depth is not None
    assert depth.in_flight
    width_us = 1e6 * float(depth.at_s[1] - depth.at_s[0])
    observed, simulated = depth.running
    assert observed.sum() * width_us == pytest.approx(run.recording.requests["e2e_us"].sum(), rel=1e-6)
    assert simulated.sum() * width_us == pytest.approx(run.e2e_us.sum(), rel=1e-6)


def test_depths_of_a_true_replay_are_the_recorded_ones(planted_page: PlantedPage) -> None:
    """The server was the engine: every step has the same depth at the same time on both sides."""
    run = replay(planted_page.recording, planted_page.true)
    depth = depth_over_time(run, run.simulated.completed)
    assert depth is not None
    assert not depth.in_flight
    assert np.nanmax(depth.running[0]) > 20
    np.testing.assert_allclose(depth.running[0], depth.running[1])
    assert depth.waiting is not None
    np.testing.assert_allclose(*depth.waiting)
    numbers = depth_chart(replace(depth, at_s=depth.at_s / 100), ()).numbers
    assert len({cell_text(row[0], numbers.columns[0].kind) for row in numbers.rows}) == len(numbers.rows)


def test_the_model_lies_on_the_cycles_of_the_server_that_follows_it(planted_page: PlantedPage) -> None:
    """8 ms + 150 us a decode was planted; medians of cycles of decodes alone are within 2 % of it."""
    run = replay(planted_page.recording, planted_page.true)
    cycles = step_cycles(run)
    assert cycles is not None
    latency = planted_page.true.models[0].latency
    assert isinstance(latency, LatencyModel)
    for side in cycles:
        often = side.count > 50
        planted_us = (latency.intercept_ns + latency.per_decode_token_ns * side.x[often]) / 1e3
        np.testing.assert_allclose(side.middle[often], planted_us, rtol=0.02)
    assert cycles[0].count.sum() == len(recorded_cycles(run.recording)[0]), "every recorded cycle is in it"


def test_iterations_of_a_log_have_depth_and_cycles_and_no_queue(planted_page: PlantedPage) -> None:
    """The steps of a recording as iterations of a log: its pictures are those of the steps."""
    run = replay(planted_page.recording, planted_page.true)
    steps = run.recording.steps.frame()
    split = {"iteration": pl.col("step_id"), "prefill_requests": pl.lit(0), "decode_requests": pl.col("running_depth")}
    others = {name: pl.lit(None) for name in ITERATION_SCHEMA if name not in steps.columns}
    logged = steps.with_columns(**(others | split))
    logged = logged.select(pl.col(name).cast(kind) for name, kind in ITERATION_SCHEMA.items())
    bare = replace(run.recording, steps=rows_of(pl.DataFrame(schema=STEP_SCHEMA)), iterations=rows_of(logged))
    everyone = np.ones(len(run.e2e_us), np.bool_)
    of_steps, of_log = (depth_over_time(replace(run, recording=one), everyone) for one in (run.recording, bare))
    assert of_steps is not None and of_log is not None
    np.testing.assert_allclose(of_log.running[0], of_steps.running[0])
    assert (of_log.waiting, of_log.in_flight) == (None, False)
    for logged_cycles, stepped in zip(*map(recorded_cycles, (bare, run.recording)), strict=True):
        np.testing.assert_array_equal(logged_cycles, stepped)


def test_stages_begin_with_their_first_request(planted_page: PlantedPage) -> None:
    """Two stages of 40 s, 4 and 11 requests a second: the second begins 40 s after the first."""
    (first, _), (second, name) = stage_starts(planted_page.recording)
    assert first == 0
    assert second == pytest.approx(40, abs=1)
    assert name == "stage 1, 11/s"


def test_a_stage_before_the_first_number_takes_no_room_from_the_curve() -> None:
    """Stage 0 begins at 0 s, and its requests have no latency: the first point is at 900 s. 72 pt an inch."""
    times = np.linspace(900.0, 901.0, 5)
    errors = ErrorsOverTime(times, np.full(5, 1, np.int64), {"e2e": np.zeros(5)}, (np.ones(5), np.ones(5)))
    chart = errors_chart(errors, [(0.0, "stage 0, 5/s"), (900.5, "stage 1, 9/s")], ["e2e"])
    assert "stage 1, 9/s" in chart.svg
    assert "stage 0, 5/s" not in chart.svg


def test_a_waterfall_goes_from_the_error_through_the_planted_cause_to_nothing(wrong_evidence: Evidence) -> None:
    """30 ms before the queue were planted: that bar is 30 ms of the observed TTFT, and nothing is left."""
    attribution = wrong_evidence.attribution
    assert attribution is not None
    column = QUANTITIES.index(("ttft", "mean"))
    bars = falls(attribution, column)
    assert bars[0].end == pytest.approx(attribution.error[column].value_us / attribution.observed_us[column])
    assert all(before.end == pytest.approx(after.start) for before, after in pairwise(bars))
    planted = next(bar for bar in bars if bar.name == "delay before the queue")
    part_us = planted.part * attribution.observed_us[column]
    assert part_us == pytest.approx(30_000, rel=0.01)
    assert planted.end == pytest.approx(planted.start - planted.part)
    assert all(bar.low <= bar.part <= bar.high for bar in bars), "each with its 95 % interval"
    assert bars[-1].start == pytest.approx(0, abs=0.01)


def test_intervals_hold_the_error(wrong_evidence: Evidence) -> None:
    for (metric, statistic), estimate in wrong_evidence.comparison.estimates.items():
        if statistic == "mean":
            error = wrong_evidence.comparison.metrics[metric][statistic].error
            assert error is not None
            assert estimate.low <= error <= estimate.high


def test_evidence_is_the_same_whether_its_rows_are_held(
    planted_page: PlantedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of few requests are held while checks look at them; of many they are asked for, each time."""
    slug, every = planted_page.recording.slug, [named_check(name) for name in check_names()]
    with open_store(planted_page.store, read_only=True) as store:
        held = check_evidence(store, slug, every)
        monkeypatch.setattr("blis_replay.ingest.recording.FEW_ROWS", 0)
        assert check_evidence(store, slug, every) == held
    assert {one.check.name for one in held if one.tables} >= {"ledger", "overloaded"}
