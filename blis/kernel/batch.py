"""Who gets which tokens in the batch being built, and what that caches: sections 2 and 6 of the semantics."""

from __future__ import annotations

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.pool import enter_cache
from blis_replay.blis.kernel.state import (
    BATCH_ATTENDED_TOKENS,
    BATCH_CONTEXT_TOKENS,
    BATCH_DECODE_TOKENS,
    BATCH_PREFILL_REQUESTS,
    BATCH_PREFILL_TOKENS,
    BATCH_SERVED,
    BATCHES_IN_FLIGHT,
    BLOCK_SIZE,
    CHUNK,
    CHUNK_STEP,
    COMPUTED,
    DECODING,
    KEYED,
    KNOWN,
    PREFIX_CACHING,
    PROMPT_TOKENS,
    SEGMENT_START,
    STATUS,
    STEP,
    State,
)


@compiled
def given_now(state: State, request: int) -> bool:
    """Whether this call has given the request tokens."""
    return state.request[request, CHUNK_STEP] == state.at[STEP] and state.request[request, CHUNK] > 0


@compiled
def give_decode(state: State, request: int, computed: int) -> None:
    """One decode token for a request with ``computed`` tokens; its block is held."""
    state.request[request, CHUNK] = 1
    state.request[request, CHUNK_STEP] = state.at[STEP]
    state.batch[BATCH_SERVED] += 1
    count(state, request, computed, 1, 1)
    if (computed + 1) % state.config[BLOCK_SIZE] == 0 or computed % state.config[BLOCK_SIZE] == 0:
        enter_decoded(state, request, computed)


@compiled
def give_chunk(state: State, request: int, tokens: int) -> None:
    """A prefill chunk; its blocks are held, and those it fills are cached at once."""
    state.request[request, CHUNK] = tokens
    state.request[request, CHUNK_STEP] = state.at[STEP]
    computed = state.request[request, COMPUTED]
    count(state, request, computed, tokens, 1)
    if state.config[PREFIX_CACHING] == 1:
        enter_cache(state, request, computed + tokens)


@compiled
def count(state: State, request: int, computed: int, tokens: int, sign: int) -> None:
    """Add a request's tokens to the batch (``sign`` 1) or take them out (-1).

    A decode is one token that is the last known one, at or past the prompt; all else,
    recomputation included, is prefill.
    """
    batch = state.batch
    decode = state.request[request, STATUS] == DECODING
    if not decode:
        decode = (
            tokens == 1
            and computed + 1 == state.request[request, KNOWN]
            and computed >= state.request[request, PROMPT_TOKENS]
        )
    if decode:
        batch[BATCH_DECODE_TOKENS] += sign
        batch[BATCH_CONTEXT_TOKENS] += sign * (computed + 1)
    else:
        batch[BATCH_PREFILL_TOKENS] += sign * tokens
        batch[BATCH_PREFILL_REQUESTS] += sign
        # Token number n of a request attends to n tokens.
        batch[BATCH_ATTENDED_TOKENS] += sign * (tokens * computed + tokens * (tokens + 1) // 2)


@compiled
def enter_decoded(state: State, request: int, computed: int) -> None:
    """Cache what a decode at ``computed`` tokens fills, as far as its tokens are known."""
    if state.config[PREFIX_CACHING] == 1 and state.request[request, KEYED] == 1:
        unknown = 1 if in_flight_input(state, request, True) else 0
        enter_cache(state, request, computed + 1 - unknown)


@compiled
def in_flight_input(state: State, request: int, given: bool) -> bool:
    """Whether the last token a decode was given as input was not known when it was scheduled.

    Asynchronous only.  ``given``: it is in the batch being built, so its input is the token
    of the step before; else it was last in the batch before, or not at all.
    """
    if state.config[BATCHES_IN_FLIGHT] == 1:
        return False
    last = state.at[STEP] if given else state.at[STEP] - 1
    return state.request[request, SEGMENT_START] < last
