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
    # Odd records can say that a prefill ended before it began: it has no chunk then.
    count = np.maximum(end_step - start_step + 1, 0)
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
    stretches = _Stretches.of(steps.unfinished_steps(), free_tokens)
    number = stretches.number_at(steps.step_id)
    low, high = stretches.used_before(steps.step_id), stretches.used_with(steps.step_id)
    begun, reached, fits = _first_come_first_served(steps, number, low, high, work_tokens)
    shared = np.minimum(reached[steps.admission], high) - np.maximum(begun[steps.admission], low)
    tokens = np.where(number >= 0, np.maximum(shared, 0), work_tokens[steps.admission])
    return Chunks(steps, tokens, *_certainty(steps, stretches, work_certain, fits, free_certain))


@dataclass(frozen=True)
class _Stretches:
    """Stretches of consecutive steps that used up their budget.

    ``full``: those steps, ascending; ``number``: the stretch of each; ``used``: its budget up to and with each.
    """

    full: Int64s
    number: Int64s
    used: Int64s

    @staticmethod
    def of(full: Int64s, free_tokens: Int64s) -> _Stretches:
        number = np.cumsum(np.diff(full, prepend=full[:1]) > 1, dtype=np.int64)
        used, starts = np.cumsum(free_tokens), np.flatnonzero(np.diff(number, prepend=-1))
        before = (used - free_tokens)[starts]
        return _Stretches(full, number, used - np.repeat(before, np.diff(np.append(starts, len(full)))))

    def at(self, values: Int64s, step_id: Int64s, other: int | Int64s) -> Int64s:
        """The value of each step that is full, of others ``other``."""
        if not len(self.full):
            return np.full(len(step_id), other)
        place = np.minimum(np.searchsorted(self.full, step_id), len(self.full) - 1)
        return np.where(self.full[place] == step_id, values[place], other)

    def number_at(self, step_id: Int64s) -> Int64s:
        """The stretch of a step, else -1; it goes on to the step after its last full one, where a prefill ends."""
        return self.at(self.number, step_id, self.at(self.number, step_id - 1, -1))

    def used_before(self, step_id: Int64s) -> Int64s:
        return self.at(self.used, step_id - 1, 0)

    def used_with(self, step_id: Int64s) -> Int64s:
        return self.at(self.used, step_id, _WITHOUT_LIMIT)

    def where_all(self, number: Int64s, flags: Bools) -> Bools:
        """bool[stretches]: all flags of a stretch."""
        agreed = np.ones(int(self.number[-1]) + 1 if len(self.full) else 0, bool)
        np.logical_and.at(agreed, number, flags)
        return agreed


def _certainty(
    steps: ChunkSteps, stretches: _Stretches, work_certain: Bools, fits: Bools, free_certain: Bools
) -> tuple[Bools, Bools]:
    """``certain`` and ``sum_certain`` of each chunk."""
    number = stretches.number_at(steps.step_id)
    inside = number >= 0
    admission, where = steps.admission[inside], number[inside]
    known = stretches.where_all(where, work_certain[admission])
    agreed = stretches.where_all(where, fits[admission])
    certain = work_certain[steps.admission]
    certain[inside] = (known & agreed & stretches.where_all(stretches.number, free_certain))[where]
    # The budget was used up whatever a hit was, unless what is known contradicts the steps.
    full_certain = free_certain & (agreed | ~known)[stretches.number]
    sums = stretches.at(full_certain.astype(np.int64), steps.step_id, certain.astype(np.int64))
    return certain, sums == 1


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
