"""Numbers in the order of their last use, in two arrays of links: what the least recently used is known by.

The list is circular through node 0; number k is node k + 1.  A link holds a node and 1; 0: the number is not in the
list.  An empty list has the links 1, 1 at node 0.
"""

from __future__ import annotations

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.state import Int32s


@compiled
def is_listed(older: Int32s, number: int) -> bool:
    """Whether a number is in the list."""
    return older[number + 1] != 0


@compiled
def oldest(newer: Int32s) -> int:
    """The least recently used; there is one."""
    return newer[0] - 2


@compiled
def drop(newer: Int32s, older: Int32s, number: int) -> None:
    """Take a number out of the list, which has it."""
    after, before = newer[number + 1], older[number + 1]
    older[after - 1] = before
    newer[before - 1] = after
    older[number + 1] = 0


@compiled
def list_first(newer: Int32s, older: Int32s, number: int) -> None:
    """Enter a number, which is not in the list, as the most recently used."""
    node, second = number + 1, older[0]
    newer[node] = 1
    older[node] = second
    newer[second - 1] = node + 1
    older[0] = node + 1
