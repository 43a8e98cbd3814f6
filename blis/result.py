"""What a simulation returns: per request and per step, in arrays."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Bools, Int32s, Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency.models import Lifecycle

# Steps per part that is read from a file.
_STEPS_AT_A_TIME = 1 << 18


def step_parts(steps: NDArray[np.void]) -> Iterator[NDArray[np.void]]:
    """Steps (``SimResult.steps``) part by part, at least one; of steps in a file one part is in memory."""
    file = _file_of(steps)
    if file is None:
        yield steps
        return
    for first in range(0, max(len(steps), 1), _STEPS_AT_A_TIME):
        yield steps[first : first + _STEPS_AT_A_TIME]
        if hasattr(mmap, "MADV_DONTNEED"):
            file.madvise(mmap.MADV_DONTNEED)


def step_column(steps: NDArray[np.void], name: str) -> NDArray[Any]:
    """One column of the steps."""
    if _file_of(steps) is None:
        return steps[name]
    values, at = np.empty(len(steps), steps.dtype[name]), 0
    for part in step_parts(steps):
        values[at : at + len(part)] = part[name]
        at += len(part)
    return values


def _file_of(steps: NDArray[np.void]) -> mmap.mmap | None:
    """The file that holds the steps; None if they are in memory."""
    base = steps.base
    while isinstance(base, np.ndarray):
        base = base.base
    source = base.obj if isinstance(base, memoryview) else None
    return source if isinstance(source, mmap.mmap) else None


@dataclass(frozen=True)
class TokenGaps:
    """The gaps between tokens of all requests, each stored once for all requests that share it.

    ``gap_us``: int64[steps + breaks].  Within a segment a gap is the end of a step minus the end of the step before.
    Between two segments of a request, where it was skipped or preempted, there is one more gap, a break.
    ``request``, ``first``, ``last``:
    int64[segments]; ``break_request``: int64[breaks].
    """

    gap_us: Int64s
    request: Int64s
    first: Int64s
    last: Int64s
    break_request: Int64s

    def counts(self, times: Int64s | Bools) -> Int64s:
        """int64[steps + breaks]: how often each gap occurs if request i counts ``times[i]`` times."""
        steps = len(self.gap_us) - len(self.break_request)
        weight = times[self.request].astype(np.float64)
        change = np.bincount(self.first + 1, weight, steps + 1) - np.bincount(self.last + 1, weight, steps + 1)
        within = np.cumsum(change)[:steps].astype(np.int64)
        return np.concatenate([within, times[self.break_request].astype(np.int64)])


def token_gaps(segments: Int64s | Int32s, step_end_us: Int64s, post_token_us: int) -> TokenGaps:
    """The gaps of the requests that have ``segments`` (int64, n x 3: request, first row, rows)."""
    ordered = segments[np.argsort(segments[:, 0], kind="stable")].astype(np.int64, copy=False)
    request, first = ordered[:, 0], ordered[:, 1]
    last = first + ordered[:, 2] - 1
    broken = request[1:] == request[:-1]
    breaks_us = step_end_us[first[1:][broken]] - step_end_us[last[:-1][broken]]
    gap_us = np.concatenate([np.diff(step_end_us, prepend=step_end_us[:1]), breaks_us]) + post_token_us
    return TokenGaps(gap_us, request, first, last, request[1:][broken])


@dataclass(frozen=True)
class SimResult:
    """A run up to now.  Requests are in the order of the trace; times are in us.

    ``scheduled_us``, ``scheduled_step``: first admission.  ``first_step``, ``last_step``: rows of ``steps`` that
    produced a request's first and last token, -1 without a token.  ``steps``: one record per step, fields as in
    ``kernel.state.Step``.  ``segments``: int64[m, 3] of request, first row and number of consecutive rows that each
    gave it a token, in the order in which they ended.  A request that was never skipped or preempted has one segment.
    ``cached_tokens``: prefix-cache hit of the first admission; ``resume_cached_tokens``: sum over later admissions.
    """

    arrival_us: Int64s
    queued_us: Int64s
    scheduled_us: Int64s
    scheduled_step: Int64s
    first_step: Int64s
    last_step: Int64s
    status: Int64s
    output_tokens: Int64s
    preemptions: Int64s
    cached_tokens: Int64s
    resume_cached_tokens: Int64s
    steps: NDArray[np.void]
    segments: Int64s | Int32s
    lifecycle: Lifecycle

    @property
    def completed(self) -> Bools:
        """bool[n]: requests that got their last token."""
        return np.equal(self.status, k.COMPLETED)

    @property
    def aborted(self) -> Bools:
        """bool[n]: requests whose client gave up."""
        return np.equal(self.status, k.ABORTED)

    @property
    def blocks_in_use(self) -> int:
        """Most KV blocks that requests held at once."""
        most, least = 0, int(np.iinfo(np.int32).max)
        for some in step_parts(self.steps):
            most = max(most, int(some["free_blocks_before"].max(initial=0)))
            least = min(least, int(some["free_blocks"].min(initial=least)))
        return most - min(least, most)

    @property
    def step_end_us(self) -> Int64s:
        """int64[steps]: when the tokens of each step are ready."""
        return step_column(self.steps, "end_us")

    @cached_property
    def first_token_us(self) -> Int64s:
        """int64[n]: when the engine had the first token, -1 without a token."""
        return self._end_of(self.first_step)

    @cached_property
    def finished_us(self) -> Int64s:
        """int64[n]: when the engine had the last token, -1 without a token."""
        return self._end_of(self.last_step)

    @property
    def post_token_us(self) -> int:
        """The delay of every token on its way out, in whole us."""
        return int(self.lifecycle.post_token_us)

    @property
    def ttft_us(self) -> Int64s:
        """int64[n]: send to first token at the client; meaningful where ``completed``."""
        waits_us = self.post_token_us + int(self.lifecycle.stamp_us) + self.first_token_wait_us
        return self.first_token_us - self.arrival_us + waits_us

    @cached_property
    def first_token_wait_us(self) -> Int64s:
        """int64[n]: a first token waits for those of its step's decodes; meaningful where ``completed``."""
        each_us = self.lifecycle.first_token_per_decode_us
        if each_us == 0 or len(self.steps) == 0:
            return np.zeros(len(self.first_step), np.int64)
        return np.rint(step_column(self.steps, "decode_tokens")[self.first_step] * each_us).astype(np.int64)

    @property
    def e2e_us(self) -> Int64s:
        """int64[n]: send to last token at the client; meaningful where ``completed``.

        The post-token delay counts once a token, as BLIS bills it (blis-semantics 1.7).
        """
        after_us = self.output_tokens * self.post_token_us + int(self.lifecycle.post_request_us)
        # No later token overtakes the first.
        last_us = np.maximum(self.finished_us, self.first_token_us + self.first_token_wait_us)
        return np.asarray(last_us - self.arrival_us + after_us, np.int64)

    @property
    def last_step_us(self) -> Int64s:
        """int64[n]: duration of the step that gave the last token."""
        durations: Int64s = self.step_end_us - step_column(self.steps, "start_us")
        return durations[self.last_step] if len(durations) else np.zeros(len(self.last_step), np.int64)

    def of_requests(self) -> SimResult:
        """The same with only the steps that gave a request its first or last token, and without segments.

        The latencies of requests stay the same, in a hundredth of the memory.
        """
        rows = np.unique(np.concatenate([self.first_step, self.last_step]))
        rows = rows[rows >= 0]
        first, last = (
            np.where(step >= 0, np.searchsorted(rows, step), step) for step in (self.first_step, self.last_step)
        )
        none = self.segments[:0].copy()
        return replace(self, first_step=first, last_step=last, steps=self.steps[rows], segments=none)

    def token_times_us(self, request: int) -> Int64s:
        """int64[tokens so far]: when the engine had each token of a request."""
        parts = [self.step_end_us[first : first + rows] for r, first, rows in self.segments if r == request]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def token_gaps(self, post_token_us: int | None = None) -> TokenGaps:
        """The gaps between consecutive output tokens of all requests; count completed ones only.

        ``post_token_us``: delay added to every token on its way out; None: that of the lifecycle.
        """
        return token_gaps(
            self.segments, self.step_end_us, self.post_token_us if post_token_us is None else post_token_us
        )

    def inter_token_gaps(self, chosen: Bools, post_token_us: int | None = None) -> tuple[Int64s, Int64s]:
        """Pooled gaps between consecutive output tokens as ``(gap_us, count)``, ascending and distinct.

        ``chosen``: bool[n], completed requests to pool.  ``post_token_us``: as in ``token_gaps``.
        """
        gaps = self.token_gaps(post_token_us)
        counts = gaps.counts(chosen)
        distinct, place = np.unique(gaps.gap_us[counts > 0], return_inverse=True)
        return distinct, np.bincount(place, counts[counts > 0], len(distinct)).astype(np.int64)

    def _end_of(self, step: Int64s) -> Int64s:
        return np.where(step >= 0, self.step_end_us[step], -1) if len(self.steps) else np.full(len(step), -1, np.int64)


def read_result(
    state: k.State, order: Int64s, arrival_us: Int64s, queued_us: Int64s, lifecycle: Lifecycle
) -> SimResult:
    """What has happened so far in a kernel's state.

    ``order``: int64[n], the request, by its place in the result, of each of the kernel's.  ``arrival_us``,
    ``queued_us``: int64[n] in the order of the result.
    """
    in_order = bool((order[1:] > order[:-1]).all())
    segments = state.segments[: state.at["segments"][0]].copy()
    place = np.empty(0 if in_order else len(order), np.int64)
    if not in_order:
        place[order] = np.arange(len(order))
        segments[:, 0] = order[segments[:, 0]]
    columns = outcomes_of(state, slice(None))
    columns = columns if in_order else {name: values[place] for name, values in columns.items()}
    steps = state.steps[: state.at["rows"][0]]
    return SimResult(arrival_us, queued_us, **columns, steps=steps, segments=segments, lifecycle=lifecycle)


def outcomes_of(state: k.State, rows: slice) -> dict[str, Int64s]:
    """What there is to say of requests, int64 each, in the order of the kernel."""
    requests, facts, outcomes = state.requests[rows], state.facts[rows], state.outcomes[rows]
    names = [*("scheduled_us", "scheduled_step", "first_step", "last_step")]
    names += ["preemptions", "cached_tokens", "resume_cached_tokens"]
    return {name: outcomes[name].astype(np.int64) for name in names} | {
        "status": requests["status"].astype(np.int64),
        "output_tokens": facts["total_tokens"].astype(np.int64) - facts["prompt_tokens"],
    }


def check_conservation(abort_us: Int64s, state: k.State, result: SimResult) -> None:
    """Requests in = out, tokens in = out, all blocks free again: a break is an error, always.

    ``abort_us``: int64[n] in the order of the result.  Raises ``TraceError``.
    """
    completed = result.completed
    if not completed.all():
        left = len(completed) - np.count_nonzero(completed | result.aborted)
        if left:
            raise TraceError(f"{left} requests neither completed nor were given up: an engine defect")
        if (np.equal(abort_us, k.NEVER) > completed).any():
            raise TraceError("a request that nobody gave up did not complete: an engine defect")
    if (state.at["free_blocks"] != state.config["num_blocks"]).any():
        raise TraceError("blocks were lost or freed twice: an engine defect")
    tokens = np.bincount(result.segments[:, 0], result.segments[:, 2], minlength=len(abort_us))
    if ((tokens != result.output_tokens) & completed).any():
        raise TraceError("a completed request has not all of its tokens: an engine defect")
