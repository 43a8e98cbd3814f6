"""Options that several verbs share."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from blis_replay.ingest.store_place import STORE_DEFAULT

if TYPE_CHECKING:
    import polars as pl

Command = TypeVar("Command", bound=Callable[..., Any])


def store_option(command: Command) -> Command:
    """``--store``: where the ground-truth store is."""
    return click.option(
        "--store",
        "store_path",
        type=click.Path(path_type=Path, dir_okay=False),
        default=STORE_DEFAULT,
        envvar="BLIS_REPLAY_STORE",
        show_default=True,
        show_envvar=True,
        help="The ground-truth store, a DuckDB file.",
    )(command)


def json_option(command: Command) -> Command:
    """``--json``: machine-readable output."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(command)


def form_options(command: Command) -> Command:
    """``--json``, ``--csv`` and ``--markdown`` as ``form``, None for a table: of verbs that print metrics."""
    for form, what in (("markdown", "a Markdown table"), ("csv", "CSV, a row a number"), ("json", "JSON")):
        told = f"Print {what} instead of a table."
        command = click.option(f"--{form}", "form", flag_value=form, type=str, default=None, help=told)(command)
    return command


def print_frame(frame: pl.DataFrame, form: str) -> None:
    """Print a frame (no nested columns) as ``csv``, numbers in full, or ``markdown``, with six digits."""
    from blis_replay.validate.terminal import markdown_table

    if form == "csv":
        click.echo(frame.write_csv(), nl=False)
    else:
        rows = [[_cell(value) for value in row] for row in frame.iter_rows()]
        click.echo(markdown_table(frame.columns, rows))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def executor_options(command: Command) -> Command:
    """``--executor`` and ``--workers``: how a verb that runs many replays runs them."""
    chosen = click.option(
        "--executor",
        type=click.Choice(["local", "serial", "ray"]),
        default="local",
        show_default=True,
        help="Processes of this machine where they save time, this one only, or a Ray cluster (RAY_ADDRESS; "
        "without it a Ray of this machine).",
    )
    workers = click.option("--workers", type=click.IntRange(1), default=None, help="[default: one a processor]")
    return chosen(workers(command))


def progress_line(label: str) -> Callable[[int, int], None] | None:
    """``progress(done, all)`` that writes on a terminal's standard error; None, silence, in a pipe."""
    if not sys.stderr.isatty():
        return None

    def write(done: int, total: int) -> None:
        click.echo(f"\r\033[K{label}: {done:,} of {total:,}" if done < total else "\r\033[K", nl=False, err=True)

    return write


def first_line(text: str) -> None:
    """Say on a terminal's standard error what is being done while there is nothing to count; progress replaces it."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=False, err=True)


def print_json(document: object) -> None:
    """Print a document as JSON; a number that is not finite would be no JSON, and is an error."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


class Window(click.ParamType[tuple[float, float]]):
    """A share of a run by arrival time, written ``0.6:1``."""

    name = "from:to"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """``(low, high)`` with 0 <= low < high <= 1."""
        if isinstance(value, tuple):
            return value
        try:
            low, high = (float(part) for part in str(value).split(":"))
        except ValueError:
            self.fail(f"{value!r} is no window; write e.g. 0.6:1 for the last 40 % of the run", param, ctx)
        if not 0 <= low < high <= 1:
            self.fail(f"{value!r} is no window; use 0 <= from < to <= 1", param, ctx)
        return low, high


class Duration(click.ParamType[int]):
    """A time, written ``600s``, ``2.5s`` or ``250ms``; in whole us."""

    name = "time"
    _UNITS: ClassVar[dict[str, int]] = {"ms": 1_000, "s": 1_000_000}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Microseconds, 0 or more."""
        if isinstance(value, int):
            return value
        matched = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s)", str(value))
        if matched is None:
            self.fail(f"{value!r} is no time; write e.g. 600s, 2.5s or 250ms", param, ctx)
        return round(float(matched[1]) * self._UNITS[matched[2]])


WINDOW = Window()
DURATION = Duration()
