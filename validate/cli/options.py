"""Options that several verbs share."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from blis_replay.ingest.errors import printable
from blis_replay.validate import STORE_DEFAULT

if TYPE_CHECKING:
    from blis_replay.validate.text.answer import Answer

Command = TypeVar("Command", bound=Callable[..., Any])
# Where a command keeps that everything is to be printed.
_VERBOSE = "blis_replay.verbose"


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


def experiment_option(command: Command) -> Command:
    """``--experiment`` as ``name``: the one recording that a verb is about."""
    return click.option("--experiment", "name", required=True, metavar="NAME", help="Slug or alias of a recording.")(
        command
    )


def experiments_options(command: Command) -> Command:
    """``--experiment`` as ``names``, several of them, or ``--all`` as ``everything``."""
    everything = click.option("--all", "everything", is_flag=True, help="All stored and bundled experiments.")
    return selector_option("")(everything(command))


def selector_option(default: str) -> Callable[[Command], Command]:
    """``--experiment`` as ``names``, several of them, patterns too; ``default``: what is meant without it."""
    help_text = (
        f"Slug, alias or pattern such as '34b-*'; may be given several times.{default and f'  [default: {default}]'}"
    )
    return click.option("--experiment", "names", multiple=True, metavar="NAME", help=help_text)


def coefficients_option(command: Command) -> Command:
    """``--coefficients``: the release to replay with, None for our own."""
    help_text = "A release that ships, or a YAML file.  [default: our own]"
    return click.option("--coefficients", default=None, metavar="RELEASE", help=help_text)(command)


def replay_option(command: Command) -> Command:
    """``--replay`` as ``mode_text``."""
    help_text = (
        "exact, as-published, spec (requests generated from the load profile), blis-spec (as BLIS expands it), "
        "or substitutions: arrivals=flat|profile, lengths=re-tokenised|profile, prefix=none|profile, "
        "scheduling=synchronous, surplus_steps=1, joined by commas."
    )
    return click.option("--replay", "mode_text", default="exact", show_default=True, metavar="MODE", help=help_text)(
        command
    )


def form_options(command: Command) -> Command:
    """``--json``, ``--csv`` and ``--markdown`` as ``form``, None for a table: of every verb that prints something."""
    for form, what in (("markdown", "a Markdown table"), ("csv", "CSV"), ("json", "JSON")):
        help_text = f"Print {what} instead of text."
        command = click.option(f"--{form}", "form", flag_value=form, type=str, default=None, help=help_text)(command)
    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=lambda context, _option, value: context.meta.update({_VERBOSE: value}),
        help="Print everything: every number, assumption and finding.",
    )(command)


def repeated(**options: str | None) -> str:
    """Options of this command as a next command needs them, with a space before each; None is left out."""
    given = [part for name, value in options.items() if value for part in (f"--{name}", shlex.quote(value))]
    return "".join(f" {part}" for part in given)


def store_given() -> str | None:
    """The store that the command line names; None where a next command finds the same by itself."""
    context = click.get_current_context()
    named = context.get_parameter_source("store_path") == click.core.ParameterSource.COMMANDLINE
    return str(context.params["store_path"]) if named else None


def print_answer(form: str | None, answer: Answer) -> int:
    """Print an answer as text, or in the form asked for; its exit code."""
    from blis_replay.validate.text.answer import csv, markdown, page_json, page_text

    if form is None:
        brief = answer.brief and not click.get_current_context().meta.get(_VERBOSE)
        click.echo(page_text(answer.brief if brief else answer.page))
    elif form == "json":
        click.echo(page_json(answer.document))
    else:
        for sentence in answer.beside_data:
            click.echo(printable(sentence), err=True)
        click.echo(csv(answer.table) if form == "csv" else markdown(answer.table) + "\n", nl=False)
    return answer.exit_code


class OutFile(click.Path):
    """A file to write: its folder is there and can be written, which is known before the work and not after it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails if nothing could be written there."""
        path: Path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: there is no folder {str(path.parent)!r}; make it first", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{str(path)!r} cannot be written; choose another place", param, ctx)
        return path


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
    workers = click.option(
        "--workers", type=click.IntRange(1), default=None, help="Processes at most.  [default: one a processor]"
    )
    return chosen(workers(command))


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
OUT_FILE = OutFile()
DURATION = Duration()
