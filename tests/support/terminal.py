"""A pseudo-terminal: what a program writes to it."""

from __future__ import annotations

import os


def read_to_end(terminal: int) -> bytes:
    """What is written to a terminal until nobody has it open any more; it is closed then."""
    written = b""
    try:
        while read := os.read(terminal, 1 << 16):
            written += read
    except OSError:
        pass  # how a terminal says that nobody writes to it any more
    os.close(terminal)
    return written
