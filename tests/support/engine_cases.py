"""Short ways to build traces and engines for engine tests, and to ask a latency model for one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency.models import Latency
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

# A synchronous engine with the default token budget of vLLM's API server.
ENGINE = EngineConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192, async_scheduling=False)


def make_trace(
    arrival_us: Sequence[int],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    prefill_tokens: Sequence[int] | None = None,
    abort_us: Sequence[int] | None = None,
) -> RequestTrace:
    """Trace from lists: arrivals, prompts, outputs; nothing cached, nobody gives up, unless given."""
    columns = [arrival_us, prompt_tokens, prefill_tokens or prompt_tokens, output_tokens]
    columns.append(abort_us or [NEVER_US] * len(arrival_us))
    return RequestTrace(*(np.array(column, np.int64) for column in columns))


def duration_us(
    model: Latency, prefill: int, decode: int, context: int = 0, attended: int = 0, prefills: int = 0, start_us: int = 0
) -> int:
    """The step time of a batch of ``prefill`` and ``decode`` tokens, as the kernel asks for it."""
    batch = np.zeros(1, k.BATCH)
    batch["prefill_tokens"], batch["decode_tokens"], batch["context_tokens"] = prefill, decode, context
    batch["attended_tokens"], batch["prefill_requests"] = attended, prefills
    return int(step_duration_us(*model.for_kernel(), batch, start_us))
