"""Random numbers, one stream for each purpose of each client.

A stream depends on the seed, the client's name and the purpose alone, so adding, removing or reordering
clients changes no other client's draws, and a change of lengths changes no arrival.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Purpose = Literal["arrivals", "prompts", "outputs", "prefixes"]
_NUMBERS: dict[Purpose, int] = {"arrivals": 0, "prompts": 1, "outputs": 2, "prefixes": 3}


def stream(seed: int, client: str, purpose: Purpose) -> np.random.Generator:
    """A generator at the beginning of its stream; equal arguments give equal numbers."""
    key = (_NUMBERS[purpose], *client.encode())
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
