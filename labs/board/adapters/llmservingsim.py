"""LLMServingSim: the table of a run that was made before; it gets no input from a replay."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from itertools import islice
from pathlib import Path

from blis_replay_labs.board.adapters.contract import Adapter, AdapterError, Answer, Inputs

_NS_PER_US = 1_000
# A row lists the gaps between its tokens.
_ROW_BYTES = 1 << 22
_COLUMNS = ("request id", "input", "arrival", "TTFT", "latency", "queuing_delay")


def _llmservingsim(inputs: Inputs, option: str) -> Iterator[Answer]:
    """The rows of its table, matched by order of arrival and checked by prompt lengths."""
    if not option:
        raise AdapterError("name its table: llmservingsim:PATH/sim.csv.gz")
    count = len(inputs.requests)
    rows = _rows(Path(option), count)
    if len(rows) != count:
        raise AdapterError(f"{option} has {'more' if len(rows) > count else len(rows)} requests, the recording {count}")
    by_arrival = sorted(rows, key=lambda row: (row["arrival"], row["request id"]))
    for request, row in zip(inputs.requests, by_arrival, strict=True):
        # Output lengths are not compared: some releases count the prompt in them.
        if row["input"] != request["prompt_tokens"]:
            raise AdapterError(f"{option}: request {row['request id']} has another prompt than was recorded")
        ttft_us, e2e_us = row["TTFT"] / _NS_PER_US, row["latency"] / _NS_PER_US
        yield Answer(request["request_index"], ttft_us, max(e2e_us, ttft_us), row["queuing_delay"] / _NS_PER_US)


def _rows(path: Path, count: int) -> list[dict[str, int]]:
    """The columns that are used, of at most ``count`` + 1 rows."""
    if not path.is_file():
        raise AdapterError(f"{path}: no such file")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            csv.field_size_limit(_ROW_BYTES)
            table = csv.DictReader(_lines(file))
            return [{name: int(row[name]) for name in _COLUMNS} for row in islice(table, count + 1)]
    except (OSError, EOFError, KeyError, TypeError, ValueError, csv.Error, zlib.error) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise AdapterError(f"{path}: no table of LLMServingSim ({problem})") from None


def _lines(file: BufferedIOBase) -> Iterator[str]:
    while line := file.readline(_ROW_BYTES + 1):
        if len(line) > _ROW_BYTES:
            raise ValueError(f"a line of more than {_ROW_BYTES:,} bytes")
        yield line.decode()


LLMSERVINGSIM = Adapter(
    "llmservingsim",
    "",
    "5daddb2",
    ("engine arguments of a replay: the table is of the run that was made",),
    _llmservingsim,
)
