"""What the router remembers to have sent to each instance: a list of blocks, the most recently sent first.

It is the router's view, not what an instance still holds.  The list is circular through node 0; block key k is node
k + 1.  A link holds the node and 1; 0: the block is not remembered.
"""

from __future__ import annotations

from blis_replay.blis.cluster.compiled import compiled
from blis_replay.blis.cluster.state import MEMORY_BLOCKS, Front
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
    while matched < known and front.older[i, stack.keys[start + matched] + 1] != 0:
        matched += 1
    return matched / blocks


@compiled
def remember(stack: State, front: Front, request: int, i: int) -> None:
    """A prompt is sent to an instance; its first block is the last to be forgotten."""
    start = front.columns[KEY_START, request]
    for block in range(min(prompt_blocks(stack, front, request), front.columns[KEY_COUNT, request]) - 1, -1, -1):
        node = stack.keys[start + block] + 1
        if front.older[i, node] != 0:
            unlink(front, i, node)
        elif front.remembered[i] == front.policy[MEMORY_BLOCKS]:
            unlink(front, i, front.newer[i, 0] - 1)
        else:
            front.remembered[i] += 1
        link_first(front, i, node)


@compiled
def unlink(front: Front, i: int, node: int) -> None:
    """Forget a block."""
    newer, older = front.newer[i, node], front.older[i, node]
    front.older[i, newer - 1] = older
    front.newer[i, older - 1] = newer
    front.older[i, node] = 0


@compiled
def link_first(front: Front, i: int, node: int) -> None:
    """Remember a block as the most recent."""
    second = front.older[i, 0]
    front.newer[i, node] = 1
    front.older[i, node] = second
    front.newer[i, second - 1] = node + 1
    front.older[i, 0] = node + 1
