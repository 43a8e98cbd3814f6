"""LLMServingSim: what it wrote of a run that was made before; it gets nothing of a replay."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from blis_replay.replay.adapters.contract import Adapter, AdapterError, Answer, Inputs

_NS_PER_US = 1_000


def _llmservingsim(inputs: Inputs, option: str) -> Iterator[Answer]:
    """Its own table of a run that was made before, matched by order of arrival and checked by lengths."""
    if not option:
        raise AdapterError("name its table: llmservingsim:PATH/sim.csv.gz")
    with _opened(Path(option)) as file:
        csv.field_size_limit(1 << 24)
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["request id"]))
    if len(rows) != len(inputs.requests):
        raise AdapterError(f"{option} has {len(rows)} requests, the recording {len(inputs.requests)}")
    by_arrival = sorted(rows, key=lambda row: int(row["arrival"]))
    for request, row in zip(inputs.requests, by_arrival, strict=True):
        # Its output counts the prompt too in some releases; what it generated is the number of gaps and one.
        if int(row["input"]) != request["prompt_tokens"]:
            raise AdapterError(f"{option}: request {row['request id']} has another prompt than was recorded")
        ttft_us, e2e_us = int(row["TTFT"]) / _NS_PER_US, int(row["latency"]) / _NS_PER_US
        yield Answer(request["request_index"], ttft_us, max(e2e_us, ttft_us), int(row["queuing_delay"]) / _NS_PER_US)


def _opened(path: Path) -> TextIO:
    if not path.is_file():
        raise AdapterError(f"{path}: no such file")
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


LLMSERVINGSIM = Adapter(
    "llmservingsim",
    "",
    "5daddb2",
    ("engine arguments of a replay: the table is of the run that was made",),
    _llmservingsim,
)
