"""The CSV of BLIS before TraceV2 (``--workload traces``): arrivals, and the token ids of prompts and answers."""

from __future__ import annotations

import csv
import re
from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.readers.documents import MAX_INTEGER, finite, text
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.records import cells_of, text_lines
from blis_replay.ingest.readers.requests import RawPrefix, Request, RequestsRead, UnusableError, arrival, gathered


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
    reading = _Reading()
    lines = ((f"line {n}", line) for n, line in text_lines(file, MAX_LINE_BYTES) if n > 1 and line.strip())
    rows, _events = gathered(file, lines, reading.request)
    source = f"token ids of the prompts, hashed by {BLOCK_TOKENS}"
    keys = (np.array(values, np.int64) for values in (reading.counts, reading.keys))
    prefix = RawPrefix(BLOCK_TOKENS, source, *keys) if rows.height else None
    return RequestsRead(rows, "client", "relative", reading.model, prefix=prefix)


@dataclass
class _Reading:
    """What is gathered beside the rows: the first model, and of each prompt the keys of its blocks."""

    model: str | None = None
    counts: array[int] = field(default_factory=lambda: array("q"))
    keys: array[int] = field(default_factory=lambda: array("q"))

    def request(self, line: str) -> Request:
        """The row of a line; :class:`UnusableError` if it has none."""
        try:
            cells = cells_of(line)
            if len(cells) < 5:
                raise UnusableError(f"{len(cells)} columns where at least 5 are needed")
            prompt, output = (np.array(_TOKEN_IDS.decode(cell), np.int64) for cell in cells[3:5])
        except csv.Error as error:
            raise UnusableError(f"no valid CSV ({error})") from error
        except _DECODE_ERRORS as error:
            raise UnusableError(f"token ids that are not a JSON array of whole numbers ({error})") from error
        row = arrival(_arrival_us(cells[0]), len(prompt), len(output))
        self.model = self.model or text(cells[2])
        hashes = block_hashes(prompt, BLOCK_TOKENS)
        self.counts.append(len(hashes))
        self.keys.extend(hashes)
        return row | {"request_id": text(cells[1])}, ()


def _arrival_us(seconds: str) -> int | None:
    value = finite(seconds)
    return int(value * 1e6) if value is not None and 0 <= value * 1e6 < MAX_INTEGER else None


FORMAT = RequestFormat("legacy-blis-csv", recognises, read=read_requests, latencies=False)
