"""Uncached prompt tokens where block identities are unknown: a hit enters a replay as a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.blis.trace import BlockKeys
from blis_replay.ingest.checks.prefix_cache import uncached_error_tokens, uncached_prompt_tokens
from blis_replay.ingest.recording import Recording, SharedPrefix
from blis_replay.replay.prefix import engine_block_keys, period_of, prefix_identity, prompt_tokens, takes_turns

_MIN_HIT_RATE = 0.03  # a smaller aggregate rate is decodes that an asynchronous server counts as prefill
_STANDARD_ERRORS = 2.0  # above it, by which a hit rate of sampled steps is believed


@dataclass(frozen=True)
class PrefixEstimate:
    """Uncached prompt tokens per request (int64, in request order) and how they are known.

    ``known``: whether anything says how many were cached.
    """

    prefill_tokens: Int64s
    basis: str
    known: bool = True


def estimate_prefix(recording: Recording, prompts: Int64s | None = None) -> PrefixEstimate:
    """How many prompt tokens of each request no prefix cache held.

    By the first of these that the recording supports.  The server's own count per request.  Recorded prompt identities
    in a cache that never forgets.  The cycle of a shared-prefix workload (see ``_shared_prefix``).  The server's count
    of at least half of the requests.  An aggregate hit rate, the same share for all.  Else the whole prompt.

    ``prompts``: int64[n], prompt tokens in place of the recorded ones.
    """
    recorded = prompt_tokens(recording)
    prompts = recorded if prompts is None else prompts
    cached = recording.requests["cached_prompt_tokens"]
    block = int(recording.engine["block_size"].value)
    if cached.null_count() == 0 and len(cached):
        return PrefixEstimate(np.maximum(prompts - cached.to_numpy(), 1), "cached prompt tokens as the server reported")
    if recording.prefix is not None:
        found = cached_tokens(engine_block_keys(recording.prefix, prompts, block), prompts)
        return PrefixEstimate(prompts - found, f"found in an endless cache by {recording.prefix.source}")
    if recording.shared_prefix and takes_turns(recorded.astype(float), period_of(recording.shared_prefix)):
        return _shared_prefix(prompts, recording.shared_prefix, block)
    known = cached.is_not_null().to_numpy()
    if 2 * known.sum() >= len(known) > 0:
        hits = np.where(known, cached.fill_null(0).to_numpy(), prompts * (cached.sum() / prompts[known].sum()))
        basis = f"of {known.sum():,} of {len(known):,} prompts, as the server reported; of the others, the same share"
        return PrefixEstimate(np.clip(prompts - np.rint(hits).astype(np.int64), 1, prompts), basis)
    computed = uncached_prompt_tokens(recording)
    rate = recording.prefix_hit_rate if computed is None else 1 - computed / float(prompts.mean())
    # A sample of the steps knows the rate no better than its draw.
    unsure = 0.0 if computed is None else _STANDARD_ERRORS * uncached_error_tokens(recording) / float(prompts.mean())
    if rate is not None and rate > _MIN_HIT_RATE + unsure:
        source = "aggregate hit rate" if computed is None else "hit rate by the step records"
        basis = f"{source} of {rate:.1%}, the same for all: not identified per request"
        return PrefixEstimate(np.clip(np.rint(prompts * (1 - rate)).astype(np.int64), 1, prompts), basis)
    if rate is not None and unsure <= _MIN_HIT_RATE:
        return PrefixEstimate(prompts, "whole prompts: hardly any token of them was cached")
    return PrefixEstimate(prompts, "no prefix information: whole prompts", known=False)


def hits_known(recording: Recording) -> bool:
    """Whether it is known what a prefix cache held of the prompts, or would have held on a server without one."""
    identified = prefix_identity(recording, prompt_tokens(recording)) is not None
    had_one = recording.argument("enable_prefix_caching", True)
    return identified or recording.shared_prefix is not None or (had_one and estimate_prefix(recording).known)


def cached_tokens(keys: BlockKeys, prompt_tokens: Int64s) -> Int64s:
    """int64[n]: prompt tokens of each request that earlier ones had, in a cache that never forgets.

    Whole blocks only, and never the last token, which is always computed (vLLM ``get_computed_blocks``).
    """
    seen = np.zeros(int(keys.keys.max(initial=-1)) + 1, np.bool_)
    found = np.zeros(len(prompt_tokens), np.int64)
    for i, (start, count) in enumerate(zip(keys.start.tolist(), keys.count.tolist(), strict=True)):
        row = keys.keys[start : start + count]
        found[i] = np.count_nonzero(seen[row])  # where a block was seen, all before it were
        seen[row] = True
    cached: Int64s = np.minimum(found, np.maximum(prompt_tokens - 1, 0) // keys.block_size) * keys.block_size
    return cached


def _shared_prefix(prompts: Int64s, workload: SharedPrefix, block: int) -> PrefixEstimate:
    """Request i carries prompt i modulo the number of prompts (groups x prompts a group).

    Its first round is cold: the first request of a group computes the whole prompt, the others all but the full
    blocks of the group's system prompt.  Groups are not recorded, so this is the expectation over random membership.
    Of the P - 1 other prompts, the i before it miss all G - 1 of its own group with probability
    C(P - G, i) / C(P - 1, i).  Later rounds find all full blocks but the one with the last token, which is always
    computed.
    """
    period = period_of(workload)
    group = workload.num_prompts_per_group
    prefill = prompts - block * ((prompts - 1) // block)
    system = block * (workload.system_prompt_tokens // block)
    for i in range(min(period, len(prompts))):
        first_of_group = comb(period - group, i) / comb(period - 1, i)
        shared = min(system, int(prompts[i]) - 1)
        prefill[i] = max(round(int(prompts[i]) - shared * (1 - first_of_group)), 1)
    basis = (
        f"{period} prompts in turn ({workload.num_groups} groups of {group}), the first {period} requests cold, "
        "group membership averaged"
    )
    return PrefixEstimate(prefill, basis)
