"""The truth beside the recordings of vLLM 0.32.0, from inside the engine core: every step and every arrival."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from blis_replay.ingest.recording import LIFECYCLE_SCHEMA, STEP_SCHEMA, Recording
from blis_replay.ingest.rows import rows_of

TOTAL_BLOCKS = 511  # 512 less the reserved one


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """``a`` (arrival), ``s`` (step) and ``u`` (update) lines, in order."""
    with gzip.open(folder / "steplog.jsonl.gz", "rt") as lines:
        yield from map(json.loads, lines)


def with_step_log(recording: Recording, folder: Path) -> Recording:
    """The recording with the steps and requests of its step log in place of iterations and spans."""
    zero_us = recording.clocks[0].zero_us  # the client's clock is the monotonic one of the same host
    requests: dict[str, dict[str, Any]] = {}
    steps, given = [], defaultdict[str, int](int)
    for event in events(folder):
        at_us = event.get("t", event.get("t0")) // 1000 - zero_us
        if event["e"] == "a":
            requests[event["r"]] = {"queued_us": at_us, "prompt_tokens": event["p"], "output_tokens": event["m"]}
        elif event["e"] == "s":
            for name, hit in event["new"].items():
                requests[name]["cached_prompt_tokens"] = hit
            steps.append(_step(event, at_us, given, requests))
    rows = [
        {"journey": i, "core_request_id": name, "status": "ok"} | row for i, (name, row) in enumerate(requests.items())
    ]
    return replace(
        recording,
        steps=rows_of(_frame(steps, STEP_SCHEMA)),
        lifecycles=rows_of(_frame(rows, LIFECYCLE_SCHEMA)),
    )


def _step(event: dict[str, Any], at_us: int, given: dict[str, int], requests: dict[str, Any]) -> dict[str, Any]:
    """A request is in prefill as long as its prompt is not computed."""
    counts = dict.fromkeys(("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens"), 0)
    for name, tokens in event["n"].items():
        hit = event["new"].get(name, 0)
        kind = "prefill" if given[name] + hit < requests[name]["prompt_tokens"] else "decode"
        given[name] += tokens + hit
        counts[f"{kind}_requests"] += 1
        counts[f"{kind}_tokens"] += tokens
    blocks = {"kv_blocks_total": TOTAL_BLOCKS, "kv_blocks_free": event["free"]}
    return {"step_id": event["i"], "start_us": at_us} | counts | blocks


def _frame(rows: list[dict[str, Any]], schema: dict[str, type[pl.DataType]]) -> pl.DataFrame:
    return pl.DataFrame([dict.fromkeys(schema) | row for row in rows], schema=schema, orient="row")
