"""Every simulator on the same recordings: the numbers of a row, from a server whose answers are known."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Run
from recordings import make_recording
from simulator_program import simulator_program

from blis_replay.base.errors import ReplayError
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.store import open_for_reading, open_store
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulators import SimulatorInputs
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay.validate.metrics.skill import Skill
from blis_replay_labs.board.leaderboard import Board, Cost, Score, leaderboard
from blis_replay_labs.board.leaderboard_text import (
    cost_table,
    leaderboard_answer,
)
from blis_replay_labs.board.simulators import contestants

RELEASE = load_release(DEFAULT_RELEASE)
# Twice the observed first token, half the observed rest; and 64 MiB of memory that it touches.
HOLD = """
held = b"x" * (64 << 20)
lines = [(place, ttft_us, e2e_us + 5_000) for place, ttft_us, e2e_us in lines]
"""
FOREIGN = simulator_program("20_000", 5_000, {"name": "foreign"}, HOLD)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server with 10 ms to the first token and 10 ms for each token: E2E of 110, 310, 210 ms."""
    columns = {
        "arrival_us": [0, 1_000, 2_000],
        "prompt_tokens": [100, 300, 200],
        "output_tokens": [10, 30, 20],
        "ttft_us": [10_000, 10_000, 10_000],
        "e2e_us": [110_000, 310_000, 210_000],
    }
    folder = tmp_path_factory.mktemp("board")
    (folder / "foreign.py").write_text(FOREIGN)
    with open_store(folder / "s.duckdb") as opened:
        ingest_recording(opened, replace(make_recording(columns), slug="one", alias="one", content_hash="one"))
    return folder / "s.duckdb"


def scores(path: Path, *names: str) -> dict[str, Score]:
    found, absent = contestants(names, SimulatorInputs(RELEASE, path, 60.0))
    with open_for_reading(path) as store:
        return {score.simulator: score for score in leaderboard(store, ["one"], found, absent).scores}


def test_a_row_has_errors_throughput_ranks_and_what_the_run_took(store: Path) -> None:
    name = f"cmd:{sys.executable} {store.with_name('foreign.py')}"
    score = scores(store, name)[name]
    # simulated E2E 70, 170, 120 ms, mean 120 of 210; TTFT 20 of 10 ms
    assert score.errors["e2e", "mean"] == pytest.approx(120 / 210 - 1)
    assert score.errors["ttft", "p90"] == pytest.approx(1.0)
    # ITL: 300 ms over 57 gaps, of 600 ms
    assert score.errors["itl", "mean"] == pytest.approx(300 / 600 - 1)
    # the same tokens from 0 to 171 ms, of 311 ms
    assert score.throughput == pytest.approx(311 / 171 - 1)
    # the longest stays the longest; a constant TTFT has no order
    assert score.rank == {"e2e": pytest.approx(1.0)}
    # E2E is off by 40, 140 and 90 ms of 210; TTFT by 10 ms of 10.
    assert {metric: skill.share for metric, skill in score.skill.items()} == pytest.approx({"e2e": 90 / 210, "ttft": 1})
    assert score.segments == pytest.approx({"to first token": 10 / 210, "to last token": -100 / 210})
    assert score.worst_segment == ("to last token", pytest.approx(-100 / 210))
    assert score.peak_bytes is not None
    assert score.peak_bytes > 64 << 20
    # Three requests are too few to decide anything.
    assert (score.passes, score.fitted) == (None, "unknown")
    assert score.lacks == ("foreign 1 does not model: queues",)


def test_skill_is_against_the_line_in_the_lengths_over_all_recordings() -> None:
    """On a and b 0.1 and 0.2 of their lines' 0.4 and 0.2: half of the error is left; c has no requests."""

    def score(alias: str, crps_us: float, of_line_us: float) -> Score:
        return Score("own", alias, alias, skill={"e2e": Skill(1.0, crps_us, of_line_us)})

    board = Board(("own",), (score("a", 0.1, 0.4), score("b", 0.2, 0.2), Score("own", "c", "c")), {})
    assert board.skill("own", "e2e") == pytest.approx(0.5)
    assert board.skill("own", "ttft") is None


@pytest.mark.heavy
def test_a_board_says_how_near_the_server_is_to_itself(run: Run) -> None:
    """As the gate does, beside a second recording of the same load."""
    assert run("calibrate", "tiny-live-b", "--out", "tb.yaml").code == 0
    named = ("tiny-live-a", "--coefficients", "tb.yaml", "--repeat", "tiny-live-a2", "--json")
    board = run("compare", *named, "--simulators", "embedded,floor:line@tiny-live-a").json
    # `validate` has draws of coefficients, a board one answer of each simulator.
    of = {score["simulator"]: score["skill"]["e2e"] for score in board["scores"]}
    assert of["floor:line@tiny-live-a"]["beside_line"] == pytest.approx(0.0, abs=1e-4)
    assert 0 < of["embedded"]["beside_repeats"] < of["floor:line@tiny-live-a"]["beside_repeats"]
    assert run("compare", "tiny-live-a", "tiny-live-b", "--repeat", "tiny-live-a2").code == 2


def test_what_costs_each_simulator_most_is_a_row_with_the_largest_evidence() -> None:
    """Two of three say step time, so it is named; sizes are means of 10 and 30 %, evidence is that of 30 %."""

    def score(alias: str, component: str, share: float, left: float = 0.02) -> Score:
        cost = Cost({component: (-share, share / 2), "delays": (0.001, 0.0)}, left, {component: f"seen in {alias}"})
        return Score("other", alias, alias, cost=cost)

    scores = (score("a", "step time", 0.1), score("b", "prefix cache", 0.9), score("c", "step time", 0.3))
    board = Board(("other",), scores, {})
    assert cost_table(board).rows == [["other", "step time", "2 of 3", "20.0 %", "10.0 %", "c: seen in c"]]
    either = Cost({"KV blocks": (0.2, 0.3), "delays": (0.0, 0.0)}, 0.01, {"KV blocks": "seen"}, "KV blocks", ("cache",))
    told = Board(("other",), (Score("other", "a", "a", cost=either),), {})
    assert cost_table(told).rows == [["other", "KV blocks or cache", "1 of 1", "20.0 %", "30.0 %", "a: seen"]]
    far = Board(("other",), (score("a", "step time", 0.1, left=0.5),), {})
    assert cost_table(far).rows == [["other", "not imitated", "1 of 1", "-", "-", "imitated within 50.0 % at best"]]


def test_what_a_simulator_cannot_do_is_said_and_the_others_are_scored(store: Path) -> None:
    """The release has no coefficients of some/Model; a line is fitted to anything."""
    found = scores(store, "embedded,floor:line@one")
    assert "has no coefficients for some/Model" in found["embedded"].problem
    assert found["floor:line@one"].errors["e2e", "mean"] == pytest.approx(0, abs=0.03)
    assert found["floor:line@one"].fitted == "fitted on this run"
    answers = [
        leaderboard_answer(Board(tuple(found), tuple(scores), {})) for scores in (found.values(), [found["embedded"]])
    ]
    assert [answer.exit_code for answer in answers] == [0, 4]


@pytest.mark.heavy
def test_of_all_what_there_is_not_is_named_and_what_is_asked_for_must_be_there(store: Path) -> None:
    found, absent = contestants(["all"], SimulatorInputs(RELEASE, store, 60.0))
    assert set(found) >= {"embedded", "floor:constant", "floor:line"}
    assert "give --blis-binary PATH" in absent["blis"]
    with open_for_reading(store) as opened:
        text = str(leaderboard_answer(leaderboard(opened, ["one"], {}, absent)))
    assert "not run: blis: no BLIS binary is named for blis; give --blis-binary PATH" in " ".join(text.split())
    for name in ("blis", "nonsense", "dynamox", "vidurr:/tmp"):
        with pytest.raises(ReplayError):
            contestants([name], SimulatorInputs(RELEASE, store, 60.0))
