"""Streams whose events bring several tokens: ``--stream-interval``, and drafts that are accepted."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from blis_runs import small_recording
from load_levels import level

from blis_replay.ingest.recording import AGGREGATE_SCHEMA, Recording, Setting
from blis_replay.replay.engine import not_simulated
from blis_replay.validate.metrics.observed import (
    Selection,
    numbers_from_aggregates,
    numbers_from_requests,
    observed_requests,
    samples_of,
    tokens_per_event,
)


def summary(**engine: object) -> Recording:
    """TTFT 100 ms, ITL 200 ms between events, 101 output tokens, and no E2E."""
    recording = level(4, 500, 101, {"ttft": 100_000, "itl_reported": 200_000})
    recording.engine.update({name: Setting(value, "recorded", "log") for name, value in engine.items()})  # type: ignore[arg-type]
    return recording


@pytest.mark.parametrize(
    ("engine", "tokens", "e2e_us"),
    [
        ({}, 1, 100_000 + 100 * 200_000),
        ({"stream_interval": 10}, 10, 100_000 + 100 * 20_000),
        # A step gives one token and what is accepted of its drafts: 1 + 0.5 + 0.3 + 0.2.
        ({"speculative_acceptance": "0.5 0.3 0.2"}, 2, 100_000 + 100 * 100_000),
        ({"stream_interval": 10, "speculative_acceptance": "0.5 0.3 0.2"}, 10, 100_000 + 100 * 20_000),
    ],
)
def test_a_stated_itl_is_that_of_events(engine: dict[str, object], tokens: float, e2e_us: float) -> None:
    recording = summary(**engine)
    assert tokens_per_event(recording) == pytest.approx(tokens)
    numbers = numbers_from_aggregates(recording, None)
    assert numbers["itl"]["mean"].value_us == pytest.approx(200_000 / tokens)
    assert numbers["e2e"]["mean"].value_us == pytest.approx(e2e_us)


def test_a_stated_tpot_is_that_of_tokens() -> None:
    recording = summary(stream_interval=10)
    row = pl.DataFrame([(-1, "tpot_reported", "mean", 20_500.0)], AGGREGATE_SCHEMA, orient="row")
    recording = type(recording)(**{**vars(recording), "aggregates": pl.concat([recording.aggregates, row])})
    assert numbers_from_aggregates(recording, None)["e2e"]["mean"].value_us == pytest.approx(100_000 + 100 * 20_500)


def test_an_interval_changes_no_schedule_and_hides_single_gaps() -> None:
    """The mean ITL is (60 - 20) / 4 ms, as the last token ends the request; gaps between events are no ITL."""
    assert not_simulated({"stream_interval": 4}) == ()
    recording = small_recording()
    gaps = (np.array([40_000.0]), np.array([3]))
    whole = Selection()
    samples = samples_of(recording, observed_requests(recording))
    assert numbers_from_requests(recording, samples, whole, gaps)["itl"]["p99"].value_us == 40_000
    recording.engine["stream_interval"] = Setting(4, "recorded", "log")
    itl = numbers_from_requests(recording, samples, whole, gaps)["itl"]
    assert itl["mean"].value_us == pytest.approx(10_000)
    assert (itl["p99"].value_us, itl["p99"].reason) == (None, "each event brings 4 tokens (stream_interval)")
