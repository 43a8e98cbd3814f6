"""The files of BLIS: TraceV2 written for its replay, and its per-request results read."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import yaml

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ReplayError
from blis_replay.blis.trace import NEVER_US, RequestTrace
from blis_replay.replay.plan import ReplayPlan
from blis_replay.replay.program import left_by

# A TraceV2 row, in the order that BLIS parses by position: what holds of a request that was not served yet.
_ROW: dict[str, object] = {
    "request_id": "",
    "client_id": "",
    "tenant_id": "",
    "slo_class": "",
    "session_id": "",
    "round_index": 0,
    "prefix_group": "",
    "prefix_length": "",
    "streaming": "true",
    "input_tokens": "",
    "output_tokens": "",
    "text_tokens": "",
    "image_tokens": 0,
    "audio_tokens": 0,
    "video_tokens": 0,
    "reason_ratio": 0,
    "model": "",
    "deadline_us": "",
    "server_input_tokens": "",
    "arrival_time_us": "",
    "send_time_us": "",
    "first_chunk_time_us": 0,
    "last_chunk_time_us": 0,
    "num_chunks": 0,
    "status": "ok",
    "error_message": "",
    "finish_reason": "",
}
COLUMNS = tuple(_ROW)
# Builds that write version 3 (``us``) read this one too.
_VERSION, _TIME_UNIT = 2, "microseconds"

# A result of BLIS takes about 150 bytes; beyond this the file is something else.
_LARGEST_BYTES_PER_REQUEST = 2_000
_METRICS_BYTES = 1 << 28
_Time = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefix sharing as TraceV2 can say it: each request is in one group at most.

    ``group``: int64[n], -1 for none; ``length``: int64[n], the leading tokens that the
    request shares with its group, a whole number of blocks and less than its prompt.
    """

    group: Int64s
    length: Int64s


@dataclass(frozen=True)
class BlisResults:
    """What BLIS answered: arrays in request order, 0 where it did not complete a request."""

    completed: Bools
    ttft_us: Int64s
    e2e_us: Int64s


def shared_prefixes(plan: ReplayPlan) -> SharedPrefixes:
    """The groups of a plan, none if its engine has no prefix cache."""
    if not plan.engine.enable_prefix_caching:
        count = len(plan.trace)
        return SharedPrefixes(np.full(count, -1, np.int64), np.zeros(count, np.int64))
    return prefix_groups(plan.trace, plan.engine.block_size)


def prefix_groups(trace: RequestTrace, block_size: int) -> SharedPrefixes:
    """The groups of a trace: by block identities if there are some, else by the number of cached tokens.

    The last token of a prompt is never shared: BLIS would compute nothing of a fully cached
    prompt (blis-semantics 2.5), vLLM at least its last block.
    """
    most = (trace.prompt_tokens - 1) // block_size
    if trace.block_keys is None:
        blocks = np.minimum((trace.prompt_tokens - trace.prefill_tokens) // block_size, most)
        return SharedPrefixes(np.where(blocks > 0, blocks, -1), blocks * block_size)
    keys = trace.block_keys
    # A key stands for all tokens up to its block, so how often it occurs is how many share them.
    rows = [keys.keys[s : s + min(c, m)] for s, c, m in zip(keys.start, keys.count, most, strict=True)]
    seen = np.bincount(np.concatenate(rows)) if any(len(row) for row in rows) else np.zeros(1, np.int64)
    blocks = np.array([int((seen[row] > 1).sum()) for row in rows], np.int64)
    last = [int(row[b - 1]) if b else -1 for row, b in zip(rows, blocks, strict=True)]
    return SharedPrefixes(np.array(last, np.int64), blocks * block_size)


def output_lengths(plan: ReplayPlan) -> Int64s:
    """int64[n]: output tokens of each request, ended where the engine's context ends, as vLLM does."""
    room = np.maximum(plan.engine.max_model_len - plan.trace.prompt_tokens, 1)
    return np.minimum(plan.trace.output_tokens, room)


def write_trace(plan: ReplayPlan, header: Path, data: Path) -> None:
    """Write the requests of a plan as TraceV2; times count from the plan's zero."""
    rows = trace_rows(plan.trace, shared_prefixes(plan), output_lengths(plan))
    write_rows({"mode": "generated"}, rows, header, data)


def write_rows(fields: Mapping[str, object], rows: Iterable[Mapping[str, object]], header: Path, data: Path) -> None:
    """Write a TraceV2 header with ``fields`` beside those that all have, and its table; lacking cells are empty."""
    head = {"trace_version": _VERSION, "time_unit": _TIME_UNIT, "warm_up_requests": 0, **fields}
    header.write_text(yaml.safe_dump(head, sort_keys=False), "utf-8")
    with data.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def trace_rows(trace: RequestTrace, prefixes: SharedPrefixes, lengths: Int64s) -> Iterator[dict[str, object]]:
    """One row per request, not served yet."""
    for i in range(len(trace)):
        shared, prompt = int(prefixes.length[i]), int(trace.prompt_tokens[i])
        abort_us, arrival_us = int(trace.abort_us[i]), int(trace.arrival_us[i])
        yield _ROW | {
            "request_id": i,
            "prefix_group": f"prefix-{prefixes.group[i]}" if shared else "",
            "prefix_length": shared,
            "input_tokens": prompt - shared,
            "output_tokens": int(lengths[i]),
            "text_tokens": prompt - shared,
            "deadline_us": 0 if abort_us == NEVER_US else max(abort_us, arrival_us),
            "server_input_tokens": prompt,
            "arrival_time_us": arrival_us,
            "send_time_us": arrival_us,
        }


class _Result(msgspec.Struct):
    request_id: Annotated[int, msgspec.Meta(ge=0)]
    ttft_us: _Time
    e2e_us: _Time
    output_tokens: int | None = None


class _Metrics(msgspec.Struct):
    preemption_count: int | None = None


def read_results(path: Path, lengths: Int64s) -> BlisResults:
    """The results file of a replay of ``len(lengths)`` requests with these output lengths.

    Raises ``ReplayError``, one line with the place, where the file does not answer the trace.  That is: anything but
    an array of results, an unknown or repeated request, a time below zero or out of order, another output length.
    """
    count = len(lengths)
    try:
        content = left_by(path, _LARGEST_BYTES_PER_REQUEST * (count + 100))  # a cut file is not valid JSON
        if content is None:
            raise ReplayError("BLIS ended without an error but wrote no results; use a build that has `replay`")
        results = msgspec.json.decode(content, type=list[_Result], strict=False)  # some times are written as 123.0
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ReplayError(
            f"the results of BLIS cannot be read: {error}; use a build that writes SimResult JSON"
        ) from None
    answer = BlisResults(np.zeros(count, np.bool_), np.zeros(count, np.int64), np.zeros(count, np.int64))
    for result in results:
        request = result.request_id
        problem = ""
        if request >= count:
            problem = f"was not asked for ({count} requests)"
        elif answer.completed[request]:
            problem = "was answered already"
        elif result.ttft_us > result.e2e_us:
            problem = "has its first token after the last"
        elif result.output_tokens not in (None, lengths[request]):
            problem = f"has {result.output_tokens} output tokens where {lengths[request]} were asked for"
        if problem:
            raise ReplayError(f"the results of BLIS: request {request} {problem}; use another BLIS build")
        answer.completed[request], answer.ttft_us[request] = True, result.ttft_us
        answer.e2e_us[request] = result.e2e_us
    return answer


def read_preemptions(path: Path) -> int | None:
    """The preemption count of a metrics file, None if it cannot be read."""
    try:
        return msgspec.json.decode(left_by(path, _METRICS_BYTES) or b"{}", type=_Metrics).preemption_count
    except (OSError, ValueError, RecursionError):
        return None
