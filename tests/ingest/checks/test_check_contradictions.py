"""Instruments that contradict each other: what was planted in a recording is objected to by the check that can tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay_labs.planted.causes import cut_off, missing
from blis_replay_labs.planted.fault_list import FAULTS
from blis_replay_labs.planted.faults import LOADS, Fault, Recorded, drawn, planted_case, taken


def objections(fault: Fault) -> list[Finding]:
    return [finding for finding in run_checks(planted_case(fault).recording)[0] if finding.severity == "unusable"]


def fault(name: str, size: str) -> Fault:
    return next(f for f in FAULTS if (f.name, f.size) == (name, size))


# What is planted, to what depth it is recorded; the check that objects, to which metric ("": nothing is judged), and
# with which number in its sentence.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "depth", "check", "metric", "number"),
    [
        ("end of the recording missing", "30 %", "full", "ledger", "", "requests sent: 360 against 252"),
        ("missing requests", "20 %", "client", "ledger", "", "requests sent: 360 against 288"),
        ("missing requests", "10 %", "steps", "ledger", "", "requests in flight"),
        ("steps of another run", "all of them", "steps", "ledger", "", "requests in flight"),
        ("steps of another run", "all of them", "full", "ledger", "", "requests in flight"),
        ("sends stamped late", "20 ms", "full", "clocks", "ttft", "too short"),
        ("requests recorded twice", "5 %", "client", "completeness", "", "18 requests repeat"),
        ("ignore_eos believed", "all lengths 160", "full", "ledger", "", "decoded tokens: 27,110 against 57,240"),
        ("ignore_eos believed", "all lengths 160", "client", "output_length", "", "r 0.9"),
        ("role chunk stamped as first token", "TTFT 1 ms, 100 %", "client", "token_events", "ttft", "1.00 ms"),
        ("role chunk stamped as first token", "TTFT 1 ms, 30 %", "client", "token_events", "ttft", "108 of 360"),
        ("step clock", "-2 s", "steps", "clocks", "step_time", "stamped 2007.1 ms early"),
        ("server clock", "+0.1 s", "full", "clocks", "segments", "ms ahead of"),
        ("coarse send stamps", "1 s", "full", "clocks", "", "1000.0 ms"),
        ("client that polls", "every 100 ms", "client", "clocks", "ttft", "steps of 100.0 ms, half of it is 50 %"),
        ("requests recorded twice", "20 %", "client", "completeness", "", "72 of 432 requests have send, first token"),
        (
            "prompt lengths without the template",
            "40 % short",
            "full",
            "ledger",
            "",
            "307,560 against 184,537",
        ),
        (
            "prompts counted by another tokenizer",
            "x 1.25",
            "full",
            "ledger",
            "",
            "307,560 against 384,449",
        ),
    ],
)
def test_the_check_that_can_tell_objects(
    name: str, size: str, depth: str, check: str, metric: str, number: str
) -> None:
    planted = replace(fault(name, size), depth=depth)  # type: ignore[arg-type]
    found = [f for f in objections(planted) if (f.check, f.metric) == (check, metric)]
    assert any(number in one.message for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("slow client", "2 ms a token"), ("server stood still", "once, for 3 s at 20 s")]
)
def test_time_outside_of_the_engine_is_no_contradiction_where_journeys_tell_it(name: str, size: str) -> None:
    """A slow client has requests in flight 20 % longer than the engine has them; a halt keeps them out of the queue."""
    assert objections(fault(name, size)) == []


@pytest.mark.slow
def test_without_journeys_the_steps_tell_that_more_was_computed_than_sent() -> None:
    """1,139.9 tokens per prompt, of which the recording has 60 %: every step is recorded, and no prompt is cached."""
    recording = planted_case(fault("prompt lengths without the template", "40 % short")).recording
    found = run_checks(replace(recording, lifecycles=recording.lifecycles.where("false")))[0]
    (objection,) = [one for one in found if (one.check, one.severity) == ("ledger", "unusable")]
    assert objection.measured == {
        "prompt tokens: client's requests": 184_537,
        "prompt tokens: step records": pytest.approx(307_830, abs=1),
    }


@pytest.mark.slow
def test_without_journeys_a_slow_client_contradicts_the_steps() -> None:
    found = objections(replace(fault("slow client", "2 ms a token"), depth="steps"))
    assert {finding.check for finding in found} == {"ledger"}


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("depth", ["full", "steps", "client"])
def test_nothing_is_objected_to_where_nothing_is_wrong(load: str, depth: str) -> None:
    assert objections(Fault("", (), depth, load)) == []  # type: ignore[arg-type]


def without_a_count(recording: Recording, *columns: pl.Series | pl.Expr) -> Recording:
    """Only what the client wrote, with these columns."""
    requests = rows_of(recording.requests.frame().with_columns(*columns))
    return replace(recording, requests=requests, stages=(), prefix=None)


def messages(recording: Recording) -> list[str]:
    return [f"{found.severity}: {found.message}" for found in run_checks(recording)[0] if found.check == "ledger"]


def a_fifth_missing(recording: Recording) -> Recording:
    n = recording.requests.height
    return taken(Recorded(recording, None, np.arange(n)), np.flatnonzero(~drawn(n, 0.2))).recording


@pytest.mark.slow
def test_numbers_in_ids_and_the_beat_of_a_constant_rate_show_what_a_client_lost() -> None:
    """Of 360 requests 72 are taken away; one gap in a hundred of the beat is off by at most 2 of 100 ms."""
    served = planted_case(Fault("", (), "client")).recording
    numbered = without_a_count(served, pl.format("bench-{}", "request_index").alias("request_id"))
    jitter_us = np.random.default_rng(1).integers(0, 2_000, 360)
    beats = without_a_count(served, pl.Series("arrival_us", np.arange(360) * 100_000 + jitter_us))
    for whole, source in ((numbered, "numbers in ids"), (beats, "constant rate")):
        assert messages(whole) == ["note: sources agree on requests sent (2 sources)"]
        (lost,) = messages(a_fifth_missing(whole))
        assert lost.startswith(f"unusable: {source} against client's requests: requests sent: 360 against 288")


@pytest.mark.slow
def test_what_nothing_counts_is_said_to_be_uncounted() -> None:
    """Requests that come at random and have random ids show no hole; a load that ends early may have been stopped."""
    lost = planted_case(Fault("", (missing(0.2),), "client")).recording
    (uncounted,) = messages(without_a_count(lost))
    assert uncounted.startswith("note: nothing but the client's file counts its requests")
    findings = run_checks(planted_case(Fault("", (cut_off(0.3),), "client")).recording)[0]
    (early,) = (found for found in findings if found.check == "completeness")
    assert early.message.startswith("load stage 1 announces 20 s, and its last request was sent after 11.2 s")
    assert [found.severity for found in findings if found.check == "ledger"] == ["note"]
