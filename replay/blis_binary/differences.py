"""Where BLIS is known to do something else than vLLM, and whether it did so in a replay."""

from __future__ import annotations

import numpy as np

from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.trace import NEVER_US
from blis_replay.compiled.arrays import Int64s
from blis_replay.replay.blis_binary.files import BlisResults, TraceForm, output_lengths, shared_prefixes
from blis_replay.replay.plan import ReplayPlan


def known_differences(
    plan: ReplayPlan, results: BlisResults, entry: ModelEntry | None, preemptions: int | None, form: TraceForm
) -> tuple[str, ...]:
    """A sentence for each known difference that applies to this replay (blis-semantics 1.5, 2.4, 2.5, 9).

    ``preemptions``: as the build counted them, None if it does not say.
    """
    return (
        *_overlap(plan, results, entry),
        *restarted_outputs(preemptions),
        *_prefixes(plan, form),
        *_scheduling(plan, entry),
        *_aborts(plan, form),
    )


def overlapping_last_steps(
    queued_us: Int64s, finished_us: Int64s, last_step_us: Int64s, completed: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> int:
    """How many requests were queued while the server ran nothing but a last step.

    BLIS starts a step for those at once, beside the one that runs.  A request counts if, of
    all queued before it, some had not finished and all were in their last step.  int64[n]
    each, ``last_step_us`` about the duration of a request's last step.
    """
    order = np.argsort(queued_us, kind="stable")
    order = order[completed[order]]
    if len(order) < 2:
        return 0
    ends = np.maximum.accumulate(finished_us[order])[:-1]
    last_begin = np.maximum.accumulate(finished_us[order] - last_step_us[order])[:-1]
    queued = queued_us[order][1:]
    return int(((last_begin < queued) & (queued < ends)).sum())


def _overlap(plan: ReplayPlan, results: BlisResults, entry: ModelEntry | None) -> list[str]:
    trace, lengths = plan.trace, output_lengths(plan)
    queued_us, finished_us = trace.arrival_us, trace.arrival_us + results.e2e_us
    gaps = np.maximum(lengths - 1, 1)
    last_step_us = np.where(lengths > 1, (results.e2e_us - results.ttft_us) // gaps, results.ttft_us)
    if entry is not None:
        delays = entry.lifecycle
        pre_us = delays.pre_queue_us + delays.pre_queue_per_prompt_token_us * trace.prompt_tokens
        queued_us = queued_us + pre_us.astype(np.int64)
        finished_us = finished_us - lengths * int(delays.post_token_us) - int(delays.post_request_us)
        last_step_us = last_step_us - int(delays.post_token_us)
        # A request of one token has its prefill as last step.
        last_step_us = np.where(lengths > 1, last_step_us, finished_us - queued_us)
    count = overlapping_last_steps(queued_us, finished_us, last_step_us, results.completed)
    if not count:
        return []
    return [
        f"about {count:,} requests came while the server ran nothing but a last step; BLIS starts their step beside "
        "it, vLLM after it"
    ]


def restarted_outputs(preemptions: int | None) -> list[str]:
    """What preemptions cost in BLIS, if there were some."""
    if not preemptions:
        return []
    return [
        f"BLIS preempted {preemptions:,} times; it generates the output of a preempted request again from its start, "
        "vLLM keeps what was generated"
    ]


def restarted_outputs_elsewhere(preemptions: int) -> str:
    """The same where only the embedded engine, given as many blocks, counted preemptions."""
    return (
        f"the embedded engine preempted {preemptions:,} times (this BLIS build does not count); BLIS generates the "
        "output of a preempted request again from its start, vLLM keeps what was generated"
    )


def _prefixes(plan: ReplayPlan, form: TraceForm) -> list[str]:
    shared, prompts, block = shared_prefixes(plan), plan.trace.prompt_tokens, plan.engine.block_size
    sharing = shared.length > 0
    if not sharing.any():
        return []
    if not form.has_prefixes:
        return [f"this BLIS build cannot be told of {int(sharing.sum()):,} shared prefixes, all prompts are computed"]
    groups = len(np.unique(shared.group[sharing]))
    lines = [
        f"prefix hits are passed to BLIS as {groups:,} groups with a shared prefix, which its first request computes"
    ]
    full = int((sharing & (prompts % block == 0) & (shared.length == prompts - block)).sum())
    if full:
        lines.append(
            f"{full:,} prompts could be in the cache as a whole; BLIS would compute nothing of them and hold no block, "
            "so their last block is passed as their own, as vLLM computes it"
        )
    return lines


def _scheduling(plan: ReplayPlan, entry: ModelEntry | None) -> list[str]:
    lines = []
    if entry is not None and entry.lifecycle.first_token_per_decode_us:
        lines.append(
            "BLIS hands a first token out at once; this release lets it wait for those of the decodes in its step"
        )
    if plan.engine.async_scheduling:
        lines.append("BLIS has no asynchronous scheduling: it schedules a step when the one before has ended")
    return lines


def _aborts(plan: ReplayPlan, form: TraceForm) -> list[str]:
    aborted = int((plan.trace.abort_us != NEVER_US).sum())
    if not aborted or form.has_prefixes:
        return []
    return [f"this BLIS build has no client timeouts: {aborted:,} requests that were given up are served to their end"]
