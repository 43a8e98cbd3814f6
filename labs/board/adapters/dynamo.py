"""Dynamo's offline replay (``ai-dynamo``).

It gets block_size, num_gpu_blocks, max_num_seqs, max_num_batched_tokens, max_model_len, prefix caching and chunked
prefill; prefixes as hash ids; step times: its own polynomial, or (dynamo-fitted) a profile made of the step times of
the coefficients.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from blis_replay_labs.board.adapters.contract import (
    US_PER_MS,
    Adapter,
    AdapterError,
    Answer,
    Inputs,
    run_to_end,
    step_times,
)

# Points on each axis of the decode table in the profile.
_PROFILE_POINTS = 300


def _dynamo(inputs: Inputs, option: str) -> Iterator[Answer]:
    """The trace in Mooncake's form, one hash id per block; the report has one line per request, in order of arrival."""
    block = int(inputs.arguments["block_size"])
    own = 1 + max((key for keys in inputs.blocks for key in keys), default=0)
    trace = []
    for request, keys in zip(inputs.requests, inputs.blocks, strict=True):
        count = -(-request["prompt_tokens"] // block)
        # A prefix with a known length only counts as shared by all requests.
        cached = (request["prompt_tokens"] - request["prefill_tokens"]) // block
        ids = (keys or [own + i for i in range(cached)])[:count]
        first = own + 10_000_000 + request["request_index"] * 100_000
        ids = ids + [first + i for i in range(count - len(ids))]
        lengths = {"input_length": request["prompt_tokens"], "output_length": request["output_tokens"]}
        trace.append({"timestamp": request["arrival_us"] / US_PER_MS, **lengths, "hash_ids": ids})
    engine = {name: inputs.arguments[name] for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")}
    engine |= {"enable_prefix_caching": bool(inputs.arguments.get("enable_prefix_caching", True))}
    engine |= {"enable_chunked_prefill": bool(inputs.arguments.get("enable_chunked_prefill", True))}
    engine |= {"max_model_len": inputs.arguments["max_model_len"]}
    engine |= {"num_gpu_blocks": inputs.arguments.get("num_gpu_blocks") or 1_000_000}
    if option == "fitted":
        engine["planner_profile_data"] = str(_profile(inputs))
    (inputs.folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace), "utf-8")
    report, lines = inputs.folder / "report.json", inputs.folder / "report.jsonl"
    command = [sys.executable, "-m", "dynamo.replay", str(inputs.folder / "trace.jsonl"), "--replay-mode", "offline"]
    command += ["--trace-block-size", str(block), "--extra-engine-args", json.dumps(engine)]
    command += ["--report-json", str(report), "--report-jsonl", str(lines)]
    # Run in a folder of our own: Python puts the working folder on the module path.
    run_to_end(command, "dynamo.replay", cwd=inputs.folder)
    if not lines.exists():
        raise AdapterError("dynamo.replay wrote no report")
    answers = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    answers = sorted((a for a in answers if a["terminal_status"] == "completed"), key=lambda a: a["arrival_time_ms"])
    if len(answers) != len(inputs.requests):
        raise AdapterError(f"dynamo.replay completed {len(answers)} of {len(inputs.requests)} requests")
    for index, answer in enumerate(answers):
        admitted_ms = answer["first_admit_ms"] - answer["arrival_time_ms"]
        yield Answer(
            index,
            US_PER_MS * answer["ttft_ms"],
            US_PER_MS * max(answer["e2e_latency_ms"], answer["ttft_ms"]),
            US_PER_MS * admitted_ms,
        )


def _profile(inputs: Inputs) -> Path:
    """The step times of the coefficients as the tables of a profile of Dynamo's planner.

    A pass of its engine takes the sum of the two tables, and counts a prompt that it completes among its decodes.  So
    the prefill table holds what a whole prompt adds to a step, and the decode table holds the fixed part.  The decode
    table is indexed by KV tokens and their mean per request; the quotient is the number of requests.
    """
    import numpy as np

    times = step_times(inputs)
    by_context = np.array(times.decode_us)
    most = times.decodes[-1] * times.contexts[-1]
    totals = np.linspace(0, most, _PROFILE_POINTS)
    means = np.geomspace(1, times.contexts[-1], _PROFILE_POINTS)
    itl = np.empty((len(totals), len(means)))
    for i, mean in enumerate(means):
        at_mean = [np.interp(mean, times.contexts, of_count) for of_count in by_context.T]
        itl[:, i] = np.interp(totals / mean, times.decodes, at_mean) / US_PER_MS
    path = inputs.folder / "profile.npz"
    np.savez(
        path,
        prefill_isl=np.array(times.prefill_tokens[1:], np.float64),
        prefill_ttft_ms=np.array(times.prefill_us[0][1:]) / US_PER_MS,
        decode_active_kv_tokens=totals,
        decode_context_length=means,
        decode_itl=itl,
    )
    return path


DYNAMO = Adapter(
    "dynamo",
    "ai-dynamo",
    "1.4.2",
    (
        "asynchronous scheduling",
        "the client's and the server's delays outside of the engine",
        "clients that give up",
        "prompts beside decodes: a pass takes the sum of two times; its KV tokens count a shared block once",
        "the model and the GPU, without a profile: its polynomial is the same for all",
    ),
    _dynamo,
    fitted="fitted",
)
