"""Check 1 and the layouts under it: two stamps per token, found and undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from builders import aggregates, recording, requests, write_events
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import token_times

from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Finding, Recording, SharedPrefix
from blis_replay.ingest.served import is_paired, published_itl
from blis_replay.ingest.store import open_store
from blis_replay.ingest.store.writing import write_recording
from blis_replay.ingest.stream import (
    BUNCHED,
    NO_EVENTS,
    PAIRED,
    PAIRED_WITH_DONE,
    PLAIN,
    ROLE_FIRST,
    SEVERAL_TOKENS_PER_EVENT,
    SINGLE_WITH_DONE,
    TokenLayout,
    detect_layout,
    event_totals,
)


def token_finding(of: Recording) -> Finding:
    (finding,) = [finding for finding in run_checks(of)[0] if finding.check == "token_events"]
    return finding


def paired(token_us: list[int], *, closing: int = 2, blank_us: int = 30) -> list[int]:
    """Stamps of a line-by-line reader: data line and blank line of each token, then ``closing`` of [DONE]."""
    stamps = [stamp for time_us in token_us for stamp in (time_us, time_us + blank_us)]
    return stamps + [stamps[-1] + 20 + i for i in range(closing)]


# Token gaps of 1 to 60 ms for runs of 1 to 6 requests.
TOKEN_TIMES = st.lists(
    st.lists(st.integers(1_000, 60_000), min_size=4, max_size=12).map(
        lambda gaps: [50_000 + sum(gaps[:i]) for i in range(len(gaps) + 1)]
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.heavy
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(times=TOKEN_TIMES, known=st.booleans(), closing=st.sampled_from([1, 2, 3]))
def test_a_paired_layout_gives_back_any_true_token_times(
    tmp_path: Path, times: list[list[int]], known: bool, closing: int
) -> None:
    """2n+1 to 2n+3 stamps for n tokens; without a known length 2n+3 cannot be told from n+1 tokens."""
    if not known:
        closing = min(closing, 2)
    events = write_events(tmp_path / "events", [paired(times_us, closing=closing) for times_us in times])
    lengths = [len(times_us) if known else None for times_us in times]
    made = recording(requests=requests(len(times), output_tokens=lengths), token_events=events)
    layout = detect_layout(events, made.requests)
    assert layout == PAIRED_WITH_DONE
    (tmp_path / "s.duckdb").unlink(missing_ok=True)
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, made, layout)
        stored = token_times(store, made.slug)
    assert stored.rows() == [(i, k, time_us) for i, times_us in enumerate(times) for k, time_us in enumerate(times_us)]


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(times=TOKEN_TIMES, known=st.booleans())
def test_plain_and_singly_closed_streams_are_told_apart(tmp_path: Path, times: list[list[int]], known: bool) -> None:
    lengths = [len(times_us) if known else None for times_us in times]
    made = requests(len(times), output_tokens=lengths)
    plain = write_events(tmp_path / "plain.parquet", times)
    closed = write_events(tmp_path / "closed.parquet", [[*times_us, times_us[-1] + 15] for times_us in times])
    assert detect_layout(plain, made) == PLAIN
    assert detect_layout(closed, made) == SINGLE_WITH_DONE
    true_us = sum(times_us[-1] - times_us[0] for times_us in times) / sum(len(times_us) - 1 for times_us in times)
    assert event_totals(closed, made, SINGLE_WITH_DONE).token_gap_us == pytest.approx(true_us)


@pytest.mark.heavy
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(times=TOKEN_TIMES, role_us=st.integers(0, 190))
def test_a_leading_role_is_no_token(tmp_path: Path, times: list[list[int]], role_us: int) -> None:
    """A chat's first event carries the role and comes with the first token: n + 1 stamps, the first two at once."""
    events = write_events(tmp_path / "e.parquet", [[times_us[0] - role_us, *times_us] for times_us in times])
    made = recording(requests=requests(len(times), output_tokens=[len(t) for t in times]), token_events=events)
    assert detect_layout(events, made.requests) == ROLE_FIRST
    (tmp_path / "s.duckdb").unlink(missing_ok=True)
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, made, ROLE_FIRST)
        stored = token_times(store, made.slug)
    assert stored.rows() == [(i, k, time_us) for i, times_us in enumerate(times) for k, time_us in enumerate(times_us)]
    true_us = sum(times_us[-1] - times_us[0] for times_us in times) / sum(len(times_us) - 1 for times_us in times)
    assert event_totals(events, made.requests, ROLE_FIRST).token_gap_us == pytest.approx(true_us)


@pytest.mark.slow
def test_a_reported_itl_that_stamps_contradict_is_corrected(tmp_path: Path) -> None:
    """11 tokens 20 ms apart; 19 ms is what a length of 11.5 would give.  Either mean of the stamps would agree."""
    times = [50_000 + k * 20_000 for k in range(11)]
    events = write_events(tmp_path / "e.parquet", [times] * 3)
    wrong = recording(token_events=events, aggregates=aggregates((-1, "itl_reported", "mean", 19_000.0)))
    finding = token_finding(wrong)
    assert (finding.severity, finding.metric) == ("corrected", "itl")
    assert "reported ITL 19.00 ms, true gap 20.00 ms" in finding.message
    right = recording(token_events=events, aggregates=aggregates((-1, "itl_reported", "mean", 20_100.0)))
    assert token_finding(right).severity == "note"


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("tpot_with_ttft_reported", "(last token - send) / n, with the time to the first token in it"),
        ("tpot_over_n_reported", "(last token - first token) / n, for n - 1 gaps"),
    ],
)
def test_another_definition_of_tpot_is_a_note_with_both_numbers(metric: str, says: str) -> None:
    """(250 ms - 50 ms) / 10 = 20 ms; no error, so nothing is corrected."""
    made = recording(aggregates=aggregates((-1, metric, "mean", 22_730.0)))
    (finding,) = [f for f in run_checks(made)[0] if f.check == "token_events" and f.metric == "tpot"]
    assert finding.severity == "note" and says in finding.message
    assert "reported TPOT 22.73 ms" in finding.message and "is 20.00 ms" in finding.message


TIMES = [i * 20_000 for i in range(11)]


@pytest.mark.parametrize(
    ("streams", "output_tokens", "layout"),
    [
        ([paired(TIMES, closing=0)] * 3, 11, PAIRED),
        ([paired(TIMES, closing=0)] * 3, None, PAIRED),
        ([paired(TIMES), paired(TIMES), TIMES], 11, PAIRED_WITH_DONE),  # a minority does not decide
        ([paired([0, 20_000])] * 3, 2, PAIRED_WITH_DONE),  # too few stamps for gaps to decide: 2n + 2 for the known n
        ([[], [], []], 11, NO_EVENTS),
    ],
)
def test_the_layout_is_that_of_most_requests(
    tmp_path: Path, streams: list[list[int]], output_tokens: int | None, layout: TokenLayout
) -> None:
    events = write_events(tmp_path / "events", streams)
    assert detect_layout(events, requests(3, output_tokens=output_tokens)) == layout


def test_without_events_and_a_published_itl_nothing_is_checked() -> None:
    assert detect_layout(None, requests()) == NO_EVENTS
    assert token_finding(recording()).message.startswith("not checked: ")


def test_a_retokenised_length_is_not_taken_for_the_count_of_tokens(tmp_path: Path) -> None:
    # 5 by re-tokenising, 11 by the stream: all 11 are numbered.
    times = [i * 20_000 for i in range(11)]
    events = write_events(tmp_path / "events", [paired(times)])
    made = requests(1, output_tokens=5, output_tokens_source="re-tokenised")
    assert event_totals(events, made, PAIRED_WITH_DONE).tokens == 11


@pytest.mark.slow
def test_several_tokens_in_an_event_are_not_numbered(tmp_path: Path) -> None:
    events = write_events(tmp_path / "events", [[0, 60_000, 120_000]] * 3)
    made = recording(token_events=events)
    assert run_checks(made)[1] == SEVERAL_TOKENS_PER_EVENT
    finding = token_finding(made)
    assert (finding.severity, finding.metric) == ("unusable", "itl quantiles")
    # The mean is left: (250 - 50) ms over 10 gaps.
    assert finding.measured["true_gap_us"] == 20_000
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, made, SEVERAL_TOKENS_PER_EVENT)
        assert token_times(store, made.slug).is_empty()


def test_a_stream_that_broke_off_keeps_all_its_tokens(tmp_path: Path) -> None:
    # The third request timed out after 3 tokens, without [DONE].
    whole = [i * 20_000 for i in range(11)]
    events = write_events(tmp_path / "events", [paired(whole), paired(whole), paired(whole[:3], closing=0)])
    made = recording(requests=requests(3, status=["ok", "ok", "timeout"]), token_events=events)
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, made, PAIRED_WITH_DONE)
        counts = token_times(store, made.slug).group_by("request_index", maintain_order=True).len()
    assert counts.rows() == [(0, 11), (1, 11), (2, 3)]


def test_the_finding_from_events_keeps_both_numbers(tmp_path: Path) -> None:
    # 11 tokens 20 ms apart: 24 stamps over 200.051 ms are 23 gaps of 8.698 ms.
    times = [i * 20_000 for i in range(11)]
    events = write_events(tmp_path / "events", [paired(times)] * 3)
    finding = token_finding(recording(token_events=events))
    assert finding.severity == "corrected"
    assert finding.message == "reported ITL 8.70 ms, true gap 20.00 ms, two stream events per token"
    assert finding.measured["reported_itl_us"] == pytest.approx(200_051 / 23)
    assert finding.measured["true_gap_us"] == 20_000
    assert finding.measured["events_per_token"] == pytest.approx(24 / 11)


# Aggregates only: figures of 34b-general as published (E2E 4,092.531 ms, TTFT 51.590 ms, ITL 8.1274 ms, n = 248).
GENERAL = (
    (-1, "e2e", "mean", 4_092_531.27),
    (-1, "ttft", "mean", 51_589.84),
    (-1, "itl_reported", "mean", 8_127.41),
)
SHAPE = (
    (-1, "itl_reported", "p50", 36.41),
    (-1, "itl_reported", "p75", 16_363.02),
    (-1, "itl_reported", "p90", 17_384.95),
    (-1, "itl_reported", "p95", 17_900.0),
    (-1, "itl_reported", "p99", 19_000.0),
    (-1, "itl_reported", "p99.9", 40_000.0),
    (-1, "tpot_reported", "mean", 8_127.42),
)
SHARED = SharedPrefix(10, 10, 100, 447, 248)


def test_from_aggregates_the_ratio_gives_it_away() -> None:
    """NOTES of the data pack, section 1: reported 8.127, true 16.36, ratio 2.013, 2.009 events per token."""
    made = recording(
        ground_truth="published aggregates",
        requests=requests(0),
        aggregates=aggregates(*GENERAL),
        shared_prefix=SHARED,
    )
    finding = token_finding(made)
    assert finding.severity == "corrected"
    assert finding.message == "reported ITL 8.13 ms, true gap 16.36 ms, two stream events per token"
    assert finding.measured["ratio"] == pytest.approx(2.013, abs=5e-4)
    assert finding.measured["events_per_token"] == pytest.approx(2.009, abs=5e-4)


@pytest.mark.parametrize(
    ("rows", "known", "severity", "true_gap_us"),
    [
        ((*GENERAL[:2], (-1, "itl_reported", "mean", 16_360.0)), {"shared_prefix": SHARED}, "note", 16_360),
        ((*GENERAL, *SHAPE), {"ignore_eos": False}, "unusable", None),  # no true length: the shape gives it away
    ],
)
def test_from_aggregates_an_honest_itl_and_one_without_a_true_length(
    rows: Any, known: dict[str, Any], severity: str, true_gap_us: float | None
) -> None:
    finding = token_finding(recording(requests=requests(0), aggregates=aggregates(*rows), **known))
    assert finding.severity == severity
    assert finding.measured["true_gap_us"] == (true_gap_us and pytest.approx(true_gap_us, rel=1e-3))


def test_published_quantiles_are_moved_to_where_they_belong() -> None:
    """Half of the pooled gaps are blank lines, so reported p75 is the true median (trace-formats 4.4)."""
    frame = aggregates(*GENERAL, *SHAPE)
    assert is_paired(frame)
    assert published_itl(frame) == {
        "p50": 16_363.02,
        "p80": 17_384.95,
        "p90": 17_900.0,
        "p98": 19_000.0,
        "p99.8": 40_000.0,
    }


def test_quantiles_of_one_stamp_per_token_stay_where_they_are() -> None:
    frame = aggregates((0, "itl_reported", "p50", 16_000.0), (0, "itl_reported", "p75", 17_000.0))
    assert published_itl(frame, stage=0) == {"p50": 16_000.0, "p75": 17_000.0}
    assert published_itl(frame, stage=1) == {}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(5_000, 50_000), min_size=20, max_size=20))
def test_moved_quantiles_are_those_of_the_true_gaps(gaps_us: list[float]) -> None:
    """Pooled with the blank-line gaps (N + 2 for N - 1 true ones), quantile q is quantile 2q - 100 of the true gaps."""
    true = pl.Series(sorted(gaps_us * 247))
    mixture = pl.concat([true, pl.Series([30.0] * (20 * 250))])
    rows = [(-1, "itl_reported", f"p{q:g}", float(mixture.quantile(q / 100) or 0)) for q in (50, 75, 90, 95, 99, 99.9)]
    corrected = published_itl(aggregates(*rows, (-1, "itl_reported", "mean", 5.0)))
    for q in (50, 80, 90, 98, 99.8):
        # The three surplus stamps of a request move a quantile by at most 0.6 percentage points.
        low, high = (float(true.quantile(min(1.0, max(0.0, (q + d) / 100))) or 0) for d in (-0.65, 0.65))
        assert low - 1e-6 <= corrected[f"p{q:g}"] <= high + 1e-6


@pytest.mark.parametrize(
    ("last_us", "found"),
    [
        ([1_000_000] * 28 + [500_050] * 2, [(2, 30)]),
        ([500_050] * 30, []),  # nothing was streamed, which another finding says
        ([1_000_000] * 29 + [400_000], []),  # a last token before the first is no time
    ],
)
def test_requests_whose_tokens_came_at_once_are_counted(last_us: list[int], found: list[tuple[int, int]]) -> None:
    """Of a recorded run of 240, five had 20 to 60 tokens within 0.24 ms: its client stood still for a second."""
    made = recording(requests=requests(30, output_tokens=[40] * 30, ttft_us=[500_000] * 30, e2e_us=last_us))
    noted = [f for f in run_checks(made)[0] if (f.check, f.metric, f.severity) == ("token_events", "ttft", "note")]
    assert [(f.measured["requests"], f.measured["of"]) for f in noted] == found


def in_groups(times: list[int], size: int) -> list[int]:
    """The same tokens, passed on when there are ``size`` of them; the rest at the end."""
    return [times[min((i // size + 1) * size, len(times)) - 1] + i % size for i in range(len(times))]


def streams(change: Callable[[list[int]], list[int]], *, step_us: int = 18_000, tokens: int = 40) -> list[list[int]]:
    """30 streams of ``tokens`` to twice as many tokens, a step of ``step_us`` ± 10 % apart, as a client stamps them."""
    draw = np.random.default_rng(7)
    stamps = []
    for _ in range(30):
        steps_us = step_us * draw.uniform(0.9, 1.1, draw.integers(tokens, 2 * tokens))
        stamps.append(change((draw.integers(10**6) + np.cumsum(steps_us)).astype(int).tolist()))
    return stamps


def found_in(tmp_path: Path, stamps: list[list[int]], lengths: list[int]) -> tuple[TokenLayout, list[Finding]]:
    """First tokens after 500 ms, and the layout with what is unusable."""
    ends = [500_000 + times[-1] - times[0] for times in stamps]
    made = requests(len(stamps), output_tokens=lengths, ttft_us=500_000, e2e_us=ends)
    findings, layout = run_checks(recording(requests=made, token_events=write_events(tmp_path / "events", stamps)))
    return layout, [one for one in findings if one.check == "token_events" and one.severity == "unusable"]


@pytest.mark.parametrize(
    ("change", "events"),
    [
        *((lambda times, size=size: in_groups(times, size), size) for size in (2, 3, 4, 5, 8, 16)),
        # Every 100 ms: 100 / 18 tokens.
        (lambda times: [-(-at // 100_000) * 100_000 for at in times], 5.6),
        (lambda times: [-(-at // 100_000) * 100_000 + i * 70 for i, at in enumerate(times)], 5.6),
        # Both stamps of each token.
        (lambda times: paired(in_groups(times, 3), closing=0), 6),
    ],
)
def test_first_tokens_of_streams_in_bunches_are_late(
    tmp_path: Path, change: Callable[[list[int]], list[int]], events: float
) -> None:
    """The first stamp is that of the last token of a bunch: neither TTFT nor single gaps can be told."""
    stamps = streams(change)
    layout, (stop,) = found_in(tmp_path, stamps, [len(times) for times in streams(list)])
    assert (layout, stop.metric) == (BUNCHED, "first token")
    assert stop.measured["events_per_bunch"] == pytest.approx(events, rel=0.15)  # the last of a stream is smaller


@pytest.mark.parametrize(
    ("change", "step_us", "tokens"),
    [
        (list, 18_000, 40),
        # The first token alone, then steps of three tokens: accepted drafts.
        (lambda times: [times[0], *in_groups(times[1:], 3)], 18_000, 40),
        # A clock of whole milliseconds, and 0.4 ms per step.
        (lambda times: [at // 1000 * 1000 for at in times], 400, 60),
        # Prefills of others between: each tenth step takes 0.5 s.
        (lambda times: [at + i // 10 * 500_000 for i, at in enumerate(times)], 3_000, 40),
        # A role, few tokens and a closing event.
        (lambda times: [times[0] - 40, *times, times[-1] + 40], 18_000, 3),
        # A client that is late for each tenth event.
        (lambda times: [times[i + (i % 10 == 9 and i + 1 < len(times))] for i in range(len(times))], 18_000, 40),
        (paired, 18_000, 40),
    ],
)
def test_first_tokens_that_come_alone_are_first(
    tmp_path: Path, change: Callable[[list[int]], list[int]], step_us: int, tokens: int
) -> None:
    stamps, whole = (streams(of, step_us=step_us, tokens=tokens) for of in (change, list))
    layout, stops = found_in(tmp_path, stamps, [len(times) for times in whole])
    assert layout != BUNCHED
    assert [stop.metric for stop in stops] == []
