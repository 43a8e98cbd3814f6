"""Scenario directories of the scheduler oracle: their files, their columns, writing, reading, comparing.

A directory holds what the real scheduler did with one workload: `config.json` (settings, cost, summary),
`requests.csv`, `steps.csv.gz`, `tokens.csv.gz`, `schedule.jsonl.gz` and `prompts.jsonl.gz`. Needs no vLLM. Its rules:

- A decode is one token that is the newest known token of its request and lies past the prompt, with the drafts behind
  it. Any other tokens of a step count as prefill, also those computed again after a preemption.
- `decode_context_tokens`: KV tokens that the step's decodes attend to, summed, the computed token included.
- `duration_us` = (b_ns[0] + b_ns[1] * prefill_tokens + b_ns[2] * decode_tokens + b_ns[3] * decode_context_tokens + 500)
  // 1000.
- Prompts are lists of segments [tag, start, n] with ids tag*8192 + start .. start+n-1. The k-th token that request
  number i generates has id (20000+i)*8192 + k.
- Scheduling costs no time. Synchronous: an arrival queues at the next turn, tokens are there at t_end_us.
  Asynchronous: a batch is built at t_sched_us, while another runs, and the device takes it at t_start_us.
- Only usable blocks count. `kv_free_before` and `kv_free` stand around schedule(), `kv_free_end` after the update of
  the step, which asynchronously follows the next schedule(). `running` and `waiting` are counted after schedule(), the
  `_before` columns before it.
- The schedule has an object for each step: tokens by request in the order of scheduling (`sched`), cache hits of the
  admitted, who resumed, and who was preempted with the computed tokens it lost.
- A turn without tokens takes no time and has no row. Whom it preempted is listed under `preempted_before` of the next
  step and not counted in `num_preempted`.
"""

import csv
import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUEST_COLUMNS = [
    *("request_id", "arrival_us", "priority", "prompt_tokens", "output_tokens", "prefix_group", "prefix_len"),
    *("queued_us", "first_scheduled_us", "first_scheduled_step", "first_token_us", "first_token_step"),
    *("finished_us", "finished_step", "emitted_tokens", "num_preemptions", "num_cached_tokens"),
    *("resume_cached_tokens", "prefill_tokens_computed"),
]
# Of clients that give up, and of speculative decoding: a digit for each output token that there can be already.
OPTIONAL_COLUMNS = ["abort_us", "drafted", "accepted", "external_tokens", "fetched_us"]
STEP_COLUMNS = [
    *("step", "t_sched_us", "t_start_us", "t_end_us", "duration_us", "running_before", "waiting_before"),
    *("running", "waiting", "num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens"),
    *("decode_context_tokens", "scheduled_tokens", "num_admitted", "num_preempted", "num_finished", "kv_total"),
    *("kv_free_before", "kv_free", "kv_free_end"),
]
TOKEN_COLUMNS = ["request_id", "token_index", "step", "time_us"]
COMPARED_FILES = ("requests.csv", "steps.csv.gz", "tokens.csv.gz", "schedule.jsonl.gz")


@dataclass(frozen=True)
class Recording:
    """What one run produced: rows in the order of the columns above, `schedule` one object per step."""

    requests: list[list[Any]]
    steps: list[list[int]]
    tokens: list[list[Any]]
    schedule: list[dict[str, Any]]
    end_us: int


def write_scenario(spec: dict[str, Any], recording: Recording, vllm_version: str, out_dir: Path) -> None:
    """Write the six files of a scenario directory; equal input gives byte-equal files."""
    out_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "scenario": spec["scenario"],
        "description": spec["description"],
        "vllm_version": vllm_version,
        "engine_args": spec["engine_args"],
        "step_time": spec["step_time"],
        "summary": summarise(recording),
    }
    (out_dir / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    columns, rows = REQUEST_COLUMNS, recording.requests
    for name in OPTIONAL_COLUMNS:
        if any(name in request for request in spec["requests"]):
            columns = [*columns, name]
            rows = [[*row, asked.get(name, "")] for row, asked in zip(rows, spec["requests"], strict=True)]
    (out_dir / "requests.csv").write_text(_csv_text(columns, rows), encoding="utf-8")
    _write_gzip(out_dir / "steps.csv.gz", _csv_text(STEP_COLUMNS, recording.steps))
    _write_gzip(out_dir / "tokens.csv.gz", _csv_text(TOKEN_COLUMNS, recording.tokens))
    _write_gzip(out_dir / "schedule.jsonl.gz", _jsonl_text(recording.schedule))
    _write_gzip(out_dir / "prompts.jsonl.gz", _jsonl_text([r["request_id"], r["prompt"]] for r in spec["requests"]))


def summarise(recording: Recording) -> dict[str, int]:
    """The totals of config.json's `summary`."""
    request = dict(zip(REQUEST_COLUMNS, zip(*recording.requests, strict=True), strict=True))
    step = dict(zip(STEP_COLUMNS, zip(*recording.steps, strict=True), strict=True))
    return {
        "requests": len(recording.requests),
        "steps": len(recording.steps),
        "tokens": len(recording.tokens),
        "preemptions": sum(request["num_preemptions"]),
        "preempted_requests": sum(1 for count in request["num_preemptions"] if count),
        "cached_prompt_tokens": sum(request["num_cached_tokens"]),
        "resume_cached_tokens": sum(request["resume_cached_tokens"]),
        "prompt_tokens": sum(request["prompt_tokens"]),
        "prefill_tokens_computed": sum(request["prefill_tokens_computed"]),
        "max_running": max(step["running"]),
        "max_waiting": max(step["waiting"]),
        "min_kv_free": min(step["kv_free"]),
        "end_us": recording.end_us,
    }


def read_spec(path: Path) -> dict[str, Any]:
    """A workload: from a spec file (JSON), or from a recorded scenario directory, whose results are then ignored.

    A spec is {scenario, description, engine_args, step_time: {b_ns}, requests: [{request_id, arrival_us, priority,
    output_tokens, prompt: [[tag, start, n], ...], prefix_group, prefix_len}, ...]}, requests in order of arrival; with
    speculative decoding each has `drafted` and `accepted` too.
    """
    if not path.is_dir():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    prompts = dict(json.loads(line) for line in _read_text(path / "prompts.jsonl.gz").splitlines())
    rows = csv.DictReader(io.StringIO(_read_text(path / "requests.csv")))
    requests = [
        {
            "request_id": row["request_id"],
            "arrival_us": int(row["arrival_us"]),
            "priority": int(row["priority"]),
            "output_tokens": int(row["output_tokens"]),
            "prompt": prompts[row["request_id"]],
            "prefix_group": row["prefix_group"],
            "prefix_len": int(row["prefix_len"]),
        }
        | ({"abort_us": int(row["abort_us"])} if row.get("abort_us") else {})
        | {name: int(row[name]) for name in ("external_tokens", "fetched_us") if row.get(name)}
        | {name: row[name] for name in ("drafted", "accepted") if row.get(name)}
        for row in rows
    ]
    return {key: config[key] for key in ("scenario", "description", "engine_args", "step_time")} | {
        "requests": requests
    }


def first_difference(recorded: Path, rerun: Path) -> str | None:
    """Where two scenario directories first differ (file, line, field, both values), or None if they are equal."""
    for name in COMPARED_FILES:
        left, right = _read_text(recorded / name).splitlines(), _read_text(rerun / name).splitlines()
        for number, (a, b) in enumerate(zip(left, right, strict=False), start=1):
            if _parse_line(name, a) != _parse_line(name, b):
                return f"{name} line {number}: {_field_difference(name, left[0], a, b)}"
        if len(left) != len(right):
            return f"{name}: {len(left)} lines recorded, {len(right)} now"
    left_summary, right_summary = (json.loads((d / "config.json").read_text())["summary"] for d in (recorded, rerun))
    return None if left_summary == right_summary else f"summary: recorded {left_summary} now {right_summary}"


def _parse_line(name: str, line: str) -> Any:
    if not name.startswith("schedule"):
        return line
    parsed = json.loads(line)
    # The order of the scheduled requests is part of the schedule, and a dict comparison would lose it.
    return parsed | {key: list(parsed[key].items()) for key in ("sched", "admitted") if key in parsed}


def _field_difference(name: str, header: str, recorded: str, rerun: str) -> str:
    if name.startswith("schedule"):
        return f"recorded {recorded[:400]} now {rerun[:400]}"
    fields = zip(header.split(","), recorded.split(","), rerun.split(","), strict=False)
    return "; ".join(f"{column} recorded {a} now {b}" for column, a, b in fields if a != b)


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def _csv_text(columns: list[str], rows: list[list[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return buffer.getvalue()


def _jsonl_text(values: Any) -> str:
    return "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values)


def _write_gzip(path: Path, text: str) -> None:
    # mtime=0: the same content gives the same bytes.
    path.write_bytes(gzip.compress(text.encode("utf-8"), compresslevel=6, mtime=0))
