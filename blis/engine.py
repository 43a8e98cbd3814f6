"""The simulator: requests, engine arguments and a latency model in, a result out."""

from __future__ import annotations

import numpy as np

from blis_replay.blis import kernel
from blis_replay.blis.errors import TraceError
from blis_replay.blis.latency import LatencyModel, Lifecycle
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace


def simulate(
    trace: RequestTrace, engine: EngineConfig, latency: LatencyModel, lifecycle: Lifecycle | None = None
) -> SimResult:
    """Serve ``trace`` in virtual time with vLLM V1 scheduling.

    Returns a :class:`SimResult` in the order of the trace.  Raises ``TraceError`` if a
    prompt does not fit ``max_model_len``.  Outputs end at ``max_model_len`` as in vLLM.
    Equal input gives byte-equal output.
    """
    lifecycle = lifecycle or Lifecycle()
    too_long = trace.prompt_tokens >= engine.max_model_len
    if too_long.any():
        i = int(np.argmax(too_long))
        raise TraceError(
            f"request {i}: a prompt of {trace.prompt_tokens[i]} tokens leaves no room in max_model_len "
            f"{engine.max_model_len}; raise it or drop the request"
        )
    output_tokens = np.minimum(trace.output_tokens, engine.max_model_len - trace.prompt_tokens)
    # Delays are truncated to whole microseconds, as BLIS does.
    pre_queue_us = np.trunc(
        lifecycle.pre_queue_us + lifecycle.pre_queue_per_prompt_token_us * trace.prompt_tokens
    ).astype(np.int64)
    queued_us = trace.arrival_us + pre_queue_us
    order = np.argsort(queued_us, kind="stable")
    abort_us = np.ascontiguousarray(trace.abort_us[order])
    steps, scheduled_us, first_step, last_step, state = kernel.run(
        queued_us[order],
        trace.prompt_tokens[order],
        trace.prefill_tokens[order],
        output_tokens[order],
        abort_us,
        np.argsort(abort_us, kind="stable"),
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        2 if engine.async_scheduling else 1,
        latency.coefficients_ns(),
    )
    back = np.empty(len(trace), np.int64)
    back[order] = np.arange(len(trace))
    result = SimResult(
        arrival_us=trace.arrival_us,
        queued_us=queued_us,
        scheduled_us=scheduled_us[back],
        first_step=first_step[back],
        last_step=last_step[back],
        state=state[back],
        output_tokens=output_tokens,
        steps=steps,
        post_token_us=int(lifecycle.post_token_us),
        post_request_us=int(lifecycle.post_request_us),
    )
    _check_conservation(trace, result)
    return result


def _check_conservation(trace: RequestTrace, result: SimResult) -> None:
    """Requests in = out, tokens in = out, time forwards: a break is an error, always."""
    if (result.state == kernel.UNFINISHED).any():
        raise TraceError(f"{int((result.state == kernel.UNFINISHED).sum())} requests never finished: an engine defect")
    never_aborted = trace.abort_us == NEVER_US
    if (result.state[never_aborted] != kernel.COMPLETED).any():
        raise TraceError("a request that nobody aborted did not complete: an engine defect")
    if never_aborted.all():
        prefilled = int(result.steps[kernel.STEP_PREFILL].sum())
        decoded = int(result.steps[kernel.STEP_DECODE].sum())
        if prefilled != int(trace.prefill_tokens.sum()) or decoded != int((result.output_tokens - 1).sum()):
            raise TraceError("tokens in and tokens out differ: an engine defect")
