"""A small simulator of the ``cmd:`` contract, right by itself, and the same with one fault: its first argument.

A step serves one token of each request that decodes, then prompt tokens within the budget, first come, first served.
Its step times are those of ``step_times.csv``, as a line.  A request holds all of its KV blocks from its admission on.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path

# Fault -> the law that names it.  The first three are faults that simulators had for days.
FAULTS = {
    "injected by the second": "alone",
    "own trace all at once": "own trace",
    "hits without effect": "cache hits",
    "looks ahead": "causality",
    "drops in a queue": "conservation",
    "last come, first served": "order of ids",
    "no limit of requests": "one at a time",
    "one request per step": "batching",
    "a delay in its own unit": "scale",
    "hash collisions": "unshared prompts",
    "scans the memory": "more memory",
    "pads to the budget": "higher budget",
    "leaks": "pause",
    "lengths swapped": "lengths",
    "time shared out": "company",
    "no seed": "own trace",
    "order of block ids": "block names",
    "waits when fast": "shorter steps",
    "first token in milliseconds": "lengths",
    "answers in the order of their ends": "causality",
}


def line(folder: Path) -> tuple[float, float, float, float]:
    """Microseconds per step, prompt token, decode and token of context."""
    with (folder / "step_times.csv").open() as file:
        rows = [[int(value) for value in row.values()] for row in csv.DictReader(file)]
    us = {(prompt, decodes, context): of for prompt, before, decodes, context, of in rows if not before}
    most, deep = max(p for p, _, _ in us), max(c for _, d, c in us if d == 1)
    many = max(d for _, d, _ in us)
    per_context = (us[0, 1, deep] - us[0, 1, 1]) / (deep - 1)
    per_prompt = (us[most, 0, 0] - us[1, 0, 0]) / (most - 1)
    per_decode = (us[0, many, many] - us[0, 1, 1]) / (many - 1) - per_context
    return us[1, 0, 0] - per_prompt, per_prompt, per_decode, per_context


class Request:
    """A request and what was computed of it."""

    def __init__(self, row: dict[str, str], fault: str) -> None:
        self.index, self.sent_us = int(row["request_index"]), float(row["arrival_us"])
        self.prompt, self.output = int(row["prompt_tokens"]), int(row["output_tokens"])
        if fault == "lengths swapped":
            self.prompt, self.output = self.output, self.prompt
        self.ids = [int(one) for one in row["prefix_blocks"].split()]
        if fault == "hash collisions":
            self.ids = [one % 7 for one in self.ids]
        self.arrival_us, self.computed, self.made, self.first_us = self.sent_us, 0, 0, 0.0


def simulate(requests: list[Request], engine: dict, price: tuple[float, float, float, float], fault: str) -> list:
    """Index, TTFT and E2E of each request that ended."""
    fixed, per_prompt, per_decode, per_context = price
    size, blocks = engine["block_size"], engine["num_gpu_blocks"] or 10**9
    seqs = {"no limit of requests": 10**9, "one request per step": 1}.get(fault, engine["max_num_seqs"])
    for request in requests:
        if fault == "injected by the second":
            request.arrival_us = -(-request.sent_us // 1_000_000) * 1_000_000
        if fault == "own trace all at once" and requests[0].sent_us > 0:
            request.arrival_us = request.sent_us = requests[0].sent_us
    if fault == "looks ahead":
        fixed *= 1 + len(requests) / 100
    if fault == "a delay in its own unit":
        fixed += 5_000
    if fault == "scans the memory":
        fixed += 20 * (engine["num_gpu_blocks"] or 0)
    if fault == "no seed":
        fixed *= 1 + time.time_ns() % 1_000_003 / 1e7
    if fault == "waits when fast" and fixed < 5_000:
        fixed += 10_000
    coming, waiting, running, cache, answers = list(requests), [], [], set(), []
    held, now_us = {}, 0.0
    while coming or waiting or running:
        if not waiting and not running:
            now_us = max(now_us, coming[0].arrival_us)
        while coming and coming[0].arrival_us <= now_us:
            if fault == "drops in a queue" and len(waiting) >= 8:
                coming.pop(0)
                continue
            waiting.insert(0 if fault == "last come, first served" else len(waiting), coming.pop(0))
        budget = engine["max_num_batched_tokens"]
        decodes = [one for one in running if one.computed >= one.prompt]
        budget -= len(decodes)
        batch = []
        for one in [one for one in running if one.computed < one.prompt]:
            batch.append((one, min(one.prompt - one.computed, budget)))
            budget -= batch[-1][1]
        while waiting and budget > 0 and len(running) < seqs:
            one = waiting[0]
            need = -(-(one.prompt + one.output) // size)
            if sum(held.values()) + need > blocks - 1:
                break
            held[one.index] = need
            waiting.pop(0)
            running.append(one)
            found = 0
            while found < min(len(one.ids), (one.prompt - 1) // size) and one.ids[found] in cache:
                found += 1
            if fault != "hits without effect":
                one.computed = found * size
            batch.append((one, min(one.prompt - one.computed, budget)))
            budget -= batch[-1][1]
        context = sum(one.prompt + one.made for one in decodes)
        tokens = sum(part for _, part in batch)
        if fault == "pads to the budget":
            tokens = engine["max_num_batched_tokens"]
        step_us = fixed + per_prompt * tokens + per_decode * len(decodes) + per_context * context
        if fault == "leaks":
            step_us *= 1 + len(answers) / 100
        if fault == "time shared out":
            step_us /= max(len(running), 1)
        if fault == "order of block ids" and any(one.ids and one.ids[0] > one.ids[-1] for one, _ in batch):
            step_us *= 2
        now_us += step_us
        for one, part in batch:
            one.computed += part
            if one.computed >= one.prompt:
                cache.update(one.ids)
        for one in decodes + [one for one, part in batch if part and one.computed >= one.prompt]:
            one.made += 1
            if one.made == 1:
                one.first_us = now_us
            if one.made == one.output:
                running.remove(one)
                del held[one.index]
                answers.append((one.index, one.first_us - one.sent_us, now_us - one.sent_us))
    if fault == "first token in milliseconds":
        answers = [(index, ttft_us / 1_000, e2e_us) for index, ttft_us, e2e_us in answers]
    if fault == "answers in the order of their ends":
        answers = [(place, *of[1:]) for place, of in enumerate(answers)]
    return answers


def main(fault: str, folder: Path) -> None:
    """Answer the requests in a folder."""
    with (folder / "requests.csv").open() as file:
        requests = [Request(row, fault) for row in csv.DictReader(file)]
    engine = json.loads((folder / "engine.json").read_text())["arguments"]
    answers = simulate(requests, engine, line(folder), fault)
    rows = "".join(f"{index},{ttft_us:.0f},{e2e_us:.0f}\n" for index, ttft_us, e2e_us in answers)
    (folder / "results.csv").write_text("request_index,ttft_us,e2e_us\n" + rows)
    header = {"name": "toy", "version": "1", "not_modelled": ["asynchronous scheduling", "preemption"]}
    (folder / "simulator.json").write_text(json.dumps(header))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
