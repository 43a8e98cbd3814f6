"""How the prefill tokens of admissions lie over their steps (vllm-scheduler-semantics 2, 3 and 6).

A chunk that does not end its prefill has used up what was left of the token budget, or has the length of
``long_prefill_token_threshold``.  So without a threshold the prefill tokens of a step with such a chunk are the
budget less the decodes, first come, first served: over a stretch of such steps, the tokens that a request
got in a step are where its share of the stretch's work meets that step's share of the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

_WITHOUT_LIMIT = 2**62


@dataclass(frozen=True)
class Budget:
    """Engine arguments: tokens a step, tokens a request in a step (0: no limit of its own)."""

    step_tokens: int
    chunk_tokens: int


@dataclass(frozen=True)
class ChunkSteps:
    """One element a chunk, by admission and step.

    ``admission``: row of the admissions; ``last``: whether it ended its prefill.
    """

    admission: Int64s
    step_id: Int64s
    last: Bools

    def unfinished_steps(self) -> Int64s:
        """The steps with a chunk that did not end its prefill, ascending."""
        return np.unique(self.step_id[~self.last])


@dataclass(frozen=True)
class Chunks:
    """The tokens of each of the ``steps``; ``certain``: they follow from the records, ``sum_certain``: the sum of
    the chunks of their step does."""

    steps: ChunkSteps
    tokens: Int64s
    certain: Bools
    sum_certain: Bools


def chunk_steps(start_step: Int64s, end_step: Int64s, ended: Bools) -> ChunkSteps:
    """A chunk for each step from start to end of each admission; the last one ends the prefill if it ``ended``."""
    count = end_step - start_step + 1
    admission = np.repeat(np.arange(len(count)), count)
    step_id = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - start_step, count)
    return ChunkSteps(admission, step_id, ended[admission] & (step_id == end_step[admission]))


def lay_chunks(
    steps: ChunkSteps,
    work_tokens: Int64s,
    work_certain: Bools,
    budget: Budget,
    free_tokens: Int64s,
    free_certain: Bools,
) -> Chunks:
    """Tokens of each chunk.

    ``work_tokens``: what each admission had to compute, in order of admission; ``free_tokens``: of each of the
    ``unfinished_steps``, the budget less decodes; ``*_certain``: whether that is so.
    """
    if budget.chunk_tokens:
        return _of_one_length(steps, work_tokens, work_certain, budget, free_tokens)
    full = steps.unfinished_steps()
    stretch = np.cumsum(np.diff(full, prepend=full[:1]) > 1, dtype=np.int64)
    free = np.cumsum(free_tokens)
    starts = np.flatnonzero(np.diff(stretch, prepend=-1))
    upto = free - np.repeat((free - free_tokens)[starts], np.diff(np.append(starts, len(full))))

    def of(values: Int64s, at: Int64s, other: int | Int64s) -> Int64s:
        place = np.minimum(np.searchsorted(full, at), len(full) - 1)
        return np.where(full[place] == at, values[place], other) if len(full) else np.full(len(at), other)

    # A stretch ends with the step after its last full one, where its last prefill ends.
    number = of(stretch, steps.step_id, of(stretch, steps.step_id - 1, -1))
    low, high = of(upto, steps.step_id - 1, 0), of(upto, steps.step_id, _WITHOUT_LIMIT)
    begun, reached, fits = _first_come_first_served(steps, number, low, high, work_tokens)
    inside = number >= 0
    shared = np.minimum(reached[steps.admission], high) - np.maximum(begun[steps.admission], low)
    tokens = np.where(inside, np.maximum(shared, 0), work_tokens[steps.admission])
    count = int(stretch[-1]) + 1 if len(full) else 0

    def all_of(where: Int64s, flags: Bools) -> Bools:
        agreed = np.ones(count, bool)
        np.logical_and.at(agreed, where, flags)
        return agreed

    admission, where = steps.admission[inside], number[inside]
    known, agreed = all_of(where, work_certain[admission]), all_of(where, fits[admission])
    certain = work_certain[steps.admission]
    certain[inside] = (known & agreed & all_of(stretch, free_certain))[where]
    # The budget was used up whatever a hit was, unless what is known contradicts the steps.
    full_certain = free_certain & (agreed | ~known)[stretch]
    sum_certain = of(full_certain.astype(np.int64), steps.step_id, certain.astype(np.int64)) == 1
    return Chunks(steps, tokens, certain, sum_certain)


def _first_come_first_served(
    steps: ChunkSteps, number: Int64s, low: Int64s, high: Int64s, work_tokens: Int64s
) -> tuple[Int64s, Int64s, Bools]:
    """Where in the budget of its stretch each admission's share begins and ends, and whether its steps agree.

    A request that left before its prefill ended was the last in line and took all there was.
    """
    count = len(work_tokens)
    begun, reached, fits = np.zeros(count, np.int64), np.zeros(count, np.int64), np.ones(count, bool)
    first = np.flatnonzero(np.diff(steps.admission, prepend=-1))
    final = np.append(first[1:], len(steps.admission)) - 1
    before, here = 0, -1
    for a, b in zip(first[number[first] >= 0].tolist(), final[number[first] >= 0].tolist(), strict=True):
        request = steps.admission[a]
        before, here = (before if number[a] == here else 0), number[a]
        begun[request] = max(before, low[a])
        wanted = begun[request] + work_tokens[request]
        after = min(max(wanted, low[b] + 1), high[b]) if steps.last[b] else high[b]
        fits[request] = begun[request] == before and (after == wanted if steps.last[b] else after < wanted)
        reached[request] = before = after
    return begun, reached, fits


def _of_one_length(
    steps: ChunkSteps, work_tokens: Int64s, work_certain: Bools, budget: Budget, free_tokens: Int64s
) -> Chunks:
    """Chunks as long as the threshold, the last one the rest; certain where that is possible within the budget."""
    chunks = np.bincount(steps.admission, minlength=len(work_tokens))
    rest = work_tokens - budget.chunk_tokens * (chunks - 1)
    tokens = np.where(steps.last, np.clip(rest, 1, budget.chunk_tokens)[steps.admission], budget.chunk_tokens)
    full = steps.unfinished_steps()
    place = np.searchsorted(full, steps.step_id)
    shared = np.isin(steps.step_id, full)
    asked = np.bincount(place[shared], tokens[shared], minlength=len(full))
    possible = (rest >= 1) & (rest <= budget.chunk_tokens) | ~_ended(steps, len(work_tokens))
    within = ~shared
    within[shared] = (asked <= free_tokens)[place[shared]]
    # Whoever got less than a whole chunk in one step has more left in the next.
    np.logical_and.at(possible, steps.admission, within)
    certain = possible[steps.admission] & (work_certain[steps.admission] | ~steps.last)
    return Chunks(steps, tokens, certain, certain)


def _ended(steps: ChunkSteps, count: int) -> Bools:
    ended = np.zeros(count, bool)
    ended[steps.admission[steps.last]] = True
    return ended
