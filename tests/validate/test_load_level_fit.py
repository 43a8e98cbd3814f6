"""Coefficients from tables of load levels: planted ones lie within their bounds, and what cannot be told is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from blis_runs import release_of, small_recording

from blis_replay.blis.closed_loop import simulate_load
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.latency.operators import DecodeAttention, OperatorModel, OperatorTables, PrefillAttention
from blis_replay.blis.latency.operators import TokenTimes as Times
from blis_replay.ingest.recording import AGGREGATE_SCHEMA, REQUEST_SCHEMA, STEP_SCHEMA, Recording
from blis_replay.ingest.rows import no_rows
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.profile import of_summary
from blis_replay.replay.release_file import load_release
from blis_replay.validate.calibration.calibrate import Options, calibrate
from blis_replay.validate.calibration.evidence import load_level
from blis_replay.validate.calibration.model_fit import DEFAULT_PRIOR
from blis_replay.validate.calibration.physical import calibrate_operators
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.errors import ValidateError

# 9 ms a step, 45 us a prefill token, 30 us a decode and 0.06 us a token of its context; 7 ms before the queue.
TRUE = {"intercept": 9_000.0, "per_prefill_token": 45.0, "per_decode_token": 30.0, "per_context_token": 0.06}
SERVER, DELAY = LatencyModel("blackbox", 9_000_000, 45_000, 30_000, 60), Lifecycle(pre_queue_us=7_000.0)


def level(clients: int, prompt: int, output: int, means_us: dict[str, float], each: float = 10.0) -> Recording:
    """A row of a table: so many clients, so many requests ``each``, mean lengths and mean latencies."""
    said = {"prompt_tokens": prompt, "output_tokens_reported": output, **means_us}
    rows = [(-1, name, "mean", float(value)) for name, value in said.items()]
    rows += [(-1, "concurrency", "asked", float(clients)), (-1, "requests", "sent", each * clients)]
    name, table = f"c{clients}-{prompt}", pl.DataFrame(rows, AGGREGATE_SCHEMA, orient="row")
    nothing = {"requests": no_rows(REQUEST_SCHEMA), "steps": no_rows(STEP_SCHEMA), "stages": ()}
    return replace(small_recording(), slug=name, alias=name, content_hash=name, aggregates=table, **nothing)


def measured(clients: int, prompt: int, output: int, noise: float = 1.0, each: float = 10.0) -> Recording:
    """The same with the latencies of that server."""
    plan = plan_replay(*of_summary(level(clients, prompt, output, {}, each), ReplayMode()))
    result = simulate_load(plan.trace, plan.engine, SERVER, DELAY, plan.loop)
    means_us = {"ttft": result.ttft_us.mean() * noise, "e2e": result.e2e_us.mean() * noise}
    return level(clients, prompt, output, means_us, each)


def table(
    shapes: Sequence[tuple[int, int]] = ((200, 60), (2_000, 60), (3_000, 200)), each: float = 10.0
) -> list[Recording]:
    """Levels of 1, 4 and 8 clients; each is off by a factor drawn from a normal distribution of 1 %."""
    noise = np.random.default_rng(7).normal(1.0, 0.01, 3 * len(shapes))
    asked = [(clients, *shape) for shape in shapes for clients in (1, 4, 8)]
    return [measured(*load, factor, each) for load, factor in zip(asked, noise.tolist(), strict=True)]


def test_a_level_has_a_mean_batch_by_littles_law() -> None:
    """8 clients, answered after 2.01 s: 3.98 requests/s; 100 gaps of 20 ms: 7.96 decode, at 1,000 + 101 / 2 tokens."""
    found = load_level(level(8, 1_000, 101, {"ttft": 10_000, "e2e": 2_010_000}), "recorded")
    output = found.output_tokens  # lengths are drawn within 10 % of the mean
    cycle_us = 2_000_000 / (output - 1)
    assert output == pytest.approx(101, rel=0.02)
    assert found.cycle_us == pytest.approx(cycle_us)
    one, prefill, decodes, context = found.batch.tolist()
    assert (one, decodes) == (1.0, pytest.approx(8 * 2_000_000 / 2_010_000))
    assert prefill == pytest.approx(8 / 2_010_000 * cycle_us * found.prompt_tokens)
    assert context == pytest.approx(decodes * (found.prompt_tokens + output / 2))


@pytest.mark.heavy
def test_planted_coefficients_lie_within_the_bounds_of_a_table() -> None:
    """Nine levels of three lengths, 5 requests a client, tell all costs of a step; the delay is known within 3 ms."""
    rows = table(each=5.0)
    made, (fit,) = calibrate(rows, "fit", Options(load_release(DEFAULT_PRIOR)))
    assert not fit.missed
    found = {c.name: c for c in fit.record.coefficients}
    assert found["intercept"].value_us == pytest.approx(TRUE["intercept"], rel=0.05)
    for name, true_us in TRUE.items():
        if found[name].status == "fitted":
            assert found[name].low_us <= true_us <= found[name].high_us, name
    assert found["per_prefill_token"].value_us == pytest.approx(TRUE["per_prefill_token"], rel=0.1)
    assert found["pre_queue"].value_us == pytest.approx(7_000, abs=3_000)
    # A level that was not fitted to is predicted, and known as held out.
    other = compare_replay(replay(measured(6, 1_000, 100), made))
    assert other.uses == "held out"
    assert abs(other.metrics["e2e"]["mean"].error or 0.0) < 0.03
    assert compare_replay(replay(rows[0], made)).uses == "fitted on this run"


@pytest.mark.slow
def test_operator_times_are_scaled_to_levels() -> None:
    """Tables are 5 % and more off a level that was not fitted to; scaled to other levels they are within 5 %.

    Multiples of products and a time per step say nearly the same, so only what they predict is held.
    """
    products = Times((1.0, 20_001.0), (8_333.0, 841_666.0), (8_333.0, 841_666.0), (0.0, 0.0))
    nothing = PrefillAttention((1.0, 2.0), (1.0, 2.0), ((0.0, 0.0), (0.0, 0.0)))
    decode = DecodeAttention((1.0, 101.0), (1.0, 10_001.0), ((0.06, 600.06), (6.06, 60_606.06)))
    release = release_of(OperatorModel(OperatorTables(products, nothing, decode)), Lifecycle())
    made, (fit,) = calibrate_operators(table(), "fit", release, Options(release), "test")
    assert fit.agreement["cycle"] < 3  # the prefills of tables cost 42, of the server 45 us a token
    before, after = (
        compare_replay(replay(measured(6, 1_000, 100), one)).metrics["e2e"]["mean"].error or 0.0
        for one in (release, made)
    )
    assert abs(after) < 0.05 < abs(before)
    assert made.fitted_on[0].requests_hash is None


def test_a_summary_with_tpot_and_without_e2e_is_a_level() -> None:
    """As `vllm bench serve` writes it by default: 50 ms and 10 ms for each further token."""
    found = load_level(level(4, 500, 101, {"ttft": 50_000, "tpot_reported": 10_000}), "recorded")
    assert found.cycle_us == 10_000
    assert found.numbers["e2e"]["mean"] == pytest.approx(50_000 + 10_000 * (found.output_tokens - 1))


def test_too_few_levels_are_refused() -> None:
    with pytest.raises(ValidateError, match="and 2 load levels cannot determine 4 coefficients; add some"):
        calibrate([measured(1, 200, 20), measured(8, 200, 20)], "fit", Options(load_release(DEFAULT_PRIOR)))


def test_a_level_without_a_mean_ttft_is_refused() -> None:
    levels = [level(clients, 100, 50, {"e2e": 1e6}) for clients in (1, 2, 4, 8)]
    with pytest.raises(ValidateError, match="c1-100: its summary has no mean TTFT, so delays cannot be told from"):
        calibrate(levels, "fit", Options(load_release(DEFAULT_PRIOR)))


def test_step_records_are_asked_for_in_vain() -> None:
    with pytest.raises(ValidateError, match="c1-200: no steps to fit"):
        calibrate([measured(1, 200, 20)], "fit", Options(load_release(DEFAULT_PRIOR), "steps"))
