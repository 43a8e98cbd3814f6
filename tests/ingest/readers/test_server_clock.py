"""The server's clock beside the requests': bridged by stamps, shared on one host, or not known."""

from __future__ import annotations

import polars as pl
import pytest
from builders import requests, run_of_steps

from blis_replay.ingest.readers.otlp.spans import READ_STEP_SCHEMA
from blis_replay.ingest.readers.server.clock import ServerTimes, bridge_of, server_times, steps_on_zero
from blis_replay.ingest.recording import REQUEST_SCHEMA, STEP_SCHEMA, Clock
from blis_replay.ingest.rows import Rows, rows_of

NO_JOURNEYS = pl.Series(dtype=pl.Int64)
NO_REQUESTS = pl.DataFrame(schema=REQUEST_SCHEMA)
NO_EVENTS = pl.Series(dtype=pl.Int64)


def steps(*starts_us: int, epoch_offset_us: int = 0, **columns: pl.Series) -> Rows:
    rows = {
        "step_id": list(range(1, len(starts_us) + 1)),
        "ts_start_ns": [start * 1000 for start in starts_us],
        "ts_end_ns": [start * 1000 + 500 for start in starts_us],
        "epoch_ns": [(start + epoch_offset_us) * 1000 + 900 for start in starts_us],
    }
    told = {name: rows.get(name, [0] * len(starts_us)) for name in READ_STEP_SCHEMA} | columns
    return rows_of(pl.DataFrame(told, schema=READ_STEP_SCHEMA))


def times(of_steps: Rows, client: Clock | None, sent: pl.DataFrame = NO_REQUESTS) -> ServerTimes:
    found = server_times(of_steps, NO_JOURNEYS, bridge_of(NO_EVENTS, of_steps), client, rows_of(sent))
    assert found is not None
    return found


def test_the_epoch_stamps_of_step_events_bridge_the_clocks() -> None:
    """Step clock 5,000,000 is epoch 1,000,000,005,000,000; the first send is 4.9 s after the zero of the step clock."""
    of_steps = steps(5_000_000, 5_010_000, epoch_offset_us=10**15)
    found = times(of_steps, Clock("client", "epoch", 1_000_000_004_900_000))
    frame = steps_on_zero(of_steps, found.zero_us).frame()
    assert frame["start_us"].to_list() == [100_000, 110_000]
    assert list(frame.columns) == list(STEP_SCHEMA)
    step, server = found.clocks
    assert step == Clock("step", "monotonic", 4_900_000, placed="bridged by pairs", stamped_zero_us=4_900_000)
    assert server == Clock("server", "epoch", 1_000_000_004_900_000, placed="bridged by pairs")
    assert found.remark == ""


def test_constructed_stamps_bridge_nothing() -> None:
    """First step stamped on the first send, as in the published H100 records."""
    zero_us = 10**15 + 5_000_000
    of_steps = steps(5_000_000, 5_010_000, epoch_offset_us=10**15)
    found = times(of_steps, Clock("client", "epoch", zero_us))
    assert steps_on_zero(of_steps, found.zero_us)["start_us"].to_list() == [0, 10_000]
    (clock,) = found.clocks
    assert (clock.zero_us, clock.constructed, clock.placed) == (5_000_000, True, "not known")
    assert clock.stamped_zero_us == zero_us - 10**15
    assert "not known (fewer than 50 steps" in found.remark


def test_two_monotonic_clocks_are_one_where_they_overlap() -> None:
    found = times(steps(5_000_000), Clock("client", "monotonic", 4_900_000), requests(2))
    assert (found.zero_us, found.clocks[0].placed) == (4_900_000, "one clock")
    found = times(steps(5_000_000), Clock("client", "monotonic", 10**12), requests(2))
    assert found.zero_us == 5_000_000
    assert found.remark


def test_journey_events_are_preferred_and_the_median_is_exact() -> None:
    """Offsets of 100 events: 90 of 10^18 + 1 ns, ten late by 1 to 10 us; a step's stamp is later still."""
    late = [0] * 90 + [1000 * i for i in range(1, 11)]
    events = pl.Series([10**18 + 1 + late[i] for i in range(100)])
    assert bridge_of(events, steps(5_000_000, epoch_offset_us=10**15)) == 10**18 + 1
    assert bridge_of(NO_EVENTS, steps()) is None


def test_without_a_bridge_the_first_journey_stands_at_the_first_send() -> None:
    found = server_times(
        steps(5_000_000),
        pl.Series([7_000_000_000, 6_000_000_000]),
        None,
        Clock("client", "relative", 0),
        rows_of(NO_REQUESTS),
    )
    assert found is not None
    assert (found.zero_us, [clock.name for clock in found.clocks]) == (6_000_000, ["step"])
    assert "first journey" in found.remark


def test_nothing_stamped_has_no_clock() -> None:
    assert server_times(steps(), NO_JOURNEYS, None, None, rows_of(NO_REQUESTS)) is None


@pytest.mark.slow
@pytest.mark.parametrize("said_later_us", [5_000, 3_000_000])
def test_stamps_that_the_depth_contradicts_are_not_believed(said_later_us: int) -> None:
    """The epoch stamps put the steps ``said_later_us`` too late; below a step of 10 ms they would be left alone."""
    traffic, records = run_of_steps(rate_per_s=10.0, seconds=60, later_us=0)
    depths = {name: records[name] for name in ("running_depth", "waiting_depth")}
    raw = steps(*(records["start_us"] + 5_000_000), epoch_offset_us=10**15 - 5_000_000 + said_later_us, **depths)
    found = times(raw, Clock("client", "epoch", 10**15), traffic)
    clock, frame = found.clocks[0], steps_on_zero(raw, found.zero_us).frame()
    believed = said_later_us < 10_000
    assert (clock.placed, found.remark) == ("bridged by pairs" if believed else "estimated from depth", "")
    shift_us = int((frame["start_us"] - records["start_us"]).mean() or 0)  # type: ignore[arg-type]
    assert abs(shift_us) <= (clock.uncertainty_us or 5_000)
