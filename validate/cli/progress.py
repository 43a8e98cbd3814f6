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
    """What long work calls with its progress; ``what``: the part at work now."""

    def __call__(self, done: int, total: int, what: str = "") -> None: ...


@contextmanager
def progress_line(label: str) -> Iterator[Progress | None]:
    """A bar and the remaining time on a terminal's standard error; None, and silence, without a terminal.

    The line is wiped at the end, after an error and Ctrl-C too.
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
            _write(" ".join(filter(None, [label, progress_text(done, total, now - begin), what])))

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


def progress_text(done: int, total: int, seconds: float) -> str:
    """A bar, the share that is done, and the time that is left at the rate so far."""
    share = done / total if total else 1.0
    filled = int(_BAR_COLUMNS * share)
    shown = f"[{'#' * filled}{'.' * (_BAR_COLUMNS - filled)}] {share:.0%}"
    if not done or done >= total or seconds < _SHOWN_EVERY_S:  # what a first moment says of the rate means nothing
        return shown
    return f"{shown}, {_time((total - done) * seconds / done)} left"


def _write(text: str) -> None:
    """The line, cut at the edge of the terminal: one that wraps cannot be wiped."""
    columns = shutil.get_terminal_size().columns
    click.echo(_WIPE + printable(text)[: columns - 1], err=True, nl=False, color=True)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
