"""What the simulator is given: requests and engine arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.errors import TraceError

Int64s = NDArray[np.int64]

NEVER_US = 2**62


@dataclass(frozen=True)
class RequestTrace:
    """Requests to simulate: int64 arrays of one length, in order of arrival.

    ``arrival_us``: when the client sent it, from the trace's zero.  ``prompt_tokens``;
    ``prefill_tokens``: those of them that no prefix cache holds (1 .. prompt_tokens).
    ``output_tokens``: tokens to generate, >= 1.  ``abort_us``: when the client gives
    up, ``NEVER_US`` if it does not.
    """

    arrival_us: Int64s
    prompt_tokens: Int64s
    prefill_tokens: Int64s
    output_tokens: Int64s
    abort_us: Int64s

    def __post_init__(self) -> None:
        n = len(self.arrival_us)
        for name in ("prompt_tokens", "prefill_tokens", "output_tokens", "abort_us"):
            if len(getattr(self, name)) != n:
                raise TraceError(f"{name} has {len(getattr(self, name))} values for {n} requests; give one a request")
        if n == 0:
            return
        _refuse(np.diff(self.arrival_us) < 0, "arrival_us runs backwards", "sort the requests by arrival", 1)
        _refuse(self.arrival_us < 0, "arrival_us is negative", "count from the first arrival")
        _refuse(self.output_tokens < 1, "output_tokens is below 1", "every request yields at least one token")
        _refuse(
            (self.prefill_tokens < 1) | (self.prefill_tokens > self.prompt_tokens),
            "prefill_tokens is not within 1 and prompt_tokens",
            "the last prompt token is always computed",
        )

    def __len__(self) -> int:
        return len(self.arrival_us)


@dataclass(frozen=True)
class EngineConfig:
    """Engine arguments under vLLM's names.

    ``num_gpu_blocks`` counts the reserved null block, as vLLM does; ``None`` if it is
    not known.  KV blocks do not limit the schedule in this form of the engine.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    async_scheduling: bool
    block_size: int = 16
    num_gpu_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            if getattr(self, name) < 1:
                raise TraceError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise TraceError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}); vLLM refuses that too"
            )


def _refuse(bad: NDArray[np.bool_], problem: str, mend: str, offset: int = 0) -> None:
    if bad.any():
        raise TraceError(f"request {int(np.argmax(bad)) + offset}: {problem}; {mend}")
