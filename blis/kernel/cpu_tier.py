"""KV blocks in the memory of the host: what is evicted from the GPU goes there, and can be fetched back.

An extension that BLIS has too (blis-semantics 2.7); vLLM's own offloading is another.  A block is known by its key, the
least recently stored or fetched makes room for another, and fetching copies: the block stays until it makes
room.  Storing takes no time; the device fetches block after block before it runs the batch that is being built.
"""

from __future__ import annotations

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.recency import drop, is_listed, list_first, oldest
from blis_replay.blis.kernel.state import (
    CPU_BLOCKS,
    CPU_FETCHED,
    CPU_STORED,
    CPU_USED,
    DEVICE_FREE,
    FETCH_US,
    NOW,
    State,
)


@compiled
def store_block(state: State, key: int) -> None:
    """The contents with this key leave the GPU."""
    at = state.at
    if is_listed(state.cpu_older, key):
        drop(state.cpu_newer, state.cpu_older, key)
    else:
        at[CPU_STORED] += 1
        if at[CPU_USED] == state.config[CPU_BLOCKS]:
            drop(state.cpu_newer, state.cpu_older, oldest(state.cpu_newer))
        else:
            at[CPU_USED] += 1
    list_first(state.cpu_newer, state.cpu_older, key)


@compiled
def is_stored(state: State, key: int) -> bool:
    """Whether the tier has the contents with this key."""
    return is_listed(state.cpu_older, key)


@compiled
def fetch_block(state: State, key: int) -> None:
    """The contents with this key, which are stored, are copied to the GPU before the batch being built."""
    drop(state.cpu_newer, state.cpu_older, key)
    list_first(state.cpu_newer, state.cpu_older, key)
    state.at[CPU_FETCHED] += 1
    state.at[DEVICE_FREE] = max(state.at[DEVICE_FREE], state.at[NOW]) + state.config[FETCH_US]
