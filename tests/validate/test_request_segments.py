"""Segments: what each holds, that they sum to E2E, and that they agree with the counterfactuals."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from planted import Planted, planted_recording, wrong_release

from blis_replay.replay.driver import replay
from blis_replay.validate.comparison.segments import Segments, segment_frame, segments_of
from blis_replay.validate.comparison.segments_text import segments_json, segments_parts
from blis_replay.validate.text.answer import page_text
from blis_replay_labs.planted.causes import PRE_QUEUE, delay
from blis_replay_labs.planted.faults import to_depth


@pytest.fixture(scope="module")
def planted() -> Planted:
    return planted_recording(seed=7)


def named(segments: Segments) -> dict[str, np.ndarray]:
    return {part.name: part.difference_us for part in segments.segments}


def test_a_delay_that_was_planted_shows_in_its_segment_alone(planted: Planted) -> None:
    """12 ms more before the queue: send to queue differs by 12,000 us for every request; decode not on average."""
    run = replay(planted.recording, wrong_release(planted, delay(PRE_QUEUE, pre_queue_us=12_000)))
    segments = segments_of(run)
    assert named(segments)["send to queue"].tolist() == [12_000.0] * len(segments.request_index)
    assert abs(named(segments)["decode"].mean()) < 120  # 1 % of what was planted


def test_the_segments_sum_to_e2e_on_both_sides_for_every_request(planted: Planted) -> None:
    run = replay(planted.recording, wrong_release(planted, delay(PRE_QUEUE, pre_queue_us=3_000)))
    segments = segments_of(run)
    e2e_us = planted.recording.requests["e2e_us"].to_numpy()[segments.request_index]
    assert segments.whole.a_us.tolist() == e2e_us.tolist()
    assert segments.whole.b_us.tolist() == run.e2e_us[segments.request_index].tolist()


def test_a_perfect_simulator_differs_in_no_segment(planted: Planted) -> None:
    for name, difference_us in named(segments_of(replay(planted.recording, planted.release))).items():
        assert np.abs(difference_us).max() == 0, name


def test_what_was_not_recorded_is_merged_and_named(planted: Planted) -> None:
    segments = segments_of(replay(to_depth(planted.recording, "steps"), planted.release))
    assert list(named(segments)) == ["to first token", "to last token"]
    assert "not recorded" in segments.merged[0]
    assert np.abs(segments.whole.difference_us).max() == 0


def test_table_frame_and_json_have_the_same_means(planted: Planted) -> None:
    segments = segments_of(replay(planted.recording, wrong_release(planted, delay(PRE_QUEUE, pre_queue_us=12_000))))
    page, document, frame = page_text(segments_parts(segments)), segments_json(segments), segment_frame(segments)
    assert max(map(len, page.splitlines())) <= 80
    assert "+12.00" in page
    assert document["parts"][0]["difference_ms"]["mean"] == 12
    for part in document["parts"]:  # of each statistic, as the page has it
        for name, difference_ms in part["difference_ms"].items():
            assert difference_ms == pytest.approx(part["simulated_ms"][name] - part["observed_ms"][name], abs=1e-6)
    means = dict(frame.group_by("segment").agg(pl.col("difference_us").mean()).iter_rows())
    assert means["E2E"] == pytest.approx(sum(part.difference_us.mean() for part in segments.segments))
