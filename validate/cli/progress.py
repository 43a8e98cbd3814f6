"""How far long work is: one line on a terminal's standard error, gone before anything else is printed."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import click

from blis_replay.base.errors import printable
from blis_replay.validate.cli.answers import quiet

_SHOWN_EVERY_S = 0.1
_WIPE = "\r\033[K"
_BAR_COLUMNS = 16


class Progress(Protocol):
    """What long work calls with its progress; ``what``: the part at work now, whose rate is shown."""

    def __call__(self, done: int, total: int, what: str = "") -> None: ...


@contextmanager
def progress_line(label: str, unit: str = "") -> Iterator[Progress | None]:
    """A bar, rate and remaining time on a terminal's standard error; None, and silence, without a terminal.

    ``unit``: ``B`` for bytes, empty for things.  The line is wiped at the end, after an error and Ctrl-C too.
    """
    if sys.stderr is None or not sys.stderr.isatty() or quiet():
        yield None
        return
    begin, shown, doing = time.monotonic(), float("-inf"), ""

    def tell(done: int, total: int, what: str = "") -> None:
        nonlocal begin, shown, doing
        now = time.monotonic()
        if what != doing:
            begin, shown, doing = now, float("-inf"), what
        if now - shown >= _SHOWN_EVERY_S or done == total:
            shown = now
            _write(" ".join(filter(None, [label, progress_text(done, total, now - begin, unit), what])))

    _write(f"{label} ...")
    if _cold():
        _write(f"compiling on first use, once, up to a minute; {label} ...")
    try:
        yield tell
    finally:
        click.echo(_WIPE, err=True, nl=False, color=True)


def _cold() -> bool:
    """Whether the engine is not compiled yet, as on the first run after an installation."""
    from blis_replay.blis.kernel.state import kept_in

    folder = kept_in()
    return folder is not None and next(folder.rglob("*.nbc"), None) is None


def progress_text(done: int, total: int, seconds: float, unit: str = "") -> str:
    """A bar, how much is done, at which rate, and the time that is left at that rate."""
    filled = _BAR_COLUMNS * done // total if total else _BAR_COLUMNS
    count = f"{_megabytes(done)} of {_megabytes(total)} MB" if unit == "B" else f"{done:,} of {total:,}"
    shown = f"[{'#' * filled}{'.' * (_BAR_COLUMNS - filled)}] {count}"
    if not done or seconds < _SHOWN_EVERY_S:  # what a first moment says of the rate means nothing
        return shown
    left = "" if done >= total else f", {_time((total - done) * seconds / done)} left"
    return f"{shown}, {_rate(done / seconds, unit)}{left}"


def _write(text: str) -> None:
    """The line, cut at the edge of the terminal: one that wraps cannot be wiped."""
    columns = shutil.get_terminal_size().columns
    click.echo(_WIPE + printable(text)[: columns - 1], err=True, nl=False, color=True)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f}" if value < 10e6 else f"{value / 1e6:,.0f}"


def _rate(per_s: float, unit: str) -> str:
    if unit == "B":
        return f"{_megabytes(per_s)} MB/s"
    return f"{per_s:,.1f}/s" if per_s >= 1 else f"{_time(1 / per_s)} each"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
