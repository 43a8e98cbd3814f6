"""What is said of the schedule: in a line of ``validate``, and as the evidence of a check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from logged import CONTEXT, ENGINE, recorded

from blis_replay.ingest.recording import ITERATION_SCHEMA
from blis_replay.ingest.rows import no_rows
from blis_replay.validate.schedule import SCHEDULE_CHECK, schedule_verdict


def test_an_equal_schedule_is_one_line() -> None:
    recording = recorded()
    steps = recording.iterations.height
    verdict = schedule_verdict(recording, ENGINE)
    assert verdict is not None
    assert verdict.sentence == f"equal to the recorded one in all {steps:,} steps, KV usage in {steps:,}"
    assert (verdict.document["equal"], verdict.document["first"], verdict.document["meaning"]) == (steps, None, None)


def test_blocks_that_nobody_recorded_are_worked_out() -> None:
    verdict = schedule_verdict(recorded(), replace(ENGINE, num_gpu_blocks=None))
    assert verdict is not None
    assert ", KV usage not compared (it fits 1,00" in verdict.sentence
    assert verdict.sentence.endswith("blocks of 16 tokens)")


def test_another_argument_is_located_and_named() -> None:
    verdict = schedule_verdict(recorded(replace(ENGINE, max_num_seqs=4), rate_per_s=20.0), ENGINE)
    assert verdict is not None
    assert "requests in prefill where" in verdict.sentence
    meaning = verdict.document["meaning"]
    assert isinstance(meaning, dict)
    assert verdict.sentence.endswith(f"; {meaning['sentence']}")
    assert (meaning["cause"], meaning["argument"], meaning["value"]) == ("engine argument", "max_num_seqs", 4)


def test_a_recording_without_every_step_has_no_line() -> None:
    bare = replace(recorded(), iterations=no_rows(ITERATION_SCHEMA), findings=())
    assert schedule_verdict(bare, ENGINE) is None
    (finding,) = SCHEDULE_CHECK.run(bare, CONTEXT)
    assert finding.message.startswith("not checked: some-test: not every step was recorded; start vLLM with")
    assert SCHEDULE_CHECK.evidence_tables(bare, CONTEXT) == ()


def test_a_log_that_cannot_be_followed_is_a_line_with_the_reason() -> None:
    recording = recorded()
    cut = replace(recording, iterations=recording.iterations.where("iteration > 9"))
    verdict = schedule_verdict(cut, ENGINE)
    assert verdict is not None
    assert verdict.sentence.startswith("not compared: some-test: the log begins with iteration 10")


def test_what_is_behind_a_gap_in_the_log_is_said_not_to_be_compared() -> None:
    recording = recorded()
    gap = replace(recording, iterations=recording.iterations.where("iteration <> 30"))
    verdict = schedule_verdict(gap, ENGINE)
    assert verdict is not None
    left = recording.iterations.height - 31
    assert verdict.sentence.startswith("equal to the recorded one in all 30 steps")
    assert verdict.sentence.endswith(f"not compared: {left:,} iterations behind the first that is missing in the log")


def test_the_evidence_shows_the_steps_about_the_first_that_differs() -> None:
    recording = recorded(replace(ENGINE, max_num_seqs=4), rate_per_s=20.0)
    assumed = dict(recording.engine)
    assumed["max_num_seqs"] = replace(assumed["max_num_seqs"], value=32)
    wrong = replace(recording, engine=assumed)
    said, basis = SCHEDULE_CHECK.run(wrong, CONTEXT)
    assert said.measured["cause"] == "engine argument"
    assert basis.message.startswith("steps: iterations of the server's log; queue: how long 60 of 60 requests waited")
    (table,) = SCHEDULE_CHECK.evidence_tables(wrong, CONTEXT)
    assert said.measured["first step"] in [row[0] for row in table.rows]
    assert len(table.rows) == 7


def test_inspect_shows_it_for_a_real_server(data_pack: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from blis_replay.validate.cli.main import cli

    store = ["--store", str(tmp_path / "s.duckdb")]
    ingested = CliRunner().invoke(cli, ["ingest", str(data_pack / "live-vllm-0.32" / "C"), *store])
    assert "1,381 iterations" in ingested.output
    about = CliRunner().invoke(cli, ["inspect", "--experiment", "C", *store]).output
    assert "11 spans that are not steps or requests" in " ".join(about.split())
    shown = CliRunner().invoke(cli, ["inspect", "--experiment", "C", "--check", "schedule", *store]).output
    assert "equal to the recorded one in all 1,381 steps" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    listed = CliRunner().invoke(cli, ["inspect", "--checks", *store]).output
    assert "\nschedule: requests and tokens of every recorded step" in listed
