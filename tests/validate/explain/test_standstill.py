"""A server that stood still: what that delays, from steps and from what a client got, and what can be left out."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from blis_replay.ingest.rows import rows_of
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.explain.attribute import QUANTITIES, attribute
from blis_replay.validate.explain.hypothesis import Replayed
from blis_replay.validate.explain.parts import OUTPUT
from blis_replay.validate.explain.standstill import standstill
from blis_replay_labs.planted.causes import PRE_QUEUE, delay, stood_still
from blis_replay_labs.planted.faults import Case, Depth, Fault, planted_case

pytestmark = pytest.mark.slow


def case_of(at_s: int, depth: Depth) -> Case:
    return planted_case(Fault("", (stood_still(3_000_000, at_s),), depth))


@pytest.mark.parametrize("depth", ["full", "client"])
@pytest.mark.parametrize(("at_s", "name"), [(0, "cold start"), (20, "standstill")])
def test_a_standstill_makes_the_error_and_the_window_after_it_has_none(at_s: int, name: str, depth: Depth) -> None:
    """Three seconds in one step make all of the error of TTFT, and in the advised window no mean is off."""
    case = case_of(at_s, depth)
    attribution = attribute(case.recording, case.release, token_gaps=case.token_gaps)
    (cause,) = (cause for cause in attribution.causes if cause.component.name == name)
    column = QUANTITIES.index(("ttft", "mean"))
    assert cause.shares[column].value_us == pytest.approx(attribution.error[column].value_us, rel=0.05)
    low, high = map(float, cause.component.command.rpartition(" --window ")[2].split(":"))
    without = attribute(case.recording, case.release, window=(low, high))
    assert not [cause for cause in without.causes if cause.component.name == name]
    assert abs(without.error[column].value_us) < 0.03 * without.observed_us[column]


@pytest.mark.parametrize(("late_ms", "every", "calibrates"), [(4_000, 20, False), (200, 1, True)])
def test_a_client_that_stood_still_is_no_delay_of_every_request(late_ms: int, every: int, calibrates: bool) -> None:
    """One request in twenty gets its tokens 4 s late, as when its client is stopped; or each of them 200 ms late."""
    case = planted_case(Fault("", (), "full"))
    requests = case.recording.requests.frame()
    late_us = pl.when(pl.int_range(pl.len()) % every == 0).then(1_000 * late_ms).otherwise(0)
    requests = requests.with_columns(pl.col("ttft_us") + late_us, pl.col("e2e_us") + late_us)
    attribution = attribute(replace(case.recording, requests=rows_of(requests)), case.release)
    (cause,) = (cause.component for cause in attribution.causes if cause.component.name == OUTPUT)
    assert cause.command.startswith("blis-replay calibrate") == calibrates


def test_nobody_is_sent_to_calibrate_to_a_server_that_stood_still() -> None:
    case = case_of(20, "full")
    replayed = Replayed(case.recording, ReplayMode(), case.release.models[0], case.release)
    still = standstill(replayed)
    assert still is not None
    assert replayed.calibrate()[1].startswith("blis-replay calibrate")
    assert replayed.put_right([still]).calibrate()[1].startswith("blis-replay explain")


def test_a_stalled_step_that_begins_earlier_in_the_simulator_is_stalled_as_well() -> None:
    """The simulator has requests in its queue 4 ms too early, so its first step begins before the recorded one.

    The 3 s of the cold start are its own share of the error, and 4 ms are that of the delay.
    """
    both = planted_case(Fault("", (stood_still(3_000_000, 0), delay(PRE_QUEUE, pre_queue_us=-4_000))))
    alone, together = (attribute(case.recording, case.release) for case in (case_of(0, "full"), both))
    column = QUANTITIES.index(("ttft", "mean"))
    (cold,) = (cause.shares[column].value_us for cause in alone.causes if cause.component.name == "cold start")
    shares_us = {cause.component.name: cause.shares[column].value_us for cause in together.causes}
    assert shares_us["cold start"] == pytest.approx(cold, rel=0.02)
    assert shares_us[PRE_QUEUE] == pytest.approx(-4_000, rel=0.1)
