"""OTLP JSON bodies as protobuf: ids are hex there, where the JSON form of protobuf has base64."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from blis_replay.ingest.collector.batches import MalformedError
from blis_replay.ingest.printable import printable
from blis_replay.ingest.readers.documents import DECODE_ERRORS

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
# Objects take many times the size of their text: one at a time.
_DECODING = threading.Lock()


def protobuf_of(text: bytes) -> bytes:
    """The serialised ``ExportTraceServiceRequest`` of an OTLP JSON text; :class:`MalformedError` if it is none.

    An id that is no hex becomes empty, so that its span alone is rejected.
    """
    with _DECODING:
        try:
            document = _OBJECT.decode(text)
            for span in _spans(document):
                _to_base64(span, "traceId", "spanId", "parentSpanId")
                for link in _objects(span, "links"):
                    _to_base64(link, "traceId", "spanId")
            request = ExportTraceServiceRequest()
            json_format.ParseDict(document, request, ignore_unknown_fields=True)
        except (*DECODE_ERRORS, json_format.ParseError) as error:
            raise MalformedError(printable(f"no OTLP JSON: {' '.join(str(error).split())[:200]}")) from error
        message: bytes = request.SerializeToString()
        return message


def _spans(document: Any) -> Iterator[dict[str, Any]]:
    for resource_spans in _objects(document, "resourceSpans"):
        for scope_spans in _objects(resource_spans, "scopeSpans"):
            yield from _objects(scope_spans, "spans")


def _objects(parent: Any, key: str) -> list[dict[str, Any]]:
    children = parent.get(key) if isinstance(parent, dict) else None
    return [child for child in children if isinstance(child, dict)] if isinstance(children, list) else []


def _to_base64(holder: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if isinstance(identity := holder.get(key), str):
            raw = bytes.fromhex(identity) if _HEX.fullmatch(identity) else b""
            holder[key] = base64.b64encode(raw).decode("ascii")
