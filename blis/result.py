"""What a simulation returns: per request and per step, in arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis import kernel
from blis_replay.blis.trace import Int64s


@dataclass(frozen=True)
class SimResult:
    """A finished run.  Requests are in the order of the trace; times are us.

    ``first_step`` / ``last_step``: columns of ``steps`` that gave a request its first and
    last token, -1 where there is none (aborted).  ``steps``: int64, ``kernel.STEP_ROWS`` x
    steps, rows named by ``kernel.STEP_*``.  Token k of a request is computed by step
    ``first_step + k``, so its time is a slice of the step ends.
    """

    arrival_us: Int64s
    queued_us: Int64s
    scheduled_us: Int64s
    first_step: Int64s
    last_step: Int64s
    state: Int64s
    output_tokens: Int64s
    steps: Int64s
    post_token_us: int
    post_request_us: int

    @property
    def completed(self) -> NDArray[np.bool_]:
        """bool[n]: requests that got their last token."""
        return np.equal(self.state, kernel.COMPLETED)

    @property
    def step_end_us(self) -> Int64s:
        """int64[steps]: when each step's tokens are in."""
        ends: Int64s = self.steps[kernel.STEP_END]
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
    def ttft_us(self) -> Int64s:
        """int64[n]: send to first token at the client; meaningful where ``completed``."""
        return self.first_token_us - self.arrival_us + self.post_token_us

    @property
    def e2e_us(self) -> Int64s:
        """int64[n]: send to last token at the client; meaningful where ``completed``.

        The post-token delay counts once a token, as BLIS bills it (blis-semantics 1.7).
        """
        return self.finished_us - self.arrival_us + self.output_tokens * self.post_token_us + self.post_request_us

    @property
    def last_step_us(self) -> Int64s:
        """int64[n]: duration of the step that gave the last token."""
        durations: Int64s = self.steps[kernel.STEP_END] - self.steps[kernel.STEP_START]
        return durations[self.last_step]

    def inter_token_gaps(self, chosen: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
        """Pooled gaps between consecutive output tokens as ``(gap_us, count)``, a pair a step.

        ``chosen``: bool[n], completed requests to pool.  A decoding request gets a token
        in every step, so the gap that ends with step s is its end less the end of step
        s - 1, once for each chosen request between its first and its last token.
        """
        gap_us = np.diff(self.step_end_us, prepend=self.step_end_us[:1]) + self.post_token_us
        change = np.zeros(len(gap_us) + 1, np.int64)
        np.add.at(change, self.first_step[chosen] + 1, 1)
        np.add.at(change, self.last_step[chosen] + 1, -1)
        return gap_us, np.cumsum(change)[:-1]

    def _end_of(self, step: Int64s) -> Int64s:
        if self.steps.shape[1] == 0:
            return np.full(len(step), -1, np.int64)
        return np.where(step >= 0, self.step_end_us[step], -1)
