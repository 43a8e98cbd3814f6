"""GuideLLM's ``benchmarks.json`` (0.5): one benchmark a load stage, as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.ingest.recording import Stage
from blis_replay_labs.planted.experiment import SyntheticTruth, client_request_id, completion_id, hex_id
from blis_replay_labs.planted.writers_inference_perf import prompt_text

_PERCENTILES = {
    **{"p001": 0.1, "p01": 1, "p05": 5, "p10": 10, "p25": 25, "p50": 50},
    **{"p75": 75, "p90": 90, "p95": 95, "p99": 99, "p999": 99.9},
}


def benchmarks(truth: SyntheticTruth) -> bytes:
    """``benchmarks.json``: requests in order of completion within their benchmark.

    Times are epoch seconds; of the token times only the first and the last are in it.
    """
    ran = [stage for stage in truth.spec.stages if stage.stage in truth.stage]
    document = {
        "metadata": {"version": 1, "guidellm_version": "0.5.4", "python_version": "3.12.1", "platform": "Linux"},
        "args": {
            "target": "http://localhost:8000",
            "profile": "poisson",
            "rate": [stage.rate_per_s for stage in ran],
            "model": truth.spec.model,
            "prefer_response_metrics": True,
        },
        "benchmarks": [_benchmark(truth, index, stage) for index, stage in enumerate(ran)],
    }
    return json.dumps(document, indent=2).encode()


def _benchmark(truth: SyntheticTruth, index: int, stage: Stage) -> dict[str, Any]:
    members = np.flatnonzero(truth.stage == stage.stage)
    ended = members[np.argsort(truth.client_end_us[members], kind="stable")].tolist()
    start_us = int(truth.trace.arrival_us[members].min())
    strategy = {"type_": "poisson", "worker_count": 10, "max_concurrency": 512, "rate": stage.rate_per_s}
    return {
        "type_": "generative_benchmark",
        "config": {"id_": hex_id(f"benchmark {index}", 16), "run_index": index, "strategy": strategy},
        "metrics": _metrics(truth, members),
        "requests": {
            "successful": [_request(truth, request) for request in ended if truth.ok[request]],
            "errored": [_request(truth, request) for request in ended if not truth.ok[request]],
            "incomplete": [],
            "total": None,
        },
        "start_time": _epoch_s(truth, start_us),
        "end_time": _epoch_s(truth, start_us + stage.duration_us),
        "duration": stage.duration_us / 1e6,
        "warmup_duration": 0.0,
        "cooldown_duration": 0.0,
    }


def _request(truth: SyntheticTruth, request: int) -> dict[str, Any]:
    ok = bool(truth.ok[request])
    sent_us, end_us = int(truth.trace.arrival_us[request]), int(truth.client_end_us[request])
    prompt_tokens, output_tokens = int(truth.trace.prompt_tokens[request]), int(truth.result.output_tokens[request])
    times_us = truth.token_times_us(request)
    timings = {
        "targeted_start": _epoch_s(truth, sent_us),
        "resolve_start": _epoch_s(truth, sent_us),
        "request_start": _epoch_s(truth, sent_us),
        "first_token_iteration": _epoch_s(truth, times_us[0]) if ok else None,
        "last_token_iteration": _epoch_s(truth, times_us[-1]) if ok else None,
        "token_iterations": len(times_us),
        "request_end": _epoch_s(truth, end_us),
        "resolve_end": _epoch_s(truth, end_us),
    }
    error = None if ok else "ReadTimeout: the server did not answer in time"
    return {
        "type_": "generative_request_stats",
        "request_id": hex_id(f"guidellm request {request}", 16),
        "request_type": "text_completions",
        "response_id": completion_id(request) if ok else None,
        "request_args": _arguments(truth, request),
        "output": "",
        "info": {"status": "completed" if ok else "errored", "timings": timings, "error": error},
        "request_start_time": timings["request_start"],
        "request_end_time": timings["request_end"],
        "request_latency": (end_us - sent_us) / 1e6 if ok else None,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens if ok else 0,
        "time_to_first_token_ms": (int(times_us[0]) - sent_us) / 1e3 if ok else None,
    }


def _arguments(truth: SyntheticTruth, request: int) -> str:
    """The request in Python's own notation, as the tool keeps it."""
    body = {
        "model": truth.spec.model,
        "stream": True,
        "max_tokens": truth.spec.shared_prefix.output_tokens,
        "ignore_eos": truth.spec.ignore_eos,
        "prompt": prompt_text(truth, request),
    }
    return repr({"method": None, "stream": True, "body": body})


def _metrics(truth: SyntheticTruth, members: Int64s) -> dict[str, Any]:
    """The tool's own definitions: time per output token has TTFT in it; it and ITL are weighted by tokens."""
    ok = members[truth.ok[members]]
    sent_us, end_us = truth.trace.arrival_us[ok], truth.client_end_us[ok]
    tokens = truth.result.output_tokens[ok]
    first_us = np.array([truth.token_times_us(request)[0] for request in ok.tolist()], np.int64)
    last_us = np.array([truth.token_times_us(request)[-1] for request in ok.tolist()], np.int64)
    itl_ms = (last_us - first_us) / np.maximum(tokens - 1, 1) / 1e3
    values = {
        "request_latency": (end_us - sent_us) / 1e6,
        "prompt_token_count": truth.trace.prompt_tokens[ok].astype(np.float64),
        "output_token_count": tokens.astype(np.float64),
        "time_to_first_token_ms": (first_us - sent_us) / 1e3,
        "time_per_output_token_ms": np.repeat((last_us - sent_us) / tokens / 1e3, tokens),
        "inter_token_latency_ms": np.repeat(itl_ms, tokens - 1),
    }
    failed = len(members) - len(ok)
    totals = {"successful": len(ok), "errored": failed, "incomplete": 0, "total": len(members)}
    return {
        "request_totals": totals,
        **{name: {"successful": _distribution(of_requests)} for name, of_requests in values.items()},
    }


def _distribution(values: Floats) -> dict[str, Any]:
    """What the tool writes of some values, all zero where there are none."""
    known = values if len(values) else np.zeros(1)
    return {
        "mean": float(known.mean()),
        "median": float(np.median(known)),
        "min": float(known.min()),
        "max": float(known.max()),
        "count": len(values),
        "total_sum": float(values.sum()),
        "percentiles": {name: float(np.percentile(known, level)) for name, level in _PERCENTILES.items()},
    }


def _epoch_s(truth: SyntheticTruth, time_us: int) -> float:
    return truth.epoch_ns(time_us) / 1e9


# The warm-up sends the first requests of the run, so long before it; the server's side of it is not in the truth.
WARM_UP_REQUESTS = 6
WARM_UP_LEAD_US = 30_000_000


def profile_export(truth: SyntheticTruth) -> bytes:
    """One line per request in order of their ends; stamps in epoch ns, latencies in ms.

    ``output_sequence_length`` is counted from the text, ``usage_completion_tokens`` by the server.
    """
    first = np.flatnonzero(truth.ok)[:WARM_UP_REQUESTS]
    warm_up = [_record(truth, request, "warmup", -WARM_UP_LEAD_US) for request in first.tolist()]
    run = [_record(truth, request, "profiling", 0) for request in range(len(truth))]
    by_end = [*sorted(warm_up, key=_end_ns), *sorted(run, key=_end_ns)]
    return "".join(f"{json.dumps(record, separators=(',', ':'))}\n" for record in by_end).encode()


def _end_ns(record: dict[str, Any]) -> int:
    return int(record["metadata"]["request_end_ns"])


def _record(truth: SyntheticTruth, request: int, phase: str, shift_us: int) -> dict[str, Any]:
    ok = bool(truth.ok[request])
    name = client_request_id(request)
    metadata = {
        "session_num": request,
        "x_request_id": name if phase == "profiling" else f"{phase}-{name}",
        "conversation_id": f"session_{request:06d}",
        "turn_index": 0,
        "request_start_ns": truth.epoch_ns(truth.trace.arrival_us[request] + shift_us),
        "request_end_ns": truth.epoch_ns(truth.client_end_us[request] + shift_us),
        "worker_id": "worker_0a1b2c3d",
        "benchmark_phase": phase,
        "was_cancelled": False,
    }
    if ok:
        return {"metadata": metadata, "metrics": _aiperf_metrics(truth, request)}
    metrics = {"error_isl": {"value": int(truth.trace.prompt_tokens[request]), "unit": "tokens"}}
    return {"metadata": metadata, "metrics": metrics, "error": {"type": "TimeoutError", "message": "gave up"}}


def _aiperf_metrics(truth: SyntheticTruth, request: int) -> dict[str, Any]:
    times_us, sent_us = truth.token_times_us(request), int(truth.trace.arrival_us[request])
    gaps_ms = (np.diff(times_us) / 1e3).tolist()
    prompt_tokens, counted_tokens = int(truth.trace.prompt_tokens[request]), int(truth.retokenised_tokens[request])
    asked_tokens = truth.spec.shared_prefix.output_tokens
    tokens = {
        "input_sequence_length": prompt_tokens,
        "output_sequence_length": counted_tokens,
        "output_token_count": counted_tokens,
        "usage_prompt_tokens": prompt_tokens,
        "usage_completion_tokens": int(truth.result.output_tokens[request]),
    }
    times: dict[str, Any] = {
        "time_to_first_token": (int(times_us[0]) - sent_us) / 1e3,
        "request_latency": (int(times_us[-1]) - sent_us) / 1e3,
        "inter_chunk_latency": gaps_ms,
    }
    if gaps_ms:
        times["inter_token_latency"] = sum(gaps_ms) / len(gaps_ms)
    mismatch = (counted_tokens - asked_tokens) / asked_tokens * 100
    return {
        **{name: {"value": value, "unit": "tokens"} for name, value in tokens.items()},
        **{name: {"value": value, "unit": "ms"} for name, value in times.items()},
        "osl_mismatch_diff_pct": {"value": mismatch, "unit": "%"},
    }


def appended_runs(truth: SyntheticTruth) -> bytes:
    """One object per load stage, each a run of the tool, behind a newline from the second on.

    Requests stand in the order in which they were sent; ``start_times`` are ``perf_counter`` seconds.
    """
    ran = [stage for stage in truth.spec.stages if stage.stage in truth.stage]
    return "\n".join(json.dumps(_run(truth, stage)) for stage in ran).encode()


def _run(truth: SyntheticTruth, stage: Stage) -> dict[str, Any]:
    members = np.flatnonzero(truth.stage == stage.stage)
    sent_us, ok = truth.trace.arrival_us[members], truth.ok[members]
    times_us = [truth.token_times_us(request) for request in members.tolist()]
    ttft_s = [_seconds(times[0] - sent) if len(times) else 0.0 for times, sent in zip(times_us, sent_us, strict=True)]
    duration_s = _seconds(truth.client_end_us[members].max() - sent_us.min())
    # Of a failed request the prompt is counted and the answer is 0.
    input_lens, output_lens = truth.trace.prompt_tokens[members], np.where(ok, truth.result.output_tokens[members], 0)
    total_tokens = int(output_lens.sum())
    return {
        "date": "20260301-120000",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": truth.spec.model,
        "tokenizer_id": truth.spec.model,
        "num_prompts": len(members),
        "request_rate": stage.rate_per_s,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": duration_s,
        "completed": int(ok.sum()),
        "failed": int((~ok).sum()),
        "total_input_tokens": int(input_lens[ok].sum()),
        "total_output_tokens": total_tokens,
        "request_throughput": int(ok.sum()) / duration_s,
        "request_goodput": None,
        "output_throughput": total_tokens / duration_s,
        "total_token_throughput": (total_tokens + int(input_lens[ok].sum())) / duration_s,
        "input_lens": input_lens.tolist(),
        "output_lens": output_lens.tolist(),
        "ttfts": ttft_s,
        "itls": [(np.diff(times) / 1e6).tolist() for times in times_us],
        "start_times": [truth.client_s(sent) for sent in sent_us],
        "generated_texts": [""] * len(members),
        "errors": ["" if completed else "Traceback (most recent call last):\nTimeoutError\n" for completed in ok],
        **_statistics([times for times in times_us if len(times)], sent_us[ok]),
    }


def _statistics(times_us: list[Int64s], sent_us: Int64s) -> dict[str, float]:
    """What the tool reports of its completed requests, in ms; E2E goes to the last token."""
    first_us, last_us = (np.array([times[place] for times in times_us], np.int64) for place in (0, -1))
    gaps = np.array([len(times) - 1 for times in times_us], np.int64)
    values_ms: dict[str, Floats] = {
        "ttft": (first_us - sent_us) / 1e3,
        "tpot": (last_us - first_us)[gaps > 0] / gaps[gaps > 0] / 1e3,
        "itl": np.concatenate([np.empty(0), *(np.diff(times) / 1e3 for times in times_us)]),
        "e2el": (last_us - sent_us) / 1e3,
    }
    statistics: dict[str, Callable[[Floats], Any]] = {
        "mean": np.mean,
        "median": np.median,
        "std": np.std,
        "p99": lambda values: np.percentile(values, 99),
    }
    return {
        f"{name}_{metric}_ms": float(statistic(values)) if len(values) else 0.0
        for metric, values in values_ms.items()
        for name, statistic in statistics.items()
    }


def _seconds(us: int) -> float:
    return int(us) / 1e6
