"""Numbers out of untrusted text and JSON: what is not a usable number is null or a named problem."""

from __future__ import annotations

import math

MAX_TOKENS = 1 << 31
# Beyond this a time in us or a count is damage, and sums of two still fit int64.
MAX_INTEGER = 1 << 61


def whole(value: object) -> int | None:
    """``value`` as a non-negative integer below 2^61, or ``None``; decimal strings and 3.0 are accepted."""
    if isinstance(value, str):
        text = value.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 19):
            return None
        value = int(text)
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        if not math.isfinite(value) or not value.is_integer():
            return None
        value = int(value)
    if not isinstance(value, int):
        return None
    return value if 0 <= value < MAX_INTEGER else None


def tokens(value: object) -> int | None:
    """``value`` as a number of tokens of at least 1, or ``None`` (0 is how these tools write "unknown")."""
    count = whole(value)
    return count if count is not None and 0 < count < MAX_TOKENS else None


def finite(value: object) -> float | None:
    """``value`` as a finite float, or ``None``; numeric strings are accepted."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        return None
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def microseconds(seconds: object) -> int | None:
    """``seconds`` as whole microseconds (rounded), or ``None`` if it is no number or beyond 2^61 us."""
    value = finite(seconds)
    if value is None or abs(value) * 1e6 >= MAX_INTEGER:
        return None
    return round(value * 1e6)
