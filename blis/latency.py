"""Latency models: how long a step takes, and the delays around the engine.

A model is data.  Coefficients are integer nanoseconds, so that a step time is exact
and the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.trace import Int64s


@dataclass(frozen=True)
class LatencyModel:
    """Step time of a batch, linear in what it holds, never below a floor.

    ``max(floor_ns, intercept_ns + per_prefill_token_ns * prefill_tokens
    + per_decode_token_ns * decode_tokens + per_context_token_ns * context_tokens)``
    nanoseconds, then to whole microseconds: half up (``round_half_up``, the rule of the
    scheduler oracle) or towards zero (``truncate``, as BLIS does), at least 1 us.

    ``context_tokens`` are the KV tokens that the batch's decodes attend to, each one's
    own token included.  Kind ``blackbox`` has no floor; kind ``floor`` is the "overhead
    floor" of the step-model studies, ``max(overhead, compute)``.
    """

    kind: Literal["blackbox", "floor"]
    intercept_ns: int
    per_prefill_token_ns: int
    per_decode_token_ns: int
    per_context_token_ns: int = 0
    floor_ns: int = 0
    rounding: Literal["round_half_up", "truncate"] = "round_half_up"

    def coefficients_ns(self) -> Int64s:
        """int64[6] for the kernel: see ``kernel.step_duration_us``."""
        half = 500 if self.rounding == "round_half_up" else 0
        return np.array(
            [
                self.intercept_ns,
                self.per_prefill_token_ns,
                self.per_decode_token_ns,
                self.per_context_token_ns,
                self.floor_ns,
                half,
            ],
            np.int64,
        )

    def smallest_positive_batch(self) -> int:
        """The least number of decodes, alone in a batch, whose step time is positive.

        1 for a sound model.  Raises ``ReleaseError`` if there is none.
        """
        if max(self.floor_ns, self.intercept_ns + self.per_decode_token_ns) > 0:
            return 1
        if self.per_decode_token_ns <= 0:
            raise ReleaseError("the step time of a decode batch is not positive at any size; fit the model again")
        return -self.intercept_ns // self.per_decode_token_ns + 1


@dataclass(frozen=True)
class Lifecycle:
    """Delays around the engine, us; none of them ever blocks the server.

    ``pre_queue_us`` + ``pre_queue_per_prompt_token_us`` * prompt tokens: client send to
    the waiting queue (BLIS alpha0, alpha1).  ``post_token_us``: added to every token on
    its way out (alpha2).  ``post_request_us``: added once at the end.
    """

    pre_queue_us: float = 0.0
    pre_queue_per_prompt_token_us: float = 0.0
    post_token_us: float = 0.0
    post_request_us: float = 0.0
