"""Throughput lines of a server's log against the tokens of a run: a line is of the 10 s before it."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf

import pytest

from blis_replay.ingest.readers.server.throughput import ThroughputLines

# 2026-03-01 12:00:00 UTC.
NOON_S = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp())
# 100 s at 900 tokens/s from noon on.
RATES = [900.0] * 10


def lines_of(*rates: float, from_s: float = 0.0, engines: int = 1) -> ThroughputLines:
    """A line of each engine every 10 s from 12:00:10 on, as vLLM 0.15 writes them; nothing while it is idle."""
    read = ThroughputLines()
    for place, rate in enumerate(rates):
        at = datetime.fromtimestamp(NOON_S + from_s + 10 * (place + 1), UTC)
        for engine in range(engines if rate else 0):
            read.take(
                f"(APIServer pid=3) INFO {at:%m-%d %H:%M:%S} [loggers.py:257] Engine {engine:03}: Avg prompt "
                f"throughput: 0.0 tokens/s, Avg generation throughput: {rate:.1f} tokens/s, Running: 9 reqs"
            )
    return read


def test_a_run_that_lies_in_the_lines_is_counted_to_an_interval_at_each_end() -> None:
    """Of 12:00:10 to 12:00:50 by clocks 5 s apart at most: 20 to 40 s for sure, all of 0 to 60 s perhaps."""
    assert lines_of(*RATES).served(NOON_S + 10, NOON_S + 50, 36_000, placed=True) == (18_000, 54_000)


@pytest.mark.parametrize("zone_h", [0, -8, 5.5])
def test_the_zone_of_the_server_is_found(zone_h: float) -> None:
    """Its idle hours before and after hold no run; only in one zone the lines cover it."""
    read = lines_of(0, *RATES, 0, from_s=3600 * zone_h)
    assert read.served(NOON_S + 10, NOON_S + 110, 90_000, placed=True) == (72_000, 90_000)


@pytest.mark.parametrize("tokens", [85_000, 260_000])
def test_on_a_clock_of_its_own_a_run_is_where_its_tokens_are(tokens: float) -> None:
    """Loads of 300 s at 300 and at 900 tokens/s, an hour apart: 90,000 and 270,000 tokens.

    The run may end with the log of a server that was stopped, so too many tokens contradict nothing.
    """
    read = lines_of(*([300.0] * 30), *([0.0] * 350), *([900.0] * 30))
    found = read.served(7.0, 307.0, tokens, placed=False) or (0, 0)
    assert found[0] <= tokens <= found[1]
    # Where the log has this load alone, a client with a tenth of the tokens was not the only one.
    assert (lines_of(*([300.0] * 30)).served(7.0, 307.0, 9_000, placed=False) or (0, 0))[0] > 70_000


def test_a_run_at_the_end_of_a_log_is_not_moved_to_another_hour() -> None:
    """Six loads of 60 s, 5 minutes apart, and the server is stopped with the last: no line is of its last 7 s."""
    read = lines_of(*(([396.0] * 6 + [0.0] * 24) * 6)[:156])
    begin_s = NOON_S + 1500
    least, most = read.served(begin_s, begin_s + 67, 23_760, placed=True) or (0, 0)
    assert least <= 23_760 <= most


@pytest.mark.parametrize(("rate", "other"), [(900.0, 600.0), (900.0, 900.0)])
def test_replicas_in_one_log_say_nothing(rate: float, other: float) -> None:
    """Both call themselves engine 000, and print 3 s apart: no line follows another after one interval."""
    read = ThroughputLines()
    for second in range(10, 600, 10):
        for late, of in ((0, rate), (3, other)):
            at = datetime.fromtimestamp(NOON_S + second + late, UTC)
            read.take(
                f"INFO {at:%m-%d %H:%M:%S} [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg "
                f"generation throughput: {of:.1f} tokens/s, Running: 9 reqs"
            )
    assert read.served(NOON_S, NOON_S + 500, 600_000, placed=True) is None


def test_engines_of_one_server_are_summed() -> None:
    assert lines_of(*RATES, engines=2).served(NOON_S, NOON_S + 100, 180_000, placed=True) == (144_000, 180_000)


def test_lines_that_end_early_bound_nothing_from_above() -> None:
    """A server that was stopped printed no last line."""
    assert lines_of(*RATES[:9]).served(NOON_S, NOON_S + 100, 90_000, placed=True) == (72_000, inf)
    assert lines_of(*RATES[:4]).served(NOON_S, NOON_S + 100, 90_000, placed=True) is None
    assert lines_of(*RATES[:2]).served(NOON_S, NOON_S + 20, 18_000, placed=True) is None


def test_a_line_that_was_printed_twice_counts_once() -> None:
    read = lines_of(*RATES)
    for _ in range(2):
        read.take(
            "INFO 03-01 12:01:50 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
            "throughput: 900.0 tokens/s, Running: 9 reqs"
        )
    assert read.served(NOON_S, NOON_S + 110, 99_000, placed=True) == (81_000, 99_000)


def test_a_time_beyond_the_calendar_places_nothing() -> None:
    """Stamps in another unit: the year 33658."""
    far_s, read = 1e12, lines_of(*RATES)
    places = [read.served(far_s, far_s + 100, 90_000, placed=placed) for placed in (True, False)]
    assert places[0] == places[1] is not None
