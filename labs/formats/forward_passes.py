"""Dynamo's forward-pass metrics, ``dynamo.fpm.trace.v1``: what every step computed.

A line a forward pass, written for vLLM, SGLang and TensorRT-LLM as gzip JSON lines, in segments per producer.  A record
has how many requests were in prefill and in decode, and the tokens of the former; a decoding request computes one
token, where none is speculated.  Records of idle workers are heartbeats and no steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from blis_replay.ingest.readers.documents import DECODE_ERRORS, MAX_INTEGER, MAX_TOKENS, finite
from blis_replay.ingest.readers.files import RecordedFile, lines
from blis_replay.ingest.readers.formats import FileKind
from blis_replay.ingest.readers.server.iterations import IterationLines

FORWARD_PASSES = b'"dynamo.fpm.trace.v1"'
MAX_PASS_BYTES = 1 << 20
_MAX_WORKERS = 4_096
_NUMBER = re.compile(r"(\d{1,9})")


class _Scheduled(Struct):
    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    num_decode_requests: int = 0


class _Pass(Struct):
    worker_id: str
    dp_rank: int
    counter_id: int
    wall_time: float
    scheduled_requests: _Scheduled


class _Event(Struct):
    observed_at_unix_ms: int
    fpm: _Pass
    capture_mode: str = ""


class _Envelope(Struct):
    event: _Event


_PASS_LINE = msgspec.json.Decoder(_Envelope)


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this has forward passes."""
    return FORWARD_PASSES in head


def in_order(files: Sequence[RecordedFile]) -> list[RecordedFile]:
    """Segments by their numbers: 10 comes after 9."""
    return sorted(files, key=lambda file: [int(p) if p.isdigit() else p for p in _NUMBER.split(file.name)])


def read_forward_passes(files: Sequence[RecordedFile], iterations: IterationLines) -> tuple[str, ...]:
    """Add the passes of all workers to ``iterations``, an engine each; also what is missing, in words.

    A line of another schema, or with impossible numbers, is rejected and counted.
    """
    workers: dict[tuple[str, int], int] = {}
    heartbeats = sampled = passes = 0
    for file in in_order(files):
        for number, line in lines(file, MAX_PASS_BYTES):
            if not line.strip():
                continue
            try:
                event = _PASS_LINE.decode(line).event
            except DECODE_ERRORS as error:
                file.tally.reject(f"line {number}", str(error))
                continue
            scheduled = event.fpm.scheduled_requests
            if problem := _problem_of_pass(event, workers):
                file.tally.reject(f"line {number}", problem)
                continue
            file.tally.records += 1
            if not scheduled.num_prefill_requests and not scheduled.num_decode_requests:
                heartbeats += 1
                continue
            passes += 1
            sampled += event.capture_mode == "sampled"
            engine = workers.setdefault((event.fpm.worker_id, event.fpm.dp_rank), len(workers))
            _add_pass(iterations, engine, event)
    if not files:
        return ()
    remarks = [f"decode tokens of {passes:,} forward passes: not written, one per decoding request is taken"]
    if sampled:
        remarks.append(f"all forward passes: {sampled:,} were sampled (DYN_FPM_MODE=full writes every one)")
    if heartbeats:
        remarks.append(f"{heartbeats:,} heartbeats of idle workers among the forward passes: no steps")
    if len(workers) > 1:
        remarks.append(f"which engine is which: {len(workers)} workers are numbered in the order of their first pass")
    return tuple(remarks)


def _add_pass(iterations: IterationLines, engine: int, event: _Event) -> None:
    scheduled = event.fpm.scheduled_requests
    iterations.add(
        engine,
        (
            event.fpm.counter_id,
            scheduled.num_prefill_requests,
            scheduled.sum_prefill_tokens,
            scheduled.num_decode_requests,
            scheduled.num_decode_requests,
            round(event.fpm.wall_time * 1e6),
        ),
        event.observed_at_unix_ms // 1000,
    )


def _problem_of_pass(event: _Event, workers: dict[tuple[str, int], int]) -> str:
    passed, scheduled = event.fpm, event.fpm.scheduled_requests
    counts = (scheduled.num_prefill_requests, scheduled.sum_prefill_tokens, scheduled.num_decode_requests)
    if not all(0 <= count < MAX_TOKENS for count in counts):
        return "a number of requests or tokens that cannot be"
    if not (0 <= passed.counter_id < MAX_INTEGER and 0 <= event.observed_at_unix_ms < MAX_INTEGER // 1000):
        return "a counter or a time that cannot be"
    if finite(passed.wall_time) is None or not 0 <= passed.wall_time < 1e6:
        return "a wall_time that is not a duration"
    if len(workers) >= _MAX_WORKERS and (passed.worker_id, passed.dp_rank) not in workers:
        return f"a forward pass of more than {_MAX_WORKERS:,} workers"
    return ""


KIND = FileKind("forward-passes", recognises, several=True, iterations=read_forward_passes)
