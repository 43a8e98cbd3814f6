"""Text of unknown origin, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""``text`` on one line, with what a terminal would obey or cannot show written out (``\x1b``)."""
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)
