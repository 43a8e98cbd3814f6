"""Keys for the blocks of a prompt whose tokens are known, without keeping the tokens."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def block_hashes(token_ids: NDArray[np.int64], block_tokens: int) -> list[int]:
    """A key below 2^63 for each full block: equal keys mean equal tokens up to the end of the block.

    The key is a hash of the block's tokens and the key before it (as vLLM chains its own).
    """
    raw = token_ids.astype("<i8").tobytes()
    step = 8 * block_tokens
    keys: list[int] = []
    before = b""
    for start in range(0, len(raw) - step + 1, step):
        before = blake2b(before + raw[start : start + step], digest_size=8).digest()
        keys.append(int.from_bytes(before, "big") >> 1)
    return keys
