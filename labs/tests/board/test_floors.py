"""The two floors: fitted to what was recorded, and as far off as arithmetic says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from recordings import make_recording

from blis_replay.base.errors import ReplayError
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import Store, open_store
from blis_replay.replay.driver import replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay_labs.board.floors import floor_simulator

PROMPTS, OUTPUTS = [100, 200, 400, 500], [11, 31, 21, 41]


def served(slug: str) -> Recording:
    """A server without queues: 5 ms and 20 us a prompt token to the first token, 2 ms for each further one."""
    ttft_us = [5_000 + 20 * prompt for prompt in PROMPTS]
    columns = {
        "arrival_us": [0, 1_000, 2_000, 3_000],
        "prompt_tokens": PROMPTS,
        "output_tokens": OUTPUTS,
        "ttft_us": ttft_us,
        "e2e_us": [first + 2_000 * (tokens - 1) for first, tokens in zip(ttft_us, OUTPUTS, strict=True)],
    }
    return replace(make_recording(columns), slug=slug, alias=slug, content_hash=slug)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Both of them; whoever brings in others does so behind them."""
    with open_store(tmp_path_factory.mktemp("floors") / "s.duckdb") as opened:
        for slug in ("one", "two"):
            ingest_recording(opened, served(slug))
        yield opened


def test_a_line_finds_a_server_that_is_one_exactly(store: Store) -> None:
    floor = floor_simulator(store, "floor:line@one", load_release(DEFAULT_RELEASE))
    (line,) = floor.lines.values()
    # as planted in `served`
    assert (line.first_us, line.prompt_us, line.gap_us) == pytest.approx((5_000, 20, 2_000))
    run = replay(served("two"), floor.release, simulator=floor)
    assert run.ttft_us.tolist() == [7_000, 9_000, 13_000, 15_000]
    assert run.e2e_us.tolist() == [27_000, 69_000, 53_000, 95_000]


def test_a_constant_is_the_mean_of_what_it_was_fitted_to(store: Store) -> None:
    """Mean prompt 300: 5 + 20 * 0.3 = 11 ms; mean of 25 further tokens: 50 ms more."""
    floor = floor_simulator(store, "floor:constant@one", load_release(DEFAULT_RELEASE))
    run = replay(served("two"), floor.release, simulator=floor)
    assert set(run.ttft_us.tolist()) == {11_000}
    assert set(run.e2e_us.tolist()) == {61_000}


def test_what_a_floor_was_fitted_on_is_told_like_that_of_any_coefficients(store: Store) -> None:
    floor = floor_simulator(store, "floor:line@one", load_release(DEFAULT_RELEASE))
    uses = [compare_replay(replay(served(slug), floor.release, simulator=floor)).use for slug in ("one", "other")]
    assert uses[0] == "fitted on this run"
    # the same requests under another name are known by their hash
    assert uses[1] == "fitted on this run"


@pytest.mark.slow
def test_without_a_name_it_is_fitted_to_what_the_release_was_fitted_on(store: Store) -> None:
    """The shipped release is fitted on eight experiments of four models, which ship as published means."""
    floor = floor_simulator(store, "floor:line", load_release(DEFAULT_RELEASE))
    assert len(floor.release.fitted_on) == 8
    line = floor.lines["codellama/codellama-34b-instruct-hf", 2]
    # 34b-codegen and 34b-general: true gaps of 14.95 and 16.36 ms, 9,000 and 16,800 requests (experiments_16.csv)
    assert line.gap_us == pytest.approx((14_950 * 9_000 + 16_360 * 16_800) / 25_800, rel=0.002)


@pytest.mark.parametrize(
    ("text", "said"),
    [("floor:cubic", "there are floor:constant, floor:line"), ("floor:line@one", "fitted to no recording of Other")],
)
def test_what_a_floor_cannot_do_is_one_line(store: Store, text: str, said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        floor = floor_simulator(store, text, load_release(DEFAULT_RELEASE))
        replay(replace(served("two"), model="Other"), floor.release, simulator=floor)
