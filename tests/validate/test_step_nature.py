"""What recorded steps say of a model's, on steps whose difference is planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from blis_runs import small_recording

from blis_replay.blis.latency.models import ObservedCycles
from blis_replay.ingest.recording import STEP_SCHEMA
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store import open_for_reading, read_stored
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.observed import observed_cycles
from blis_replay.replay.pace import ForcedSteps, recorded_pace, served_alike
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.explain.cycles import nature_of, recorded_nature, stretch_of
from blis_replay.validate.explain.hypothesis import Replayed


def steps_off(factor: float, held_up_every: int, times: int = 20) -> ForcedSteps:
    """Decode steps of some 12 ms by the model; recorded ones take ``factor`` of it, and every so manieth 20 times."""
    draw = np.random.default_rng(0)
    decodes = draw.integers(1, 64, 2_000)
    modelled_us = 10_000 + 50 * decodes
    recorded_us = np.rint(factor * modelled_us).astype(np.int64)
    recorded_us[::held_up_every] *= times
    batch = np.column_stack([0 * decodes, decodes, 500 * decodes])
    start_us = np.cumsum(recorded_us) - recorded_us
    return ForcedSteps(start_us, start_us, recorded_us, modelled_us, batch)


def test_steps_that_are_held_up_are_told_from_the_pace_of_the_others() -> None:
    """0.9 of the model but for one in 25, which takes 18 times as long: 24/25 * 0.9 + 1/25 * 18 = 1.584 of all."""
    steps = steps_off(0.9, held_up_every=25)
    nature = nature_of(steps, np.arange(2_000))
    assert nature is not None
    assert nature.is_held_up
    np.testing.assert_allclose(nature.of_all, 1.584, rtol=0.01)
    # 18 / 25 of 1.584 is time of steps that are held up.
    np.testing.assert_allclose((nature.factor, nature.held_up, nature.held_up_time), (0.9, 0.04, 0.4545), rtol=0.01)
    assert "4.0 % of steps, 45." in nature.words
    assert (
        "take over 10 times what others do; the others take 10.0 % less time than the coefficients say" in nature.words
    )


def test_a_step_that_a_fit_counts_is_not_held_up() -> None:
    """0.9 of the model but for one in 25, which takes five times as long: (24 + 5) / 25 * 0.9 = 1.044 of all."""
    nature = nature_of(steps_off(0.9, held_up_every=25, times=5), np.arange(2_000))
    assert nature is not None
    assert nature.factor == pytest.approx(1.044, rel=0.005)
    assert nature.held_up == 0


def test_a_long_step_counts_as_long_as_it_takes() -> None:
    """Nine decode steps of 10 ms take 30 % more, each tenth, a prefill of 90 ms, as modelled: (9 * 13 + 90) / 180."""
    place = np.arange(2_000)
    modelled_us = np.where(place % 10 == 9, 90_000, 10_000)
    recorded_us = np.where(place % 10 == 9, 90_000, 13_000)
    batch = np.column_stack([np.where(place % 10 == 9, 800, 0), 0 * place + 1, 0 * place + 500])
    start_us = np.cumsum(recorded_us) - recorded_us
    nature = nature_of(ForcedSteps(start_us, start_us, recorded_us, modelled_us, batch), place)
    assert nature is not None
    assert nature.factor == pytest.approx(207 / 180, abs=1e-3)


@pytest.mark.parametrize(("slower", "seen"), [(1.5, True), (1.15, False)])
def test_a_stretch_of_another_pace_is_named(slower: float, seen: bool) -> None:
    """Steps of 10 ms, each second some 3 % off at random; from second 20 to 28 they take longer."""
    draw = np.random.default_rng(5)
    second = np.repeat(np.arange(60), 100)
    factor = np.exp(draw.normal(0, 0.03, 60))[second] * np.where((second >= 20) & (second < 28), slower, 1.0)
    observed_us, start_us = np.rint(10_000 * factor).astype(np.int64), 1_000_000 * second
    modelled_us = np.full(6_000, 10_000)
    found = stretch_of(ForcedSteps(start_us, start_us, observed_us, modelled_us, np.zeros((6_000, 3), np.int64)))
    assert (found is not None) == seen
    if found is not None:
        assert (found.from_s, found.until_s) == (20.0, 28.0)
        assert found.factor == pytest.approx(slower, rel=0.05)


def test_steps_that_all_take_less_are_of_another_pace() -> None:
    nature = nature_of(steps_off(0.9, held_up_every=5_000), np.arange(2_000))
    assert nature is not None
    assert nature.is_pace
    assert not nature.is_held_up
    assert nature.words.startswith("take 10.0 % less time than the coefficients say")


@pytest.mark.slow
def test_a_pace_that_is_replayed_is_no_longer_off(bundled_store: Path) -> None:
    """A real run of steps that take some 12 % less than its coefficients say, at equal batches."""
    with open_for_reading(bundled_store) as store:
        recording = read_stored(store, "tiny-live-e")
    release = load_release("cpu-vllm-0.32.0")
    cycles, _basis = observed_cycles(recording)
    modelled = Replayed(recording, ReplayMode(), entry_of(release, recording), release)
    natures = [recorded_nature(replace(modelled, mode=parse_mode(mode)), cycles) for mode in ("exact", "pace=recorded")]
    factors = [nature.factor for nature in natures if nature is not None]
    assert factors == pytest.approx([0.88, 1.0], abs=0.03)
    # What ``validate`` says of the same steps is the same.
    plan = plan_replay(recording, modelled.mode, modelled.entry)
    pace = recorded_pace(recording, plan.trace, plan.engine, modelled.entry)
    assert pace is not None
    assert pace.factor == pytest.approx(factors[0], abs=0.005)


def test_a_prefill_one_step_from_the_servers_is_no_evidence_of_its_time() -> None:
    """Steps of 10 ms; the server's prefill of 500 tokens is in the third, the engine's in the fourth.

    Behind the seventh the server was idle, so its cycle is that of another; the ninth has no record.
    """
    start_us = 10_000 * np.arange(9)
    served = {"step_id": range(1, 9), "start_us": start_us[:8], "decode_tokens": [4, 4, 3, *[4] * 5]}
    served["prefill_tokens"] = [0, 0, 500, *[0] * 5]
    full = {name: served.get(name, [100] * 8) for name in STEP_SCHEMA}
    recording = replace(small_recording(), steps=rows_of(pl.DataFrame(full, schema=STEP_SCHEMA)))
    batch = np.array([[0, 4, 0]] * 9)
    batch[3] = 500, 3, 0
    cycles = ObservedCycles(start_us[:8], np.full(8, 10_000), np.arange(8) != 6)
    steps = ForcedSteps(start_us, start_us, np.full(9, 10_000), np.full(9, 10_000), batch)
    alike = [True, True, False, False, True, True, False, True, False]
    assert served_alike(recording, cycles, steps).tolist() == alike
    # One that begins 3 ms before the server's, as its request came a little earlier, is the nearest one.
    earlier = replace(steps, scheduled_us=start_us - 3_000, start_us=start_us - 3_000)
    assert served_alike(recording, cycles, earlier).tolist() == alike
    other = replace(steps, batch=batch + np.array([0, 9, 0]))
    assert not served_alike(recording, cycles, other).any(), "not half of them are its steps"
