"""Gaps between the output tokens of a run, pooled over requests without making a list of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.trace import Int64s


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

    def counts(self, times: NDArray[np.int64] | NDArray[np.bool_]) -> Int64s:
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
