"""From a workload to the requests that the simulator takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from blis_replay.blis.errors import WorkloadError
from blis_replay.blis.trace import NEVER_US, Int64s, RequestTrace
from blis_replay.blis.workloads.block_identities import block_identities
from blis_replay.blis.workloads.client_requests import client_requests
from blis_replay.blis.workloads.workload import Workload


@dataclass(frozen=True)
class GeneratedLoad:
    """Requests in order of arrival, and the client of each: int64[n], by its place in the workload."""

    trace: RequestTrace
    client: Int64s


def generate(workload: Workload, block_size: int = 16) -> GeneratedLoad:
    """The requests of all clients; equal workloads give equal requests.

    Every client draws from streams of its own.  Requests that arrive together go by the name of their client.
    ``block_size``: tokens of a KV block, of the engine that will serve them.  Raises ``WorkloadError`` for a load
    too large to make, or without a request.
    """
    parts = [client_requests(client, workload) for client in workload.clients]
    names = sorted(range(len(parts)), key=lambda i: workload.clients[i].name)
    client = np.repeat(np.arange(len(parts)), [len(part.arrival_us) for part in parts])
    arrival_us = np.concatenate([part.arrival_us for part in parts])
    order = np.lexsort((np.argsort(names)[client], arrival_us))
    order = order[: workload.requests] if workload.requests is not None else order
    if workload.duration_s is not None:
        order = order[arrival_us[order] < workload.duration_s * 1e6]
    if not len(order):
        raise WorkloadError("no request arrives within the workload's duration; raise it or the rates")
    keys = block_identities(workload.clients, parts, block_size)
    prompts = np.concatenate([part.prompt_tokens for part in parts])[order]
    priority = np.array([one.priority for one in workload.clients], np.int64)[client[order]]
    trace = RequestTrace(
        arrival_us=arrival_us[order],
        prompt_tokens=prompts,
        prefill_tokens=prompts,
        output_tokens=np.concatenate([part.output_tokens for part in parts])[order],
        abort_us=np.full(len(order), NEVER_US),
        priority=priority,
        block_keys=replace(keys, start=keys.start[order], count=keys.count[order]),
    )
    return GeneratedLoad(trace, client[order])
