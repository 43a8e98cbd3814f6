"""Delays that stamps show: by hand, and against traces whose delays are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.recording import LIFECYCLE_SCHEMA, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.validate.fit.evidence import measured_delays

# Three requests of 11 tokens, 10 ms apart: the first alone, the others together, one second later.
ARRIVED_US = [0, 1_000_000, 1_000_000]
QUEUED_US = [9_000, 1_013_000, 1_015_000]
FIRST_US = [20_000, 1_040_000, 1_040_000]
FINISHED_US = [120_000, 1_140_000, 1_140_000]
DEPARTED_US = [122_000, 1_143_000, 1_144_000]


def journeys() -> Recording:
    columns = {
        "arrived_us": ARRIVED_US,
        "queued_us": QUEUED_US,
        "first_token_us": FIRST_US,
        "finished_us": FINISHED_US,
        "departed_us": DEPARTED_US,
        "output_tokens": [11] * 3,
        "status": ["ok"] * 3,
    }
    made = bundled_recording("20260218-150304-codellama-34b-tp2-general")
    e2e_us = [departed - arrived for departed, arrived in zip(DEPARTED_US, ARRIVED_US, strict=True)]
    requests = (
        made.requests.frame()
        .head(3)
        .with_columns(arrival_us=pl.Series(ARRIVED_US), e2e_us=pl.Series(e2e_us), ttft_us=pl.lit(None, pl.Int64))
    )
    full = {name: columns.get(name, [None] * 3) for name in LIFECYCLE_SCHEMA}
    return replace(made, requests=rows_of(requests), lifecycles=rows_of(pl.DataFrame(full, schema=LIFECYCLE_SCHEMA)))


def test_half_a_cycle_of_waiting_for_the_engine_is_no_delay() -> None:
    """9 ms in an idle engine; 13 and 15 ms less half of 10 ms in a busy one: the median of 8, 9 and 10.

    Three journeys say little of others: the interval is wider than they are apart.
    """
    delay = measured_delays([journeys()])["pre_queue"]
    assert delay.value_us == 9_000
    assert delay.low_us < 8_000
    assert delay.high_us > 10_000
    assert delay.remark.startswith("median of arrival to queued of 3 journeys, less half a step cycle")


def test_the_way_back_is_measured_too() -> None:
    """2, 3 and 4 ms from the last token in the engine to the answer sent."""
    assert measured_delays([journeys()])["post_request"].value_us == 3_000


def test_without_stamps_nothing_is_measured() -> None:
    recording = journeys()
    assert measured_delays([replace(recording, lifecycles=rows_of(pl.DataFrame(schema=LIFECYCLE_SCHEMA)))]) == {}


@pytest.mark.parametrize("scenario", ["fcfs-async", "kv-tight-sync", "shared-prefix-async", "long-prompts-sync"])
def test_the_delay_of_traces_with_truth_comes_back(data_pack: Path, scenario: str) -> None:
    """True: arrival to the engine's input queue, which no trace shows; queued is stamped 3 to 5 ms later."""
    directory = data_pack / "vllm-traces" / scenario
    truth = pl.read_csv(directory / "requests.csv")
    with read_recording(directory) as recording:
        measured = measured_delays([recording])["pre_queue"]
    true_us, stamped_us = (
        (truth[name] - truth["arrived_us"]).drop_nulls().median() for name in ("core_arrival_us", "queued_us")
    )
    assert isinstance(true_us, float)
    assert isinstance(stamped_us, float)
    assert stamped_us - true_us > 3_000
    assert measured.low_us <= true_us <= measured.high_us
    assert measured.value_us == pytest.approx(true_us, abs=300)
