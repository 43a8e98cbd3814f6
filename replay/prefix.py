"""Which prompt tokens the server had to compute, as far as a recording tells.

Where the workload says which prompts share what, requests get block identities and the
simulated cache finds out (``prefix_identity``).  Where only numbers are known, a hit enters
a replay as the number of uncached prompt tokens (``estimate_prefix``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import comb

import numpy as np
import polars as pl

from blis_replay.blis.trace import BlockKeys, RequestTrace
from blis_replay.compiled.arrays import Int32s, Int64s
from blis_replay.ingest.checks.prefix_cache import uncached_error_tokens, uncached_prompt_tokens
from blis_replay.ingest.checks.reconstruction import ADMISSIONS_A_STRETCH, reconstruct_by_stretches
from blis_replay.ingest.errors import ReconstructionError
from blis_replay.ingest.recording import SERVER_BLOCKS, PromptTree, Recording, SharedPrefix
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.steps.admissions import of_journeys
from blis_replay.ingest.steps.prefill import ASSUMED
from blis_replay.ingest.steps.reconstruction import computed_prompts, reconstruct
from blis_replay.replay.errors import ReplayError


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


# Which prompt belongs to which group is not recorded, so it is drawn.
_MEMBERSHIP_SEED = 42

# A load generator that cycles through its prompts repeats the prompt length exactly;
# recordings show 98 to 99.7 % (failed rows say 0), unrelated prompts about 4 %.
_CYCLES_FROM = 0.9
_FEWEST_HITS = 0.03
# A hit rate by sampled steps is believed from so many standard errors above that.
_STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class PrefixEstimate:
    """Uncached prompt tokens per request (int64, in request order) and how they are known."""

    prefill_tokens: Int64s
    basis: str


def prompt_tokens(recording: Recording) -> Int64s:
    """int64[n]: prompt tokens of every request, the lost ones filled in.

    A failed request has no prompt length in some recordings.  Where the load generator
    cycles through its prompts it takes the length of its own prompt, else the median.
    Raises ``ReplayError`` if no length is known at all.
    """
    known = recording.requests["prompt_tokens"]
    if known.null_count() == len(known) > 0:
        raise ReplayError(f"{recording.slug}: no request has a prompt length; record prompt tokens")
    if known.null_count() == 0:
        recorded: Int64s = known.to_numpy().astype(np.int64)
        return recorded
    lengths = known.cast(pl.Float64).fill_null(np.nan).to_numpy().copy()
    period = _period(recording.shared_prefix)
    if _cycles(lengths, period):
        for prompt in range(period):
            own = lengths[prompt::period]
            if not np.isnan(own).all():
                own[np.isnan(own)] = np.nanmedian(own)
    filled: Int64s = np.nan_to_num(lengths, nan=float(np.nanmedian(lengths))).round().astype(np.int64)
    return filled


def estimate_prefix(recording: Recording, prompts: Int64s | None = None) -> PrefixEstimate:
    """How many prompt tokens of each request no prefix cache held.

    The first of these that the recording supports: the server's own count per request;
    recorded prompt identities in a cache that never forgets; the cycle of a shared-prefix
    workload (see ``_shared_prefix``); what journeys and step records leave for each prefill; an aggregate hit
    rate, of step records or of the server, the same share for all; the whole prompt.
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
    if recording.shared_prefix and _cycles(recorded.astype(float), _period(recording.shared_prefix)):
        return _shared_prefix(prompts, recording.shared_prefix, block)
    if (reconstructed := _from_journeys(recording, prompts)) is not None:
        return reconstructed
    computed = uncached_prompt_tokens(recording)
    rate = recording.prefix_hit_rate if computed is None else 1 - computed / float(prompts.mean())
    # Below, it is the decodes that a server under asynchronous scheduling counts as prefill.
    # And of a sample of the steps a rate is no more sure than its draw.
    unsure = 0.0 if computed is None else _STANDARD_ERRORS * uncached_error_tokens(recording) / float(prompts.mean())
    if rate is not None and rate > _FEWEST_HITS + unsure:
        source = "aggregate hit rate" if computed is None else "hit rate by the step records"
        basis = f"{source} of {rate:.1%}, the same for all: not identified per request"
        return PrefixEstimate(np.clip(np.rint(prompts * (1 - rate)).astype(np.int64), 1, prompts), basis)
    return PrefixEstimate(prompts, "no prefix information: whole prompts")


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


def prefix_identity(recording: Recording, prompts: Int64s | None = None) -> tuple[BlockKeys, str] | None:
    """Block identities of the prompts, and how they are known.

    They are the recorded ones if there are some, else those of a shared-prefix workload:
    request i carries prompt i modulo the number of prompts; prompts of a group begin with
    the same system prompt.  Membership is drawn (seeded): it matters to the first round of
    prompts only.  None where the workload is no such cycle, or the server counted hits itself; its own identities tell
    more than its count, because they hold under other engine arguments as well.
    ``prompts`` as in ``estimate_prefix``.
    """
    workload, recorded = recording.shared_prefix, prompt_tokens(recording)
    prompts = recorded if prompts is None else prompts
    by_server = recording.prefix is not None and recording.prefix.source == SERVER_BLOCKS
    cached = recording.requests["cached_prompt_tokens"]
    if cached.null_count() == 0 and len(cached) and not by_server:
        return None
    block, period = int(recording.engine["block_size"].value), _period(workload)
    if recording.prefix is not None:
        return engine_block_keys(recording.prefix, prompts, block), recording.prefix.source
    if workload is None or not _cycles(recorded.astype(float), period):
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


def sessions_of(trace: RequestTrace, alias: str) -> tuple[Int64s, str]:
    """int64[n]: requests with one number are turns of one session, as far as block identities show; and in words.

    The next turn of a request is the first one behind it whose prompt holds all of its blocks and has room for its
    answer; of several that it could follow, it follows the longest.  Raises ``ReplayError`` without identities of
    prompts, or if no prompt goes on from another.
    """
    keys, sessions, tokens = trace.block_keys, np.arange(len(trace)), trace.prompt_tokens + trace.output_tokens
    if keys is None:
        raise ReplayError(f"{alias}: the identities of its prompts are not known; leave out sessions=prompts")
    ended_in = np.full(int(keys.keys.max(initial=-1)) + 1, -1)  # by key: the request whose last block that is
    for i in range(len(trace)):
        row = keys.keys[keys.start[i] : keys.start[i] + keys.count[i]]
        blocks = row[: trace.prompt_tokens[i] // keys.block_size]
        before = ended_in[blocks]
        goes_on = np.flatnonzero((before >= 0) & (tokens[before] < trace.prompt_tokens[i]))
        if len(goes_on):
            sessions[i] = sessions[before[goes_on[-1]]]
            ended_in[blocks[goes_on[-1]]] = -1
        if len(row):
            ended_in[row[-1]] = i
    if (count := len(np.unique(sessions))) == len(trace):
        raise ReplayError(f"{alias}: no prompt goes on where another request ended; leave out sessions=prompts")
    turns = f"{len(trace):,} requests in {count:,} sessions"
    return sessions, f"{turns}: a prompt that goes on where an earlier request ended is taken for its next turn"


def group_of_prompts(workload: SharedPrefix) -> Int64s:
    """int64[prompts]: the group of each distinct prompt, in the order in which they take turns; drawn (seeded)."""
    groups = np.repeat(np.arange(workload.num_groups), workload.num_prompts_per_group)
    drawn: Int64s = np.random.default_rng(_MEMBERSHIP_SEED).permutation(groups)
    return drawn


def _shared_prefix(prompts: Int64s, workload: SharedPrefix, block: int) -> PrefixEstimate:
    """Request i carries prompt i modulo the number of prompts (groups x prompts a group).

    Its first round is cold: the first request of a group computes the whole prompt, the
    others all but the full blocks of the group's system prompt.  Which prompt belongs to
    which group is not recorded, so the expectation over random membership is taken: of
    the P - 1 other prompts, those before it (i of them) miss all G - 1 of its own group
    with probability C(P - G, i) / C(P - 1, i).  Later rounds find all full blocks but the
    one that holds the last token, which is always computed.
    """
    period = _period(workload)
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


def _period(workload: SharedPrefix | None) -> int:
    return workload.num_groups * workload.num_prompts_per_group if workload else 0


def _cycles(lengths: np.ndarray[tuple[int], np.dtype[np.float64]], period: int) -> bool:
    """Whether prompt lengths repeat at the period of the workload (nan: not known)."""
    if period < 1 or len(lengths) <= period:
        return period > 0
    same = lengths[period:] == lengths[:-period]
    known = ~(np.isnan(lengths[period:]) | np.isnan(lengths[:-period]))
    return bool(known.any() and same[known].mean() >= _CYCLES_FROM)
