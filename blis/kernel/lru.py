"""LRU list: numbers by their last use, in a table of links.

The list is circular through node 0; number k is node k + 1.  A link holds a node and 1; 0: the number is not in the
list.  An empty list has the links 1, 1 at node 0.
"""

from __future__ import annotations

from blis_replay.blis.kernel.state import Table, compiled


@compiled
def is_listed(lru: Table, number: int) -> bool:
    """Whether a number is in the list."""
    return lru[number + 1].older != 0


@compiled
def oldest(lru: Table) -> int:
    """The least recently used; there is one."""
    return lru[0].newer - 2


@compiled
def drop(lru: Table, number: int) -> None:
    """Take a number out of the list, which has it."""
    newer, older = lru[number + 1].newer, lru[number + 1].older
    lru[newer - 1].older = older
    lru[older - 1].newer = newer
    lru[number + 1].older = 0


@compiled
def enter(lru: Table, number: int) -> None:
    """Enter a number, which is not in the list, as the most recently used."""
    node, second = number + 1, lru[0].older
    lru[node].newer = 1
    lru[node].older = second
    lru[second - 1].newer = node + 1
    lru[0].older = node + 1
