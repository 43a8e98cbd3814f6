"""A timeline as the tracks of a viewer, written as Chrome trace events (JSON) or as Perfetto's trace packets.

The protobuf messages are the few that are needed of ``trace_packet.proto``, ``track_descriptor.proto``,
``counter_descriptor.proto``, ``track_event.proto`` and ``debug_annotation.proto``,
with the numbers that Perfetto's reference documents (perfetto.dev/docs/reference/trace-packet-proto).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from blis_replay.compiled.files import whole_file
from blis_replay.ingest.errors import printable
from blis_replay.validate.errors import ValidateError
from blis_replay.validate.timeline.lanes import SIDES
from blis_replay.validate.timeline.window import Timeline

ENGINE, REQUESTS = 1, 2
GROUPS = {ENGINE: "engine", REQUESTS: "requests"}
FORMATS = (".json", ".pftrace")
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

    ``group``: ENGINE or REQUESTS; ``number``: its place, unique over both.  ``axis``: counters that
    have the same are drawn on one scale (Perfetto's packets only; Chrome's events cannot say it).
    """

    group: int
    number: int
    name: str
    slices: tuple[Slice, ...] = ()
    samples: tuple[tuple[int, float], ...] = ()
    axis: str = ""


def write_timeline(shown: Timeline, path: Path) -> None:
    """Write it as Chrome trace events (``.json``) or Perfetto's trace packets (``.pftrace``).

    Raises ``ValidateError`` for another suffix.
    """
    if path.suffix not in FORMATS:
        raise ValidateError(f"{path}: name a .json (Chrome trace events) or a .pftrace (Perfetto) file")
    with whole_file(path) as file:
        (write_json if path.suffix == ".json" else write_protobuf)(shown, file)


def title(shown: Timeline) -> str:
    """The experiment, made printable."""
    return _text(shown.alias)


def tracks(shown: Timeline) -> Iterator[Track]:
    """Steps and counters, then the lanes by request, observed above simulated; all cut off at the window.

    A slice that is cut off has its whole time among its arguments.
    """
    number = 0
    for side in SIDES:
        steps = shown.steps.filter(pl.col("side") == side)
        if steps.height:
            number += 1
            yield Track(
                ENGINE, number, f"steps {side}", tuple(_step(row, shown) for row in steps.iter_rows(named=True))
            )
    # Ordered by counter, so that the two sides of one are neighbours.
    for (counter, side), rows in _parts(shown.counters.sort("counter", "side", "at_us"), "counter", "side"):
        number += 1
        samples = tuple(
            (max(at_us, shown.from_us), value) for at_us, value in rows.select("at_us", "value").iter_rows()
        )
        yield Track(ENGINE, number, f"{counter} {side}", samples=samples, axis=counter)
    for (request, side), rows in _parts(shown.lanes.sort("request_index", "side", "start_us"), "request_index", "side"):
        number += 1
        slices = tuple(_segment(row, shown) for row in rows.iter_rows(named=True))
        yield Track(REQUESTS, number, f"request {request} {side}", slices)


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


# message -> field -> (number, type); a type is a scalar's name or a message.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "CounterDescriptor": {"y_axis_share_key": (7, "STRING")},
    "TrackDescriptor": {
        "uuid": (1, "UINT64"),
        "name": (2, "STRING"),
        "parent_uuid": (5, "UINT64"),
        "counter": (8, "CounterDescriptor"),
        "child_ordering": (11, "INT32"),
        "sibling_order_rank": (12, "INT32"),
    },
    "DebugAnnotation": {"name": (10, "STRING"), "int_value": (4, "INT64"), "string_value": (6, "STRING")},
    "TrackEvent": {
        "type": (9, "INT32"),
        "track_uuid": (11, "UINT64"),
        "name": (23, "STRING"),
        "double_counter_value": (44, "DOUBLE"),
        "debug_annotations": (4, "repeated DebugAnnotation"),
    },
    "TracePacket": {
        "timestamp": (8, "UINT64"),
        "trusted_packet_sequence_id": (10, "UINT32"),
        "track_event": (11, "TrackEvent"),
        "track_descriptor": (60, "TrackDescriptor"),
    },
    "Trace": {"packet": (1, "repeated TracePacket")},
}
_PACKAGE = "blis_replay.timeline"
# TrackEvent.Type and TrackDescriptor.ChildTracksOrdering.
_SLICE_BEGIN, _SLICE_END, _COUNTER, _EXPLICIT = 1, 2, 4, 3
_SEQUENCE = 1
_NS_PER_US = 1000


def write_protobuf(shown: Timeline, file: BinaryIO) -> None:
    """Write it packet by packet; the parts of a ``Trace`` may stand one after the other."""
    trace = _trace_class()
    for packet in _packets(shown):
        file.write(trace(packet=[packet]).SerializeToString())


def _packets(shown: Timeline) -> Iterator[dict[str, Any]]:
    for number, name in GROUPS.items():
        group = {
            "uuid": number,
            "name": f"{name}, {title(shown)}",
            "child_ordering": _EXPLICIT,
            "sibling_order_rank": number,
        }
        yield {"trusted_packet_sequence_id": _SEQUENCE, "track_descriptor": group}
    for track in tracks(shown):
        yield from _of_track(track)


def _of_track(track: Track) -> Iterator[dict[str, Any]]:
    uuid = 1000 + track.number  # beside those of the groups
    descriptor = {"uuid": uuid, "parent_uuid": track.group, "name": track.name, "sibling_order_rank": track.number}
    if track.samples:
        descriptor["counter"] = {"y_axis_share_key": track.axis}
    yield {"trusted_packet_sequence_id": _SEQUENCE, "track_descriptor": descriptor}
    for at_us, value in track.samples:
        yield _event(at_us, {"type": _COUNTER, "track_uuid": uuid, "double_counter_value": value})
    for part in track.slices:
        begin = {"type": _SLICE_BEGIN, "track_uuid": uuid, "name": part.name, "debug_annotations": _arguments(part)}
        yield _event(part.start_us, begin)
        yield _event(part.end_us, {"type": _SLICE_END, "track_uuid": uuid})


def _event(at_us: int, event: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": at_us * _NS_PER_US, "trusted_packet_sequence_id": _SEQUENCE, "track_event": event}


def _arguments(part: Slice) -> list[dict[str, int | str]]:
    return [
        {"name": name, ("string_value" if isinstance(value, str) else "int_value"): value}
        for name, value in part.arguments.items()
    ]


@cache
def _trace_class() -> Any:
    """The class of ``Trace``, of the table above; in a pool of its own, so that it meets nobody else's Perfetto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="blis_replay/timeline.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            message.field.add(name=field, number=number, **_field_type(descriptor_pb2.FieldDescriptorProto, kind))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Trace"))


def _field_type(proto: Any, kind: str) -> dict[str, Any]:
    label = proto.LABEL_REPEATED if kind.startswith("repeated ") else proto.LABEL_OPTIONAL
    kind = kind.removeprefix("repeated ")
    if kind in _MESSAGES:
        return {"label": label, "type": proto.TYPE_MESSAGE, "type_name": f".{_PACKAGE}.{kind}"}
    return {"label": label, "type": getattr(proto, f"TYPE_{kind}")}


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
