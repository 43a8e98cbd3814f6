"""inference-perf: its configuration files, its per-request file in three generations, and its reports, as bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import yaml

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.ingest.recording import LoadProfile, SharedPrefix, Stage
from blis_replay_labs.planted.experiment import SyntheticTruth

# What is declared; ``SyntheticExperiment.stage_gap_us`` is what ran.
_STAGE_GAP_US = 1_000_000


def exp_config(truth: SyntheticTruth) -> bytes:
    """``exp-config.yaml``: the server's arguments as the experiment's author noted them."""
    spec = truth.spec
    return _yaml(
        {
            "model": spec.model,
            "tensor_parallelism": spec.tensor_parallelism,
            "max_model_len": spec.engine.max_model_len,
            "max_num_batched_tokens": spec.engine.max_num_batched_tokens,
            "max_num_seqs": spec.engine.max_num_seqs,
            "app": "inference-perf",
        }
    )


def profile(truth: SyntheticTruth) -> bytes:
    """``profile.yaml``: what was asked of the load generator, one line of JSON.

    Its prefix keys are the newer names that the older build ignores, so its group counts are not
    those that ran: as in the recordings.
    """
    spec, shared = truth.spec, _prompts_asked_for(truth)
    declared = {
        "api": {"streaming": True, "type": "completion"},
        "data": {
            "shared_prefix": {
                "num_unique_system_prompts": shared.num_groups,
                "num_users_per_system_prompt": shared.num_prompts_per_group,
                "output_len": shared.output_tokens,
                "question_len": shared.question_tokens,
                "system_prompt_len": shared.system_prompt_tokens,
            },
            "type": "shared_prefix",
        },
        "load": {"stages": _stages(truth), "type": "constant"},
        "report": {"request_lifecycle": {"per_request": True, "per_stage": True, "summary": True}},
        "server": {
            "base_url": "http://localhost:8000",
            "ignore_eos": spec.ignore_eos,
            "model_name": spec.model,
            "type": "vllm",
        },
        "tokenizer": {"pretrained_model_name_or_path": spec.model},
    }
    return json.dumps(declared, separators=(",", ":")).encode()


def declared_load(truth: SyntheticTruth) -> LoadProfile:
    """What ``profile`` declares, as ingest reads it beside ``load_config``."""
    stages, declared = truth.spec.stages, _prompts_asked_for(truth)
    return LoadProfile("profile.yaml", "constant", stages, _STAGE_GAP_US, declared, multi_turn=False)


def _prompts_asked_for(truth: SyntheticTruth) -> SharedPrefix:
    ran = truth.spec.shared_prefix
    prompts = max(ran.num_prompts_per_group // 2, 1)
    return replace(ran, num_groups=ran.num_groups - 1, num_prompts_per_group=prompts)


def load_config(truth: SyntheticTruth) -> bytes:
    """``results/config.yaml``: the resolved configuration, that is what ran."""
    spec, shared = truth.spec, truth.spec.shared_prefix
    return _yaml(
        {
            "api": {"type": "completion", "streaming": True, "headers": None},
            "data": {
                "type": "shared_prefix",
                "path": None,
                "input_distribution": None,
                "output_distribution": None,
                "shared_prefix": {
                    "num_groups": shared.num_groups,
                    "num_prompts_per_group": shared.num_prompts_per_group,
                    "system_prompt_len": shared.system_prompt_tokens,
                    "question_len": shared.question_tokens,
                    "output_len": shared.output_tokens,
                },
            },
            "load": {
                "type": "constant",
                "interval": _STAGE_GAP_US / 1_000_000,
                "stages": _stages(truth),
                "sweep": None,
                "num_workers": 8,
                "worker_max_concurrency": 100,
                "worker_max_tcp_connections": 2500,
                "circuit_breakers": [],
                "request_timeout": spec.timeout_us / 1e6 if spec.failures else None,
            },
            "metrics": None,
            "report": {
                "request_lifecycle": {"summary": True, "per_stage": True, "per_request": True},
                "prometheus": {"summary": True, "per_stage": False},
            },
            "storage": {"local_storage": {"path": "results", "report_file_prefix": None}},
            "server": {
                "type": "vllm",
                "model_name": spec.model,
                "base_url": "http://localhost:8000",
                "ignore_eos": spec.ignore_eos,
                "api_key": None,
            },
            "tokenizer": {"pretrained_model_name_or_path": spec.model, "trust_remote_code": None, "token": None},
            "circuit_breakers": None,
        }
    )


def _stages(truth: SyntheticTruth) -> list[dict[str, Any]]:
    return [
        {"rate": stage.rate_per_s, "duration": _plain(stage.duration_us / 1_000_000)} for stage in truth.spec.stages
    ]


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _yaml(document: dict[str, Any]) -> bytes:
    text: str = yaml.safe_dump(document, sort_keys=False)
    return text.encode()


# A blank line is stamped so long after its data line, and [DONE] so long after the last token.
PAIR_GAP_US = 25
DONE_GAP_US = 60


def stream_events_us(truth: SyntheticTruth, request: int) -> Int64s:
    """int64[]: the client's stamps for n tokens; empty if it gave up.

    2n + 2 in 0.2 (each line and the blank one after it, [DONE] included), n + 1 in 0.4 ([DONE]
    included), n from 0.5 on.  None is later than the end of the request.
    """
    tokens_us, version = truth.token_times_us(request), truth.spec.inference_perf
    if len(tokens_us) == 0 or version in ("0.5", "0.6"):
        return tokens_us
    lines_us = np.append(tokens_us, tokens_us[-1] + DONE_GAP_US)
    if version == "0.2":
        lines_us = np.repeat(lines_us, 2)
        lines_us[1::2] += PAIR_GAP_US
    events_us: Int64s = np.minimum(lines_us, truth.client_end_us[request])
    return events_us


def reported_times_us(truth: SyntheticTruth, request: int) -> Int64s:
    """int64[]: ``output_token_times``, the input of the reports.

    Up to 0.4 the stamps; from 0.5 on a time for each re-tokenised token, that of the event
    with its text.
    """
    events_us = stream_events_us(truth, request)
    if truth.spec.inference_perf in ("0.2", "0.4") or len(events_us) == 0:
        return events_us
    spread = np.linspace(0, len(events_us) - 1, int(truth.retokenised_tokens[request]))
    return events_us[np.rint(spread).astype(np.int64)]


def per_request(truth: SyntheticTruth) -> bytes:
    """``per_request_lifecycle_metrics.json``: one array, stamps in ``perf_counter`` seconds.

    Records stand in order of completion, as the generator's workers hand them in.
    """
    order = np.argsort(truth.client_end_us, kind="stable")
    return json.dumps([_record(truth, int(request)) for request in order], indent=2).encode()


def prompt_text(truth: SyntheticTruth, request: int) -> str:
    """The prompt of a request, a word a token: that of its group's system prompt, then its own.

    Words have 1 to 8 bytes with the space, as tokens have some 4 on average.  A prompt whose length the
    recording loses has it nevertheless.
    """
    shared = truth.spec.shared_prefix.system_prompt_tokens
    group, prompt = int(truth.group[request]), int(truth.prompt[request])
    own = int(truth.trace.prompt_tokens[request]) - shared
    return _words(truth.spec.seed, group, 0, shared) + _words(truth.spec.seed, group, prompt + 1, own)


@cache
def _words(seed: int, group: int, prompt: int, count: int) -> str:
    random = np.random.default_rng((seed, group, prompt))
    letters = random.choice(list("abcdefghijklmnopqrstuvwxyz"), (count, 7))
    lengths = random.integers(0, 8, count)
    return "".join(f"{''.join(row[:length])} " for row, length in zip(letters, lengths.tolist(), strict=True))


def _record(truth: SyntheticTruth, request: int) -> dict[str, Any]:
    body = {
        "model": truth.spec.model,
        "prompt": prompt_text(truth, request),
        "max_tokens": truth.spec.shared_prefix.output_tokens,
        "ignore_eos": truth.spec.ignore_eos,
        "stream": True,
    }
    return {
        "start_time": truth.client_s(truth.trace.arrival_us[request]),
        "end_time": truth.client_s(truth.client_end_us[request]),
        "request": json.dumps(body),
        "response": "",
        "info": _info(truth, request),
        "error": None if truth.ok[request] else {"error_type": "TimeoutError", "error_msg": ""},
    }


def _info(truth: SyntheticTruth, request: int) -> dict[str, Any]:
    """What is known of prompt and answer, by generation; nothing of a request that failed."""
    ok = bool(truth.ok[request])
    input_tokens = int(truth.trace.prompt_tokens[request]) if ok else 0
    output: dict[str, Any] = {
        "output_tokens": int(truth.retokenised_tokens[request]) if ok else 0,
        "output_token_times": [truth.client_s(time_us) for time_us in reported_times_us(truth, request)],
    }
    if truth.spec.inference_perf in ("0.2", "0.4"):
        return {"input_tokens": input_tokens, **output}
    response = None if not ok else output | _of_stream(truth, request)
    if truth.spec.inference_perf == "0.5":
        return {"input_tokens": input_tokens, "extra_info": {}, "lora_adapter": None, "response_info": response}
    return {
        "request_metrics": {"text": {"input_tokens": input_tokens}, "image": None, "video": None, "audio": None},
        "response_metrics": response,
        "extra_info": {},
        "lora_adapter": None,
        "labels": {},
        "input_tokens": input_tokens,
    }


def _of_stream(truth: SyntheticTruth, request: int) -> dict[str, Any]:
    """What the records have from 0.5 on: when each event came, and what the server counted."""
    prompt_tokens, completion_tokens = int(truth.trace.prompt_tokens[request]), int(truth.result.output_tokens[request])
    cached = int(truth.cached_prompt_tokens[request])
    return {
        "response_chunks": [],
        "chunk_times": [truth.client_s(time_us) for time_us in stream_events_us(truth, request)],
        "server_usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            # vLLM leaves it out where nothing was cached.
            "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        },
    }


_PERCENTILES = (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)


def summary_report(truth: SyntheticTruth) -> bytes:
    """``summary_lifecycle_metrics.json``: load, latencies and failures of the whole run."""
    return _report(truth, np.arange(len(truth)), {})


def stage_report(truth: SyntheticTruth, stage: Stage) -> bytes:
    """``stage_N_lifecycle_metrics.json``: the same for one load stage."""
    members = np.flatnonzero(truth.stage == stage.stage)
    sent_us = truth.trace.arrival_us[members]
    send_s = float(np.ptp(sent_us)) / 1e6 if len(members) else 0.0
    achieved = len(members) / send_s if send_s else 0.0
    load = {"send_duration": send_s, "requested_rate": stage.rate_per_s, "achieved_rate": achieved}
    return _report(truth, members, load)


def _report(truth: SyntheticTruth, members: Int64s, load: dict[str, float]) -> bytes:
    ok, failed = members[truth.ok[members]], members[~truth.ok[members]]
    report = {
        "load_summary": {"count": len(members), "schedule_delay": _distribution(np.zeros(len(members))), **load},
        "successes": {"count": len(ok), **_successes(truth, members, ok)},
        "failures": {
            "count": len(failed),
            "request_latency": _distribution(_held_s(truth, failed)),
            "prompt_len": _distribution(np.zeros(len(failed))),
        },
    }
    return json.dumps(report, indent=2).encode()


def _successes(truth: SyntheticTruth, members: Int64s, ok: Int64s) -> dict[str, Any]:
    e2e_s, retokenised = _held_s(truth, ok), truth.retokenised_tokens[ok]
    prompt_tokens = truth.trace.prompt_tokens[ok]
    # TTFT and gaps are taken of requests with more than one stamp.
    timed = [(request, times) for request in ok if len(times := reported_times_us(truth, request) / 1e6) > 1]
    gaps_s = [np.diff(times) for _, times in timed]
    ttft_s = np.array([times[0] - truth.trace.arrival_us[request] / 1e6 for request, times in timed])
    busy_s = float(np.ptp(np.append(truth.client_end_us[members], truth.trace.arrival_us[members]))) / 1e6
    return {
        "latency": {
            "request_latency": _distribution(e2e_s),
            "normalized_time_per_output_token": _distribution(
                np.divide(e2e_s, retokenised, out=np.zeros(len(ok)), where=retokenised > 0)
            ),
            "time_per_output_token": _distribution(np.array([gaps.mean() for gaps in gaps_s])),
            "time_to_first_token": _distribution(ttft_s),
            "inter_token_latency": _distribution(np.concatenate([*gaps_s, np.empty(0)])),
        },
        "throughput": {
            "input_tokens_per_sec": float(prompt_tokens.sum()) / busy_s,
            "output_tokens_per_sec": float(retokenised.sum()) / busy_s,
            "total_tokens_per_sec": float(prompt_tokens.sum() + retokenised.sum()) / busy_s,
            "requests_per_sec": len(ok) / busy_s,
        },
        "prompt_len": _distribution(prompt_tokens),
        "output_len": _distribution(retokenised),
    }


def _held_s(truth: SyntheticTruth, members: Int64s) -> Floats:
    held_s: Floats = (truth.client_end_us[members] - truth.trace.arrival_us[members]) / 1e6
    return held_s


def _distribution(values: Floats | Int64s) -> dict[str, float] | None:
    if len(values) == 0:
        return None
    at = dict(zip(_PERCENTILES, np.percentile(values, _PERCENTILES), strict=True))
    named = {"median" if level == 50 else f"p{level:g}": float(value) for level, value in at.items()}
    return {"mean": float(np.mean(values)), "min": float(np.min(values)), **named, "max": float(np.max(values))}
