"""Recorded block identities at the block size of the engine."""

from __future__ import annotations

import numpy as np

from blis_replay.blis.block_keys import chain_blocks
from blis_replay.blis.trace import BlockKeys, Int64s
from blis_replay.ingest.recording import PrefixBlocks
from blis_replay.replay.errors import ReplayError


def engine_block_keys(prefix: PrefixBlocks, prompt_tokens: Int64s, block_size: int) -> BlockKeys:
    """Keys for the full ``block_size`` blocks of every prompt, as far as recorded blocks reach.

    A block's key is made of the recorded block in which it ends, that one's place after
    the blocks before it, and its own place inside: a recorded block of 512 tokens becomes 32
    keys of 16.  Where blocks of the two sizes overlap, a block is shared only if every
    recorded block that it touches is.  Raises ``ReplayError`` beyond 2^31 keys.
    """
    recorded = np.bincount(prefix.blocks["request_index"].to_numpy(), minlength=len(prompt_tokens)).astype(np.int64)
    chained = chain_blocks(prefix.blocks["block_key"].to_list(), recorded.tolist())
    width = prefix.block_tokens
    # Engine blocks that end within one recorded block.
    inside = -(-width // block_size)
    if (int(chained.max(initial=0)) + 1) * inside >= 1 << 31:
        raise ReplayError("the recorded prompts have more than 2^31 different blocks; replay a part of them")
    count = np.minimum(prompt_tokens, recorded * width) // block_size
    start = np.cumsum(count) - count
    block = np.arange(int(count.sum())) - np.repeat(start, count)
    last = ((block + 1) * block_size - 1) // width
    first_recorded = np.repeat(np.cumsum(recorded) - recorded, count)
    keys = chained[first_recorded + last] * inside + (block - last * width // block_size)
    return BlockKeys(start, count, keys.astype(np.int32), block_size)
