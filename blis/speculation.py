"""Speculative decoding: who drafts, how much, and what the model accepts of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from blis_replay.base.arrays import Int8s, Int64s
from blis_replay.base.errors import TraceError

MOST_DRAFTS = 64
# vLLM settings that change the schedule and are not simulated.
_NOT_SIMULATED = ("num_speculative_tokens_per_batch_size", "parallel_drafting", "disable_eagle_block_drop")


@dataclass(frozen=True)
class Drafts:
    """What speculative decoding drafts for each request, and what the model would accept of it.

    ``drafted`` and ``accepted``: int8[output tokens of all requests].  At index ``start[i] + t - 1`` request i has t
    output tokens; ``drafted`` tokens follow, and the model would accept ``accepted`` of them.  Asynchronous
    scheduling ignores ``drafted`` and schedules the maximum.  ``start``: int64[n].
    """

    start: Int64s
    drafted: Int8s
    accepted: Int8s

    def __post_init__(self) -> None:
        if len(self.drafted) != len(self.accepted) or (len(self.start) and self.start.max() >= len(self.drafted)):
            raise TraceError("drafts: give drafted and accepted for each output token of each request")
        if min(self.drafted.min(initial=0), self.accepted.min(initial=0)) < 0:
            raise TraceError("drafts: a number of tokens is negative; give 0 or more")


# Methods whose drafter has a KV cache: slots for its tokens are reserved in the block pool.
_DRAFTS_WITH_KV = ("eagle", "eagle3", "mtp")
SIMULATED_DRAFTERS = ("ngram", "ngram_gpu", *_DRAFTS_WITH_KV)


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: the drafter (vLLM's ``method``), its number of draft tokens, and their acceptance.

    ``acceptance``: share of drafts whose i-th token is accepted, as vLLM's metrics count it by position
    (``spec_decode_num_accepted_tokens_per_pos`` over ``spec_decode_num_drafts``); it never rises with i.
    ``drafted_share``: share of steps in which the drafter proposes anything.  ``seed`` draws both.  A trace with
    ``drafts`` overrides them.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    acceptance: tuple[float, ...] = ()
    drafted_share: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in SIMULATED_DRAFTERS:
            raise TraceError(
                f"speculative method {self.method!r} is not simulated; {', '.join(SIMULATED_DRAFTERS)} are"
            )
        if not 1 <= self.num_speculative_tokens <= MOST_DRAFTS:
            raise TraceError(f"num_speculative_tokens is {self.num_speculative_tokens}; give 1 to {MOST_DRAFTS}")
        shares = (*self.acceptance, self.drafted_share)
        if not all(0 <= share <= 1 for share in shares) or any(np.diff(self.acceptance) > 0):
            raise TraceError(
                "speculation: a share of accepted drafts is not within 0 and 1, or rises with the position"
            )

    def in_words(self) -> str:
        """One line for people."""
        shares = ", ".join(f"{share:.0%}" for share in self.acceptance)
        return f"{self.num_speculative_tokens} drafts a token by {self.method}, accepted {shares} by position, drawn"

    @property
    def lookahead_tokens(self) -> int:
        """KV slots that a step reserves beyond its own tokens."""
        return self.num_speculative_tokens if self.method in _DRAFTS_WITH_KV else 0

    @property
    def drops_last_hit(self) -> bool:
        """Whether the last block of a cached prefix is computed again so that the drafter sees it."""
        return self.method in _DRAFTS_WITH_KV

    def draw(self, output_tokens: Int64s) -> Drafts:
        """Draw drafts for requests with these output lengths, int64[n]; equal seeds give equal draws."""
        if len(self.acceptance) != self.num_speculative_tokens:
            raise TraceError(
                f"speculation: {len(self.acceptance)} shares of accepted drafts for {self.num_speculative_tokens} "
                "positions; give one for each"
            )
        total = int(output_tokens.sum())
        rng = np.random.default_rng(self.seed)
        level = rng.random(total)
        accepted = np.zeros(total, np.int8)
        for share in self.acceptance:
            accepted += level < share
        drafted = np.where(rng.random(total) < self.drafted_share, self.num_speculative_tokens, 0).astype(np.int8)
        return Drafts(np.cumsum(output_tokens) - output_tokens, drafted, accepted)


def speculation_of(arguments: Mapping[str, object]) -> Speculation | None:
    """Speculative decoding from engine arguments; None if it is off, incomplete, or not simulated.

    Reads ``speculative_config`` (such as ``method=eagle3 num_speculative_tokens=3``), ``speculative_acceptance`` (such
    as ``0.7 0.4 0.2``) and ``speculative_drafted_share``.
    """
    words = (word.partition("=") for word in str(arguments.get("speculative_config", "")).split())
    said = {name: value for name, _, value in words}
    drafts = said.get("num_speculative_tokens", said.get("num_spec_tokens", ""))
    acceptance = tuple(map(float, str(arguments.get("speculative_acceptance") or "").split()))
    other = any(said.get(name, "False") not in ("False", "None") for name in _NOT_SIMULATED)
    alone = arguments.get("data_parallel_size") in (None, 1)
    counted = drafts.isascii() and drafts.isdigit() and len(drafts) < 3 and 1 <= int(drafts) <= MOST_DRAFTS
    known = counted and len(acceptance) == int(drafts)
    if not known or said.get("method") not in SIMULATED_DRAFTERS or other or not alone:
        return None
    share = arguments.get("speculative_drafted_share")
    return Speculation(int(drafts), said["method"], acceptance, 1.0 if share is None else float(str(share)))
