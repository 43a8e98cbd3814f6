"""Which blocks of made-up prompts are the same: shared texts, and what was said before in a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from blis_replay.blis.errors import WorkloadError
from blis_replay.blis.trace import BlockKeys, Int64s
from blis_replay.blis.workloads.client_requests import ClientRequests
from blis_replay.blis.workloads.workload import Client

_MOST_KEYS = 1 << 28


def block_identities(clients: Sequence[Client], parts: Sequence[ClientRequests], block_size: int) -> BlockKeys:
    """Keys of all requests, client after client.

    Only full blocks have an identity, and only where another request may have the same: the others are like
    no other block.  Raises ``WorkloadError`` for more than 2^28 keys.
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
    """Where the keys of each group's first text start and how many blocks a text has, and the keys of all groups."""
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
