"""AIConfigurator's aggregated estimate: one latency for all requests.

It gets the model, the GPU, tensor parallelism, max_num_seqs, mean lengths and the mean cached prefix.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from blis_replay_labs.board.adapters.contract import US_PER_MS, Adapter, AdapterError, Answer, Inputs

# The estimate has no arrivals, only a number of concurrent requests: rounds of Little's law to find it.
_ROUNDS = 6
# NVIDIA's names of systems.
_SYSTEMS = (
    *(("h200", "h200_sxm"), ("gb200", "gb200"), ("b200", "b200_sxm"), ("b300", "b300_sxm"), ("h100", "h100_sxm")),
    *(("a100", "a100_sxm"), ("l40s", "l40s"), ("rtx pro 6000", "rtx_pro_6000_server"), ("a30", "a30"), ("l4", "l4")),
)


def _aiconfigurator(inputs: Inputs, option: str) -> Iterator[Answer]:
    """Its aggregated estimate at the mean lengths and at the concurrency that Little's law gives."""
    del option
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found,unused-ignore]

    logging.disable(logging.WARNING)
    requests, arguments = inputs.requests, inputs.arguments
    count = len(requests)
    prompt, output = (
        max(1, round(sum(request[name] for request in requests) / count)) for name in ("prompt_tokens", "output_tokens")
    )
    cached = min(_cached_tokens(inputs), prompt - 1)
    span_s = max((requests[-1]["arrival_us"] - requests[0]["arrival_us"]) / 1e6, 1e-3)
    most = int(arguments["max_num_seqs"])
    at_once, estimate = min(8, most), None
    tp = int(inputs.served["tensor_parallelism"] or 1)
    config = (
        json.loads((inputs.folder / "config.json").read_text("utf-8")) if inputs.model == str(inputs.folder) else {}
    )
    moe = {"moe_tp_size": tp, "moe_ep_size": 1} if config.get("num_local_experts") else {}
    for _ in range(_ROUNDS):
        estimate = cli_estimate(
            model_path=inputs.model,
            system_name=inputs.gpu_of(_SYSTEMS),
            backend_name="vllm",
            isl=prompt,
            osl=max(output, 2),
            prefix=cached,
            batch_size=at_once,
            tp_size=tp,
            **moe,
        )
        wanted = min(max(round(count / span_s * float(estimate.request_latency) / 1e3), 1), most)
        if wanted == at_once:
            break
        at_once = wanted
    if estimate is None:
        raise AdapterError("aiconfigurator made no estimate")
    for request in requests:
        ttft_us = US_PER_MS * float(estimate.ttft)
        rest_us = US_PER_MS * float(estimate.tpot) * (request["output_tokens"] - 1)
        yield Answer(request["request_index"], ttft_us, ttft_us + rest_us, None)


def _cached_tokens(inputs: Inputs) -> int:
    """Tokens of a mean prompt that an unbounded prefix cache holds: every block seen before."""
    block, seen, cached = int(inputs.arguments["block_size"]), set[int](), 0
    for request, keys in zip(inputs.requests, inputs.blocks, strict=True):
        cached += request["prompt_tokens"] - request["prefill_tokens"] + block * sum(key in seen for key in keys)
        seen.update(keys)
    return round(cached / len(inputs.requests)) if inputs.arguments.get("enable_prefix_caching", True) else 0


AICONFIGURATOR = Adapter(
    "aiconfigurator",
    "aiconfigurator",
    "0.12.0",
    (
        "arrivals: it estimates a fixed number of requests at once, here by Little's law from its own latency",
        "queues, KV blocks, single requests",
        "delays outside of the GPU",
    ),
    _aiconfigurator,
)
