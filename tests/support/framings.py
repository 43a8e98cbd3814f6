"""OTLP spans in every framing in which a collector or a hand leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from blis_replay_labs.planted.experiment import SyntheticTruth
from blis_replay_labs.planted.writers_otlp import Messages, compact, json_lines, messages_of


def _length_framed(contents: Iterable[bytes]) -> bytes:
    """Each content behind its length in four bytes, big-endian."""
    return b"".join(len(content).to_bytes(4, "big") + content for content in contents)


def _zstd(content: bytes) -> bytes:
    import pyarrow as pa

    compressed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return compressed


def _in_one(messages: Messages) -> dict[str, Any]:
    return {"resourceSpans": [spans for message in messages for spans in message["resourceSpans"]]}


# File name -> how the messages stand in it: lines, frames, frames compressed one by one or the whole of it
# (newer collectors), and what a hand makes of them, one object, an array or the body of one request.
FRAMINGS: dict[str, Callable[[Messages], bytes]] = {
    "traces.json": json_lines,
    "traces.json.zst": lambda messages: _length_framed(_zstd(compact(message)) for message in messages),
    "traces-stream.json.zst": lambda messages: _zstd(json_lines(messages)),
    "traces-one.json": lambda messages: json.dumps(_in_one(messages), indent=1).encode(),
    "traces-array.json": lambda messages: json.dumps(messages).encode(),
}


def traces_in(truth: SyntheticTruth, name: str) -> bytes:
    """The spans of an experiment as a file called ``name``, one of ``FRAMINGS``, has them."""
    return FRAMINGS[name](messages_of(truth))
