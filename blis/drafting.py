"""What a run needs whose requests are walked one by one in every step, as speculative decoding does.

Few servers draft, so this and the third of the kernel behind it are loaded for them only.
"""

from __future__ import annotations

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.blis.kernel.draft_batch import DRAFT_CONFIG, DRAFTED, Flight
from blis_replay.blis.speculation import Drafts
from blis_replay.blis.trace import EngineConfig, RequestTrace


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
    return Flight(
        config=config,
        requests=np.zeros(len(trace), DRAFTED),
        batches=np.zeros((2, engine.max_num_seqs, 4), np.int64),
        counts=np.zeros(2, np.int64),
        start=drafts.start[order],
        drafted=np.minimum(drafts.drafted, config["tokens"].astype(np.int8)),
        accepted=drafts.accepted,
    )
