"""inference-perf's per-request records by a compiled scan; what it does not take goes to the decoder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.prompt_tree import NONE
from blis_replay.ingest.readers.clients.inference_perf_requests import (
    Hashing,
    Int64s,
    Part,
    body_of,
    decoded_parts,
    failure_of,
    message_of,
    model_of,
)
from blis_replay.ingest.readers.clients.prompt_texts import HASH, PIECE_BYTES, Hashes, PromptTexts
from blis_replay.ingest.readers.documents import DECODE_ERRORS
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.json_records import ObjectScan, objects_of
from blis_replay.ingest.readers.numbers import MAX_TOKENS
from blis_replay.ingest.readers.requests_frame import BATCH_ROWS, READ_SCHEMA
from blis_replay.ingest.scan.lifecycle_records import FIELDS, FULL, MORE, digest_of, scan_records
from blis_replay.ingest.scan.prompt_hashes import hashes_of
from blis_replay.ingest.scan.window import Window

_FIELD = {name: place for place, name in enumerate(FIELDS)}
_ROWS = 8192
_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*(?:\[|(?=\{))")
_OPENING_BYTES = 4096


def scanned_parts(file: RecordedFile, stream: BinaryIO, texts: PromptTexts, limit_bytes: int) -> Iterator[Part]:
    """The records of a file in batches, not in order; their stamps are appended to ``stream``.

    Equal to what the decoder makes of them.  Where something stands between records that is
    none, the rest of the file is read by the decoder alone.
    """
    window, rest = Window(file.chunks()), ObjectScan(file.tally, limit_bytes)
    rows = np.empty((_ROWS, len(FIELDS)), np.int64)
    stamps, body, hashes = np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, HASH)
    held = _Taken([], {}, None)
    while window.refill():
        if rest.base is None and not _opened(window, rest):
            break
        if len(body) < len(window.words):  # memory that is fresh costs as much as reading into it
            stamps, body = np.empty(len(window.text) // 2, np.int64), np.empty_like(window.words)
            hashes = np.empty(len(window.text) // PIECE_BYTES + 1, HASH)
        why = FULL
        while why == FULL:
            read = (window.text, window.words, window.at, window.end)
            why, window.at, found, used = scan_records(*read, rows, stamps, hashes, body.view(np.uint8), body)
            rows[:found, _FIELD["ordinal"]] = np.arange(rest.count + 1, rest.count + 1 + found)
            rest.count += found
            rows[:found, _FIELD["stamps_at"]] += stream.tell() // 8
            stream.write(stamps[:used].data)
            left = _hold(held, rows[:found], window)
            _number_prompts(held.rows[-1], hashes, texts)
            yield from decoded_parts(file, left, stream, texts, _HASHING)
            if sum(map(len, held.rows)) >= BATCH_ROWS:
                yield _part(held)
                held = _Taken([], {}, held.model)
        if why != MORE:
            break
        rest.check_size(file, window.end - window.at)
    if held.rows:
        yield _part(held)
    yield from decoded_parts(file, objects_of(file, window.rest(), rest), stream, texts, _HASHING)


@dataclass
class _Taken:
    """What the scan took: ``rows`` (``FIELDS``), what failed requests ended with, by ordinal, and the first model."""

    rows: list[Int64s]
    errors: dict[int, object]
    model: tuple[int, str] | None


def _opened(window: Window, rest: ObjectScan) -> bool:
    """Whether the file starts as one with records does; the window then stands at the first."""
    opening = _OPENING.match(window.take(window.at, min(window.end, window.at + _OPENING_BYTES)))
    if opening is None:
        return False
    rest.resume(inside_array=opening[0].endswith(b"["))
    window.at += opening.end()
    return True


def _hold(held: _Taken, rows: Int64s, window: Window) -> list[tuple[int, bytes]]:
    """Keep what the scan took of these rows; the records, with their ordinals, that are left to the decoder."""
    taken = rows[:, _FIELD["taken"]] == 1
    for row in rows[taken & (rows[:, _FIELD["error_at"]] >= 0)]:
        try:
            held.errors[int(row[0])] = msgspec.json.decode(_text_of(row, "error", window)) or None
        except DECODE_ERRORS:
            taken[rows[:, 0] == row[0]] = False
    named = rows[taken & (rows[:, _FIELD["model_at"]] >= 0)]
    held.model = held.model or _first_model((int(row[0]), _text_of(row, "request", window)) for row in named)
    held.rows.append(rows[taken])
    return [(int(row[0]), _text_of(row, "record", window)) for row in rows[~taken]]


def _number_prompts(rows: Int64s, hashes: Hashes, texts: PromptTexts) -> None:
    """Put the number of each row's prompt in the place of its digest."""
    names = ("prompt", "prompt_at", "prompt_end", "hashes_at", "hashes")
    found = rows[:, [_FIELD[name] for name in names]].tolist()
    memory = hashes.data  # a slice of it costs a tenth of one of an array
    rows[:, _FIELD["prompt"]] = [
        NONE if begin < 0 else texts.number(digest, end - begin, memory[at : at + count])
        for digest, begin, end, at, count in found
    ]


def _text_of(row: Int64s, field: str, window: Window) -> bytes:
    """The text from ``<field>_at`` to ``<field>_end``."""
    return window.take(int(row[_FIELD[f"{field}_at"]]), int(row[_FIELD[f"{field}_end"]]))


def _part(held: _Taken) -> Part:
    rows = np.concatenate(held.rows)
    columns = dict(zip(FIELDS, rows.T.copy(), strict=True))
    errors = [held.errors.get(ordinal) for ordinal in columns["ordinal"].tolist()]
    ends = {
        "status": pl.Series(["ok" if error is None else failure_of(error) for error in errors], dtype=pl.String),
        "error": pl.Series([None if error is None else message_of(error) for error in errors], dtype=pl.String),
    }
    return Part(
        frame=_frame(pl.DataFrame(columns | ends)),
        ordinals=columns["ordinal"],
        digests=columns["digest"],
        offsets=columns["stamps_at"],
        counts=columns["stamps"],
        prompts=columns["prompt"],
        model=held.model,
    )


def _frame(found: pl.DataFrame) -> pl.DataFrame:
    """``READ_SCHEMA`` of the fields of the scan with ``first_us``, ``status`` and ``error``."""
    ok = pl.col("status") == "ok"
    known = found.select(
        "status",
        "error",
        prompt_tokens=pl.coalesce(_tokens("usage_prompt_tokens"), _tokens("input_tokens")),
        output_tokens_reported=pl.when(ok).then(pl.coalesce(_count("output_tokens"), _count("info_output_tokens"))),
        max_tokens=pl.coalesce(_tokens("max_tokens"), _tokens("max_completion_tokens")),
        ttft_us=pl.when(ok & (pl.col("stamps") > 0)).then(pl.col("first_us") - pl.col("start_us")),
        e2e_us=pl.col("end_us") - pl.col("start_us"),
        cached_prompt_tokens=_count("cached_tokens"),
        sent_us="start_us",
        usage_output_tokens=pl.when(ok).then(_tokens("usage_completion_tokens")),
        ignore_eos=_count("ignore_eos").cast(pl.Boolean),
    )
    unknown = [pl.lit(None, kind).alias(name) for name, kind in READ_SCHEMA.items() if name not in known.columns]
    return known.with_columns(unknown).select(READ_SCHEMA.keys())


def _count(field: str) -> pl.Expr:
    return pl.when(pl.col(field) >= 0).then(pl.col(field))


def _tokens(field: str) -> pl.Expr:
    return pl.when(pl.col(field).is_between(1, MAX_TOKENS - 1)).then(pl.col(field))


def _first_model(requests: Iterable[tuple[int, bytes]]) -> tuple[int, str] | None:
    """The first model that these bodies name, after the ordinal of its record."""
    models = (model_of(ordinal, body_of(msgspec.json.decode(request))) for ordinal, request in requests)
    return next((model for model in models if model), None)


def _record_hash(record: bytes) -> int:
    return digest_of(_words(record), len(record))


def _prompt_hashes(parts: Sequence[bytes]) -> tuple[int, Hashes]:
    ends = np.cumsum([len(part) for part in parts])
    spans = np.column_stack([ends - [len(part) for part in parts], ends])
    spans[[not part for part in parts]] = -1
    chain = np.empty(len(parts[0]) // PIECE_BYTES, HASH)
    return hashes_of(_words(b"".join(parts)), spans.reshape(-1), chain), chain


def _words(content: bytes) -> NDArray[np.uint64]:
    words = np.zeros(len(content) // 8 + 2, np.uint64)
    words.view(np.uint8)[: len(content)] = np.frombuffer(content, np.uint8)
    return words


_HASHING = Hashing(_record_hash, _prompt_hashes)
