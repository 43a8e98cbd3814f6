"""Nothing is lost: requests and tokens in = out, at the end and in the middle; all of it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import RequestTrace
from blis_replay.blis.verification.workloads import (
    ENGINE,
    LATENCY,
    LIFECYCLE,
    Scenario,
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
