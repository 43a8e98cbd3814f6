"""Metrics that an instrument check forbids: which numbers go, and what the verdict becomes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blis_replay.blis.releases.release import format_release, parse_release
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.identity import requests_hash
from blis_replay.ingest.recording import OVERLOAD_CHECK, Finding
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.overview import mean_abs_errors, means_by_fit
from blis_replay.validate.comparison.pages import comparison_answer
from blis_replay.validate.comparison.verdict_text import first_screen, use_text
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay.validate.judgement import Verdict, exit_code
from blis_replay.validate.metrics.latency import METRICS, STATISTICS
from blis_replay.validate.metrics.observed import unusable_cells
from blis_replay.validate.text.answer import page_text


@pytest.fixture(scope="module")
def run() -> ReplayRun:
    recording = bundled_recording(bundled_aliases()["34b-general"])
    return replay(recording, load_release(DEFAULT_RELEASE), ReplayMode())


def unusable(check: str, metric: str) -> Finding:
    return Finding(check, "unusable", metric, f"no {metric}")


def compared(run: ReplayRun, *findings: Finding) -> Comparison:
    """The comparison, had the instrument checks found this."""
    return compare_replay(replace(run, recording=replace(run.recording, findings=findings)))


def gone(comparison: Comparison) -> set[str]:
    return {metric for metric in METRICS if comparison.metrics[metric]["mean"].unusable}


@pytest.mark.parametrize(
    ("metric", "token_times", "spoiled"),
    [
        ("itl", False, {"itl"}),
        ("itl", True, {"itl"}),
        ("output_tokens", False, {"itl", "tpot"}),  # (E2E - TTFT) / (output tokens - 1)
        ("output_tokens", True, {"itl", "tpot"}),  # an event may bring several tokens
        ("ttft", False, {"ttft", "itl", "tpot"}),
        ("e2e", True, {"e2e", "tpot"}),
        ("", False, set()),  # of the recording as a whole
        ("step_time", False, set()),
    ],
)
def test_what_is_computed_from_a_spoiled_metric_is_spoiled_too(
    metric: str, token_times: bool, spoiled: set[str]
) -> None:
    cells = unusable_cells([unusable("some_check", metric)], token_times=token_times)
    assert set(cells) == {(name, statistic) for name in spoiled for statistic in STATISTICS}


def test_only_unusable_findings_forbid() -> None:
    assert unusable_cells([replace(unusable("c", "itl"), severity="corrected")], token_times=False) == {}


def test_without_single_gaps_the_mean_is_left() -> None:
    cells = unusable_cells([unusable("token_events", "itl quantiles")], token_times=False)
    assert set(cells) == {("itl", name) for name in ("p50", "p90", "p99")}


def test_a_gated_metric_that_must_not_be_used_is_not_judged(run: ReplayRun) -> None:
    """34b-general passes; with its ITL forbidden it is exit code 4, and no ITL is printed."""
    assert compared(run).verdict == "FITS"
    comparison = compared(run, unusable("token_events", "itl"))
    assert (comparison.verdict, comparison.refused()) == ("NOT JUDGED", {"itl": "token_events: no itl"})
    assert gone(comparison) == {"itl"}
    assert exit_code([comparison.verdict]) == 4
    text = str(comparison_answer(comparison))
    assert text.startswith("NOT JUDGED  34b-general: ITL unusable (token_events: no itl)")
    for name in ("mean", "p50", "p90", "p99"):
        (row,) = [line for line in text.splitlines() if line.startswith(f"ITL {name} ")]
        assert row.split() == ["ITL", name, "unusable:", "token_events"]
    assert mean_abs_errors([comparison.judgement])["e2e"] is None


def test_the_first_screen_names_the_check_once_and_fits_80_columns(run: ReplayRun) -> None:
    page = page_text(first_screen(compared(run, unusable("output_length", "itl"))))
    assert max(map(len, page.splitlines())) <= 80
    (row,) = [line for line in page.splitlines() if line.startswith("ITL ")]
    assert (row.split()[1], row.split()[-1]) == ("-", "unusable")
    assert page.count("instrument checks: unusable: output_length (ITL)") == 1


def test_another_gated_metric_that_fails_is_a_failure(run: ReplayRun) -> None:
    """Scheduled synchronously, TTFT is a third short: FAIL, whatever the ITL."""
    mode = ReplayMode(scheduling="synchronous")
    slow = replay(run.recording, load_release(DEFAULT_RELEASE), mode)
    comparison = compared(slow, unusable("token_events", "itl"))
    assert (comparison.verdict, "itl" in [q.key for q in comparison.judgement.beyond]) == ("FAIL", False)
    assert exit_code([comparison.verdict]) == 1
    assert comparison.judgement.refused == {"itl": "token_events: no itl"}


def test_a_metric_that_is_not_gated_does_not_hold_the_verdict_up(run: ReplayRun) -> None:
    comparison = compared(run, unusable("some_check", "itl quantiles"))
    assert (comparison.verdict, comparison.refused()) == ("FITS", {})
    assert comparison.metrics["itl"]["p50"].unusable == "some_check"


def test_what_must_not_be_used_judges_no_overloaded_recording_either(run: ReplayRun) -> None:
    """34b-general, were it overloaded: its ITL passes alone, and not beside an E2E that must not be used."""
    queue = Finding(OVERLOAD_CHECK, "note", "", "planted")
    passed, refused = (
        compare_replay(replace(run, recording=replace(run.recording, findings=findings)), queues=True)
        for findings in ((queue,), (queue, unusable("clocks", "e2e")))
    )
    assert [(c.verdict, exit_code([c.verdict])) for c in (passed, refused)] == [("FITS", 0), ("NOT JUDGED", 4)]


def test_the_json_has_null_and_the_reason(run: ReplayRun) -> None:
    document = comparison_answer(compared(run, unusable("clocks", "ttft"))).document
    assert document["judgement"]["refused"] == {"ttft": "clocks: no ttft", "itl": "clocks: no ttft"}
    metrics = document["metrics"]
    assert isinstance(metrics, dict)
    cell = metrics["ttft"]["mean"]
    assert (cell["observed_ms"], cell["error"], cell["reason"]) == (None, None, "unusable: clocks: no ttft")
    assert metrics["e2e"]["mean"]["observed_ms"] is not None


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["PASS"], 0),
        (["PASS", "FITS"], 0),
        (["PASS", "UNDECIDED"], 3),
        (["UNDECIDED", "NOT JUDGED"], 4),
        (["NOT JUDGED", "FAIL"], 1),
        ([], 4),
    ],
)
def test_the_worst_verdict_is_the_exit_code(verdicts: list[Verdict], code: int) -> None:
    assert exit_code(verdicts) == code


def test_lost_requests_stop_a_verdict(run: ReplayRun) -> None:
    """600 sent and 532 recorded: what was replayed is not what was served, and no threshold says anything of it."""
    lost = Finding("completeness", "unusable", "", "the published report counts 600 requests sent, the records 532")
    comparison = compared(run, lost)
    assert comparison.verdict == "NOT JUDGED"
    answer = comparison_answer(comparison)
    assert answer.exit_code == 4
    assert "NOT JUDGED 34b-general: completeness: the published report counts 600" in " ".join(str(answer).split())


def test_a_copy_under_another_name_is_not_held_out() -> None:
    """Renamed and with another content hash a recording is known by its requests."""
    recording = bundled_recording(bundled_aliases()["34b-general"])
    release = load_release(DEFAULT_RELEASE)
    fit = replace(release.fitted_on[0], experiment="elsewhere", requests_hash=requests_hash(recording))
    renamed = replace(recording, slug="20260101-000000-copy", content_hash="0" * 64)
    known = replay(renamed, replace(release, fitted_on=(fit,)))
    unknown = replay(renamed, replace(release, fitted_on=(replace(fit, requests_hash=None),)))
    assert [compare_replay(made).use for made in (known, unknown)] == ["fitted on this run", "held out"]


def test_coefficients_fitted_to_nothing_are_not_those_of_unknown_runs() -> None:
    """Operator times state an empty ``fitted_on``; what names none at all may have been fitted to anything."""
    recording = bundled_recording(bundled_aliases()["34b-general"])
    release = load_release(DEFAULT_RELEASE)
    runs = [compare_replay(replay(recording, replace(release, fitted_on=stated))) for stated in ((), None)]
    assert [run.use for run in runs] == ["fitted on no recording", "unknown"]
    assert [use_text(run.judgement.subject) for run in runs] == ["fitted on no recording", "unknown whether held out"]
    assert [list(means_by_fit([run.judgement])) for run in runs] == [["held out"], ["unknown"]]
    assert [parse_release(format_release(run.run.release), "x").fitted_on for run in runs] == [(), None]


@pytest.mark.parametrize("metric", ["", "e2e"])
def test_the_next_command_shows_the_check_that_forbids(run: ReplayRun, metric: str) -> None:
    """`inspect` alone would say the same sentence again."""
    command = compared(run, unusable("clocks", metric)).judgement.next
    assert (command.verb, command.more) == ("inspect", " --check clocks")
