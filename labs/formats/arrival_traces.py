"""Published arrival traces without latencies: Azure LLM and Mooncake."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.readers.documents import DECODE_ERRORS, microseconds, quoted_value, tokens
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.records import decoded_records, named_rows, numbered_lines
from blis_replay.ingest.readers.requests import (
    NONE,
    RawPrompts,
    Request,
    RequestsRead,
    Row,
    UnusableError,
    gathered,
    shared_units,
)


def arrival(arrival_us: int | None, prompt: object, output: object) -> Row:
    """A row of a trace that has no latencies; :class:`UnusableError` if the request could not be served."""
    prompt_tokens, output_tokens = tokens(prompt), tokens(output)
    if arrival_us is None:
        raise UnusableError("no usable arrival time")
    if prompt_tokens is None:
        raise UnusableError(f"a prompt length of {quoted_value(prompt)}")
    if output_tokens is None:
        raise UnusableError(f"an output length of {quoted_value(output)}")
    return {
        "sent_us": arrival_us,
        "prompt_tokens": prompt_tokens,
        "usage_output_tokens": output_tokens,
        "output_tokens_reported": output_tokens,
        "status": "ok",
    }


# -- Azure LLM inference traces of 2023 and 2024: when requests came, and how long they were ------

_AZURE_LLM_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_LLM_HEADER = re.compile(rb"(?:\xef\xbb\xbf)?[^\r\n]*\bTIMESTAMP,ContextTokens,GeneratedTokens\b")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\s?(?:(Z)|([+-])(\d\d):?(\d\d))?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def recognises_azure_llm(head: bytes) -> bool:
    """Whether the first line names the three columns."""
    return _AZURE_LLM_HEADER.match(head) is not None


def read_azure_llm(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests in file order.

    Stamps are wall-clock times (UTC where none is named) of 100 ns, rounded to us.  Raises
    :class:`RecordingError` if a column is missing; a row that could not be served is rejected
    and counted by line.
    """
    records = named_rows(file, _AZURE_LLM_COLUMNS, "take the trace as it was published")
    rows, _events = gathered(file, records, _azure_llm_request)
    return RequestsRead(rows, "server", "epoch")


def _azure_llm_request(values: Mapping[str, str]) -> Request:
    stamp, context, generated = (values[name] for name in _AZURE_LLM_COLUMNS)
    return arrival(epoch_us(stamp), context, generated), ()


def epoch_us(stamp: str) -> int | None:
    """``YYYY-MM-DD HH:MM:SS`` with 0 to 9 decimals and an optional offset as us of the epoch, else ``None``."""
    match = _STAMP.fullmatch(stamp.strip())
    if match is None:
        return None
    day, clock, decimals, _utc, sign, hours, minutes = match.groups()
    offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)) * (-1 if sign == "-" else 1)
    try:
        whole = datetime.fromisoformat(f"{day} {clock}").replace(tzinfo=timezone(offset))
    except ValueError:
        return None
    ns = int((decimals or "").ljust(9, "0"))
    return (whole - _EPOCH) // timedelta(microseconds=1) + (ns + 500) // 1000


# -- Mooncake: JSON lines with arrivals, lengths and the prompt's blocks; AIPerf's dialect of them too

# A list of empty arrays takes 25 times its text.
MAX_LINE_BYTES = 16 << 20
# Tokens of a block: in the released traces, and in those made from Qwen's.
BLOCK_TOKENS = (512, 16)
_LARGEST_KEY = (1 << 63) - 1
_FIELD = re.compile(rb'"input_length"\s*:')
_OTHER_FIELD = re.compile(rb'"(?:output_length|timestamp|hash_ids)"\s*:')


class _Record(msgspec.Struct, gc=False):
    timestamp: Any = None
    input_length: Any = None
    output_length: Any = None
    hash_ids: Any = None


_RECORD = msgspec.json.Decoder(_Record)


@dataclass
class _Blocks:
    """Block keys of the requests so far; ``fitting``: requests whose number of keys fits a block size."""

    counts: array[int] = field(default_factory=lambda: array("q"))
    keys: array[int] = field(default_factory=lambda: array("q"))
    named: int = 0
    fitting: dict[int, int] = field(default_factory=lambda: dict.fromkeys(BLOCK_TOKENS, 0))

    def request(self, record: _Record) -> Request:
        """The row of a record; :class:`UnusableError` if it has none."""
        row = arrival(_arrival_us(record.timestamp), record.input_length, record.output_length)
        keys, prompt_tokens = _keys(record.hash_ids), int(str(row["prompt_tokens"]))
        self.counts.append(len(keys))
        self.keys.extend(keys)
        self.named += bool(keys)
        for size in self.fitting if keys else ():
            self.fitting[size] += len(keys) in (prompt_tokens // size, -(-prompt_tokens // size))
        return row, ()


def recognises_mooncake(head: bytes) -> bool:
    """Whether the first line is an object with a prompt length and another field of the format."""
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().split(b"\n", 1)[0]
    if not line.startswith(b"{") or _FIELD.search(line) is None or _OTHER_FIELD.search(line) is None:
        return False
    try:
        return _RECORD.decode(line).input_length is not None
    except DECODE_ERRORS:
        return len(line) == len(head)  # longer than the head, so cut


def read_mooncake(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests in file order on a clock that counts from the trace's start, and their block identities.

    Equal leading ``hash_ids`` are a shared prefix.  A line without ``timestamp``, such as a turn
    that follows another by a ``delay``, has no arrival; it and what could not be served is
    rejected and counted by line.
    """
    blocks = _Blocks()
    rows, _events = gathered(file, decoded_records(file, numbered_lines(file, MAX_LINE_BYTES), _RECORD), blocks.request)
    prefix, remarks = _prefix(blocks)
    return RequestsRead(rows, "server", "relative", prefix=prefix, remarks=remarks)


def _arrival_us(timestamp_ms: object) -> int | None:
    ns = microseconds(timestamp_ms)  # a thousandth of what a number of seconds would be
    return None if ns is None or ns < 0 else (ns + 500) // 1000


def _keys(hash_ids: object) -> list[int]:
    if hash_ids is None:
        return []
    if not isinstance(hash_ids, list) or not all(type(key) is int and 0 <= key <= _LARGEST_KEY for key in hash_ids):
        raise UnusableError("hash_ids is not a list of whole numbers below 2^63")
    return hash_ids


def _prefix(blocks: _Blocks) -> tuple[RawPrompts | None, tuple[str, ...]]:
    """The identities at the block size that fits the most requests; none if it fits no more than half of them."""
    if not blocks.named:
        return None, ()
    size = max(BLOCK_TOKENS, key=lambda tokens: blocks.fitting[tokens])
    fitting = f"{blocks.fitting[size]:,} of {blocks.named:,} requests"
    if 2 * blocks.fitting[size] <= blocks.named:
        sizes = " or ".join(map(str, BLOCK_TOKENS))
        return None, (f"prefix identities: hash_ids are in blocks of {sizes} tokens in no more than {fitting}",)
    remarks = () if blocks.fitting[size] == blocks.named else (f"hash_ids for every {size} tokens but in {fitting}",)
    source = f"hash_ids of the trace, one for {size} tokens"
    counts, keys = (np.array(numbers, np.int64) for numbers in (blocks.counts, blocks.keys))
    return prompts_of_blocks(source, size, counts, keys), remarks


def prompts_of_blocks(source: str, block_tokens: int, counts: Int64s, keys: Int64s) -> RawPrompts:
    """The prompts of requests that each own the next ``counts[i]`` of ``keys``, one for ``block_tokens`` tokens.

    Equal keys are equal blocks if those before them are; requests without keys are not known.
    """
    starts = np.cumsum(counts) - counts
    numbers: dict[bytes, int] = {}
    prompt = np.full(len(counts), NONE, np.int64)
    first: list[int] = []
    for i in np.flatnonzero(counts).tolist():
        own = keys[starts[i] : starts[i] + counts[i]].tobytes()
        prompt[i] = numbers.setdefault(own, len(numbers))
        if prompt[i] == len(first):
            first.append(i)
    parent, shared = shared_units(starts[first], counts[first], keys)
    return RawPrompts(source, prompt, parent, shared * block_tokens, counts[first] * block_tokens)


AZURE_LLM = RequestFormat("azure-llm", recognises_azure_llm, read=read_azure_llm, latencies=False)
MOONCAKE = RequestFormat("mooncake", recognises_mooncake, read=read_mooncake, latencies=False)
