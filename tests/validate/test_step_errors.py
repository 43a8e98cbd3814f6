"""Single steps against their recorded times: by regime, by batch size, and against step cycles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from blis_runs import small_recording

from blis_replay.base.errors import ValidateError
from blis_replay.blis.kernel.state import BATCH
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.ingest.recording import STEP_SCHEMA, Recording, Setting
from blis_replay.ingest.rows import rows_of
from blis_replay.validate.fit.step_errors import RecordedSteps, step_cycles, step_errors

LINE = LatencyModel("blackbox", 5_000_000, 30_000, 60_000)


def steps_of(prefill: list[int], decode: list[int], time_us: list[int]) -> RecordedSteps:
    batch = np.zeros(len(prefill), BATCH)
    batch["prefill_tokens"], batch["decode_tokens"] = prefill, decode
    return RecordedSteps(batch, np.array(time_us, np.int64))


def counts(steps: RecordedSteps) -> list[tuple[int, int]]:
    """Prefill and decode tokens."""
    return steps.batch[["prefill_tokens", "decode_tokens"]].tolist()


def recording_with(step_id: list[int], start_us: list[int], prefill: list[int], decode: list[int]) -> Recording:
    """Sampled steps, all with a duration of 100 us; the requests are those of a bundled experiment."""
    columns = {"step_id": step_id, "start_us": start_us, "prefill_tokens": prefill, "decode_tokens": decode}
    full = {name: columns.get(name, [100] * len(step_id)) for name in STEP_SCHEMA}
    return replace(
        bundled_recording("20260218-150304-codellama-34b-tp2-general"),
        steps=rows_of(pl.DataFrame(full, schema=STEP_SCHEMA)),
    )


def test_errors_by_regime_and_batch_size() -> None:
    """Predicted 5600, 5600, 8600 and 14000 us against recorded times 10 % above, equal, 20 % below, equal."""
    steps = steps_of([0, 0, 100, 300], [10, 10, 10, 0], [6_222, 5_600, 7_167, 14_000])
    errors = {error.group: error for error in step_errors(LINE, steps)}
    assert [errors[g].steps for g in ("all", "decode-only", "mixed, light (< 256)", "mixed, heavy (>= 256)")] == [
        4,
        2,
        1,
        1,
    ]
    assert errors["decode-only"].mape == pytest.approx(0.05, abs=1e-4)
    assert errors["decode-only"].signed == pytest.approx(11_200 / 11_822 - 1)
    assert errors["mixed, light (< 256)"].mape == pytest.approx(0.2, abs=1e-3)
    assert errors["mixed, heavy (>= 256)"].mape == 0
    assert errors["1 to 15 decodes"].steps == 3
    assert "16 to 31 decodes" not in errors


def test_the_cycle_runs_from_start_to_start_with_the_batch_of_the_later_step() -> None:
    """Steps 1, 2 and 4 were sampled: one consecutive pair."""
    cycles = step_cycles(recording_with([1, 2, 4], [0, 8_000, 26_000], [0, 40, 0], [7, 8, 9]))
    assert cycles.time_us.tolist() == [8_000]
    assert counts(cycles) == [(40, 8)]


def test_a_synchronous_cycle_has_the_batch_of_the_earlier_step() -> None:
    """schedule() of the next step waits for the result of this one, so its prefill is what takes the time."""
    steps = recording_with([1, 2], [0, 8_000], [40, 0], [7, 8])
    synchronous = replace(steps, engine=steps.engine | {"async_scheduling": Setting(False, "recorded")})
    assert counts(step_cycles(synchronous)) == [(40, 7)]


def test_a_cycle_in_which_the_engine_may_have_idled_is_no_step_time() -> None:
    """Three steps in a row, of which the second ran 3 requests: only the first cycle is sure to have no pause."""
    steps = recording_with([1, 2, 3], [0, 8_000, 2_000_000], [0, 0, 0], [7, 8, 9])
    depth = pl.Series("running_depth", [4, 3, 4])
    cycles = step_cycles(replace(steps, steps=rows_of(steps.steps.frame().with_columns(depth))))
    assert cycles.time_us.tolist() == [8_000]


def test_a_server_that_takes_two_requests_is_busy_with_two() -> None:
    steps = recording_with([1, 2, 3], [0, 8_000, 2_000_000], [0, 0, 0], [2, 1, 2])
    depth = pl.Series("running_depth", [2, 1, 2])
    two = steps.engine | {"max_num_seqs": Setting(2, "file")}
    small = replace(steps, engine=two, steps=rows_of(steps.steps.frame().with_columns(depth)))
    assert step_cycles(small).time_us.tolist() == [8_000]


def test_the_mean_error_of_single_cycles_by_hand() -> None:
    """5000 + 60 * 8 = 5480 us of 8000: 31.5 % short."""
    error = step_errors(LINE, step_cycles(recording_with([1, 2], [0, 8_000], [0, 0], [7, 8])))[0]
    assert (error.group, error.mape) == ("all", pytest.approx(1 - 5_480 / 8_000))


def test_without_consecutive_steps_there_is_no_cycle() -> None:
    with pytest.raises(ValidateError, match="34b-general: no two consecutive steps of a busy engine were sampled"):
        step_cycles(recording_with([1, 3], [0, 9_000], [0, 0], [1, 1]))


def test_numbers_that_no_server_has_are_named() -> None:
    """2^61 tokens times a length is no int64; without requests there are no lengths."""
    with pytest.raises(ValidateError, match="a step of 2,305,843,009,213,693,951 tokens or requests"):
        step_cycles(recording_with([1, 2], [0, 9_000], [0, 0], [7, 2**61 - 1]))
    steps = recording_with([1, 2], [0, 9_000], [0, 0], [7, 8])
    with pytest.raises(ValidateError, match="no requests are recorded"):
        step_cycles(replace(steps, requests=rows_of(steps.requests.frame().clear())))


def test_a_token_of_a_prompt_attends_to_those_before_it() -> None:
    """Prompts of 100 tokens, nothing cached: the i-th attends to i, so 50.5 on average, and 40 of them to 2,020."""
    columns = {"step_id": [1, 2], "start_us": [0, 8_000], "prefill_tokens": [40, 0], "decode_tokens": [7, 8]}
    full = {name: columns.get(name, [100] * 2) for name in STEP_SCHEMA}
    engine = {"async_scheduling": False, "enable_prefix_caching": False}
    recording = replace(small_recording(20, **engine), steps=rows_of(pl.DataFrame(full, schema=STEP_SCHEMA)))
    assert step_cycles(recording).batch["attended_tokens"].tolist() == [2_020]
