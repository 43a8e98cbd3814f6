"""Synthetic experiments whose truth is known: the embedded engine serves a load."""

from __future__ import annotations

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.blis.engine import simulate
from blis_replay.blis.trace import NEVER_US, BlockKeys, RequestTrace
from blis_replay.fixtures.bundled import stage_arrivals
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth


def generate(spec: SyntheticExperiment) -> SyntheticTruth:
    """Serve the load of ``spec`` with the embedded engine.  Equal specs give equal truths."""
    random = np.random.Generator(np.random.PCG64(spec.seed))
    arrival_us, stage = _arrivals(spec, random)
    n, shared = len(arrival_us), spec.shared_prefix
    lengths, groups = _prompts(spec, random)
    prompt = np.arange(n) % len(lengths)
    cached, keys = np.zeros(n, np.int64), None
    if spec.prefix_caching and spec.cache == "simulated":
        keys = prompt_blocks(lengths, groups, n, shared.system_prompt_tokens, spec.engine.block_size)
    elif spec.prefix_caching:
        cached = cached_prompt_tokens(lengths, groups, n, shared.system_prompt_tokens, spec.engine.block_size)
    trace = RequestTrace(
        arrival_us=arrival_us,
        prompt_tokens=lengths[prompt],
        prefill_tokens=lengths[prompt] - cached,
        output_tokens=_output_tokens(spec, n, random),
        abort_us=_aborts(spec, arrival_us, random),
        block_keys=keys,
        # Three priorities, whatever else of the load is drawn.
        priority=np.arange(n) * 7 % 3 if spec.engine.scheduling_policy == "priority" else None,
    )
    result = simulate(trace, spec.engine, spec.latency, spec.lifecycle)
    cached = cached if keys is None else result.cached_tokens
    shortfall = random.random(n) * 2 * spec.retokenised_shortfall
    retokenised = np.rint(result.output_tokens * (1 - shortfall)).astype(np.int64)
    return SyntheticTruth(spec, trace, result, stage, prompt, groups[prompt], cached, retokenised)


def cached_prompt_tokens(
    lengths: Int64s, groups: Int64s, requests: int, system_prompt_tokens: int, block_size: int
) -> Int64s:
    """int64[requests]: prompt tokens in the prefix cache when request i sends prompt i mod len(lengths).

    Only full blocks are cached, and never the last token.  The first prompt of a group finds
    nothing, its other prompts the system prompt, a prompt sent again itself.
    """
    prompts = len(lengths)
    first_of_group = np.zeros(prompts, bool)
    first_of_group[np.unique(groups, return_index=True)[1]] = True
    cold = np.where(first_of_group, 0, system_prompt_tokens // block_size * block_size)
    full = (lengths - 1) // block_size * block_size
    index = np.arange(requests)
    return np.where(index < prompts, np.minimum(cold, full)[index % prompts], full[index % prompts])


def prompt_blocks(
    lengths: Int64s, groups: Int64s, requests: int, system_prompt_tokens: int, block_size: int
) -> BlockKeys:
    """Identities of the full blocks of each request's prompt: those of a group begin with its system prompt's."""
    shared = system_prompt_tokens // block_size
    count = lengths // block_size
    start = np.cumsum(count) - count
    keys = int(groups.max()) * shared + shared + np.arange(int(count.sum()))
    for first, length, group in zip(start.tolist(), count.tolist(), groups.tolist(), strict=True):
        of_group = min(shared, length)
        keys[first : first + of_group] = group * shared + np.arange(of_group)
    prompt = np.arange(requests) % len(lengths)
    return BlockKeys(start[prompt], count[prompt], keys.astype(np.int32), block_size)


def _arrivals(spec: SyntheticExperiment, random: np.random.Generator) -> tuple[Int64s, Int64s]:
    counts = [round(stage.rate_per_s * stage.duration_us / 1_000_000) for stage in spec.stages]
    arrival_us, stage = stage_arrivals(spec.stages, counts, spec.stage_gap_us, random)
    return arrival_us[: spec.requests], stage[: spec.requests]


def _prompts(spec: SyntheticExperiment, random: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Length and group of each distinct prompt, in the order in which they are sent."""
    shared = spec.shared_prefix
    count = shared.num_groups * shared.num_prompts_per_group
    jitter = np.floor((random.random(count) * 2 - 1) * (spec.prompt_jitter_tokens + 0.5) + 0.5).astype(np.int64)
    groups = np.repeat(np.arange(shared.num_groups), shared.num_prompts_per_group)
    # The load generator shuffles its prompts, so membership follows no pattern.
    shuffled = groups[np.argsort(random.random(count), kind="stable")]
    return shared.system_prompt_tokens + shared.question_tokens + jitter, shuffled


def _output_tokens(spec: SyntheticExperiment, n: int, random: np.random.Generator) -> Int64s:
    longest = spec.shared_prefix.output_tokens
    if spec.ignore_eos:
        return np.full(n, longest, np.int64)
    return 1 + (random.random(n) * longest).astype(np.int64)


def _aborts(spec: SyntheticExperiment, arrival_us: Int64s, random: np.random.Generator) -> Int64s:
    abort_us = np.full(len(arrival_us), NEVER_US)
    chosen = np.argsort(random.random(len(arrival_us)), kind="stable")[: spec.failures]
    abort_us[chosen] = arrival_us[chosen] + spec.timeout_us
    return abort_us
