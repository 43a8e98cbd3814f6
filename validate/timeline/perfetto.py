"""A timeline as Perfetto's trace packets.

The messages are the few that are needed of ``trace_packet.proto``, ``track_descriptor.proto``,
``counter_descriptor.proto``, ``track_event.proto`` and ``debug_annotation.proto``,
with the numbers that Perfetto's reference documents (perfetto.dev/docs/reference/trace-packet-proto).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO

from blis_replay.validate.timeline.tracks import GROUPS, Slice, Track, title, tracks

if TYPE_CHECKING:
    from blis_replay.validate.timeline.window import Timeline

# message -> field -> (number, type); a type is a scalar's name or a message.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "CounterDescriptor": {},
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
    uuid = _uuid(track)
    descriptor = {"uuid": uuid, "parent_uuid": track.group, "name": track.name, "sibling_order_rank": track.number}
    if track.samples:
        descriptor["counter"] = {}
    yield {"trusted_packet_sequence_id": _SEQUENCE, "track_descriptor": descriptor}
    for at_us, value in track.samples:
        yield _event(at_us, {"type": _COUNTER, "track_uuid": uuid, "double_counter_value": value})
    for part in track.slices:
        begin = {"type": _SLICE_BEGIN, "track_uuid": uuid, "name": part.name, "debug_annotations": _arguments(part)}
        yield _event(part.start_us, begin)
        yield _event(part.end_us, {"type": _SLICE_END, "track_uuid": uuid})


def _uuid(track: Track) -> int:
    """Beside those of the groups."""
    return 1000 + track.number


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
