"""TraceV2 of BLIS: header and requests, as bytes."""

from __future__ import annotations

import csv
import gzip
import io

import yaml

from blis_replay_labs.planted.experiment import SyntheticTruth

COLUMNS = (
    *("request_id", "client_id", "tenant_id", "slo_class", "session_id", "round_index", "prefix_group"),
    *("prefix_length", "streaming", "input_tokens", "output_tokens", "text_tokens", "image_tokens"),
    *("audio_tokens", "video_tokens", "reason_ratio", "model", "deadline_us", "server_input_tokens"),
    *("arrival_time_us", "send_time_us", "first_chunk_time_us", "last_chunk_time_us", "num_chunks", "status"),
    *("error_message", "finish_reason"),
)


def trace_header(truth: SyntheticTruth) -> bytes:
    """``trace.yaml``: version, clock unit and server."""
    spec = truth.spec
    header = {
        "trace_version": 2,
        "time_unit": "us",
        "created_at": "2026-03-01T12:00:00Z",
        "mode": "real",
        "warm_up_requests": 0,
        "server": {
            "type": "vllm",
            "model": spec.model,
            "tensor_parallel": spec.tensor_parallelism,
            "max_num_seqs": spec.engine.max_num_seqs,
            "block_size": spec.engine.block_size,
            "max_model_len": spec.engine.max_model_len,
        },
    }
    text: str = yaml.safe_dump(header, sort_keys=False)
    return text.encode()


def trace_data(truth: SyntheticTruth) -> bytes:
    """``trace.csv.gz``: one row per request in send order.

    Like the published files: ``output_tokens`` is the re-tokenised count, ``num_chunks`` is unknown
    (0), the last chunk is the client's end, and a request that timed out has no tokens.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(_row(truth, request) for request in range(len(truth)))
    return gzip.compress(text.getvalue().encode(), mtime=0)


def _row(truth: SyntheticTruth, request: int) -> dict[str, str | int]:
    ok, spec = bool(truth.ok[request]), truth.spec
    zero_us = spec.epoch_zero_ns // 1000
    arrival_us = int(truth.trace.arrival_us[request])
    prompt_tokens = int(truth.trace.prompt_tokens[request]) if ok else 0
    first_us = zero_us + arrival_us + int(truth.result.ttft_us[request]) if ok else 0
    known: dict[str, str | int] = {
        "request_id": request,
        "round_index": 0,
        "prefix_length": 0,
        "streaming": "true",
        "input_tokens": prompt_tokens,
        "output_tokens": int(truth.retokenised_tokens[request]) if ok else 0,
        "text_tokens": prompt_tokens,
        "image_tokens": 0,
        "audio_tokens": 0,
        "video_tokens": 0,
        "reason_ratio": 0,
        "model": spec.model,
        "deadline_us": 0,
        "server_input_tokens": prompt_tokens,
        "arrival_time_us": arrival_us,
        "send_time_us": zero_us + arrival_us,
        "first_chunk_time_us": first_us,
        "last_chunk_time_us": zero_us + int(truth.client_end_us[request]),
        "num_chunks": 0,
        "status": "ok" if ok else "timeout",
        "finish_reason": "length" if ok else "",
    }
    return {column: known.get(column, "") for column in COLUMNS}
