"""What the router remembers to have sent to each instance: a list of blocks, the most recently sent first.

It is the router's view, not what an instance still holds.  Blocks are known by their keys; the list is that of
``kernel.recency``.
"""

from __future__ import annotations

from blis_replay.blis.cluster.compiled import compiled
from blis_replay.blis.cluster.state import MEMORY_BLOCKS, Front
from blis_replay.blis.kernel.recency import drop, is_listed, list_first, oldest
from blis_replay.blis.kernel.state import BLOCK_SIZE, KEY_COUNT, KEY_START, PROMPT_TOKENS, State


@compiled
def prompt_blocks(stack: State, front: Front, request: int) -> int:
    """Full blocks of a prompt, of a request by its number by queueing."""
    return front.columns[PROMPT_TOKENS, request] // stack.config[BLOCK_SIZE]


@compiled
def remembered_share(stack: State, front: Front, request: int, i: int) -> float:
    """Share of the full blocks of a prompt, from the first on, that were sent to an instance."""
    blocks = prompt_blocks(stack, front, request)
    if blocks == 0:
        return 0.0
    start, known = front.columns[KEY_START, request], min(blocks, front.columns[KEY_COUNT, request])
    matched = 0
    while matched < known and is_listed(front.older[i], stack.keys[start + matched]):
        matched += 1
    return matched / blocks


@compiled
def remember(stack: State, front: Front, request: int, i: int) -> None:
    """A prompt is sent to an instance; its first block is the last to be forgotten."""
    start, newer, older = front.columns[KEY_START, request], front.newer[i], front.older[i]
    for block in range(min(prompt_blocks(stack, front, request), front.columns[KEY_COUNT, request]) - 1, -1, -1):
        key = stack.keys[start + block]
        if is_listed(older, key):
            drop(newer, older, key)
        elif front.remembered[i] == front.policy[MEMORY_BLOCKS]:
            drop(newer, older, oldest(newer))
        else:
            front.remembered[i] += 1
        list_first(newer, older, key)
