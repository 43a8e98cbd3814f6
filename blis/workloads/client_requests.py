"""The requests of one client, as if there were no other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.errors import WorkloadError
from blis_replay.blis.trace import Int64s
from blis_replay.blis.workloads.arrivals import arrival_times_us
from blis_replay.blis.workloads.lengths import draw_lengths
from blis_replay.blis.workloads.streams import stream
from blis_replay.blis.workloads.workload import Client, Workload

MOST_REQUESTS = 5_000_000
_LONGEST_US = 1e15


@dataclass(frozen=True)
class ClientRequests:
    """int64[n] each, conversation by conversation and turn by turn.

    ``conversation``: numbered from 0; ``member``: the shared text that it begins with.  ``repeated_tokens``: how
    many of a request's prompt and output tokens a later one may repeat: all where a turn follows, else the
    shared text.
    """

    arrival_us: Int64s
    prompt_tokens: Int64s
    output_tokens: Int64s
    conversation: Int64s
    member: Int64s
    repeated_tokens: Int64s


def client_requests(client: Client, workload: Workload) -> ClientRequests:
    """All that a client may send within the workload: at least what will be taken of it.

    Raises ``WorkloadError`` for more than ``MOST_REQUESTS`` requests, or a load that lasts for decades.
    """
    turns = client.conversations.turns if client.conversations else 1
    gap_us = client.conversations.gap_s * 1e6 if client.conversations else 0.0
    first_us = _first_arrivals_us(client, workload)
    count = len(first_us)
    _refuse_too_much(client, count * turns, float(first_us[-1]) + turns * gap_us if count else 0.0)
    questions = draw_lengths(client.prompt_tokens, count * turns, stream(workload.seed, client.name, "prompts"))
    outputs = draw_lengths(client.output_tokens, count * turns, stream(workload.seed, client.name, "outputs"))
    # A conversation's draws stand together, so more conversations leave the earlier ones as they are.
    said = np.cumsum((questions + outputs).reshape(count, turns), axis=1).reshape(-1) - outputs
    prefix = client.prefix
    before = prefix.tokens if prefix is not None and prefix.place == "before" else 0
    prompts = before + said
    shared = np.minimum(prompts, prefix.tokens if prefix is not None else 0)
    members = prefix.members if prefix is not None else 1
    member = np.floor(stream(workload.seed, client.name, "prefixes").random(count) * members).astype(np.int64)
    sent_us = np.floor(np.repeat(first_us, turns) + np.tile(np.arange(turns), count) * gap_us).astype(np.int64)
    return ClientRequests(
        arrival_us=sent_us,
        prompt_tokens=prompts,
        output_tokens=outputs,
        conversation=np.repeat(np.arange(count), turns),
        member=np.repeat(member, turns),
        repeated_tokens=prompts + outputs if turns > 1 else shared,
    )


def _first_arrivals_us(client: Client, workload: Workload) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """When conversations begin: as many as requests are wanted of all clients, or all within the duration."""
    if workload.requests is not None:
        random = stream(workload.seed, client.name, "arrivals")
        return arrival_times_us(client.arrivals, client.rate_per_s, workload.requests, random)
    duration_us = float(workload.duration_s or 0) * 1e6
    count = int(client.rate_per_s * duration_us / 1e6) + 16
    while True:
        _refuse_too_much(client, count, duration_us)
        random = stream(workload.seed, client.name, "arrivals")
        times_us = arrival_times_us(client.arrivals, client.rate_per_s, count, random)
        if times_us[-1] >= duration_us:
            return times_us[times_us < duration_us]
        count *= 2


def _refuse_too_much(client: Client, requests: int, last_us: float) -> None:
    if requests > MOST_REQUESTS:
        raise WorkloadError(
            f"client {client.name}: more than {MOST_REQUESTS:,} requests; lower its rate, requests or duration"
        )
    if not last_us < _LONGEST_US:
        raise WorkloadError(f"client {client.name}: its requests last for decades; raise its rate")
