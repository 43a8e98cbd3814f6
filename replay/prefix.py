"""Prompts of a recording: their lengths, and their block identities, by which the simulated cache finds hits.

Where identities are unknown, ``prefix_estimate`` says how many tokens of each prompt were cached.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int32s, Int64s
from blis_replay.base.errors import ReplayError, UnreplayableError
from blis_replay.blis.trace import BlockKeys
from blis_replay.ingest.recording import SERVER_BLOCKS, PromptTree, Recording, SharedPrefix


def engine_block_keys(tree: PromptTree, prompt_tokens: Int64s, block_size: int) -> BlockKeys:
    """Keys for the full blocks of every request's prompt, as far as they are known.

    A block is shared if it ends within what two prompts share.  Raises ``ReplayError`` beyond 2^31 blocks.
    """
    keys = recorded_block_keys(tree, len(prompt_tokens), block_size)
    return replace(keys, count=np.minimum(prompt_tokens // block_size, keys.count))


def recorded_block_keys(tree: PromptTree, requests: int, block_size: int) -> BlockKeys:
    """Keys as far as recorded identities reach, which may be a block of theirs beyond the prompt's end.

    Raises ``ReplayError`` beyond 2^31 blocks.
    """
    start, count, keys = _prompt_rows(tree, block_size)
    request, prompt = (tree.requests[column].to_numpy() for column in ("request_index", "prompt"))
    own_start, own_count = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    own_start[request], own_count[request] = start[prompt], count[prompt]
    return BlockKeys(own_start, own_count, keys, block_size)


def _prompt_rows(tree: PromptTree, block_size: int) -> tuple[Int64s, Int64s, Int32s]:
    """``(start, count, keys)``: prompt p has ``keys[start[p] : start[p] + count[p]]``, equal where shared."""
    count = tree.prompts["tokens"].to_numpy() // block_size
    shared = np.minimum(tree.prompts["shared_tokens"].to_numpy() // block_size, count)
    start = np.cumsum(count) - count
    own = count - shared
    if int(own.sum()) >= 1 << 31:
        raise ReplayError("the recorded prompts have more than 2^31 different blocks; replay a part of them")
    first_own = (np.cumsum(own) - own).tolist()
    keys = np.empty(int(count.sum()), np.int32)
    parents = tree.prompts["parent"].to_list()
    rows = zip(start.tolist(), count.tolist(), shared.tolist(), strict=True)
    for prompt, (begin, length, of_parent) in enumerate(rows):
        if of_parent:
            from_parent = int(start[parents[prompt]])
            keys[begin : begin + of_parent] = keys[from_parent : from_parent + of_parent]
        first = first_own[prompt]
        keys[begin + of_parent : begin + length] = np.arange(first, first + length - of_parent)
    return start, count, keys


# Which prompt belongs to which group is not recorded, so it is drawn.
_MEMBERSHIP_SEED = 42

# A load generator that cycles through its prompts repeats prompt lengths exactly: recordings show 98 to 99.7 % (failed
# rows say 0), unrelated prompts about 4 %.
_MIN_REPEATED = 0.9
# Of all prompt tokens.  Six live recordings have 0 to 2.2 % behind a client's first requests; a second load had 18 %.
_MOST_FROM_BEFORE = 0.05


def prompt_tokens(recording: Recording) -> Int64s:
    """int64[n]: prompt tokens of every request, the lost ones filled in.

    A failed request has no prompt length in some recordings.  Where the load generator
    cycles through its prompts it takes the length of its own prompt, else the median.
    Raises ``ReplayError`` if no length is known at all.
    """
    known = recording.requests["prompt_tokens"]
    if known.null_count() == len(known) > 0:
        raise UnreplayableError(f"{recording.slug}: no request has a prompt length; record prompt tokens")
    if known.null_count() == 0:
        recorded: Int64s = known.to_numpy().astype(np.int64)
        return recorded
    lengths = known.cast(pl.Float64).fill_null(np.nan).to_numpy().copy()
    period = period_of(recording.shared_prefix)
    if takes_turns(lengths, period):
        for prompt in range(period):
            own = lengths[prompt::period]
            if not np.isnan(own).all():
                own[np.isnan(own)] = np.nanmedian(own)
    filled: Int64s = np.nan_to_num(lengths, nan=float(np.nanmedian(lengths))).round().astype(np.int64)
    return filled


def prefix_identity(recording: Recording, prompts: Int64s | None = None) -> tuple[BlockKeys, str] | None:
    """Block identities of the prompts, and how they are known.

    They are the recorded ones if there are some, else those of a shared-prefix workload:
    request i carries prompt i modulo the number of prompts; prompts of a group begin with
    the same system prompt.  Membership is drawn (seeded): it matters to the first round of
    prompts only.  None for another workload, or where the server counted hits.  Identities that the server recorded
    come before its count, because they hold under other engine arguments as well.  Where its cache had prompts
    from before the recording, as after another load, only the count knows.
    ``prompts`` as in ``estimate_prefix``.
    """
    workload, recorded = recording.shared_prefix, prompt_tokens(recording)
    prompts = recorded if prompts is None else prompts
    by_server = recording.prefix is not None and recording.prefix.source == SERVER_BLOCKS
    cached = recording.requests["cached_prompt_tokens"]
    counted = cached.null_count() == 0 and len(cached) > 0
    if counted and not by_server:
        return None
    block, period = int(recording.engine["block_size"].value), period_of(workload)
    if recording.prefix is not None:
        keys = engine_block_keys(recording.prefix, prompts, block)
        # What another server sent counts as a hit too.
        apart = "kv_transfer_config" in recording.engine
        before = _found_from_before(keys, cached.to_numpy()) if counted and not apart else 0
        return None if before > _MOST_FROM_BEFORE * int(recorded.sum()) else (keys, recording.prefix.source)
    if workload is None or not takes_turns(recorded.astype(float), period):
        return None
    group = group_of_prompts(workload)
    shared = workload.system_prompt_tokens // block
    longest = max(int(prompts.max()) // block, shared)
    rows = np.empty((period, longest), np.int32)
    rows[:, :shared] = group[:, None] * shared + np.arange(shared)
    own = longest - shared
    rows[:, shared:] = workload.num_groups * shared + np.arange(period * own).reshape(period, own)
    prompt = np.arange(len(prompts)) % period
    keys = BlockKeys(prompt * longest, prompts // block, rows.reshape(-1), block)
    return keys, f"{period} prompts in turn, {workload.num_groups} groups; which prompt is in which group is drawn"


def _found_from_before(keys: BlockKeys, cached: Int64s) -> int:
    """Tokens that a server found cached of blocks that no earlier request has; ``cached``: int64[n], tokens of each."""
    request = np.repeat(np.arange(len(keys.count)), keys.count)
    depth = np.arange(len(request)) - np.repeat(np.cumsum(keys.count) - keys.count, keys.count)
    key = keys.keys[keys.start[request] + depth]
    first = np.full(int(key.max(initial=-1)) + 1, len(keys.count))
    np.minimum.at(first, key, request)
    return int(((depth < cached[request] // keys.block_size) & (first[key] == request)).sum()) * keys.block_size


def group_of_prompts(workload: SharedPrefix) -> Int64s:
    """int64[prompts]: the group of each distinct prompt, in the order in which they take turns; drawn (seeded)."""
    groups = np.repeat(np.arange(workload.num_groups), workload.num_prompts_per_group)
    drawn: Int64s = np.random.default_rng(_MEMBERSHIP_SEED).permutation(groups)
    return drawn


def period_of(workload: SharedPrefix | None) -> int:
    """Number of distinct prompts of a shared-prefix workload, which take turns; 0 for another."""
    return workload.num_groups * workload.num_prompts_per_group if workload else 0


def takes_turns(lengths: np.ndarray[tuple[int], np.dtype[np.float64]], period: int) -> bool:
    """Whether prompt lengths (nan: unknown) repeat at the period of the workload."""
    if period < 1 or len(lengths) <= period:
        return period > 0
    same = lengths[period:] == lengths[:-period]
    known = ~(np.isnan(lengths[period:]) | np.isnan(lengths[:-period]))
    return bool(known.any() and same[known].mean() >= _MIN_REPEATED)
