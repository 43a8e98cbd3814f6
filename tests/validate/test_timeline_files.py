"""The file of a timeline, read by the rules of Chrome's trace events."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from planted import PLANTED, Planted, planted_recording

from blis_replay.ingest.recording import Stage
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import replay
from blis_replay.validate.timeline.viewer_files import write_timeline
from blis_replay.validate.timeline.window import Timeline, timeline

SPEC = replace(PLANTED, stages=(Stage(0, 8.0, 6_000_000),))
HOSTILE = '</script><script>alert(1)</script>","ph":"B"}\x1b[31m\x00\ud800\u202e' + "x" * 100_000


@pytest.fixture(scope="module")
def planted() -> Planted:
    return planted_recording(seed=3, spec=SPEC)


@pytest.fixture(scope="module")
def shown(planted: Planted) -> Timeline:
    return timeline(replay(planted.recording, planted.release), 1_000_000, 4_000_000)


def as_json(shown: Timeline, folder: Path) -> list[dict[str, Any]]:
    write_timeline(shown, folder / "trace.json")
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
    return events


def slices_of_json(events: list[dict[str, Any]]) -> dict[str, list[tuple[str, int, int]]]:
    """By the name of a thread: name, begin and end of its slices, us."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    return dict(found)


def test_json_follows_the_rules_of_chrome_trace_events(shown: Timeline, tmp_path: Path) -> None:
    """Trace Event Format: every event has a phase, a name, process and thread; X has ts and dur, C numbers, M names."""
    events = as_json(shown, tmp_path)
    assert {event["ph"] for event in events} == {"X", "C", "M"}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] > 0 and 1_000_000 <= event["ts"] <= event["ts"] + event["dur"] <= 4_000_000
        if event["ph"] == "C":
            assert all(isinstance(value, float) for value in event["args"].values())
    assert sum(event["ph"] == "X" for event in events) == shown.lanes.height + shown.steps.height
    assert sum(event["ph"] == "C" for event in events) == shown.counters.height


def test_a_step_says_what_was_in_its_batch(shown: Timeline, tmp_path: Path) -> None:
    """The first one with prefill; a perfect simulator has it on both sides."""
    row = shown.steps.filter(pl.col("side") == "simulated", pl.col("prefill_tokens") > 0).row(0, named=True)
    told, number = ("prefill_tokens", "decode_tokens", "running"), row["step"]
    in_json = [event["args"] for event in as_json(shown, tmp_path) if event["name"] == "mixed"]
    in_json = [arguments for arguments in in_json if arguments["step"] == number]
    for arguments in in_json:
        assert [arguments[key] for key in told] == [row[key] for key in told]
    assert len(in_json) == 2


def test_steps_are_named_by_their_kind_and_say_where_nobody_saw_them(shown: Timeline, tmp_path: Path) -> None:
    """A viewer adds up what has one name, so a number is no part of it."""
    interpolated = shown.steps.with_columns(pl.lit("interpolated").alias("source"))
    tracks = slices_of_json(as_json(replace(shown, steps=interpolated), tmp_path))
    names = {name for track in ("steps observed", "steps simulated") for name, _begin, _end in tracks[track]}
    assert {name.partition(", ")[2] for name in names} == {"interpolated"}
    assert {"decode, interpolated", "mixed, interpolated"} <= names


def test_a_viewer_adds_up_the_steps_of_a_kind(shown: Timeline, tmp_path: Path) -> None:
    """``SELECT name, sum(dur) FROM slice GROUP BY name`` on one track: the time of steps with such a batch, in us."""
    totals: Counter[str] = Counter()
    for name, begin_us, end_us in slices_of_json(as_json(shown, tmp_path))["steps simulated"]:
        totals[name] += end_us - begin_us
    prefill, decode = pl.col("prefill_tokens") > 0, pl.col("decode_tokens") > 0
    lasts_us = pl.min_horizontal("end_us", shown.until_us) - pl.max_horizontal("start_us", shown.from_us)
    steps = shown.steps.filter(pl.col("side") == "simulated").with_columns(lasts_us=lasts_us)
    kinds = {"mixed": prefill & decode, "prefill": prefill & ~decode, "decode": ~prefill & decode}
    expected = {name: steps.filter(kind)["lasts_us"].sum() for name, kind in kinds.items()}
    assert totals == {name: total for name, total in expected.items() if total}


def test_hostile_names_are_text_and_nothing_else(planted: Planted, tmp_path: Path) -> None:
    """An alias and request ids with markup, quotes, control characters, half a surrogate pair and 100,000 letters."""
    requests = planted.recording.requests.frame().with_columns(
        pl.lit(HOSTILE.replace("\ud800", "")).alias("request_id")
    )
    run = replay(replace(planted.recording, alias=HOSTILE, requests=rows_of(requests)), planted.release)
    hostile = timeline(run, 1_000_000, 4_000_000)
    events = as_json(hostile, tmp_path)
    text = (tmp_path / "trace.json").read_bytes()
    assert max(text) < 128 and not [c for c in text if c < 32 and c != ord("\n")]
    assert {event["ph"] for event in events} == {"X", "C", "M"}
    ids = {event["args"]["request_id"] for event in events if "request_id" in event.get("args", {})}
    assert {len(name) < 300 and name.isprintable() for name in ids} == {True}
    assert any(slices_of_json(events).values())
