"""What a simulation returns: per request and per step, in arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.compiled.arrays import Bools, Int64s


@dataclass(frozen=True)
class TokenGaps:
    """The gaps of all requests of a run, each stored once for all requests that share it.

    ``gap_us``: int64[steps + breaks].  Within a segment (request, first row, rows of the step table) the gap that
    ends with a step is its end less that of the step before; between two segments of a request (it
    was passed over or preempted) there is one gap more, a break.  ``request``, ``first``, ``last``:
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


def token_gaps(segments: Int64s, step_end_us: Int64s, post_token_us: int) -> TokenGaps:
    """The gaps of the requests that have ``segments`` (int64, n x 3: request, first row, rows)."""
    ordered = segments[np.argsort(segments[:, 0], kind="stable")]
    request, first = ordered[:, 0], ordered[:, 1]
    last = first + ordered[:, 2] - 1
    broken = request[1:] == request[:-1]
    breaks_us = step_end_us[first[1:][broken]] - step_end_us[last[:-1][broken]]
    gap_us = np.concatenate([np.diff(step_end_us, prepend=step_end_us[:1]), breaks_us]) + post_token_us
    return TokenGaps(gap_us, request, first, last, request[1:][broken])


@dataclass(frozen=True)
class SimResult:
    """A run as far as it went.  Requests are in the order of the trace; times are us.

    ``scheduled_us`` / ``scheduled_step``: first admission, when ``schedule()`` ran and its step.
    ``first_step`` / ``last_step``: rows of ``steps`` that gave a request its first and last
    token, -1 where there is none (yet).  ``steps``: one record a step, fields
    named by ``kernel.state.Step``.  ``segments``: int64, n x 3: request, first row, rows that
    all gave it a token, in the order in which they ended; a request that was never passed
    over nor preempted has one.  ``cached_tokens``: prefix-cache hit of the first admission;
    ``resume_cached_tokens``: of later ones, summed; those fetched from a CPU tier are among both.
    ``stored_blocks``, ``fetched_blocks``: KV blocks copied to that tier and back.
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
    segments: Int64s
    lifecycle: Lifecycle
    stored_blocks: int = 0
    fetched_blocks: int = 0

    @property
    def completed(self) -> Bools:
        """bool[n]: requests that got their last token."""
        return np.equal(self.status, k.COMPLETED)

    @property
    def aborted(self) -> Bools:
        """bool[n]: requests whose client gave up."""
        return np.equal(self.status, k.ABORTED)

    @property
    def step_end_us(self) -> Int64s:
        """int64[steps]: when each step's tokens are in."""
        ends: Int64s = self.steps["end_us"]
        return ends

    @property
    def first_token_us(self) -> Int64s:
        """int64[n]: when the engine had the first token, -1 where there is none."""
        return self._end_of(self.first_step)

    @property
    def finished_us(self) -> Int64s:
        """int64[n]: when the engine had the last token, -1 where there is none."""
        return self._end_of(self.last_step)

    @property
    def post_token_us(self) -> int:
        """The delay of every token on its way out, in whole us."""
        return int(self.lifecycle.post_token_us)

    @property
    def ttft_us(self) -> Int64s:
        """int64[n]: send to first token at the client; meaningful where ``completed``."""
        return self.first_token_us - self.arrival_us + self.post_token_us + self.first_token_wait_us

    @property
    def first_token_wait_us(self) -> Int64s:
        """int64[n]: a first token waits for those of its step's decodes; meaningful where ``completed``."""
        each_us = self.lifecycle.first_token_per_decode_us
        if each_us == 0 or len(self.steps) == 0:
            return np.zeros(len(self.first_step), np.int64)
        return np.rint(self.steps["decode_tokens"][self.first_step] * each_us).astype(np.int64)

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
    def scheduling_delay_us(self) -> Int64s:
        """int64[n]: arrival to first admission, and the reported scheduling time; -1 if never admitted."""
        delay = self.scheduled_us - self.arrival_us + int(self.lifecycle.scheduling_us)
        return np.where(self.scheduled_us >= 0, delay, -1)

    @property
    def preemption_delay_us(self) -> Int64s:
        """int64[n]: reported preemption time, a share for each preemption; no time of the server."""
        return self.preemptions * int(self.lifecycle.preemption_us)

    @property
    def last_step_us(self) -> Int64s:
        """int64[n]: duration of the step that gave the last token."""
        durations: Int64s = self.step_end_us - self.steps["start_us"]
        return durations[self.last_step] if len(durations) else np.zeros(len(self.last_step), np.int64)

    def token_times_us(self, request: int) -> Int64s:
        """int64[tokens so far]: when the engine had each token of a request."""
        parts = [self.step_end_us[first : first + rows] for r, first, rows in self.segments if r == request]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def token_gaps(self, post_token_us: int | None = None) -> TokenGaps:
        """The gaps between consecutive output tokens of all requests; count completed ones only.

        ``post_token_us``: how much later than the one before each token comes out, as the lifecycle has it if None.
        """
        return token_gaps(
            self.segments, self.step_end_us, self.post_token_us if post_token_us is None else post_token_us
        )

    def inter_token_gaps(self, chosen: Bools) -> tuple[Int64s, Int64s]:
        """Pooled gaps between consecutive output tokens as ``(gap_us, count)``.

        ``chosen``: bool[n], completed requests to pool.
        """
        gaps = self.token_gaps()
        return gaps.gap_us, gaps.counts(chosen)

    def _end_of(self, step: Int64s) -> Int64s:
        if len(self.steps) == 0:
            return np.full(len(step), -1, np.int64)
        return np.where(step >= 0, self.step_end_us[step], -1)


def read_result(
    state: k.State, order: Int64s, arrival_us: Int64s, queued_us: Int64s, lifecycle: Lifecycle
) -> SimResult:
    """What has happened so far in a kernel's state.

    ``order``: int64[n], the request, by its place in the result, of each of the kernel's.  ``arrival_us``,
    ``queued_us``: int64[n] in the order of the result.
    """
    in_order = bool((order[1:] > order[:-1]).all())
    segments = state.segments[: state.at[0].segments].copy()
    place = np.empty(0 if in_order else len(order), np.int64)
    if not in_order:
        place[order] = np.arange(len(order))
        segments[:, 0] = order[segments[:, 0]]

    def column(table: k.Table, name: str) -> Int64s:
        values = table[name].astype(np.int64)
        return values if in_order else values[place]

    facts, outcomes = state.facts, state.outcomes
    return SimResult(
        arrival_us=arrival_us,
        queued_us=queued_us,
        scheduled_us=column(outcomes, "scheduled_us"),
        scheduled_step=column(outcomes, "scheduled_step"),
        first_step=column(outcomes, "first_step"),
        last_step=column(outcomes, "last_step"),
        status=column(state.requests, "status"),
        output_tokens=column(facts, "total_tokens") - column(facts, "prompt_tokens"),
        preemptions=column(outcomes, "preemptions"),
        cached_tokens=column(outcomes, "cached_tokens"),
        resume_cached_tokens=column(outcomes, "resume_cached_tokens"),
        steps=state.steps[: state.at[0].rows],
        segments=segments,
        lifecycle=lifecycle,
        stored_blocks=int(state.at[0].cpu_stored),
        fetched_blocks=int(state.at[0].cpu_fetched),
    )


def check_conservation(abort_us: Int64s, state: k.State, result: SimResult) -> None:
    """Requests in = out, tokens in = out, all blocks free again: a break is an error, always.

    ``abort_us``: int64[n] in the order of the result.  Raises ``TraceError``.
    """
    completed = result.completed
    left = len(completed) - np.count_nonzero(completed | result.aborted)
    if left:
        raise TraceError(f"{left} requests neither completed nor were given up: an engine defect")
    if (np.equal(abort_us, k.NEVER) > completed).any():
        raise TraceError("a request that nobody gave up did not complete: an engine defect")
    if state.at[0].free_blocks != state.config[0].num_blocks:
        raise TraceError("blocks were lost or freed twice: an engine defect")
    if not 0 <= state.at[0].cpu_used <= state.config[0].cpu_blocks:
        raise TraceError("the CPU tier holds more blocks than it has: an engine defect")
    tokens = np.bincount(result.segments[:, 0], result.segments[:, 2], minlength=len(abort_us))
    if ((tokens != result.output_tokens) & completed).any():
        raise TraceError("a completed request has not all of its tokens: an engine defect")
