"""The scoreboard of planted faults: its list, and how an answer is graded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from blis_replay.replay.driver import replay
from blis_replay.validate.explain.search import depths
from blis_replay_labs.planted.fault_list import FAULTS
from blis_replay_labs.planted.faults import Fault, planted_case
from blis_replay_labs.planted.live_faults import LIVE_CONTROLS, LIVE_FAULTS, is_there
from blis_replay_labs.planted.scoreboard import (
    ControlRow,
    FaultRow,
    Scoreboard,
    control,
    judged,
    judged_in,
    scoreboard_answer,
)

GROUPS = {
    *("recording", "clock", "load", "engine arguments", "cache", "scheduler", "step time", "delays", "output"),
    *("simulator", "coefficients", "two at once", "operation", "live recordings"),
}


def fault(name: str, size: str, depth: str = "full") -> Fault:
    return next(f for f in FAULTS if (f.name, f.size, f.depth) == (name, size, depth))


def test_the_list_has_eighty_faults_of_every_kind() -> None:
    assert len(FAULTS) >= 80
    assert {f.group for f in FAULTS} == GROUPS
    assert len({(f.name, f.size, f.depth, f.load) for f in FAULTS}) == len(FAULTS)


def test_without_a_cause_a_replay_is_the_recording() -> None:
    case = planted_case(Fault("", ()))
    run = replay(case.recording, case.release)
    assert (run.e2e_us == case.recording.requests["e2e_us"].to_numpy()).all()


@pytest.mark.slow
def test_a_fault_that_was_planted_is_found_with_its_size() -> None:
    row = judged(fault("step time", "intercept x 1.25"))
    assert (row.grade, row.blamed, row.found_by, row.verdict) == ("right", ("step time",), "attribute", "FAIL")
    assert row.explained == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "grade", "blamed"),
    [
        # Its first 30 prompts are in the cache; TTFT 3.7 % too high was once put down to step time.
        (fault("warm prefix cache", "from the stage before", "client"), "right", "prefix cache"),
        # By which step each request catches, 0.9 of 95 ms of TTFT were once put down to a delay that was as recorded.
        (fault("priority scheduling", "priority, told as fcfs"), "not identified", "nothing"),
    ],
)
def test_what_once_was_put_down_to_something_else(planted: Fault, grade: str, blamed: str) -> None:
    row = judged(planted)
    assert (row.grade, row.blamed) == (grade, (blamed,))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "grade", "blamed"),
    [
        # First tokens are 100 ms late and every E2E is as simulated: it once ended in a division by an error of 0.
        ("proxy that batches chunks", "right", {"output processing"}),
        ("second token stamped as first", "right", {"output processing"}),
        # These were once put down to step time alone, which a client cannot tell.
        ("data_parallel_size", "right", {"data_parallel_size"}),
        ("prompts counted by another tokenizer", "right", {"step time", "prompt lengths"}),
        ("tensor parallelism", "right", {"step time"}),
    ],
)
def test_a_client_tells_step_time_from_what_looks_like_it(name: str, grade: str, blamed: set[str]) -> None:
    (planted,) = (f for f in FAULTS if (f.name, f.depth, f.group) == (name, "client", "operation"))
    row = judged(planted)
    assert (row.grade, set(row.blamed)) == (grade, blamed)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "depth", "blamed"),
    [
        # Its file has the records of two engines, whose depth is one engine's: that once was another run's log.
        ("data_parallel_size", "full", {"data_parallel_size"}),
        # A tenth of the steps says that they are right; what a client alone shows, it shows here as well.
        ("second token stamped as first", "steps", {"output processing"}),
        # 30 of 1,624 ms of E2E, which are recorded, once were too few beside the 822 of the queue.
        ("time to connect and max_num_seqs", "full", {"max_num_seqs", "delay before the queue"}),
    ],
)
def test_more_records_tell_no_less(name: str, depth: str, blamed: set[str]) -> None:
    (planted,) = (f for f in FAULTS if (f.name, f.depth) == (name, depth) and not f.is_live)
    row = judged(planted)
    assert (row.grade, set(row.blamed)) == ("right", blamed)


@pytest.mark.slow
def test_several_tokens_a_step_are_named_beside_a_shorter_step() -> None:
    """Requests take 44 % of the time, and a tenth of that scatters whatever the steps take."""
    (planted,) = (f for f in FAULTS if (f.name, f.depth) == ("speculative decoding", "client"))
    row = judged(planted)
    assert row.grade != "wrong"
    assert row.blamed[:2] == ("step time", "speculative decoding")


@pytest.mark.slow
def test_a_recording_without_a_fault_raises_no_alarm() -> None:
    row = control("two levels", "full", 3)
    assert (row.verdict, row.alarm) == ("PASS", "")


@pytest.mark.slow
def test_the_answer_counts_grades_and_fails_where_something_else_is_blamed() -> None:
    row = judged(fault("delay before the queue", "pre queue +12 ms"))
    answer = scoreboard_answer(Scoreboard((row,), ()))
    assert answer.exit_code == 0
    assert "1 faults: 1 right, 0 half, 0 not identified, 0 wrong" in str(answer)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("load", "depth", "name", "size"),
    [
        # Steps of tiny-live-b stalled, so step time is blamed for 12 points of TTFT whatever is planted beside that.
        ("tiny-live-b", "full", "scheduling mode", ""),
        # 4 instead of 32 makes a queue; once it is put right, steps are off by what they were before.
        ("tiny-live-b", "full", "max_num_seqs", ""),
        # While others wait, 3 or 4 requests decode for 86 % of the time with 4 sequences; with 24 blocks 4 to 10.
        ("tiny-live-e", "client", "max_num_seqs", ""),
        ("tiny-live-d", "client", "KV blocks", ""),
        # 48 steps have 1,024 tokens, with six numbers of decodes among them, and none has more.
        ("tiny-live-c", "full", "max_num_batched_tokens", "1024, told as 4096"),
    ],
)
def test_a_fault_in_the_recording_of_a_real_server_is_found(load: str, depth: str, name: str, size: str) -> None:
    planted = [f for f in FAULTS if (f.load, f.depth, f.name) == (load, depth, name) and size in f.size]
    (row,) = judged_in(load, planted[:1])
    assert isinstance(row, FaultRow)
    assert (row.grade, row.blamed) == ("right", (name,))
    assert load != "tiny-live-b" or row.explained == pytest.approx(1, abs=0.02)


def test_live_faults_and_controls_are_as_many_as_asked_for(data_pack: Path) -> None:
    """Each once, with a right answer, in a recording that is there."""
    assert len(LIVE_FAULTS) >= 80
    assert len(LIVE_CONTROLS) >= 30
    for faults in (LIVE_FAULTS, LIVE_CONTROLS):
        assert len({(f.name, f.size, f.depth, f.load) for f in faults}) == len(faults)
        assert all(is_there(fault.load) for fault in faults)
    assert all(cause.blamed or cause.checks for fault in LIVE_FAULTS for cause in fault.causes)


# A tenth of the list; `verify --faults` judges all of it.
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (
            "0.29/q8c",
            {
                ("max_num_seqs", "8, told as 2"): ("attribute", "max_num_seqs"),
                ("step time", "intercept x 1.25"): ("attribute", "step time"),
                # Idle time before the load once made it a cold start.
                ("machine frozen", "3 s at 20 s"): ("attribute", "standstill"),
                # Steps of another run were once blamed beside.
                ("file of another run", "steps-* of 0.29/again"): ("ledger", "nothing"),
                ("rows removed", "10 %"): ("ledger", "nothing"),
                ("arrivals in whole seconds", "1 s"): ("clocks", "nothing"),
                ("token 5 stamped as first", "all requests"): ("token_events", "nothing"),
            },
        ),
        (
            "0.32/A",
            {
                # /metrics counts 3.2 % of the prompts as hits: a prefix cache was once named beside.
                ("step time", "every step x 1.25"): ("attribute", "step time"),
                # Latencies scatter by more than the stop changes in the mean: requests open meanwhile decide.
                ("machine frozen", "3 s at 30 s"): ("attribute", "standstill"),
            },
        ),
    ],
)
def test_a_fault_in_a_live_recording_is_found(
    data_pack: Path, load: str, expected: dict[tuple[str, str], tuple[str, str]]
) -> None:
    faults = [f for f in LIVE_FAULTS if f.load == load and (f.name, f.size) in expected]
    rows = judged_in(load, faults)
    assert len(rows) == len(expected)
    found = {(r.fault, r.size): (r.found_by, ", ".join(r.blamed), r.grade) for r in rows if isinstance(r, FaultRow)}
    assert found == {planted: (*answer, "right") for planted, answer in expected.items()}


@pytest.mark.slow
def test_parts_of_a_live_recording_raise_no_alarm(data_pack: Path) -> None:
    rows = judged_in("0.32/C", [f for f in LIVE_CONTROLS if f.load == "0.32/C"])
    assert [(row.verdict, row.alarm) for row in rows if isinstance(row, ControlRow)] == [("FITS", "")] * 2


def test_depths_count_only_while_a_request_waits() -> None:
    """Three sent at 0; first tokens at 10, 30 and 60 us, ends at 40, 50 and 80; a wait begins 10 us after a send.

    Some wait from 10 to 60: one decodes from 10 to 30 and from 40 to 50, two from 30 to 40, none from 50 to 60.
    """
    streams_us = np.array([[0, 0, 0], [10, 30, 60], [40, 50, 80]], np.float64)
    shares, waited_us = depths(streams_us, usual_us=10)
    assert waited_us == 50
    assert shares == pytest.approx([0.2, 0.6, 0.2])


def test_the_page_counts_every_fault_of_the_list() -> None:
    """Whoever adds a fault runs the scoreboard again: the grades of the page's last rows sum to the list."""
    page = (Path(__file__).parents[3] / "research" / "faults.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| after")]
    counted = [[int(number) for number in re.findall(r"[0-9]+", row)] for row in rows]
    planted = [sum(not f.is_live for f in FAULTS), sum(f.is_live for f in FAULTS), len(LIVE_FAULTS)]
    assert [row[0] for row in counted] == planted
    for faults_in_all, *grades in counted:
        assert (sum(grades[:4]), grades[3:]) == (faults_in_all, [0, 0])
