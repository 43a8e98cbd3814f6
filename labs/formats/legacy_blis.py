"""The CSV of BLIS before TraceV2 (``--workload traces``): arrivals, and the token ids of prompts and answers."""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.readers.documents import MAX_INTEGER, finite, text
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.records import cells_of, text_lines
from blis_replay.ingest.readers.requests import RawPrefix, RequestsRead, arrival_row, frame_of
from blis_replay.ingest.rows import rows_of


def block_hashes(token_ids: NDArray[np.int64], block_tokens: int) -> list[int]:
    """A key below 2^63 for each full block: equal keys mean equal tokens up to the end of the block.

    The key is a hash of the block's tokens and the key before it (as vLLM chains its own).
    """
    raw = token_ids.astype("<i8").tobytes()
    step = 8 * block_tokens
    keys: list[int] = []
    before = b""
    for start in range(0, len(raw) - step + 1, step):
        before = blake2b(before + raw[start : start + step], digest_size=8).digest()
        keys.append(int.from_bytes(before, "big") >> 1)
    return keys


# A prompt of a million token ids fits.
MAX_LINE_BYTES = 16 << 20
# vLLM's default block: a prefix that is shared beyond the last full block is not cached either.
BLOCK_TOKENS = 16
# A header that says anything, then an arrival, two cells and an array of numbers.
_FIRST_LINES = re.compile(
    rb"[^\r\n]*\r?\n[ \t]*[0-9][0-9.eE+-]*[ \t]*,(?:[^,\"\r\n]*|\"[^\"\r\n]*\"),(?:[^,\"\r\n]*|\"[^\"\r\n]*\"),"
    rb"[ \t]*\"?[ \t]*\[[-0-9, \t]*(?:\]|\Z)"
)
_TOKEN_IDS = msgspec.json.Decoder(list[int])
_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeError, OverflowError)


def recognises(head: bytes) -> bool:
    """Whether the second line is a row of the format; the first is a header that BLIS skips unread."""
    return _FIRST_LINES.match(head) is not None


def read_requests(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests in file order, columns by position, and block identities from their token ids.

    Arrivals are seconds from 0, cut to us as BLIS cuts them.  Of the token ids only their number
    and hashes of whole blocks are kept.  A row that could not be served is rejected and
    counted by line.
    """
    models: list[str] = []
    counts, keys = array("q"), array("q")
    frame = frame_of(_rows(file, models, counts, keys))
    file.tally.records = len(frame)
    source = f"token ids of the prompts, hashed by {BLOCK_TOKENS}"
    prefix = RawPrefix(BLOCK_TOKENS, source, np.array(counts, np.int64), np.array(keys, np.int64))
    return RequestsRead(
        rows_of(frame), "client", "relative", next(iter(models), None), prefix=prefix if len(frame) else None
    )


def _rows(file: RecordedFile, models: list[str], counts: array[int], keys: array[int]) -> Iterator[dict[str, object]]:
    for number, line in text_lines(file, MAX_LINE_BYTES):
        if number == 1 or not line.strip():
            continue
        problem, row, prompt = _row(line)
        if problem:
            file.tally.reject(f"line {number}", problem)
            continue
        model = row.pop("model")
        if isinstance(model, str) and not models:
            models.append(model)
        hashes = block_hashes(prompt, BLOCK_TOKENS)
        counts.append(len(hashes))
        keys.extend(hashes)
        yield row


def _row(line: str) -> tuple[str, dict[str, object], NDArray[np.int64]]:
    """What is wrong with a line, or its row (with its ``model``) and the token ids of its prompt."""
    none = np.empty(0, np.int64)
    try:
        cells = cells_of(line)
        if len(cells) < 5:
            return f"{len(cells)} columns where at least 5 are needed", {}, none
        prompt, output = (np.array(_TOKEN_IDS.decode(cell), np.int64) for cell in cells[3:5])
    except csv.Error as error:
        return f"no valid CSV ({error})", {}, none
    except _DECODE_ERRORS as error:
        return f"token ids that are not a JSON array of whole numbers ({error})", {}, none
    problem, row = arrival_row(_arrival_us(cells[0]), len(prompt), len(output))
    return problem, row | {"request_id": text(cells[1]), "model": text(cells[2])}, prompt


def _arrival_us(seconds: str) -> int | None:
    value = finite(seconds)
    return int(value * 1e6) if value is not None and 0 <= value * 1e6 < MAX_INTEGER else None


FORMAT = RequestFormat("legacy-blis-csv", recognises, read=read_requests, latencies=False)
