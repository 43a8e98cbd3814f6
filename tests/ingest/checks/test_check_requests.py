"""Checks 2, 7 and 8 and the overload rule, from requests."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from builders import aggregates, recording, requests, steps, write_events

from blis_replay.base.errors import RecordingError
from blis_replay.blis.latency.models import ObservedCycles
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.ledger import JOURNEYS, SENT, entries
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.checks.stationarity import usual_us
from blis_replay.ingest.overload import failed_share, overloaded
from blis_replay.ingest.recording import (
    FIRST_TOKEN,
    LIFECYCLE_SCHEMA,
    REBUILT_E2E,
    Clock,
    Finding,
    Recording,
    Setting,
    SharedPrefix,
    SourceFile,
    Stage,
)
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.served import away
from blis_replay.ingest.served import refused as refused_by
from blis_replay.ingest.stream import late_first_tokens
from blis_replay.replay.observed import stalled_us
from blis_replay.validate.metrics.observed import Selection, numbers_from_requests, observed_requests, samples_of

SECOND = 1_000_000


def findings_of(made: Recording, check: str) -> list[Finding]:
    return [finding for finding in run_checks(made)[0] if finding.check == check]


# Output length.


def test_retokenised_lengths_are_replaced_and_their_shortfall_measured() -> None:
    """Lengths 10, 5, 0 and 9 for a true 10: 40 % short on average, two of four more than 10 % short, one zero."""
    made = recording(requests=requests(4, output_tokens=10, output_tokens_reported=[10, 5, 0, 9]))
    (finding,) = findings_of(made, "output_length")
    assert finding.severity == "corrected"
    assert finding.measured["short_percent"] == pytest.approx(40.0)
    assert finding.measured["share_over_10_percent_short"] == 0.5
    assert finding.measured["zeros"] == 1


def test_a_count_that_does_not_follow_the_decode_time_has_no_correlation_with_it() -> None:
    made = recording(
        requests=requests(4, output_tokens_reported=[10, 5, 5, 10], e2e_us=[250_000, 250_000, 260_000, 260_000])
    )
    (finding,) = findings_of(made, "output_length")
    assert finding.measured["correlation_with_decode_time"] == pytest.approx(0.0, abs=1e-9)


def test_a_count_that_was_decoded_correlates_with_its_time() -> None:
    """20 ms per token."""
    made = recording(
        requests=requests(4, output_tokens_reported=[10, 5, 7, 9], e2e_us=[n * 20_000 for n in (10, 5, 7, 9)])
    )
    (finding,) = findings_of(made, "output_length")
    assert finding.measured["correlation_with_decode_time"] == pytest.approx(1.0)


@pytest.mark.slow
def test_equal_counts_are_noted_and_lone_retokenised_ones_unusable() -> None:
    (equal,) = findings_of(recording(requests=requests(3, output_tokens_reported=11)), "output_length")
    assert equal.severity == "note"
    alone = requests(3, output_tokens_source="re-tokenised", output_tokens_reported=11)
    (finding,) = findings_of(recording(requests=alone), "output_length")
    assert (finding.severity, finding.metric) == ("unusable", "output_tokens")
    (none,) = findings_of(recording(requests=requests(3, output_tokens=None)), "output_length")
    assert none.message.startswith("no output length was recorded")


def test_published_mean_length_against_the_configured_one() -> None:
    """7b-codegen as published: 195.1 of 247 tokens, 21.0 % short."""
    made = recording(
        ground_truth="published aggregates",
        shared_prefix=SharedPrefix(10, 10, 100, 466, 247),
        requests=requests(3, output_tokens=247),
        aggregates=aggregates((-1, "output_tokens_reported", "mean", 195.1)),
    )
    (finding,) = findings_of(made, "output_length")
    assert finding.measured["short_percent"] == pytest.approx(21.0, abs=0.05)


# Overload.


def ttft_run(first_us: int, last_us: int, count: int = 100) -> Recording:
    ttft = [round(first_us + (last_us - first_us) * i / (count - 1)) for i in range(count)]
    return recording(requests=requests(count, ttft_us=ttft, e2e_us=[t + 200_000 for t in ttft]))


@pytest.mark.parametrize(
    ("failures", "answered_ttft_us", "failed_ttft_us", "failed_e2e_us", "expected"),
    [
        (["error"], 3_000_000, None, None, False),  # one in ten
        (["error", "timeout"], 3_000_000, None, None, True),
        (["error", "timeout"], None, None, None, True),  # nobody knows whether others waited
        (["error", "timeout"], 3_000_000, None, 5_000_000, True),
        (["error", "error"], 3_000_000, None, 2_000, False),  # refused at once
        (["error", "error"], 3_000_000, 500_000, 5_000_000, False),  # broken off
        (["error", "error"], 50_000, None, None, False),  # nobody waited
        (["error", "error"], 50_000, None, 5_000_000, False),
        (["timeout", "timeout"], 50_000, None, None, True),  # but for these
    ],
)
def test_more_than_a_tenth_that_failed_in_a_queue_is_overloaded(
    failures: list[str],
    answered_ttft_us: int | None,
    failed_ttft_us: int | None,
    failed_e2e_us: int | None,
    expected: bool,
) -> None:
    answered = 10 - len(failures)
    rows = requests(
        10,
        status=failures + ["ok"] * answered,
        ttft_us=[failed_ttft_us] * len(failures) + [answered_ttft_us] * answered,
        e2e_us=[failed_e2e_us] * len(failures) + [3_500_000] * answered,
    )
    assert overloaded(recording(files=(), requests=rows))[0] == expected


@pytest.mark.parametrize(
    ("statuses", "failed_e2e_us", "refused"),
    [
        (["ok"] * 20 + ["error"] * 40, 0, 40),  # it ended
        (["error"] * 40 + ["ok"] * 20, 0, 40),  # it had not started
        (["ok"] * 20 + ["error"] * 5 + ["ok"] * 20, 0, 5),  # it started again
        (["ok"] * 20 + ["error"] * 5 + ["ok"] * 20, None, 0),  # how quickly they failed is not known
        (["error"] * 40, 0, 0),  # nothing says how soon it answers
        (["ok"] * 20 + ["error"] * 4 + ["ok"] * 20, 0, 0),  # too few to tell
        (["ok"] * 20 + ["error"] * 40, None, 40),  # it is not known either, but nothing was answered any more
        (["ok"] * 20 + ["error"] * 40, 60_000, 0),  # a server took them and failed: its first token takes 50 ms
        (["ok"] * 20 + ["timeout"] * 40, None, 0),
        (["ok", "error"] * 20, 0, 0),  # it refuses some, and serves others meanwhile
    ],
)
def test_requests_that_no_server_was_there_for_are_no_overload(
    statuses: list[str], failed_e2e_us: int | None, refused: int
) -> None:
    """One request a second, answered in 250 ms."""
    columns = {
        name: [value if status == "ok" else failed for status in statuses]
        for name, value, failed in (("ttft_us", 50_000, None), ("e2e_us", 250_000, failed_e2e_us))
    }
    made = recording(files=(), requests=requests(len(statuses), status=statuses, **columns))
    assert sum(stretch.requests for stretch in away(made)) == refused
    failed = len(statuses) - statuses.count("ok") - refused
    assert failed_share(made) == pytest.approx(failed / (len(statuses) - refused))
    assert refused_by(made).sum() == refused
    timed_out = statuses.count("timeout") > 0
    assert overloaded(made)[0] == timed_out
    found = findings_of(made, "completeness")
    unusable = any(one.severity == "unusable" for one in found if "failed" in one.measured)
    assert unusable == (
        2 * failed > len(statuses) and not timed_out
    )  # most were not answered, and nobody knows what they cost
    measured = [one.measured for one in found]
    assert [one["requests"] for one in measured if "until_s" in one] == ([refused] if refused else [])
    assert [one["failed"] for one in measured if "failed" in one] == ([failed] if failed else [])


@pytest.mark.parametrize("ends_at_s", [39.5, 90.0])
def test_a_server_that_refuses_in_a_row_but_has_others_in_flight_is_there(ends_at_s: float) -> None:
    """40 refusals in 40 s from second 20 on; a request sent before them ends among them, or long after."""
    status = ["ok"] * 20 + ["error"] * 40 + ["ok"] * 20
    e2e_us = [250_000] * 19 + [int((ends_at_s - 19) * SECOND)] + [0] * 40 + [250_000] * 20
    made = recording(files=(), requests=requests(80, status=status, e2e_us=e2e_us, ttft_us=50_000))
    assert away(made) == ()
    assert failed_share(made) == pytest.approx(0.5)


def test_what_was_in_flight_when_a_server_ended_has_failed() -> None:
    """Sent each second; the last answer comes at 22 s, so two failures were sent before it, and eleven behind."""
    e2e_us = [250_000] * 19 + [3 * SECOND, *[None] * 13]
    status = ["ok"] * 20 + ["error"] * 13
    made = recording(files=(), requests=requests(33, status=status, e2e_us=e2e_us, ttft_us=50_000))
    (stretch,) = away(made)
    assert (stretch.from_us, stretch.requests) == (22 * SECOND, 11)
    # As many failed before its last answer as behind it: it was there, and had too much to do.
    few = recording(files=(), requests=requests(27, status=status[:27], e2e_us=e2e_us[:27], ttft_us=50_000))
    assert [one.requests for one in away(few)] == [5]
    late = [250_000] * 19 + [5 * SECOND, *[None] * 13]  # the last answer comes at 24 s, and four failed before it
    made = recording(files=(), requests=requests(31, status=status[:31], e2e_us=late[:31], ttft_us=50_000))
    assert away(made) == ()


def test_an_answer_that_was_sent_with_the_first_refusal_is_none() -> None:
    sent = requests(26, status=["ok"] * 20 + ["error"] * 6, e2e_us=[250_000] * 20 + [0] * 6)
    at_once = sent.with_columns(arrival_us=pl.when(pl.col("status") == "ok").then("arrival_us").otherwise(19_500_000))
    made = recording(files=(), requests=at_once)
    assert refused_by(made).tolist() == [False] * 20 + [True] * 6


def test_a_growing_ttft_is_overloaded_only_above_one_second() -> None:
    """Medians of the first and last fifth, 0.5 to 10 s: 1.4 and 9.1 s."""
    assert overloaded(ttft_run(500_000, 10_000_000))[0]
    assert not overloaded(ttft_run(20_000, 900_000))[0]
    assert not overloaded(ttft_run(3_000_000, 5_000_000))[0]


def test_growth_is_looked_for_within_a_stage_not_across_stages() -> None:
    two = requests(100, stage=[0] * 50 + [1] * 50, ttft_us=[100_000] * 50 + [2_000_000] * 50, e2e_us=3_000_000)
    assert not overloaded(recording(requests=two))[0]


def test_from_aggregates_a_slow_median_is_overloaded() -> None:
    """70b-general, at the limit of its slots, has a median of 63.9 ms; the reasoning runs 91 s and more."""
    published: dict[str, Any] = {"ground_truth": "published aggregates"}
    assert not overloaded(recording(**published, aggregates=aggregates((-1, "ttft", "p50", 63_923.2))))[0]
    assert overloaded(recording(**published, aggregates=aggregates((-1, "ttft", "p50", 91_288_500.0))))[0]
    failed = aggregates((-1, "requests", "sent", 4800.0), (-1, "requests", "failed", 4068.0))
    assert overloaded(recording(**published, requests=requests(0), aggregates=failed)) == (
        True,
        "85 % of requests failed",
    )


def without_events(hidden: float, count: int = 100) -> Recording:
    """A reasoning model at 20 ms a token and 50 ms to the first: so much of each output has no event; 20 requests/s."""
    tokens = [50 + 37 * i % 200 for i in range(count)]
    lost = [round(hidden * (n - 1)) for n in tokens]
    return recording(
        requests=requests(
            count,
            arrival_us=[i * SECOND // 20 for i in range(count)],
            output_tokens=tokens,
            output_tokens_source="server usage",
            ttft_us=[50_000 + 20_000 * n for n in lost],
            e2e_us=[50_000 + 20_000 * (n - 1) for n in tokens],
        )
    )


@pytest.mark.parametrize(("hidden", "comes_at_once"), [(0.5, False), (1.0, True)])
def test_a_first_event_that_is_not_the_first_token_leaves_e2e_alone(hidden: float, comes_at_once: bool) -> None:
    """TTFT follows the output length of a request: no overload and no TTFT or ITL, whatever its mean."""
    made = without_events(hidden)
    found = [finding for finding in run_checks(made)[0] if finding.severity == "unusable"]
    assert [(finding.check, finding.metric) for finding in found] == [("token_events", FIRST_TOKEN)]
    late = late_first_tokens(made)
    assert late is not None and late.comes_at_once is comes_at_once
    assert late.us_per_token == pytest.approx(20_000 * hidden, rel=0.01)
    assert not overloaded(made)[0]


@pytest.mark.parametrize(
    ("collected", "share", "held_back"),
    # How many tokens a proxy collects, and for which share of requests.
    [(0, 1.0, False), (1, 1.0, False), (5, 1.0, True), (5, 0.7, False), (5, 0.8, True)],
)
def test_first_tokens_that_a_proxy_collects_with_others_are_not_first(
    collected: int, share: float, held_back: bool
) -> None:
    """Tokens come every 20 ms; the engine has the first after 50 ms, and its clock says 7 s more than the client's."""
    count, late_us = 40, collected * 20_000
    ttft_us = [50_000 + (late_us if i < share * count else 0) for i in range(count)]
    sent = requests(count, ttft_us=ttft_us, e2e_us=250_000)
    rows = {name: [None] * count for name in LIFECYCLE_SCHEMA} | {"request_index": list(range(count))}
    for name, at_us in (("first_token_us", 50_000), ("finished_us", 250_000)):
        rows[name] = [i * SECOND + at_us + 7 * SECOND for i in range(count)]
    made = recording(requests=sent, lifecycles=rows_of(pl.DataFrame(rows, schema=LIFECYCLE_SCHEMA)))
    late = late_first_tokens(made)
    assert (late is not None) == held_back
    (found,) = (one for one in findings_of(made, "token_events"))
    measured_us = found.measured["held_back_us"] if found.metric == FIRST_TOKEN else None
    assert measured_us == (100_000 if held_back else None)


def test_without_a_stream_e2e_alone_is_judged() -> None:
    made = recording(requests=requests(30, ttft_us=None))
    assert [finding for finding in run_checks(made)[0] if finding.severity == "unusable"] == []
    observed = observed_requests(made)
    numbers = numbers_from_requests(made, samples_of(made, observed), Selection(), None)
    assert observed.all() and numbers["e2e"]["mean"].value_us == 250_000
    assert {numbers[metric]["mean"].value_us for metric in ("ttft", "itl")} == {None}


def test_where_e2e_follows_from_a_mean_tpot_only_its_mean_is_judged() -> None:
    """Each request has the same TPOT, so that quantiles would be those of the output lengths."""
    made = recording(requests=requests(30), clocks=(Clock("client", "monotonic", 0, True, REBUILT_E2E),))
    numbers = numbers_from_requests(made, samples_of(made, observed_requests(made)), Selection(), None)
    assert (numbers["e2e"]["mean"].value_us, numbers["e2e"]["p99"].value_us) == (250_000, None)
    assert numbers["e2e"]["mean"].derived
    assert numbers["ttft"]["p99"].value_us is not None


def test_the_mean_itl_is_per_token_where_an_event_brings_several() -> None:
    """30 requests of 200 ms after the first token in five events of four tokens: 10 ms per token, gaps of 40 ms."""
    made = recording(requests=requests(30, ttft_us=50_000, e2e_us=250_000, output_tokens=21))
    samples = samples_of(made, observed_requests(made))
    itl = numbers_from_requests(made, samples, Selection(), (np.array([40_000]), np.array([150])))["itl"]
    assert (itl["mean"].value_us, itl["p50"].value_us) == (10_000, 40_000)


def test_first_tokens_that_wait_in_a_queue_are_first_tokens() -> None:
    assert late_first_tokens(without_events(0.0)) is None
    lengths = [5 + 37 * i % 200 for i in range(100)]
    of_prompts = {"prompt_tokens": 100, "output_tokens": 1, "ttft_us": 5_000, "e2e_us": 25_000}
    columns = {name: [each * n for n in lengths] for name, each in of_prompts.items()}
    long_prompts = requests(100, output_tokens_source="server usage", **columns)
    assert late_first_tokens(recording(requests=long_prompts)) is None, "a prefill takes longer, and so may the answer"
    assert overloaded(ttft_run(500_000, 10_000_000))[0]


# Stationarity.


def long_run(**columns: Any) -> Recording:
    """120 s at 2 requests/s."""
    defaults = {"arrival_us": [i * SECOND // 2 for i in range(240)]}
    return recording(stages=(Stage(0, 2.0, 120 * SECOND),), requests=requests(240, **(defaults | columns)))


def test_a_steady_run_is_said_to_be_so() -> None:
    (finding,) = findings_of(long_run(), "stationarity")
    assert finding.message == "one load level, no cold start, drift or stall"


def test_a_cold_start_is_reported_by_window() -> None:
    """The first 10 s (20 requests) take 500 ms instead of 250, the next 10 s 300."""
    (finding,) = findings_of(long_run(e2e_us=[500_000] * 20 + [300_000] * 20 + [250_000] * 200), "stationarity")
    assert "cold start" in finding.message
    assert finding.measured["e2e_ratio"] == pytest.approx(2.0)
    assert finding.measured["e2e_0_3_s_us"] == 500_000
    assert finding.measured["e2e_10_20_s_us"] == 300_000
    assert finding.measured["e2e_later_us"] == 250_000


@pytest.mark.parametrize(("late", "found"), [(12, True), (2, False)])
def test_neighbours_that_are_late_once_are_a_stall(late: int, found: bool) -> None:
    """Requests that take 20 s longer at one time, while others go on; two of them are none."""
    e2e = [250_000 + (20 * SECOND if 100 <= i < 100 + late else 0) for i in range(240)]
    stalls = [f for f in findings_of(long_run(e2e_us=e2e), "stationarity") if "longest_us" in f.measured]
    assert [(f.measured["requests"], f.measured["longest_us"]) for f in stalls] == [(12, 20 * SECOND)] * found


def test_a_closed_loop_is_named() -> None:
    """Four clients that send at once when they have their answer, 1 s each."""
    made = long_run(arrival_us=[i // 4 * SECOND for i in range(240)], e2e_us=SECOND)
    assert [f.measured["in_flight"] for f in findings_of(made, "stationarity") if "in_flight" in f.measured] == [4]


def test_drift_inside_a_stage_is_reported() -> None:
    """From 250 to 489 ms through the run: the last fifth of the settled part is a third above the first."""
    findings = findings_of(long_run(e2e_us=[250_000 + 1000 * i for i in range(240)]), "stationarity")
    assert [finding.message.split(":")[1].split(",")[0].strip() for finding in findings] == [
        "drift from second 20 to 110"
    ]


def test_a_pause_in_arrivals_is_reported() -> None:
    """Nothing is sent for 20 s, where an even 2 requests/s would send 40."""
    arrivals = [i * SECOND // 2 + (20 * SECOND if i >= 120 else 0) for i in range(240)]
    findings = findings_of(long_run(arrival_us=arrivals), "stationarity")
    stall = next(finding for finding in findings if "no request was sent" in finding.message)
    assert stall.measured["gap_us"] == 20_500_000
    assert stall.measured["at_us"] == 59_500_000


def test_a_stall_of_the_engine_is_found_between_sampled_steps() -> None:
    starts = [i * 20_000 + (3 * SECOND if i >= 3000 else 0) for i in range(5000)]
    made = recording(stages=(Stage(0, 2.0, 120 * SECOND),), requests=long_run().requests, steps=steps(starts))
    stall = next(f for f in findings_of(made, "stationarity") if "stood still" in f.message)
    assert stall.measured["excess_us"] == 3 * SECOND
    assert stall.measured["step_id"] == 3000
    assert stall.measured["usual_cycle_us"] == 20_000


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("stalled_s", [0, 4])
def test_a_long_prompt_is_no_standstill(behind: int, stalled_s: int) -> None:
    """Ten steps of a thousand take 1.5 s for 1,600 tokens; asynchronously the time stands one step behind.

    With 4 s more once the server stood still for these 4 s.
    """
    # Ten prefills in a row, as under a queue: then the steps beside one are no small ones.
    long = np.arange(5000) % 1000 // 10 == 5
    cycles = np.where(np.roll(long, behind), SECOND + SECOND // 2, 20_000)
    cycles[3050 + behind] += stalled_s * SECOND
    starts = np.concatenate([[0], cycles.cumsum()[:-1]])
    made = recording(
        stages=(Stage(0, 2.0, 200 * SECOND),),
        engine={"async_scheduling": Setting(bool(behind), "recorded", "recorder")},
        requests=long_run().requests,
        steps=steps(starts.tolist(), prefill_tokens=np.where(long, 1_600, 0).tolist()),
    )
    found = [f.measured["excess_us"] for f in findings_of(made, "stationarity") if "excess_us" in f.measured]
    assert found == [4 * SECOND] * (stalled_s > 0)
    assert stalled_us(made, ObservedCycles(starts, cycles)).sum() == stalled_s * SECOND


def test_what_is_usual_for_a_size_is_its_own_median_or_grows_with_its_tokens() -> None:
    """Two of 8,192 tokens tell nothing: 2,048 take 280 ms more than the median, so four times as many 1,120 ms more."""
    usual = usual_us({1: (20_000, 900), 11: (300_000, 40), 13: (9e6, 2)}, 20_000)
    assert usual == {1: 20_000, 11: 300_000, 13: 1_140_000}
    assert usual_us({-1: (20_000, 900), 1: (20_000, 3), 12: (9e6, 1)}, 20_000) == dict.fromkeys((-1, 1, 12), 20_000)


def test_several_load_stages_are_named() -> None:
    made = recording(
        stages=(Stage(0, 1.0, 60 * SECOND), Stage(1, 1.0, 60 * SECOND)),
        requests=requests(4, stage=[0, 0, 1, 1], e2e_us=[200_000, 200_000, 400_000, 400_000]),
    )
    (finding,) = findings_of(made, "stationarity")
    assert "mean E2E 200 / 400 ms" in finding.message


# Completeness.


def messages(made: Recording) -> list[str]:
    return [finding.message for finding in findings_of(made, "completeness")]


def test_a_whole_recording_is_said_to_be_so() -> None:
    assert messages(recording(files=())) == ["all 3 requests completed, none lacks a field or was rejected"]


def test_rejected_records_are_named_with_the_first_place() -> None:
    file = SourceFile("trace.csv", "TraceV2", 10, "aa", 8, 2, (("line 3", "not a number"),))
    assert messages(recording(files=(file,))) == [
        "trace.csv: 2 of 10 records rejected, the first at line 3: not a number"
    ]


@pytest.mark.parametrize(
    "file",
    [
        "guidellm-0.5.4/constant/benchmarks.json.gz",
        "vllm-bench-0.15.1/random-poisson/openai-8.0qps-mock-model-20261121-051236.json",
        "aiperf-0.13.0/poisson-chat/artifacts/profile_export.jsonl",
        "inference-perf-0.7.0/random-poisson/reports/per_request_lifecycle_metrics.json",
    ],
)
def test_a_client_file_that_is_cut_in_the_middle_stops_a_verdict(data_pack: Path, tmp_path: Path, file: str) -> None:
    """The requests before the cut are no load that anybody served: half a file is not a shorter run."""
    genuine = next((data_pack / "clients" / file).parent.glob(f"{Path(file).name}*"))
    content = genuine.read_bytes()
    content = gzip.decompress(content) if genuine.suffix == ".gz" else content
    lost = []
    for kept in (len(content), len(content) // 2):
        path = tmp_path / Path(file).name.removesuffix(".gz")
        path.write_bytes(content[:kept])
        try:
            with read_recording(path) as made:
                found = findings_of(made, "completeness")
            lost.append([one.message for one in found if one.severity == "unusable" and not one.metric])
        except RecordingError as error:
            lost.append([str(error)])
    assert lost[0] == []
    assert "the rest of the file is lost" in lost[1][0]


def test_failures_time_outs_and_lost_prompts_are_counted() -> None:
    made = recording(
        files=(), requests=requests(4, status=["ok", "ok", "error", "timeout"], prompt_tokens=[10, 10, 10, None])
    )
    (message,) = messages(made)
    assert message.startswith("2 of 4 requests failed (50.0 %), 1 of them by time-out")
    assert message.endswith("1 lost their prompt length")


def test_fields_that_completed_requests_lack_are_counted() -> None:
    (message,) = messages(recording(files=(), requests=requests(3, ttft_us=[None, None, 50_000])))
    assert message == "of 3 completed requests some lack a field: ttft_us of 2"


def test_requests_longer_than_the_model_allows_are_reported() -> None:
    """100 prompt and 11 output tokens fit into 111, and not into 110."""
    fits, breaks = (
        messages(recording(files=(), engine={"max_model_len": Setting(limit, "recorded")})) for limit in (111, 110)
    )
    assert fits == ["all 3 requests completed, none lacks a field or was rejected"]
    (message,) = breaks
    assert message.startswith("3 completed requests have more tokens than max_model_len (110), up to 111;")


def test_repeated_ids_and_differing_counts_are_reported() -> None:
    made = recording(
        files=(),
        requests=requests(3, request_id=["a", "b", "a"]),
        aggregates=aggregates((-1, "requests", "sent", 4.0), (-1, "requests", "failed", 1.0)),
    )
    assert messages(made) == ["1 requests repeat the id of another, first a; each is kept"]
    (contradiction,) = findings_of(made, "ledger")
    assert (contradiction.severity, contradiction.metric) == ("unusable", "")
    assert contradiction.measured == {"requests sent: client's requests": 3, "requests sent: client's report": 4}


@pytest.mark.slow
@pytest.mark.parametrize("ground_truth", ["recorded", "published aggregates"])
def test_checks_work_with_any_part_missing(ground_truth: str, tmp_path: Any) -> None:
    whole = {
        "requests": requests(60),
        "steps": steps(range(0, 60 * SECOND, 20_000)),
        "stages": (Stage(0, 1.0, 60 * SECOND),),
        "token_events": write_events(tmp_path / "events", [[0, 20_000]] * 60),
        "aggregates": aggregates((-1, "itl_reported", "mean", 20_000.0)),
    }
    nothing = {
        "requests": requests(0),
        "steps": steps([]),
        "stages": (),
        "token_events": None,
        "aggregates": aggregates(),
    }
    for mask in range(32):
        parts: dict[str, Any] = {name: (whole if mask >> i & 1 else nothing)[name] for i, name in enumerate(whole)}
        if parts["token_events"] is not None and parts["requests"].is_empty():  # there is no event without a request
            parts["token_events"] = write_events(tmp_path / "none", [])
        findings, _ = run_checks(recording(ground_truth=ground_truth, **parts))
        assert {"token_events", "output_length", "step_cycle", "step_clock", "prefix_cache"} <= {
            finding.check for finding in findings
        }


def test_checks_work_with_every_field_null() -> None:
    kept = {"request_index", "status"}
    null = requests(60, **{name: None for name in requests(0).columns if name not in kept})
    steps_null = steps(range(60), **dict.fromkeys(steps([]).columns))
    findings, _ = run_checks(recording(requests=null, steps=steps_null, stages=(), files=()))
    assert any("lack a field" in finding.message for finding in findings)


def with_journeys(known: int, nobodys: int) -> Recording:
    """100 client requests, one a millisecond; journeys of so many of them, and of so many that no client sent."""
    rows = [
        {"journey": i, "request_index": i if i < known else None, "arrived_us": i % 100 * 1000, "status": "ok"}
        for i in range(known + nobodys)
    ]
    sent = requests(100, arrival_us=[i * 1000 for i in range(100)])
    return recording(requests=sent, lifecycles=rows_of(pl.DataFrame(rows, schema=LIFECYCLE_SCHEMA)))


@pytest.mark.parametrize(("nobodys", "severity"), [(5, "note"), (6, "unusable"), (58, "unusable")])
def test_server_journeys_without_a_client_request_stop_a_verdict(nobodys: int, severity: str) -> None:
    """Five warm-up requests and probes are usual; what more was served is load that the replay lacks."""
    made = with_journeys(100, nobodys)
    (finding,) = findings_of(made, "ledger")
    assert (finding.severity, finding.metric) == (severity, "")
    stated = {entry.source: entry.value for entry in entries(made) if entry.quantity == SENT}
    assert stated[JOURNEYS] == 100 + nobodys


@pytest.mark.parametrize(("known", "nobodys"), [(100, 0), (0, 58)])
def test_journeys_that_are_all_known_or_of_which_none_is_say_nothing(known: int, nobodys: int) -> None:
    """None is known where the client's file names no requests: that is no lost load."""
    assert [finding.severity for finding in findings_of(with_journeys(known, nobodys), "ledger")] == ["note"]
