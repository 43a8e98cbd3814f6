"""How one value is written, by the kind of its column."""

from __future__ import annotations

from blis_replay.ingest.tables import NUMBERS, Cell, Kind, Number, plain


def number_text(value: float | None, how: Number | str) -> str:
    """A number as ``how`` says, which may be the name of one of NUMBERS; what rounds to 0 is 0, None is ``-``."""
    if value is None:
        return "-"
    number = NUMBERS[how] if isinstance(how, str) else how
    scaled = number.factor * value
    decimals = 0 if abs(round(scaled, number.decimals)) >= number.whole_from else number.decimals
    return f"{round(scaled, decimals) + 0.0:{'+' * number.signed},.{decimals}f}{number.unit}"


def percent(fraction: float | None) -> str:
    """A signed percentage, without decimals from 1,000 % on."""
    return number_text(fraction, "error")


def percent_plain(fraction: float | None) -> str:
    """An unsigned percentage, without decimals from 1,000 % on."""
    return number_text(fraction, "share")


def percent_span(low: float, high: float) -> str:
    """Two signed percentages: ``-1.2 .. +3.4 %``."""
    return f"{percent(low).removesuffix(' %')} .. {percent(high)}"


def step_times(change: float, low: float, high: float, of: str) -> str:
    """``12.2 % less time than the coefficients say``, for steps; ``of``: what the bounds are."""
    which, ends = "more" if change > 0 else "less", (low, high) if change > 0 else (-high, -low)
    bounds = percent_span(*ends) if low * high < 0 else " to ".join(map(percent_plain, ends))
    return f"{percent_plain(abs(change))} {which} time than the coefficients say ({of}: {bounds})"


def milliseconds(value_us: float | None) -> str:
    """A time in ms with two decimals, none from 10 s on."""
    return number_text(value_us, "ms")


def limit_text(fraction: float) -> str:
    """The limit of an error: ``±10 %``."""
    return f"±{100 * fraction:.3g} %"


def time_unit(longest_us: float) -> tuple[float, str]:
    """The unit of times up to this one, and its us: ms, from ten seconds on s."""
    return (1e6, "s") if abs(longest_us) >= 10_000_000 else (1e3, "ms")


def time_text(value_us: float | None) -> str:
    """A time with its unit and three or four digits: ms, or s from ten seconds on; ``-`` for None."""
    if value_us is None:
        return "-"
    unit_us, unit = time_unit(value_us)
    value = value_us / unit_us
    return f"{value:,.{0 if abs(value) >= 999.5 else 1 if abs(value) >= 99.95 else 2}f} {unit}"


def time_span(low_us: float, high_us: float) -> str:
    """Two times: ``497.6 .. 512.9 ms``, and both units where they differ."""
    high = time_text(high_us)
    return f"{time_text(low_us).removesuffix(high[high.index(' ') :])} .. {high}"


UNITS_US = {"us": 1.0, "ms": 1e3, "s": 1e6}


def quantity_text(value: float | None, unit: str) -> str:
    """A number in its unit: a time as ``time_text``, else four digits."""
    if value is None or unit in UNITS_US:
        return time_text(None if value is None else value * UNITS_US[unit])
    return f"{value:,.4g} {unit}"


def in_ms(value_us: float | None) -> float | None:
    """A time in ms for programs, rounded to the ns; None if not available."""
    return None if value_us is None else round(value_us / 1000, 6)


def cell_text(cell: Cell, kind: Kind = "value") -> str:
    """A cell in a column of this kind; a text as it is, ``-`` for none, which programs read as nothing."""
    value = plain(cell)
    if isinstance(value, str):
        return value
    if kind in ("data", "real"):
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    if value is None:
        return "-"
    if kind == "time":
        return time_text(value)
    if kind not in ("value", "text", "word"):
        return number_text(value, kind)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def predicted(error: float) -> str:
    """An error of a latency in words: ``under-predicted by 32.0 %``."""
    return f"{'over' if error > 0 else 'under'}-predicted by {percent(abs(error))[1:]}"
