"""A timeline as a file of Chrome trace events (JSON), which ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from blis_replay.base.errors import printable
from blis_replay.base.files import whole_file
from blis_replay.validate.timeline.lanes import SIDES
from blis_replay.validate.timeline.window import Timeline

_LONGEST_TEXT = 200
_TIMES = ("side", "start_us", "end_us", "segment")
# Of a step whose schedule() nobody recorded: laid evenly between two that are known.
_INTERPOLATED = "interpolated"
# One process for all: viewers keep the order of threads, but put processes into one of their own.
_PROCESS = 1

Event = dict[str, Any]


def write_timeline(shown: Timeline, path: Path) -> None:
    """Write the file, event by event.

    It is plain ASCII, so that no text of a recording means anything to a reader of the file.
    """
    with whole_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for i, event in enumerate(trace_events(shown)):
            file.write(b",\n" if i else b"\n")
            file.write(json.dumps(event, separators=(",", ":"), allow_nan=False).encode())
        file.write(b"\n]}\n")


def trace_events(shown: Timeline) -> Iterator[Event]:
    """Steps and counters, then the lanes by request, observed above simulated; all cut off at the window.

    A thread is a line of the viewer, numbered from the top; its events are in order of time.
    """
    yield _metadata("process_name", 0, {"name": _text(shown.alias)})
    number = 0
    for side in SIDES:
        steps = shown.steps.filter(pl.col("side") == side)
        if steps.height:
            number += 1
            yield from _thread(number, f"steps {side}")
            for row in steps.iter_rows(named=True):
                yield _slice(number, _kind(row), row, shown)
    # Ordered by counter, so that the two sides of one are neighbours.
    for (counter, side), rows in _parts(shown.counters.sort("counter", "side", "at_us"), "counter", "side"):
        number += 1
        for at_us, value in rows.select("at_us", "value").iter_rows():
            place = {"ts": max(at_us, shown.from_us), "pid": _PROCESS, "tid": number}
            yield {"ph": "C", "name": f"{counter} {side}", **place, "args": {"value": value}}
    worst_first = (pl.col("request_index") != (-1 if shown.worst is None else shown.worst), "request_index")
    for (request, side), rows in _parts(shown.lanes.sort(*worst_first, "side", "start_us"), "request_index", "side"):
        number += 1
        largest = ", largest error" if request == shown.worst else ""
        yield from _thread(number, f"request {request} {side}{largest}")
        name = shown.request_ids.get(request)
        more = {} if name is None else {"request_id": _text(name)}
        for row in rows.iter_rows(named=True):
            yield _slice(number, row["segment"], row, shown, more)


def _parts(frame: pl.DataFrame, *by: str) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    return iter(frame.partition_by(*by, maintain_order=True, as_dict=True).items())


def _kind(row: dict[str, Any]) -> str:
    """The name of a step: its kind alone, so that a viewer adds up the steps of a kind."""
    prefill, decode = row["prefill_tokens"], row["decode_tokens"]
    if prefill is None or decode is None:
        kind = "step"
    elif prefill and decode:
        kind = "mixed"
    else:
        kind = "prefill" if prefill else "decode" if decode else "empty"
    return f"{kind}, {_INTERPOLATED}" if row["source"] == _INTERPOLATED else kind


def _slice(number: int, name: str, row: dict[str, Any], shown: Timeline, more: dict[str, str] | None = None) -> Event:
    """What lasts; its arguments are shown when it is picked, with its whole time where it is cut off."""
    arguments = {key: value for key, value in row.items() if value is not None and key not in _TIMES} | (more or {})
    start_us, end_us = max(row["start_us"], shown.from_us), min(row["end_us"], shown.until_us)
    if (start_us, end_us) != (row["start_us"], row["end_us"]):
        arguments |= {"whole_start_us": row["start_us"], "whole_duration_us": row["end_us"] - row["start_us"]}
    times = {"ts": start_us, "dur": end_us - start_us}
    return {"ph": "X", "name": _text(name), **times, "pid": _PROCESS, "tid": number, "args": arguments}


def _text(text: str) -> str:
    """Made printable, and of a length that a viewer can show."""
    return printable(text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…")


def _thread(number: int, name: str) -> Iterator[Event]:
    yield _metadata("thread_name", number, {"name": name})
    yield _metadata("thread_sort_index", number, {"sort_index": number})


def _metadata(name: str, thread: int, arguments: dict[str, str | int]) -> Event:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": thread, "args": arguments}
