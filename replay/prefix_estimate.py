"""Uncached prompt tokens where block identities are unknown: a hit enters a replay as a number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReconstructionError
from blis_replay.blis.trace import BlockKeys
from blis_replay.ingest.checks.prefix_cache import uncached_error_tokens, uncached_prompt_tokens
from blis_replay.ingest.checks.reconstruction import ADMISSIONS_A_STRETCH, reconstruct_by_stretches
from blis_replay.ingest.recording import Recording, SharedPrefix
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.steps.admissions import of_journeys
from blis_replay.ingest.steps.prefill import ASSUMED
from blis_replay.ingest.steps.reconstruction import computed_prompts, reconstruct
from blis_replay.replay.prefix import engine_block_keys, period_of, prompt_tokens, takes_turns

_MIN_HIT_RATE = 0.03  # a smaller aggregate rate is decodes that an asynchronous server counts as prefill
_STANDARD_ERRORS = 2.0  # above it, by which a hit rate of sampled steps is believed


@dataclass(frozen=True)
class PrefixEstimate:
    """Uncached prompt tokens per request (int64, in request order) and how they are known."""

    prefill_tokens: Int64s
    basis: str


def estimate_prefix(recording: Recording, prompts: Int64s | None = None) -> PrefixEstimate:
    """How many prompt tokens of each request no prefix cache held.

    By the first of these that the recording supports.  The server's own count per request.  Recorded prompt identities
    in a cache that never forgets.  The cycle of a shared-prefix workload (see ``_shared_prefix``).  What journeys and
    step records leave for each prefill.  An aggregate hit rate, the same share for all.  Else the whole prompt.

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
    if (reconstructed := _from_journeys(recording, prompts)) is not None:
        return reconstructed
    computed = uncached_prompt_tokens(recording)
    rate = recording.prefix_hit_rate if computed is None else 1 - computed / float(prompts.mean())
    # A sample of the steps knows the rate no better than its draw.
    unsure = 0.0 if computed is None else _STANDARD_ERRORS * uncached_error_tokens(recording) / float(prompts.mean())
    if rate is not None and rate > _MIN_HIT_RATE + unsure:
        source = "aggregate hit rate" if computed is None else "hit rate by the step records"
        basis = f"{source} of {rate:.1%}, the same for all: not identified per request"
        return PrefixEstimate(np.clip(np.rint(prompts * (1 - rate)).astype(np.int64), 1, prompts), basis)
    return PrefixEstimate(prompts, "no prefix information: whole prompts")


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


def _from_journeys(recording: Recording, prompts: Int64s) -> PrefixEstimate | None:
    """By the tokens that the steps of an admission have left for it; None where no step tells."""
    journeys = recording.lifecycles.where("request_index IS NOT NULL").only(["journey", "request_index"])
    if journeys.is_empty():
        return None
    try:
        work = pl.concat(_computed(recording, journeys)).unique("journey", keep="first", maintain_order=True)
    except ReconstructionError:
        return None
    known = int(work["known"].sum())
    if not known:
        return None
    request, computed = work["request_index"].to_numpy(), work["computed_tokens"].to_numpy()
    share = float(computed.sum() / prompts[request].sum())
    prefill = np.rint(prompts * share).astype(np.int64)
    prefill[request] = computed
    basis = f"of {known:,} of {len(prompts):,} prompts, what the recorded steps computed; of the others, the same share"
    return PrefixEstimate(np.clip(prefill, 1, prompts), basis)


def _computed(recording: Recording, journeys: Rows) -> Iterator[pl.DataFrame]:
    """``request_index``, ``computed_tokens`` and whether they are ``known``, of some admissions after the others.

    Of many journeys what nothing tells is assumed as in its stretch of the run; the same errors as ``reconstruct``.
    """
    stretches = (
        reconstruct_by_stretches(recording, ADMISSIONS_A_STRETCH) if journeys.height > ADMISSIONS_A_STRETCH else None
    )
    built = [reconstruct(recording)] if stretches is None else (stretch.built for stretch in stretches)
    for part in built:
        work = computed_prompts(part)
        of_part = of_journeys(journeys, work).frame()
        yield work.join(of_part, on="journey").select(
            "journey", "request_index", "computed_tokens", (pl.col("hit_source") != ASSUMED).alias("known")
        )


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
