"""A timeline as Chrome trace events, which Perfetto and chrome://tracing open.

The form is that of "Trace Event Format" (the Chromium project's public document): complete events ``X``,
counters ``C`` and metadata ``M`` in one object; ``ts`` and ``dur`` are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from blis_replay.validate.timeline_tracks import Track, process_names, tracks

if TYPE_CHECKING:
    from blis_replay.validate.timeline import Timeline

Event = dict[str, Any]


def write_json(shown: Timeline, file: BinaryIO) -> None:
    """Write it event by event; plain ASCII, so that no text of a recording means anything to a reader of the file."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for i, event in enumerate(trace_events(shown)):
        file.write(b",\n" if i else b"\n")
        file.write(json.dumps(event, separators=(",", ":"), allow_nan=False).encode())
    file.write(b"\n]}\n")


def trace_events(shown: Timeline) -> Iterator[Event]:
    """The events, track by track, in order of time within each."""
    for process, name in process_names(shown).items():
        yield _metadata("process_name", process, 0, {"name": name})
        yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for track in tracks(shown):
        yield from _events(track)


def _events(track: Track) -> Iterator[Event]:
    place = {"pid": track.process, "tid": track.number}
    for at_us, value in track.samples:
        yield {"ph": "C", "name": track.name, "ts": at_us, **place, "args": {"value": value}}
    if track.slices:
        yield _metadata("thread_name", *place.values(), {"name": track.name})
        yield _metadata("thread_sort_index", *place.values(), {"sort_index": track.number})
    for part in track.slices:
        yield {
            "ph": "X",
            "name": part.name,
            "ts": part.start_us,
            "dur": part.end_us - part.start_us,
            **place,
            "args": dict(part.arguments),
        }


def _metadata(name: str, process: int, thread: int, arguments: dict[str, str | int]) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}
