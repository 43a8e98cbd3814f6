"""Public workload traces, as bytes: arrivals and lengths, no latencies.

What a client that gave up would have got is in them as asked for, but for BurstGPT, where it is a failure.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from token_ids import answer_token_ids, block_chains, prompt_token_ids

from blis_replay_labs.planted.experiment import SyntheticTruth

MOONCAKE_BLOCK_TOKENS = 512


def mooncake(truth: SyntheticTruth) -> bytes:
    """JSON lines with arrivals in whole ms and a hash id for each 512 tokens of a prompt, the last ones included.

    Ids are small numbers in order of first appearance, as in the released traces.
    """
    known: dict[bytes, int] = {}
    lines = []
    for request in range(len(truth)):
        chains = block_chains(prompt_token_ids(truth, request), MOONCAKE_BLOCK_TOKENS, partial=True)
        record = {
            "timestamp": int(truth.trace.arrival_us[request]) // 1000,
            "input_length": int(truth.trace.prompt_tokens[request]),
            "output_length": int(truth.trace.output_tokens[request]),
            "hash_ids": [known.setdefault(chain, len(known)) for chain in chains],
        }
        lines.append(f"{json.dumps(record)}\n")
    return "".join(lines).encode()


def azure(truth: SyntheticTruth) -> bytes:
    """The columns of the Azure LLM inference traces, arrivals in UTC with seven decimals."""
    rows = [
        (_azure_stamp(truth, request), truth.trace.prompt_tokens[request], truth.trace.output_tokens[request])
        for request in range(len(truth))
    ]
    return _table(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), rows)


def burstgpt_1(truth: SyntheticTruth) -> bytes:
    """BurstGPT, release 1: arrivals in whole seconds from midnight; a failure has no tokens."""
    header = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
    rows = [(_seconds_of_day(truth, request), *_burstgpt_cells(truth, request)) for request in range(len(truth))]
    return _table(header, rows)


def burstgpt_2(truth: SyntheticTruth) -> bytes:
    """BurstGPT, release 2: with the session and the whole response time after the arrival."""
    header = (
        *("Timestamp", "Session ID", "Elapsed time", "Model"),
        *("Request tokens", "Response tokens", "Total tokens", "Log Type"),
    )
    held_us = truth.client_end_us - truth.trace.arrival_us
    rows = [
        (_seconds_of_day(truth, request), request, int(held_us[request]) / 1e6, *_burstgpt_cells(truth, request))
        for request in range(len(truth))
    ]
    return _table(header, rows)


def legacy_blis(truth: SyntheticTruth) -> bytes:
    """BLIS before TraceV2: arrivals in seconds, token ids of prompts and answers as arrays.

    BLIS cuts what it makes of the seconds to us, so half a us stands behind each arrival.
    """
    rows = []
    for request in range(len(truth)):
        seconds, us = divmod(int(truth.trace.arrival_us[request]), 1_000_000)
        prompt = prompt_token_ids(truth, request).tolist()
        answer = answer_token_ids(truth, request).tolist()
        cells = (f"{seconds}.{us:06d}5", f"request_{request}", truth.spec.model, json.dumps(prompt), json.dumps(answer))
        rows.append(cells)
    return _table(("arrival_time", "request_id", "model", "prefill_tokens", "decode_tokens"), rows)


def _azure_stamp(truth: SyntheticTruth, request: int) -> str:
    at = _wall_clock(truth, request)
    return f"{at:%Y-%m-%d %H:%M:%S.%f}0"


def _burstgpt_cells(truth: SyntheticTruth, request: int) -> tuple[str, int, int, int, str]:
    ok = bool(truth.ok[request])
    prompt_tokens, output_tokens = int(truth.trace.prompt_tokens[request]), int(truth.result.output_tokens[request])
    lengths = (prompt_tokens, output_tokens, prompt_tokens + output_tokens) if ok else (0, 0, 0)
    return "ChatGPT", *lengths, "Conversation log"


def _seconds_of_day(truth: SyntheticTruth, request: int) -> int:
    first = _wall_clock(truth, 0)
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
    return int((_wall_clock(truth, request) - midnight) // timedelta(seconds=1))


def _wall_clock(truth: SyntheticTruth, request: int) -> datetime:
    since_us = truth.epoch_ns(truth.trace.arrival_us[request]) // 1000
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=since_us)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    table.writerows(rows)
    return text.getvalue().encode()
