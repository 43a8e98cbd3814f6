"""How one value is written, by the kind of its column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from blis_replay.ingest.tables import Cell, Kind, Value, plain


def percent(fraction: float | None, digits: int = 1) -> str:
    """A signed percentage, without decimals from 1,000 % on; what rounds to nothing is positive, ``-`` is none."""
    if fraction is None:
        return "-"
    digits = 0 if abs(fraction) >= 9.9995 else digits
    return f"{round(100 * fraction, digits) + 0.0:+,.{digits}f} %"


def percent_plain(fraction: float | None) -> str:
    """An unsigned percentage, without decimals from 1,000 % on."""
    return "-" if fraction is None else f"{100 * fraction:,.{0 if fraction >= 9.9995 else 1}f} %"


def milliseconds(value_us: float | None) -> str:
    """A time in ms with two decimals, none from 10 s on, ``-`` where there is none."""
    return "-" if value_us is None else f"{value_us / 1000:,.{_decimals(value_us)}f}"


def time_unit(longest_us: float) -> tuple[float, str]:
    """The unit of times up to this one, and its us: ms, from ten seconds on s."""
    return (1e6, "s") if abs(longest_us) >= 10_000_000 else (1e3, "ms")


def time_text(value_us: float | None) -> str:
    """A time with its unit and three or four digits: ms, from ten seconds on s; ``-`` where there is none."""
    if value_us is None:
        return "-"
    unit_us, unit = time_unit(value_us)
    value = value_us / unit_us
    return f"{value:,.{0 if abs(value) >= 999.5 else 1 if abs(value) >= 99.95 else 2}f} {unit}"


def percent_brief(fraction: float | None, brief_from: float = 1.0) -> str:
    """A signed percentage; no decimals from 100 % on, or from another fraction on."""
    return percent(fraction, 0 if fraction is not None and abs(fraction) >= brief_from - 0.0005 else 1)


def milliseconds_signed(value_us: float | None) -> str:
    """A difference of times in ms; two decimals, none from 10 s on."""
    if value_us is None:
        return "-"
    return f"{value_us / 1000:+,.{_decimals(value_us)}f}"


def _decimals(value_us: float) -> int:
    """Of a time in ms."""
    return 2 if abs(value_us) < 9_999_995 else 0  # what rounds to 10 s counts as such


def in_ms(value_us: float | None) -> float | None:
    """A time in ms for programs, to the ns; None where there is none."""
    return None if value_us is None else round(value_us / 1000, 6)


def hundredths(value: float | None) -> str:
    """Two decimals, ``-`` where there is nothing."""
    return "-" if value is None else f"{value:,.2f}"


def by_type(value: Value) -> str:
    """A value of which nothing more is known than its type."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _data(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_WRITTEN: Mapping[Kind, Callable[[Any], str]] = {
    "value": by_type,
    "text": by_type,
    "word": by_type,
    "count": "{:,.0f}".format,
    "ms": milliseconds,
    "ms_difference": lambda value_us: f"{value_us / 1000:+,.2f}",
    "ms_difference_brief": milliseconds_signed,
    "time": time_text,
    "error": percent,
    "error_brief": percent_brief,
    "error_short": lambda fraction: percent_brief(fraction, 0.1),
    "limit": lambda fraction: f"±{100 * fraction:.0f} %",
    "share": percent_plain,
    "points": lambda fraction: f"{100 * fraction:+.1f}",
    "points_plain": lambda fraction: f"{100 * fraction:,.1f}",
    "points_fine": lambda fraction: f"{100 * fraction:+.2f}",
    "decimal": hundredths,
    "magnitude": lambda value: f"{value:,.2f}" if value < 1000 else f"{value:,.0f}",
    "significant": "{:,.7g}".format,
    "rounded": "{:.4g}".format,
    "data": _data,
    "real": _data,
}
# What stands for a value that is not available; programs read nothing as nothing.
_ABSENT: Mapping[Kind, str] = {"data": "", "real": ""}


def cell_text(cell: Cell, kind: Kind = "value") -> str:
    """A cell in a column of this kind; a text as it is."""
    value = plain(cell)
    if value is None:
        return _ABSENT.get(kind, "-")
    return value if isinstance(value, str) else _WRITTEN[kind](value)


def predicted(error: float) -> str:
    """An error of a latency in words: ``under-predicted by 32.0 %``."""
    return f"{'over' if error > 0 else 'under'}-predicted by {percent(abs(error))[1:]}"
