"""Nothing is lost: requests and tokens in = out, at the end and in the middle; all of it ends.

At every step: the token budget, the number of sequences, and the accounts of KV blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency.models import BatchFeatures
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay_labs.verification.workloads import (
    ENGINE,
    LATENCY,
    LIFECYCLE,
    Scenario,
    SlowLatency,
    VerificationRow,
    random_trace,
    row_of_faults,
)

_MOMENTS = 200


def running_requests(state: k.State) -> list[int]:
    """Members of the running list, in its order; stops after more members than there are requests."""
    members: list[int] = []
    request = int(state.at[0].running.head)
    while request != k.NONE and len(members) <= len(state.requests):
        members.append(request)
        request = int(state.links[request].running.next)
    return members


def population_faults(state: k.State) -> list[str]:
    """Where injected requests are not exactly those completed, queued, running and aborted.

    Queue and running list are counted by walking them, the others by status; whoever has
    queued before the last ``schedule()`` must have been injected.
    """
    injected = int(state.at[0].arrived)
    status = state.requests["status"][:injected]
    waiting = state.by_rank[state.heap[: state.at[0].waiting_depth]].tolist()
    running = running_requests(state)
    over = np.flatnonzero((status == k.COMPLETED) | (status == k.ABORTED)).tolist()
    faults = []
    if sorted(waiting + running + over) != list(range(injected)):
        counts = f"{len(over)} completed or aborted + {len(waiting)} queued + {len(running)} running"
        faults.append(f"{injected} injected, but {counts}")
    if any(state.requests[request].status != k.WAITING for request in waiting):
        faults.append("a request in the queue has another status")
    if len(running) != state.at[0].running_depth:
        faults.append(f"{len(running)} members in the running list, counted {int(state.at[0].running_depth)}")
    rows = int(state.at[0].rows)
    if rows and (state.facts["queued_us"][injected:] <= state.steps["scheduled_us"][rows - 1]).any():
        faults.append("a request had queued before the last schedule() and is not known to the engine")
    return faults


def outcome_faults(trace: RequestTrace, result: SimResult) -> list[str]:
    """Where a finished run has lost or invented a request or a token."""
    faults = []
    left = len(trace) - int(result.completed.sum()) - int(result.aborted.sum())
    if left:
        faults.append(f"{left} of {len(trace)} requests neither completed nor aborted")
    tokens = np.bincount(result.segments[:, 0], result.segments[:, 2], minlength=len(trace))
    wrong = result.completed & ((tokens != trace.output_tokens) | (result.output_tokens != trace.output_tokens))
    if wrong.any():
        faults.append(f"request {int(np.argmax(wrong))} completed without its number of tokens")
    computed = int(result.steps["prefill_tokens"].sum())
    hits = int((result.cached_tokens + result.resume_cached_tokens).sum())
    asked = int(trace.prompt_tokens[result.completed].sum())
    if computed + hits < asked:
        faults.append(f"{asked} prompt tokens asked for, {computed} computed and {hits} found in the cache")
    once = not (result.preemptions.any() or result.aborted.any())
    if once and computed + hits != asked:
        faults.append(f"{asked} prompt tokens asked for, but {computed} computed and {hits} cached")
    decodes = int((result.output_tokens - 1)[result.completed].sum())
    if once and int(result.steps["decode_tokens"].sum()) != decodes:
        faults.append(f"{decodes} decode tokens due, {int(result.steps['decode_tokens'].sum())} in the step table")
    return faults


def missing_features(scenario: Scenario, result: SimResult) -> list[str]:
    """Features that a scenario is made for and that its run did not show."""
    seen = {
        "preemptions": bool(result.preemptions.any()),
        "prefix hits": bool(result.cached_tokens.any()),
        "aborts": bool(result.aborted.any()) and bool(result.completed.any()),
    }
    return [f"{scenario.name}: no {feature} in this run" for feature in scenario.must_show if not seen[feature]]


def check_conservation(chosen: Sequence[Scenario]) -> VerificationRow:
    """Injected = completed + queued + running + aborted, at many moments of each run and at its end.

    Nothing is ever dropped: a request that the engine can never serve is refused before the run.
    """
    faults, moments = [], 0
    for scenario in chosen:
        engine = scenario.start()
        last_us = int(scenario.trace.arrival_us[-1] * 1.2)
        for until_us in [*np.linspace(0, last_us, _MOMENTS, dtype=np.int64).tolist(), k.NEVER]:
            engine.advance(LATENCY, until_us)
            faults += [f"{scenario.name} at {engine.now_us} us: {text}" for text in population_faults(engine.state)]
            moments += 1
        result = engine.result()
        faults += [f"{scenario.name}: {text}" for text in outcome_faults(scenario.trace, result)]
        faults += missing_features(scenario, result)
    return row_of_faults("conservation", f"{len(chosen)} workloads", faults, f"{moments:,} moments and each end")


def check_liveness(chosen: Sequence[Scenario]) -> VerificationRow:
    """Every request that nobody gives up completes, whatever is preempted on the way."""
    faults, served, preemptions = [], 0, 0
    for scenario in chosen:
        try:
            result = simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)
        except TraceError as error:
            faults.append(f"{scenario.name}: {error}")
            continue
        faults += [f"{scenario.name}: {text}" for text in liveness_faults(scenario.trace, result)]
        served += int(result.completed.sum())
        preemptions += int(result.preemptions.sum())
    checked = f"{served:,} requests completed, {preemptions:,} preemptions"
    return row_of_faults("liveness", f"{len(chosen)} workloads", faults, checked)


def liveness_faults(trace: RequestTrace, result: SimResult) -> list[str]:
    """Requests that should have completed and did not."""
    hanging = ~result.completed & (trace.abort_us == k.NEVER)
    return [f"request {i} never completed" for i in np.flatnonzero(hanging).tolist()]


def check_overload(seed: int, requests: int, async_scheduling: bool) -> VerificationRow:
    """Arrivals at ten times what the engine can serve: the queue grows, and nothing is lost.

    Capacity is measured: the same requests, all there at the start, divided by their makespan.
    """
    rng = np.random.default_rng([seed, 2])
    config = replace(ENGINE, async_scheduling=async_scheduling)
    trace = random_trace(rng, requests, 1.0)
    makespan_us = int(simulate(trace, config, LATENCY).finished_us.max())
    flood = random_trace(rng, requests, makespan_us / requests / 10)
    engine = Engine(flood, config)
    engine.advance(LATENCY, int(flood.arrival_us[-1]))
    queued = int(engine.state.at[0].waiting_depth)
    faults = population_faults(engine.state)
    engine.advance(LATENCY)
    result = engine.result()
    faults += outcome_faults(flood, result) + liveness_faults(flood, result)
    if queued < requests // 2:
        faults.append(f"only {queued} requests queued when the last arrived: no overload")
    name = "10 x capacity, async" if async_scheduling else "10 x capacity, sync"
    return row_of_faults("overload", name, faults, f"{queued:,} of {requests:,} requests queued at the last arrival")


# -- At every step --------------------------------------------------------------------------


def batch_faults(engine: EngineConfig, batch: BatchFeatures) -> list[str]:
    """Limits of the engine that a batch breaks."""
    tokens = batch.prefill_tokens + batch.decode_tokens
    faults = []
    if tokens > engine.max_num_batched_tokens:
        faults.append(f"{tokens} tokens in a batch of at most {engine.max_num_batched_tokens}")
    if max(batch.running, batch.prefill_requests + batch.decode_tokens) > engine.max_num_seqs:
        faults.append(f"{batch.running} requests run, at most {engine.max_num_seqs} may")
    if batch.prefill_tokens < batch.prefill_requests:
        faults.append(f"{batch.prefill_requests} requests share {batch.prefill_tokens} prompt tokens")
    return faults


def block_faults(state: k.State, scheduled: bool = False) -> list[str]:
    """Where block accounts disagree with a recount from the tables of requests and the free queue.

    Cached extents: the reference count of each is that of the running requests whose tables list it, whole;
    those that nobody holds are in the free queue, each once.  All blocks: free and held ones
    are as many as there are; blocks held cover the computed tokens and no more; the prefix
    cache finds what has a key.  ``scheduled``: the state is between ``schedule`` and ``run``.
    """
    running = running_requests(state)
    queue, faults = free_queue(state)
    if faults:
        return faults
    holders = _holders(state, running)
    cached_free = [extent for extent in queue if state.extents["depth"][extent] != k.UNKEYED]
    for extent, count in sorted(holders.items()):
        if state.extents[extent].ref_count != count:
            said = int(state.extents[extent].ref_count)
            faults.append(f"extent {extent} is in {count} tables and says {said}")
    if any(state.extents[extent].ref_count != 0 or extent in holders for extent in cached_free):
        faults.append("an extent of the free queue is held")
    free = int(state.extents["blocks"][queue].sum())
    if free != state.at[0].free_blocks:
        faults.append(f"{free} blocks in the free queue, counted {int(state.at[0].free_blocks)}")
    unkeyed_held = int((_blocks_held(state, running, scheduled) - state.requests["blocks_entered"][running]).sum())
    cached_held = int(state.extents["blocks"][list(holders)].sum()) if holders else 0
    if free + unkeyed_held + cached_held != state.config[0].num_blocks:
        faults.append(
            f"{free} free, {unkeyed_held} held and {cached_held} held and cached are not "
            f"{int(state.config[0].num_blocks)} blocks"
        )
    faults += _idle_holder_faults(state, running) + _cover_faults(state, running)
    return faults + _cache_faults(state, sorted(holders) + cached_free)


def free_queue(state: k.State) -> tuple[list[int], list[str]]:
    """Extents of the free queue in the order in which they will be taken, and what is wrong with its links."""
    queue: list[int] = []
    extent, before = int(state.at[0].free_queue.head), k.NONE
    while extent != k.NONE:
        if not 0 <= extent < state.at[0].extents_used or state.extents[extent].queue.previous != before:
            return queue, [f"the free queue is broken at extent {extent}"]
        if state.extents[extent].blocks < 1:
            return queue, [f"extent {extent} of the free queue has no blocks"]
        queue.append(extent)
        before, extent = extent, int(state.extents[extent].queue.next)
    if before != state.at[0].free_queue.tail:
        return queue, [f"the free queue ends with extent {before}, not {int(state.at[0].free_queue.tail)}"]
    unkeyed = state.extents["depth"][queue] == k.UNKEYED
    return queue, ["blocks without contents stand side by side"] if (unkeyed[1:] & unkeyed[:-1]).any() else []


def check_limits(chosen: Sequence[Scenario]) -> list[VerificationRow]:
    """Drive every workload a step at a time and recount after each ``schedule()`` and each step."""
    limits: list[str] = []
    blocks: list[str] = []
    steps = 0
    for scenario in chosen:
        engine, latency = scenario.start(), SlowLatency()
        while (batch := engine.schedule()) is not None:
            where = f"{scenario.name}, step {steps}"
            limits += [f"{where}: {text}" for text in batch_faults(scenario.engine, batch)]
            blocks += [f"{where}: {text}" for text in block_faults(engine.state, scheduled=True)]
            engine.run(max(int(latency.step_time(batch)), 1))
            blocks += [f"{where}, its end: {text}" for text in block_faults(engine.state)]
            steps += 1
        if engine.state.at[0].free_blocks != engine.state.config[0].num_blocks:
            blocks.append(f"{scenario.name}: blocks are held at the end")
    configuration = f"{len(chosen)} workloads"
    return [
        row_of_faults("token budget and sequences", configuration, limits, f"{steps:,} batches"),
        row_of_faults("KV block accounts", configuration, blocks, f"{2 * steps:,} recounts"),
    ]


def _holders(state: k.State, running: Sequence[int]) -> Counter[int]:
    """In how many tables of running requests each cached extent is."""
    holders: Counter[int] = Counter()
    for request in running:
        row = state.table[state.requests[request].table_row, : 2 * state.requests[request].extents_held]
        for first, blocks in row.reshape(-1, 2).tolist():
            extent, left = first, blocks
            while left > 0:  # what was cut off the extent since
                holders[extent] += 1
                left -= int(state.extents[extent].blocks)
                extent = int(state.extents[extent].rest)
    return holders


def _blocks_held(state: k.State, running: Sequence[int], scheduled: bool) -> Int64s:
    """int64[running]: blocks of each; of a decoding request those that its computed tokens fill."""
    request = state.requests[running]
    computed = state.at[0].step + int(scheduled) - request["step_offset"]
    held: Int64s = -(-computed // state.config[0].block_size)
    return np.where(request["status"] == k.DECODING, held, request["blocks_held"])


def _idle_holder_faults(state: k.State, running: Sequence[int]) -> list[str]:
    """Requests outside the running list that still hold blocks."""
    idle = np.ones(len(state.requests), np.bool_)
    idle[running] = False
    holding = np.flatnonzero(idle & (state.requests["blocks_held"] > 0))
    return [f"request {holding[0]} does not run and holds blocks"] if len(holding) else []


def _cover_faults(state: k.State, running: Sequence[int]) -> list[str]:
    """Requests in prefill whose blocks are too few for their computed tokens."""
    request, size = state.requests[running], state.config[0].block_size
    too_few = (request["status"] == k.PREFILLING) & (request["blocks_held"] * size < request["computed"])
    if not too_few.any():
        return []
    i = int(np.argmax(too_few))
    held, tokens = int(request["blocks_held"][i]), int(request["computed"][i])
    return [f"request {running[i]} has {tokens} tokens computed and holds {held} blocks of {size}"]


def _cache_faults(state: k.State, cached: Sequence[int]) -> list[str]:
    """Cached blocks that are not found under their keys, and keys under which there is nothing."""
    blocks = state.extents["blocks"][cached].astype(np.int64)
    extent = np.repeat(np.asarray(cached, np.int64), blocks)
    place = np.arange(len(extent)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    key, depth = _keys(state, extent, place), state.extents["depth"][extent] + place
    lost = np.flatnonzero(~_is_found(state, extent, key, depth))
    faults = [f"block {place[i]} of extent {extent[i]} is not found under its key" for i in lost[:1]]
    stale = sorted(set(np.flatnonzero(state.extent_of_key != k.NONE).tolist()) - set(key.tolist()))
    return faults + [f"under key {other} something is found that is not cached" for other in stale[:1]]


def _keys(state: k.State, extent: Int64s, place: Int64s) -> Int64s:
    """int64[n]: the key of each block, given by its extent and its place in it."""
    where = state.extents["keys_at"][extent].astype(np.int64)
    keys: Int64s = -where - 2 + place
    listed = where >= 0
    keys[listed] = state.keys[where[listed] + place[listed]]
    return keys


def _is_found(state: k.State, extent: Int64s, key: Int64s, depth: Int64s) -> Bools:
    """bool[n]: whether the path from ``extent_of_key`` along what was cut off, and along twins, leads to the block."""
    at = state.extent_of_key[key].astype(np.int64)
    for _ in range(len(state.extents)):
        lost = at == k.NONE
        row = state.extents[at]
        beyond = depth >= row["depth"] + row["blocks"]
        on = ~lost & (beyond | (at != extent))
        if not on.any():
            break
        at = np.where(on, np.where(beyond, row["rest"], row["twin"]), at)
    found: Bools = at == extent
    return found
