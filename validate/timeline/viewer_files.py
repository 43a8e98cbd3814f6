"""A timeline as the tracks of a trace viewer, written as Chrome trace events (JSON), which ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from blis_replay.base.files import whole_file
from blis_replay.ingest.errors import printable
from blis_replay.validate.errors import ValidateError
from blis_replay.validate.timeline.lanes import SIDES
from blis_replay.validate.timeline.window import Timeline

_LONGEST_TEXT = 200
_TIMES = ("side", "start_us", "end_us")
# Of a step whose schedule() nobody recorded: laid evenly between two that are known.
_INTERPOLATED = "interpolated"


@dataclass(frozen=True)
class Slice:
    """Something that lasts, us from the experiment's zero; ``arguments`` are shown when it is picked."""

    name: str
    start_us: int
    end_us: int
    arguments: Mapping[str, int | str]


@dataclass(frozen=True)
class Track:
    """One line of the viewer: slices one after the other, or ``(at_us, value)`` of a counter.

    ``number``: its place from the top.
    """

    number: int
    name: str
    slices: tuple[Slice, ...] = ()
    samples: tuple[tuple[int, float], ...] = ()


def write_timeline(shown: Timeline, path: Path) -> None:
    """Write a ``.json`` file, event by event; raises ``ValidateError`` for another suffix.

    It is plain ASCII, so that no text of a recording means anything to a reader of the file.
    """
    if path.suffix != ".json":
        raise ValidateError(f"{path}: name a .json file (Chrome trace events)")
    with whole_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for i, event in enumerate(trace_events(shown)):
            file.write(b",\n" if i else b"\n")
            file.write(json.dumps(event, separators=(",", ":"), allow_nan=False).encode())
        file.write(b"\n]}\n")


def tracks(shown: Timeline) -> Iterator[Track]:
    """Steps and counters, then the lanes by request, observed above simulated; all cut off at the window.

    A slice that is cut off has its whole time among its arguments.
    """
    number = 0
    for side in SIDES:
        steps = shown.steps.filter(pl.col("side") == side)
        if steps.height:
            number += 1
            yield Track(number, f"steps {side}", tuple(_step(row, shown) for row in steps.iter_rows(named=True)))
    # Ordered by counter, so that the two sides of one are neighbours.
    for (counter, side), rows in _parts(shown.counters.sort("counter", "side", "at_us"), "counter", "side"):
        number += 1
        samples = tuple(
            (max(at_us, shown.from_us), value) for at_us, value in rows.select("at_us", "value").iter_rows()
        )
        yield Track(number, f"{counter} {side}", samples=samples)
    for (request, side), rows in _parts(shown.lanes.sort("request_index", "side", "start_us"), "request_index", "side"):
        number += 1
        slices = tuple(_segment(row, shown) for row in rows.iter_rows(named=True))
        yield Track(number, f"request {request} {side}", slices)


def _parts(frame: pl.DataFrame, *by: str) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    return iter(frame.partition_by(*by, maintain_order=True, as_dict=True).items())


def _step(row: dict[str, Any], shown: Timeline) -> Slice:
    """Named by its kind alone, so that a viewer adds up the steps of a kind; its number is an argument."""
    prefill, decode = row["prefill_tokens"], row["decode_tokens"]
    if prefill is None or decode is None:
        kind = "step"
    elif prefill and decode:
        kind = "mixed"
    else:
        kind = "prefill" if prefill else "decode" if decode else "empty"
    return _slice(f"{kind}, {_INTERPOLATED}" if row["source"] == _INTERPOLATED else kind, row, {}, shown)


def _segment(row: dict[str, Any], shown: Timeline) -> Slice:
    name = shown.request_ids.get(row["request_index"])
    return _slice(row["segment"], row, {} if name is None else {"request_id": _text(name)}, shown)


def _slice(name: str, row: dict[str, Any], more: dict[str, int | str], shown: Timeline) -> Slice:
    arguments = {
        key: value for key, value in row.items() if value is not None and key not in (*_TIMES, "segment")
    } | more
    start_us, end_us = max(row["start_us"], shown.from_us), min(row["end_us"], shown.until_us)
    if (start_us, end_us) != (row["start_us"], row["end_us"]):
        arguments |= {"whole_start_us": row["start_us"], "whole_duration_us": row["end_us"] - row["start_us"]}
    return Slice(_text(name), start_us, end_us, arguments)


def _text(text: str) -> str:
    """Made printable, and of a length that a viewer can show."""
    return printable(text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…")


Event = dict[str, Any]

# One for all: viewers keep the order of threads, but put processes into one of their own.
_PROCESS = 1


def trace_events(shown: Timeline) -> Iterator[Event]:
    """The events, track by track, in order of time within each."""
    yield _metadata("process_name", 0, {"name": _text(shown.alias)})
    for track in tracks(shown):
        yield from _events(track)


def _events(track: Track) -> Iterator[Event]:
    place = {"pid": _PROCESS, "tid": track.number}
    for at_us, value in track.samples:
        yield {"ph": "C", "name": track.name, "ts": at_us, **place, "args": {"value": value}}
    if track.slices:
        yield _metadata("thread_name", track.number, {"name": track.name})
        yield _metadata("thread_sort_index", track.number, {"sort_index": track.number})
    for part in track.slices:
        times = {"ts": part.start_us, "dur": part.end_us - part.start_us}
        yield {"ph": "X", "name": part.name, **times, **place, "args": dict(part.arguments)}


def _metadata(name: str, thread: int, arguments: dict[str, str | int]) -> Event:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": thread, "args": arguments}
