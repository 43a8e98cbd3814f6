"""The CSV that BLIS read before TraceV2: token ids made up so that prefixes are equal where they were."""

from __future__ import annotations

import csv
from pathlib import Path

from blis_replay.blis.trace import RequestTrace
from blis_replay.ingest.recording import Recording
from blis_replay.replay.export_arrivals import lost_of_arrivals
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import request_trace

COLUMNS = ("arrival_us", "prompt_tokens", "output_tokens", "request_id")
_HEADER = ("arrival_time", "request_id", "model", "prefill_tokens", "decode_tokens")


def write(recording: Recording, folder: Path) -> list[str]:
    """Write ``requests.csv``; returns what was lost beside whole columns, in words.

    All tokens of a block have its key as their id, so equal prefixes stay equal; what no block
    names has an id of its own.  Raises ``ReplayError`` as ``request_trace`` does.
    """
    trace, _basis = request_trace(recording, ReplayMode())
    names = recording.requests["request_id"].to_list()
    first_own_id = 0 if trace.block_keys is None else int(trace.block_keys.keys.max(initial=-1)) + 1
    with (folder / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(_HEADER)
        for i, name in enumerate(names):
            own_id = first_own_id + i
            prompt, output = _prompt_ids(trace, i, own_id), _array([f"{own_id}, " * int(trace.output_tokens[i])])
            table.writerow((_seconds(int(trace.arrival_us[i])), name or "", recording.model or "", prompt, output))
    return lost_of_arrivals(recording, trace)


def _seconds(arrival_us: int) -> str:
    """The arrival with half a microsecond more, because readers cut to whole ones."""
    return f"{arrival_us // 1_000_000}.{arrival_us % 1_000_000:06d}5"


def _prompt_ids(trace: RequestTrace, i: int, own_id: int) -> str:
    """The token ids of a prompt as a JSON array; ``own_id``: one that no other request has."""
    keys, length = trace.block_keys, int(trace.prompt_tokens[i])
    if keys is None:
        return _array([f"{own_id}, " * length])
    row = keys.keys[keys.start[i] : keys.start[i] + keys.count[i]]
    rest = length - len(row) * keys.block_size
    return _array([*(f"{key}, " * keys.block_size for key in row.tolist()), f"{own_id}, " * rest])


def _array(parts: list[str]) -> str:
    return "[" + "".join(parts)[:-2] + "]"
