"""A timeline as Chrome trace events, which Perfetto and chrome://tracing open.

The form is that of "Trace Event Format" (the Chromium project's public document): complete events ``X``,
counters ``C`` and metadata ``M`` in one object; ``ts`` and ``dur`` are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from blis_replay.validate.timeline.tracks import Track, title, tracks

if TYPE_CHECKING:
    from blis_replay.validate.timeline.window import Timeline

Event = dict[str, Any]

# One for all: viewers keep the order of threads, but put processes into one of their own.
_PROCESS = 1


def write_json(shown: Timeline, file: BinaryIO) -> None:
    """Write it event by event; plain ASCII, so that no text of a recording means anything to a reader of the file."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for i, event in enumerate(trace_events(shown)):
        file.write(b",\n" if i else b"\n")
        file.write(json.dumps(event, separators=(",", ":"), allow_nan=False).encode())
    file.write(b"\n]}\n")


def trace_events(shown: Timeline) -> Iterator[Event]:
    """The events, track by track, in order of time within each."""
    yield _metadata("process_name", 0, {"name": title(shown)})
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
