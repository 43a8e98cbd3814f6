"""Keys for the full blocks of requests, from their tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from blis_replay.blis.trace import BlockKeys, Int64s


def intern_blocks(rows: Iterable[Int64s], block_size: int) -> BlockKeys:
    """Number the full blocks of token sequences so that equal keys mean equal tokens so far.

    ``rows``: token ids of each request (int64): its prompt, and its generated tokens too
    where another request's prompt repeats them.
    """
    numbers: dict[tuple[int, bytes], int] = {}
    starts: list[int] = []
    counts: list[int] = []
    keys: list[int] = []
    for row in rows:
        count = len(row) // block_size
        blocks = np.ascontiguousarray(row[: count * block_size], np.int64).reshape(count, block_size)
        starts.append(len(keys))
        counts.append(count)
        before = -1
        for block in blocks:
            before = numbers.setdefault((before, block.tobytes()), len(numbers))
            keys.append(before)
    return BlockKeys(np.array(starts, np.int64), np.array(counts, np.int64), np.array(keys, np.int32), block_size)
