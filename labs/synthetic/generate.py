"""Make the requests of a workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.blis.trace import NEVER_US, BlockKeys, RequestTrace
from blis_replay_labs.synthetic.workload import (
    MOST_REQUESTS,
    Client,
    Workload,
    WorkloadError,
    arrival_times_us,
    draw_lengths,
)

Purpose = Literal["arrivals", "prompts", "outputs", "prefixes"]
_NUMBERS: dict[Purpose, int] = {"arrivals": 0, "prompts": 1, "outputs": 2, "prefixes": 3}


def stream(seed: int, client: str, purpose: Purpose) -> np.random.Generator:
    """A random generator for one purpose of one client; equal arguments give equal numbers."""
    key = (_NUMBERS[purpose], *client.encode())
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


_LONGEST_US = 1e15


@dataclass(frozen=True)
class ClientRequests:
    """Requests of one client, int64[n] each, by conversation and turn.

    ``conversation``: its number from 0; ``member``: the shared text that it begins with.  ``repeated_tokens``: prompt
    and output tokens that a later request may repeat: all of them in a conversation, else the shared text.
    """

    arrival_us: Int64s
    prompt_tokens: Int64s
    output_tokens: Int64s
    conversation: Int64s
    member: Int64s
    repeated_tokens: Int64s


def client_requests(name: str, workload: Workload, seed: int) -> ClientRequests:
    """All requests that a client may send within the workload; ``generate`` takes the first of them.

    Raises ``WorkloadError`` for more than ``MOST_REQUESTS`` requests, or a load that lasts for decades.
    """
    client, draws = workload.clients[name], partial(stream, seed, name)
    turns = client.conversations.turns if client.conversations else 1
    gap_us = client.conversations.gap_s * 1e6 if client.conversations else 0.0
    first_us = _first_arrivals_us(name, workload, seed)
    count = len(first_us)
    _refuse_too_much(name, count * turns, float(first_us[-1]) + turns * gap_us if count else 0.0)
    questions = draw_lengths(client.prompt_tokens, count * turns, draws("prompts"))
    outputs = draw_lengths(client.output_tokens, count * turns, draws("outputs"))
    # Draws are ordered by conversation, so more conversations do not change the earlier ones.
    said = np.cumsum((questions + outputs).reshape(count, turns), axis=1).reshape(-1) - outputs
    prefix = client.prefix
    before = prefix.tokens if prefix is not None and prefix.place == "before" else 0
    prompts = before + said
    shared = np.minimum(prompts, prefix.tokens if prefix is not None else 0)
    members = prefix.members if prefix is not None else 1
    member = np.floor(draws("prefixes").random(count) * members).astype(np.int64)
    sent_us = np.floor(np.repeat(first_us, turns) + np.tile(np.arange(turns), count) * gap_us).astype(np.int64)
    return ClientRequests(
        arrival_us=sent_us,
        prompt_tokens=prompts,
        output_tokens=outputs,
        conversation=np.repeat(np.arange(count), turns),
        member=np.repeat(member, turns),
        repeated_tokens=prompts + outputs if turns > 1 else shared,
    )


def _first_arrivals_us(name: str, workload: Workload, seed: int) -> Floats:
    """Begin of each conversation in us: one per requested request, or all within the duration."""
    client = workload.clients[name]

    def times_us(count: int) -> Floats:
        return arrival_times_us(client.process, client.rate_per_s, count, stream(seed, name, "arrivals"))

    if workload.requests is not None:
        return times_us(workload.requests)
    duration_us = workload.duration_us or 0
    count = int(client.rate_per_s * duration_us / 1e6) + 16
    while True:
        _refuse_too_much(name, count, duration_us)
        arrivals_us = times_us(count)
        if arrivals_us[-1] >= duration_us:
            return arrivals_us[arrivals_us < duration_us]
        count *= 2


def _refuse_too_much(name: str, requests: int, last_us: float) -> None:
    if requests > MOST_REQUESTS:
        raise WorkloadError(
            f"client {name}: more than {MOST_REQUESTS:,} requests; lower its rate, requests or duration"
        )
    if not last_us < _LONGEST_US:
        raise WorkloadError(f"client {name}: its requests last for decades; raise its rate")


_MOST_KEYS = 1 << 28


def block_identities(clients: Sequence[Client], parts: Sequence[ClientRequests], block_size: int) -> BlockKeys:
    """Keys of all requests, client after client.

    Only full blocks that another request may share have keys.  Raises ``WorkloadError`` for more than 2^28 keys.
    """
    groups, keys = _group_rows(clients, block_size)
    starts, counts, used = [], [], keys
    tables = [np.arange(keys, dtype=np.int32)]
    for client, part in zip(clients, parts, strict=True):
        count = part.repeated_tokens // block_size
        if client.conversations is None:
            starts.append(_shared_start(client, part.member, groups))
        else:
            rows = _conversation_rows(client, part, int(count.max(initial=0)), groups, block_size, used)
            starts.append(sum(map(len, tables)) + part.conversation * rows.shape[1])
            tables.append(rows.reshape(-1))
            used += rows.size
        counts.append(count)
    return BlockKeys(np.concatenate(starts), np.concatenate(counts), np.concatenate(tables), block_size)


def _group_rows(clients: Sequence[Client], block_size: int) -> tuple[dict[str, tuple[int, int]], int]:
    """First key and blocks per text of each group, and the number of keys of all groups."""
    sizes: dict[str, tuple[int, int]] = {}
    for prefix in (client.prefix for client in clients if client.prefix is not None):
        members, blocks = sizes.get(prefix.group, (0, 0))
        sizes[prefix.group] = max(members, prefix.members), max(blocks, prefix.tokens // block_size)
    starts: dict[str, tuple[int, int]] = {}
    used = 0
    for group, (members, blocks) in sizes.items():
        starts[group] = used, blocks
        used += members * blocks
        _refuse_too_many(used)
    return starts, used


def _shared_start(client: Client, member: Int64s, groups: Mapping[str, tuple[int, int]]) -> Int64s:
    if client.prefix is None:
        return np.zeros(len(member), np.int64)
    start, blocks = groups[client.prefix.group]
    return start + member * blocks


def _conversation_rows(
    client: Client,
    part: ClientRequests,
    length: int,
    groups: Mapping[str, tuple[int, int]],
    block_size: int,
    first_key: int,
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """int32[conversations, length]: the shared text's keys, then keys of their own."""
    conversations = int(part.conversation.max(initial=-1)) + 1
    _refuse_too_many(first_key + conversations * length)
    own = first_key + np.arange(conversations * length, dtype=np.int32).reshape(conversations, length)
    if client.prefix is None:
        return own
    first_turns = np.searchsorted(part.conversation, np.arange(conversations))
    start = _shared_start(client, part.member[first_turns], groups)
    shared = np.minimum(part.prompt_tokens[first_turns], client.prefix.tokens) // block_size
    depth = np.arange(length, dtype=np.int32)
    rows = np.where(depth < shared[:, np.newaxis], start[:, np.newaxis] + depth, own)
    return rows.astype(np.int32)


def _refuse_too_many(keys: int) -> None:
    if keys > _MOST_KEYS:
        raise WorkloadError(f"the prompts have more than {_MOST_KEYS:,} different blocks; shorten them or send fewer")


@dataclass(frozen=True)
class GeneratedLoad:
    """Requests in order of arrival, and the client of each: int64[n], by its place in the workload."""

    trace: RequestTrace
    client: Int64s


def generate(workload: Workload, seed: int, block_size: int = 16) -> GeneratedLoad:
    """The requests of all clients; equal workloads and seeds give equal requests.

    Every client has its own random streams.  Requests that arrive together are ordered by client name.
    ``block_size``: tokens per KV block of the engine.  Raises ``WorkloadError`` for a workload that is too large, or
    without a request.
    """
    clients = list(workload.clients.values())
    parts = [client_requests(name, workload, seed) for name in workload.clients]
    names = np.argsort(list(workload.clients))
    client = np.repeat(np.arange(len(parts)), [len(part.arrival_us) for part in parts])
    arrival_us = np.concatenate([part.arrival_us for part in parts])
    order = np.lexsort((np.argsort(names)[client], arrival_us))
    order = order[: workload.requests] if workload.requests is not None else order
    if workload.duration_us is not None:
        order = order[arrival_us[order] < workload.duration_us]
    if not len(order):
        raise WorkloadError("no request arrives within the workload's duration; raise it or the rates")
    keys = block_identities(clients, parts, block_size)
    prompts = np.concatenate([part.prompt_tokens for part in parts])[order]
    priority = np.array([one.priority for one in clients], np.int64)[client[order]]
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
