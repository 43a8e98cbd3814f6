"""Which engine arguments of a replay nobody recorded, as far as they change it, and which contradict each other.

An assumed value is named only if the replay shows that another one would matter.  For a bound: the replay reached the
smallest default that vLLM could have used.  For memory: it could have been short.  For the rest: what the argument
governs happened.  Bounds that someone may have set below vLLM's defaults are not considered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.base.engine_packs import shown_argument
from blis_replay.blis.result import SimResult, step_parts
from blis_replay.ingest.recording import ENGINE_CHECK, UNKNOWN, Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.plan import ReplayPlan
from blis_replay.validate.judgement import Remark, remark

_BOUNDS = ("max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True)
class OpenArgument:
    """An engine argument that was assumed and changes this replay; ``value``: None for unlimited memory."""

    name: str
    value: int | float | bool | str | None
    why: str


def open_arguments(run: ReplayRun) -> tuple[OpenArgument, ...]:
    """Arguments that nobody recorded and that change this replay, what matters most first; of a run without steps
    all that were assumed."""
    engine, result = run.recording.engine, run.simulated.engine
    found = []
    if run.plan.engine.num_gpu_blocks is None and (result is None or _memory_could_bind(run.plan, result)):
        used = "" if result is None else f"; up to {result.blocks_in_use:,} were in use at once"
        found.append(OpenArgument("num_gpu_blocks", None, f"unlimited KV memory{used}"))
    changed = {name for name, _value in run.mode.engine}
    for name in ("async_scheduling", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "block_size"):
        setting = engine.get(name)
        if setting is None or setting.source != UNKNOWN or name in changed:
            continue
        why = "not simulated step by step" if result is None else _why(name, run, result)
        if why:
            found.append(OpenArgument(name, setting.value, why))
    return tuple(found)


def _why(name: str, run: ReplayRun, result: SimResult) -> str:
    """What of the run an assumed argument governs, empty if nothing."""
    plan, steps = run.plan, result.steps
    if name == "async_scheduling":
        return "" if run.mode.scheduling != "recorded" or "scheduling" in plan.basis else "it governs every step"
    if name in _BOUNDS:
        from blis_replay.ingest.readers.server.engine_defaults import least_default  # of most runs both are recorded

        least = min(least_default(name), getattr(plan.engine, name))
        columns = ("running_depth",) if name == "max_num_seqs" else ("prefill_tokens", "decode_tokens")
        sums = (sum(some[column].astype(np.int64) for column in columns) for some in step_parts(steps))
        reached = max(int(np.max(of_part, initial=0)) for of_part in sums)
        return f"the replay reached {reached:,}" if reached >= least else ""
    hits = plan.trace.block_keys is not None and int(result.cached_tokens.sum()) > 0
    if name == "enable_prefix_caching" or hits:
        return f"{int(result.cached_tokens.sum()):,} prompt tokens were found in the cache" if hits else ""
    blocks = plan.engine.num_gpu_blocks
    tight = blocks is not None and 2 * result.blocks_in_use > blocks
    return "more than half of the KV blocks were in use" if tight else ""


def _memory_could_bind(plan: ReplayPlan, result: SimResult) -> bool:
    """Whether requests could have met the end of KV memory.

    A server that has not room for one request of ``max_model_len`` does not start (vllm/v1/core/kv_cache_utils.py), so
    there is that much; with prefix caching every block that was ever filled counts.
    """
    engine, trace = plan.engine, plan.trace
    certain = -(-engine.max_model_len // engine.block_size)
    if trace.block_keys is None:
        return result.blocks_in_use > certain
    filled = -(-(trace.prompt_tokens + trace.output_tokens) // engine.block_size)
    return int(filled.sum()) > certain


def argument_remarks(recording: Recording, found: tuple[OpenArgument, ...]) -> list[Remark]:
    """What is open, each contradiction between sources, and which release stands for the recorded one."""
    arguments = [(one.name, None if one.value is None else shown_argument(one.value), one.why) for one in found]
    engine = [finding for finding in recording.findings if finding.check == ENGINE_CHECK]
    return [
        *([remark("not_recorded", arguments=arguments)] if arguments else []),
        *(remark("sources_disagree", what=finding.message) for finding in engine if "used" in finding.measured),
        *(remark("scheduler", what=finding.message) for finding in engine if "scheduled_as" in finding.measured),
    ]
