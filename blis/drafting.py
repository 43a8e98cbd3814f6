"""What a run needs whose requests are walked one by one in every step, as speculative decoding does.

Few servers draft, so this and the third of the kernel behind it are loaded for them only.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.blis.kernel import loop
from blis_replay.blis.kernel.flight import DRAFT_CONFIG, DRAFTED, Flight
from blis_replay.blis.kernel.state import NONE, State
from blis_replay.blis.kernel.step_time import KernelModel, step_duration_us
from blis_replay.blis.latency.models import BatchFeatures
from blis_replay.blis.speculation import Drafts
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace


class Stepped(Protocol):
    """An engine that is driven a step at a time (``engine.Engine``)."""

    state: State

    def schedule(self, until_us: int = NEVER_US) -> BatchFeatures | None:
        """Build the next batch, if one can be scheduled before ``until_us``."""

    def run(self, duration_us: int) -> None:
        """Let it take this long."""


def new_flight(trace: RequestTrace, engine: EngineConfig, order: Int64s) -> Flight:
    """What the kernel needs beside its state before the first arrival; ``order``: requests as the state has them."""
    config = np.zeros(1, DRAFT_CONFIG)
    config["once_more"] = engine.behaviours.decodes_once_more
    if engine.speculation is None:
        nothing = np.zeros(int(trace.output_tokens.sum()), np.int8)
        drafts = Drafts(np.cumsum(trace.output_tokens) - trace.output_tokens, nothing, nothing)
    else:
        drafts = trace.drafts or engine.speculation.draw(trace.output_tokens)
        config["tokens"] = engine.speculation.num_speculative_tokens
        config["lookahead"] = engine.speculation.lookahead_tokens
        if engine.behaviours.lookahead_at_admission:
            config["lookahead_at_admission"] = engine.speculation.lookahead_tokens
        config["drops_last_hit"] = engine.speculation.drops_last_hit and not engine.hash_lookahead_tokens
    config["cached_as_accepted"] = engine.behaviours.drafts_cached_as_accepted
    config["hash_lookahead"] = engine.hash_lookahead_tokens
    config["keeps_drafts"] = not engine.behaviours.drafts_end_with_preemption
    config["pads"] = engine.behaviours.single_tokens_padded
    config["pads_or_waits"] = not engine.behaviours.padding_where_it_fits
    config["pads_alone"] = engine.behaviours.padding_without_company
    requests = np.zeros(len(trace), DRAFTED)
    if trace.fetched_us is not None:
        requests["stays"] = trace.fetched_us[order] >= 0
    return Flight(
        config=config,
        requests=requests,
        batches=np.zeros((2, engine.max_num_seqs, 4), np.int64),
        counts=np.zeros(2, np.int64),
        start=drafts.start[order],
        drafted=np.minimum(drafts.drafted, config["tokens"].astype(np.int8)),
        accepted=drafts.accepted,
    )


def advance_to_answer(engine: Stepped, model: KernelModel, until_us: int, seen: int) -> tuple[bool, int]:
    """As ``Engine.advance_to_answer``."""
    while True:
        batch = engine.schedule(until_us)
        if batch is not None:
            engine.run(step_duration_us(*model, engine.state.batch, batch.start_us))
        at = engine.state.at
        in_flight = engine.state.flight[: at["in_flight"].item()]
        ended = at["rows"].item() - int((in_flight != NONE).sum())
        answered = np.flatnonzero(engine.state.steps["finished"][seen:ended] > 0)
        if len(answered):
            return True, seen + int(answered[0]) + 1
        seen = ended
        if batch is None:
            return False, seen


def serve_rows(engine: Stepped, row: int, last: int, table: Int64s) -> None:
    """As ``kernel.loop.serve_rows``."""
    at, requests, facts = engine.state.at, engine.state.requests, engine.state.facts
    preempted = 0
    while row < last:
        at["now_us"] = np.maximum(at["now_us"], row)
        batch = engine.schedule(row + 1)
        if batch is None:
            row += 1
            continue
        gone = at["preempted_in_call"].item()
        preempted += gone
        table[row, loop.ROW_PREEMPTED] += gone
        if tokens := batch.prefill_tokens + batch.decode_tokens:
            # Who computes again what it had, some of it output, counts as a decode.
            again = (requests["chunk_step"] == at["step"]) & (requests["chunk"] > 1)
            again &= (requests["known"] > facts["prompt_tokens"]) & (preempted > 0)
            resumed, resumed_tokens = int(again.sum()), int(requests["chunk"][again].sum())
            table[row, 0] = batch.prefill_requests - resumed
            table[row, 1] = batch.prefill_tokens - resumed_tokens
            table[row, 2] = batch.decode_tokens + resumed
            table[row, 3] = batch.decode_tokens + resumed_tokens
            table[row, loop.ROW_STEP] = at["rows"].item()
        engine.run(1)
        row += tokens > 0
