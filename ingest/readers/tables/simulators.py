"""Files of simulators: TraceV2, the CSV of the legacy BLIS, and LLMServingSim's.

TraceV2, the request trace of BLIS, is ``trace.yaml`` and ``trace.csv``.  Columns are read by name, so both
generations of the header (with and without the newer columns) are one.  Stamps of a real run are Unix epoch
microseconds; those of a generated or replayed one count from its start, and such a row without chunk stamps is a
request that nobody has served yet.

The CSV of BLIS before TraceV2 (``--workload traces``) has arrivals, and the token ids of prompts and answers.

The benchmark runs of LLMServingSim are ``requests.jsonl``, a table whose columns are known, and ``meta.json``.
``queued_ts`` and the stamps behind it are of the engine's monotonic clock, ``arrival_time`` is of the epoch.  Its own
latencies count from ``queued_ts``, so that is the arrival here.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.documents import (
    MAX_INTEGER,
    finite,
    json_mapping,
    quoted,
    section,
    text,
    tokens,
    whole,
    yaml_mapping,
)
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.records import cells_of, named_rows, text_lines
from blis_replay.ingest.readers.requests import (
    RawPrefix,
    RequestsRead,
    arrival_row,
    frame_of,
    prefixes_of_groups,
    request_row,
)
from blis_replay.ingest.readers.server.engine_arguments import ARGUMENTS
from blis_replay.ingest.readers.tables.columns import Column
from blis_replay.ingest.readers.tables.requests_table import read_requests as read_table
from blis_replay.ingest.rows import rows_of

_ENGINE_KEYS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "dtype")
_REQUIRED = ("input_tokens", "output_tokens", "send_time_us", "first_chunk_time_us", "last_chunk_time_us", "status")
# 2001: stamps before that count from the start of the trace (of a generated or replayed one).
_EARLIEST_EPOCH_US = 1_000_000_000_000_000
_TRACEV2_STATUS = {"ok": "ok", "error": "error", "timeout": "timeout", "incomplete": "aborted"}


@dataclass(frozen=True)
class TraceHeader:
    """What the header of a trace, called ``name``, says of the server: model, parallelism, engine arguments and GPU."""

    model: str | None = None
    tensor_parallelism: int | None = None
    engine: tuple[tuple[str, object], ...] = ()
    hardware: str | None = None
    name: str = "trace header"


def read_header(file: RecordedFile) -> TraceHeader:
    """The header; :class:`RecordingError` if it is no YAML mapping or its time unit is not microseconds."""
    document = yaml_mapping(file)
    unit = document.get("time_unit", "us")
    if unit not in ("us", "microseconds"):
        raise RecordingError(
            file.path, "field time_unit", f"{quoted(unit)} is not a unit of TraceV2", "give the times in us"
        )
    server = section(document, "server")
    return TraceHeader(
        model=text(server.get("model")),
        tensor_parallelism=tokens(server.get("tensor_parallel")),
        engine=tuple((key, server[key]) for key in _ENGINE_KEYS if server.get(key) is not None),
    )


def recognises_tracev2(head: bytes) -> bool:
    """Whether a file that begins like this is a TraceV2 table."""
    header = head.partition(b"\n")[0]
    return all(name.encode() in header for name in ("send_time_us", "first_chunk_time_us", "last_chunk_time_us"))


def read_tracev2(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests of ``trace.csv`` in file order; the table has no stream stamps.

    Failed requests have no TTFT, and as E2E the time for which the client held on.  The
    column ``output_tokens`` is kept as reported.  Raises :class:`RecordingError` if a needed
    column is missing; rows that cannot be used are rejected and counted by line.
    """
    models: list[str] = []
    groups: list[tuple[str, int | None]] = []
    frame = frame_of(_tracev2_rows(file, models, groups))
    file.tally.records = len(frame)
    sent_us = frame["sent_us"].min() or 0
    kind = "epoch" if sent_us >= _EARLIEST_EPOCH_US else "relative"  # type: ignore[operator]  # the column is int64
    prefix, remarks = prefixes_of_groups(groups, "prefix_group and prefix_length of TraceV2")
    return RequestsRead(rows_of(frame), "client", kind, next(iter(models), None), prefix=prefix, remarks=remarks)


def _tracev2_rows(
    file: RecordedFile, models: list[str], groups: list[tuple[str, int | None]]
) -> Iterator[dict[str, object]]:
    seen: dict[str, int] = {}
    for place, cells, values in named_rows(file, _REQUIRED, "write it as TraceV2"):
        name, content = values.get("request_id", ""), hash(tuple(cells))
        if name and name in seen:
            again = "identical" if seen[name] == content else "with other values"
            file.tally.reject(place, f"request {name[:60]} again, {again}")
            continue
        problem, row = _tracev2_row(values)
        if problem:
            file.tally.reject(place, problem)
            continue
        seen[name] = content
        if not models and (model := text(values.get("model"))):
            models.append(model)
        groups.append((values.get("prefix_group", ""), tokens(values.get("prefix_length"))))
        yield row


def _tracev2_row(values: dict[str, str]) -> tuple[str, dict[str, object]]:
    status = _TRACEV2_STATUS.get(values["status"])
    sent_us, first_us, last_us = (whole(values[f"{event}_time_us"]) for event in ("send", "first_chunk", "last_chunk"))
    if status is None:
        return f"status {values['status'][:40]!r} is not one of {', '.join(_TRACEV2_STATUS)}", {}
    if sent_us is None or first_us is None or last_us is None:
        return "a time that is not a whole number of microseconds", {}
    ok = status == "ok"
    served = first_us > 0 or last_us > 0 or sent_us >= _EARLIEST_EPOCH_US
    if last_us < sent_us and ((ok and served) or last_us > 0):
        return f"the last chunk comes {sent_us - last_us} us before the send", {}
    if ok and first_us and not sent_us <= first_us <= last_us:
        return "the first chunk does not lie between the send and the last chunk", {}
    incomplete = "not finished at the horizon" if values["status"] == "incomplete" else None
    return "", request_row(
        request_id=text(values.get("request_id")),
        prompt_tokens=tokens(values.get("server_input_tokens")) or _requested_tokens(values),
        output_tokens_reported=whole(values["output_tokens"]) if ok else None,
        ttft_us=first_us - sent_us if ok and first_us else None,
        e2e_us=last_us - sent_us if last_us else None,
        sent_us=sent_us,
        status=status,
        error=None if ok else text(values.get("error_message")) or incomplete,
    )


def _requested_tokens(values: dict[str, str]) -> int | None:
    """The requested prompt length: a row's own tokens, and those that it shares with its group before them."""
    own = whole(values["input_tokens"])
    shared = whole(values.get("prefix_length")) if values.get("prefix_group") else 0
    return tokens(own + (shared or 0)) if own is not None else None


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
_ROWS = re.compile(
    rb"[^\r\n]*\r?\n[ \t]*[0-9][0-9.eE+-]*[ \t]*,(?:[^,\"\r\n]*|\"[^\"\r\n]*\"),(?:[^,\"\r\n]*|\"[^\"\r\n]*\"),"
    rb"[ \t]*\"?[ \t]*\[[-0-9, \t]*(?:\]|\Z)"
)
_TOKEN_IDS = msgspec.json.Decoder(list[int])
_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeError, OverflowError)


def recognises_legacy_csv(head: bytes) -> bool:
    """Whether the second line is a row of the format; the first is a header that BLIS skips unread."""
    return _ROWS.match(head) is not None


def read_legacy_csv(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests in file order, columns by position, and block identities from their token ids.

    Arrivals are seconds from 0, cut to us as BLIS cuts them.  Of the token ids only their number
    and hashes of whole blocks are kept.  A row that could not be served is rejected and
    counted by line.
    """
    models: list[str] = []
    counts, keys = array("q"), array("q")
    frame = frame_of(_legacy_rows(file, models, counts, keys))
    file.tally.records = len(frame)
    source = f"token ids of the prompts, hashed by {BLOCK_TOKENS}"
    prefix = RawPrefix(BLOCK_TOKENS, source, np.array(counts, np.int64), np.array(keys, np.int64))
    return RequestsRead(
        rows_of(frame), "client", "relative", next(iter(models), None), prefix=prefix if len(frame) else None
    )


def _legacy_rows(
    file: RecordedFile, models: list[str], counts: array[int], keys: array[int]
) -> Iterator[dict[str, object]]:
    for number, line in text_lines(file, MAX_LINE_BYTES):
        if number == 1 or not line.strip():
            continue
        problem, row, prompt = _legacy_row(line)
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


def _legacy_row(line: str) -> tuple[str, dict[str, object], NDArray[np.int64]]:
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


_COLUMNS = {
    "arrival": Column("queued_ts", "s"),
    "scheduled": Column("scheduled_ts", "s"),
    "first_token": Column("first_token_ts", "s"),
    "end": Column("last_token_ts", "s"),
    "prompt_tokens": Column("input_toks"),
    "output_tokens": Column("output_toks"),
    "request_id": Column("request_id"),
}
# Sections of meta.json with engine arguments, that which knows best first.
_SECTIONS = (
    ("kv_cache",),
    *(("resolved_config", f"{name}_config") for name in ("scheduler", "cache", "parallel", "model")),
    ("engine_kwargs",),
)
# Here `policy` is the order of requests.
_RENAMED = {"policy": "scheduling_policy", "cache_dtype": "kv_cache_dtype"}


def recognises_llmservingsim(head: bytes) -> bool:
    """Whether a file that begins like this has the requests of such a run."""
    first = head.lstrip().partition(b"\n")[0]
    return first[:1] == b"{" and all(f'"{key}"'.encode() in first for key in ("input_toks", "queued_ts"))


def read_llmservingsim(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """The requests in file order, on the engine's clock; errors as of a table."""
    read = read_table(file, stamps_path, _COLUMNS)
    remarks = [remark for remark in read.remarks if "arrival_time" not in remark]
    behind = f"the time between arrival_time and queued_ts in {file.name}: their clocks are two, arrivals are queued_ts"
    return replace(
        read, clock_name="server", clock_kind="monotonic", version="LLMServingSim bench", remarks=(*remarks, behind)
    )


def recognises_meta(head: bytes) -> bool:
    """Whether a file that begins like this says what served such a run."""
    return head.lstrip()[:1] == b"{" and all(
        f'"{key}"'.encode() in head[:4000] for key in ("engine_kwargs", "vllm_version", "dataset_hash")
    )


def read_meta(file: RecordedFile) -> TraceHeader:
    """Model, GPU, parallelism and engine arguments; ``RecordingError`` if it is no JSON object."""
    document = json_mapping(file)
    engine: dict[str, object] = {}
    for path in _SECTIONS:
        for key, value in section(document, *path).items():
            name = _RENAMED.get(key, key)
            if name in ARGUMENTS and value is not None and not isinstance(value, Mapping | list):
                engine.setdefault(name, value)
    if version := text(document.get("vllm_version")):
        engine["vllm_version"] = version
    return TraceHeader(
        name=file.name,
        model=text(document.get("model")),
        tensor_parallelism=tokens(engine.get("tensor_parallel_size")),
        engine=tuple(engine.items()),
        hardware=text(section(document, "hardware").get("device_name")),
    )
