"""Keys for the full blocks of requests, from their tokens or from identities given to them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

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


def chain_blocks(identities: Iterable[int], count: Iterable[int]) -> Int64s:
    """int64[sum of count]: identities numbered from 0 on, so that equal numbers mean equal blocks so far.

    Request i owns the next ``count[i]`` identities, which are equal where the tokens
    of a block are and the blocks before it are.
    """
    numbers: dict[tuple[int, int], int] = {}
    chained: list[int] = []
    values = iter(identities)
    for length in count:
        before = -1
        for identity in islice(values, length):
            before = numbers.setdefault((before, identity), len(numbers))
            chained.append(before)
    return np.array(chained, np.int64)
