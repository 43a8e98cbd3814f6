"""Recordings of any size for measurements, written as a stream: the kinds of large file, as the tools print them.

    python scripts/large_recordings.py FOLDER MB    # FOLDER/per-request JSON, FOLDER/OTLP JSON

The values are plausible and not true to anything; an experiment has the large file and its configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

KINDS = ("per-request JSON", "OTLP JSON")
SLUG = "20260101-000000-llama-2-7b-tp1-general"
CONFIGURATION = "model: meta-llama/Llama-2-7b-hf\ntensor_parallelism: 1\nmax_num_seqs: 128\n"
MODEL, TOKENS, PROMPT_WORDS = "meta-llama/Llama-2-7b-hf", 248, 450
PROMPT_TOKENS = 575
STEPS_PER_SPAN, SPANS_PER_LINE = 10, 4
# A request is admitted in every fifth step, computes its prompt in it, and then decodes one token per step.
STEPS_PER_REQUEST = 5

STEP_ATTRIBUTES = (
    *("step.id", "step.ts_start_ns", "step.ts_end_ns", "step.duration_us", "queue.running_depth"),
    *("queue.waiting_depth", "batch.num_prefill_reqs", "batch.num_decode_reqs", "batch.scheduled_tokens"),
    *("batch.prefill_tokens", "batch.decode_tokens", "batch.num_finished", "batch.num_preempted"),
)
JOURNEY = ("QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED")


def per_request_records() -> Iterator[str]:
    """The text of one record after another of inference-perf 0.2: two stamps per token, and two for [DONE]."""
    draw = np.random.default_rng(0)
    words = [f"word{i}" for i in range(100)]
    sent_s = 8515.0
    for number in range(1 << 62):
        sent_s += float(draw.exponential(0.04))
        tokens_s = sent_s + 0.05 + np.cumsum(draw.normal(0.0163, 0.0005, TOKENS + 1))
        stamps_s = np.repeat(tokens_s, 2)
        stamps_s[1::2] += 25e-6
        prompt = f'system {number % 10} "\ufffd" ' + " ".join(words[i] for i in draw.integers(0, 100, PROMPT_WORDS))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        stamps = ",\n        ".join(["%.9f"] * len(stamps_s)) % tuple(stamps_s)
        yield f"""{{
    "start_time": {sent_s:.9f},
    "end_time": {stamps_s[-1] + 0.001:.9f},
    "request": {json.dumps(json.dumps(body))},
    "response": "",
    "info": {{
      "input_tokens": {PROMPT_TOKENS},
      "output_tokens": 250,
      "output_token_times": [
        {stamps}
      ]
    }},
    "error": null
  }}"""


def otlp_lines() -> Iterator[str]:
    """Lines of step spans with ten summaries each, and of the journeys of a request for every five steps."""
    step, request = 1, 0
    while True:
        yield _line("vllm.scheduler.step", [_step_span(step + STEPS_PER_SPAN * i) for i in range(SPANS_PER_LINE)])
        step += STEPS_PER_SPAN * SPANS_PER_LINE
        requests = range(request, request + STEPS_PER_SPAN * SPANS_PER_LINE // STEPS_PER_REQUEST)
        yield _line("vllm.api", [_api_span(number) for number in requests])
        yield _line("vllm.scheduler", [_core_span(number) for number in requests])
        request = requests.stop


def write(folder: Path, size_bytes: int) -> None:
    """Write an experiment of about this size for each kind of file."""
    requests, traces = (folder / kind / SLUG for kind in KINDS)
    for directory in (requests, traces):
        (directory / "results").mkdir(parents=True)
        (directory / "exp-config.yaml").write_text(CONFIGURATION)
    with (requests / "results" / "per_request_lifecycle_metrics.json").open("w") as file:
        records = per_request_records()
        file.write(f"[\n  {next(records)}")
        while file.tell() < size_bytes:
            file.write(f",\n  {next(records)}")
        file.write("\n]")
    with (traces / "traces.json").open("w") as file:
        lines = otlp_lines()
        while file.tell() < size_bytes:
            file.write(next(lines))


def _line(scope: str, spans: list[str]) -> str:
    resource = '{"attributes":[{"key":"service.name","value":{"stringValue":"vllm"}}]}'
    scoped = f'{{"scope":{{"name":"{scope}"}},"spans":[{",".join(spans)}]}}'
    return f'{{"resourceSpans":[{{"resource":{resource},"scopeSpans":[{scoped}]}}]}}\n'


def _integers(names: tuple[str, ...]) -> str:
    return ",".join(f'{{"key":"{name}","value":{{"intValue":"%d"}}}}' for name in names)


_SUMMARY = (
    '{"timeUnixNano":"%d","name":"step.BATCH_SUMMARY","attributes":['
    + _integers(STEP_ATTRIBUTES)
    + ',{"key":"kv.usage_gpu_ratio","value":{"doubleValue":%r}},'
    + _integers(("kv.blocks_total_gpu", "kv.blocks_free_gpu"))
    + "]}"
)
_SPAN = (
    '{"traceId":"%032x","spanId":"%016x",%s"flags":256,"name":"%s","kind":1,"startTimeUnixNano":"%d",'
    '"endTimeUnixNano":"%d","attributes":[%s],"events":[%s],"status":{}}'
)
_EVENT = '{"timeUnixNano":"%d","name":"%s","attributes":[%s]}'
_ZERO_NS, _MONOTONIC_NS, _STEP_NS = 1_771_430_000_000_000_000, 226_106_700_000_000, 16_000_000


def _step_span(first: int) -> str:
    events = [_summary(step) for step in range(first, first + STEPS_PER_SPAN)]
    names = ("scheduler.span_sequence", "scheduler.step_range_start", "scheduler.step_range_end")
    attributes = _integers(names) % (first // STEPS_PER_SPAN, first, first + STEPS_PER_SPAN - 1)
    at_ns = _ZERO_NS + first * _STEP_NS
    identity = (first * 0x9E3779B97F4A7C15) % (1 << 64)
    span = (identity << 64 | identity, identity, "", f"scheduler_steps_{first}", at_ns, at_ns + _STEP_NS)
    return _SPAN % (*span, attributes, ",".join(events))


def _summary(step: int) -> str:
    start_ns = _MONOTONIC_NS + step * _STEP_NS
    admitted, finished = _admitted_until(step), _admitted_until(step - TOKENS)
    prefills = admitted - _admitted_until(step - 1)
    depth, free = admitted - finished, 20_000 - step % 1_111
    work = (prefills * PROMPT_TOKENS, depth - prefills)
    counts = (depth, 0, prefills, depth - prefills, sum(work), *work, finished - _admitted_until(step - TOKENS - 1), 0)
    stamps = (step, start_ns, start_ns + 240_000, 240)
    return _SUMMARY % (
        _ZERO_NS + step * _STEP_NS + 250_000,
        *stamps,
        *counts,
        1 - free / 26_602,
        26_602,
        free,
    )


def _admitted_step(request: int) -> int:
    return request * STEPS_PER_REQUEST + 1


def _admitted_until(step: int) -> int:
    """Requests admitted in this step and before."""
    return max(0, -(-step // STEPS_PER_REQUEST))


def _stamped(step: int, later_us: int) -> tuple[int, int]:
    """The time so long after the start of a step: epoch, and monotonic."""
    since_ns = step * _STEP_NS + later_us * 1000
    return _ZERO_NS + since_ns, _MONOTONIC_NS + since_ns


def _api_span(request: int) -> str:
    first = _admitted_step(request)
    stamps = {"api.ARRIVED": (first, -600), "api.FIRST_RESPONSE_FROM_CORE": (first + 1, 100)}
    events = []
    for name, place in (stamps | {"api.DEPARTED": (first + TOKENS, 200)}).items():
        epoch_ns, monotonic_ns = _stamped(*place)
        stamp = f'{{"key":"event.ts.monotonic","value":{{"doubleValue":{monotonic_ns / 1e9!r}}}}}'
        events.append(_EVENT % (epoch_ns, name, stamp))
    names = ("gen_ai.usage.prompt_tokens", "gen_ai.request.max_tokens")
    identity = f'{{"key":"gen_ai.request.id","value":{{"stringValue":"cmpl-{request:032x}"}}}}'
    attributes = f"{identity},{_integers(names) % (PROMPT_TOKENS, TOKENS)}"
    ids = (request + 1, request + 1, "")
    spanned = (_stamped(first, -600)[0], _stamped(first + TOKENS, 200)[0])
    return _SPAN % (*ids, "llm_request", *spanned, attributes, ",".join(events))


def _core_span(request: int) -> str:
    first = _admitted_step(request)
    last = first + TOKENS - 1
    # The step that an event names, and the step from whose start its time is told.
    places = ((first - 1, first, -200), (first, first, 50), (first, first + 1, -100), (last, last + 1, -100))
    events = []
    for place, (kind, (step, begun, later_us)) in enumerate(zip(JOURNEY, places, strict=True)):
        epoch_ns, monotonic_ns = _stamped(begun, later_us)
        texts = {"event.type": kind, "phase": "WAITING" if place == 0 else "DECODE"}
        texts |= {"SCHEDULED": {"schedule.kind": "FIRST"}, "FINISHED": {"finish.status": "length"}}.get(kind, {})
        values = [f'{{"key":"{key}","value":{{"stringValue":"{text}"}}}}' for key, text in texts.items()]
        values.append(f'{{"key":"ts.monotonic","value":{{"doubleValue":{monotonic_ns / 1e9!r}}}}}')
        names = ("ts.monotonic_ns", "scheduler.step", "prefill.done_tokens", "prefill.total_tokens")
        names += ("decode.done_tokens", "decode.max_tokens", "num_preemptions")
        done = (0, 0, 1, TOKENS)[place]
        values.append(_integers(names) % (monotonic_ns, step, PROMPT_TOKENS, PROMPT_TOKENS, done, TOKENS, 0))
        events.append(_EVENT % (epoch_ns, f"journey.{kind}", ",".join(values)))
    identity = f'{{"key":"gen_ai.request.id","value":{{"stringValue":"cmpl-{request:032x}-0-1a2b3c4d"}}}}'
    ids = (request + 1, (1 << 60) + request, f'"parentSpanId":"{request + 1:016x}",')
    spanned = (_stamped(first, -200)[0], _stamped(last + 1, -100)[0])
    return _SPAN % (*ids, "llm_core", *spanned, identity, ",".join(events))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(float(sys.argv[2]) * 1e6))
