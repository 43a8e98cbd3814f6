"""What verbs share: the shape of a command, and its options."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click
from click.shell_completion import CompletionItem

from blis_replay.base.addons import addon, addons, in_labs
from blis_replay.validate import STORE_DEFAULT
from blis_replay.validate.cli.answers import Command, form_options, set_out_file

if TYPE_CHECKING:
    from blis_replay.validate.metrics.objectives import Objectives

# Where a command keeps which store it is of.
_STORE = "store"


class PlacePath(click.Path):
    """A path that is not empty: an empty one, from an unset variable, would mean the working directory."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails if it is empty."""
        if value == "":
            self.fail("the value is empty; name a file or a folder", param, ctx)
        if not self.dir_okay and Path(os.fsdecode(value)).is_dir():
            self.fail(f"File {os.fsdecode(value)!r} is a directory; name a file", param, ctx)
        return super().convert(value, param, ctx)


FILE = PlacePath(dir_okay=False)
FOLDER = PlacePath(file_okay=False)


def _remembered(ctx: click.Context, _param: click.Parameter, store_path: Path) -> Path:
    """The store as it is, and for ``main`` how the commands of an error repeat it."""
    ctx.find_root().ensure_object(dict)[_STORE] = store_path
    return store_path


store_option = click.option(
    *("--store", "store_path"),
    type=FILE,
    default=STORE_DEFAULT,
    envvar="BLIS_REPLAY_STORE",
    show_envvar=True,
    callback=_remembered,
)


_TOLD = re.compile(r"`blis-replay ([^`]+)`")


def with_store(message: str, root: click.Group, given: dict[str, Path]) -> str:
    """An error in which each command that takes a store has that of the command that failed.

    ``given``: the object of its context.
    """
    if _STORE not in given or not _TOLD.search(message):
        return message
    from blis_replay.validate.experiment import given_options

    repeated, context = given_options(None, given[_STORE]), click.Context(root)

    def told(found: re.Match[str]) -> str:
        command: click.Command | None = root
        for word in found[1].split():
            if isinstance(command, click.Group):
                command = command.get_command(context, word)
        takes = command is not None and any(one.name == "store_path" for one in command.params)
        return f"`blis-replay {found[1]}{repeated if takes and ' --store ' not in found[1] else ''}`"

    return _TOLD.sub(told, message)


Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def completer(names: Callable[[click.Context], Iterable[str]]) -> Completer:
    """Completes a word of a shell by those of the names that begin so."""
    return lambda ctx, _param, begun: [name for name in names(ctx) if name.startswith(begun)]


def _experiments(ctx: click.Context) -> list[str]:
    """Aliases, of the store and of what ships; slugs where two have one alias."""
    from blis_replay.validate.inspection import experiment_names

    return experiment_names(Path(ctx.params.get("store_path") or os.environ.get("BLIS_REPLAY_STORE") or STORE_DEFAULT))


def _complete_releases(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Releases that ship, else files."""
    from blis_replay.blis.releases.release import bundled_releases

    names = [CompletionItem(name) for name in bundled_releases() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def name_option(
    name: str, help_text: str, option: str = "--experiment", *, several: bool = False, **settings: Any
) -> Callable[[Command], Command]:
    """An option that names an experiment, or ``several``."""
    short = ["-e"] if option == "--experiment" else []
    shown: dict[str, Any] = {"metavar": "NAME", "help": help_text, "shell_complete": completer(_experiments)}
    return click.option(*(option, *short, name), multiple=several, **shown, **settings)


def _named(
    metavar: str, chosen: Callable[[tuple[str, ...]], Any], option: Callable[[Command], Command], name: str
) -> Callable[[Command], Command]:
    """Experiments as ``name``, positional or by an option that is read first; ``chosen``: what all of them become."""

    def together(ctx: click.Context, _param: click.Parameter, positional: tuple[str, ...]) -> Any:
        by_option = ctx.meta.pop(_NAMED, None) or ()
        return chosen((*positional, *((by_option,) if isinstance(by_option, str) else by_option)))

    complete = completer(_experiments)
    argument = click.argument(name, nargs=-1, metavar=metavar, shell_complete=complete, callback=together)
    return lambda command: argument(option(command))


def _keep(ctx: click.Context, _param: click.Parameter, value: Any) -> None:
    ctx.meta[_NAMED] = value


# What an option of experiments leaves for the positional ones.
_NAMED = "blis_replay.named"
_BESIDE: dict[str, Any] = {"expose_value": False, "is_eager": True, "callback": _keep}


def one_experiment(*, required: bool) -> Callable[[Command], Command]:
    """The one recording that a verb is about as ``name``; None where none is given and none is ``required``."""

    def only(names: tuple[str, ...]) -> str | None:
        chosen = list(dict.fromkeys(names))
        if len(chosen) > 1:
            raise click.UsageError(f"{' and '.join(chosen)}: one experiment at a time; name one")
        if required and not chosen:
            raise click.UsageError("name an experiment; list them with `blis-replay list`")
        return chosen[0] if chosen else None

    return _named("[EXPERIMENT]", only, name_option("names", "", **_BESIDE), "name")


experiment_option = one_experiment(required=True)


def selector_option(default: str, option: str = "--experiment") -> Callable[[Command], Command]:
    """Experiments as ``names``, several, patterns too; ``default``: what is meant without any."""
    help_text = f"Slug, alias or pattern.  [default: {default}]" if default else ""
    every = name_option("by_option", help_text, option, several=True, **_BESIDE)
    return _named("[EXPERIMENT]...", tuple, every, "names")


def experiments_options(command: Command) -> Command:
    """Experiments as ``names``, positional or as ``--experiment``, or ``--all`` as ``everything``."""
    return selector_option("")(click.option("--all", "everything", is_flag=True)(command))


repeat_option = name_option("repeats", "Another recording of the same load and server.", "--repeat", several=True)


def _objectives(_ctx: click.Context, _param: click.Parameter, limits: str | None) -> Objectives:
    if limits is None:
        return ()
    from blis_replay.validate.metrics.objectives import parse_objectives

    return parse_objectives(limits)


slo_option = click.option(
    *("--slo", "objectives"),
    metavar="LIMITS",
    callback=_objectives,
    help="Limits to check: ttft.p95=500ms,itl.p95=50ms.",
)


def release_option(*names: str, help_text: str, **settings: Any) -> Callable[[Command], Command]:
    """An option that names a release."""
    return click.option(*names, metavar="RELEASE", shell_complete=_complete_releases, help=help_text, **settings)


timeout_option = click.option(
    *("--simulator-timeout", "timeout_s"),
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    metavar="S",
    help="Seconds for a simulator.  [default: 600]",
)
coefficients_option = release_option("--coefficients", help_text="Name or YAML file.  [default: the one that ships]")
gpu_file_option = click.option(
    "--gpu-file", type=FILE, metavar="FILE", help="YAML with datasheets of other GPUs (docs/fit.md)."
)
replay_option = click.option(
    *("--replay", "mode_text"), default="exact", metavar="MODE", help="exact, spec, or changes such as prefix=none."
)


class OutFile(PlacePath):
    """A file to write: its folder is there and can be written, which is known before the work and not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails if nothing could be written there."""
        path: Path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: there is no folder {str(path.parent)!r}; make it first", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{str(path)!r} cannot be written; choose another place", param, ctx)
        if path.is_file() and _is_database(path):
            self.fail(f"{str(path)!r} is a DuckDB database, which would be lost; choose another name", param, ctx)
        return path


def _is_database(path: Path) -> bool:
    """Whether a file begins like one of DuckDB: the letters are behind a checksum of 8 bytes."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(12)[8:] == b"DUCK"
    return False


history_option = click.option("--history", type=FILE, metavar="FILE", help="What --record wrote, commit by commit.")
# How many processes a verb that runs many replays may use.
workers_option = click.option("--jobs", "workers", type=click.IntRange(1), metavar="N")


class Shares(click.ParamType[tuple[float, float]]):
    """Two shares of a run, written ``0.6:1``; ``holds``: what they must satisfy.

    ``not_two``, ``broken``: the end of an error, for what cannot be read and for what does not hold.
    """

    def __init__(self, name: str, not_two: str, broken: str, holds: Callable[[float, float], bool]) -> None:
        self.name, self.not_two, self.broken, self.holds = name, not_two, broken, holds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """Both of them."""
        if isinstance(value, tuple):
            return value
        try:
            low, high = (float(part) for part in str(value).split(":"))
        except ValueError:
            self.fail(f"{value!r} is not {self.not_two}", param, ctx)
        if not self.holds(low, high):
            self.fail(f"{value!r} is not {self.broken}", param, ctx)
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
            if re.fullmatch(r"\d{10,}(?:\.\d+)?(ms|s)", str(value)):
                self.fail(f"{value!r} is longer than any run; use at most 999999999s", param, ctx)
            self.fail(f"{value!r} is not a time; write e.g. 600s, 2.5s or 250ms", param, ctx)
        return round(float(matched[1]) * self._UNITS[matched[2]])


WINDOW = Shares(
    *("from:to", "a window; write e.g. 0.6:1 for the last 40 % of the run", "a window; use 0 <= from < to <= 1"),
    lambda low, high: 0 <= low < high <= 1,
)
OUT_FILE = OutFile()


def _history(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """A history that can be added to, which is known before anything is judged."""
    if path is not None and path.exists():
        from blis_replay.validate.history import read

        read(path)
    return path


record_option = click.option(
    *("--record", "history"),
    type=OUT_FILE,
    metavar="FILE",
    callback=_history,
    help="Add the judgement to this history (JSON lines).",
)
DURATION = Duration()


# Options that many verbs have.  The help of a verb has their names only, that of the program says what they do.
COMMON = {
    "-e, --experiment NAME": "A slug, an alias, or a pattern such as '34b-*'.",
    "--all": "All stored and bundled experiments.",
    "--jobs N": "Processes to use.  [default: one per processor]",
    "--store FILE": f"The store.  [default: {STORE_DEFAULT}]",
    "-o, --out FILE": "Write the answer there: .json, .csv, .md or text.",
    "--json, --csv, --markdown": "Print the answer in this form.",
    "-v, --verbose": "Print everything, where an answer is shorter.",
    "-q, --quiet": "Print no answer and no progress.",
}
# Columns for the names of options in a help page; longer ones have a line of their own.
OPTION_COLUMNS = 22


class Verb(click.Command):
    """A command whose help has the common options in one line.

    ``longer``: what -v adds, if anything.  ``answers``: whether it prints an answer, which options give a form.
    """

    def __init__(self, *args: Any, longer: str = "", answers: bool = True, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += form_options() if answers else ()
        named = {param.name: param for param in self.params if isinstance(param, click.Option)}
        if "verbose" in named:
            named["verbose"].help = longer
        if "json" in named and "out" not in named:
            at = next(i for i, param in enumerate(self.params) if param.name in ("workers", "store_path", "json"))
            self.params.insert(
                at, click.Option(["--out", "-o"], type=OUT_FILE, expose_value=False, callback=set_out_file)
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As of any command, but no value is dropped for a later one; an error says which verb it is of."""
        try:
            _, _, given = self.make_parser(ctx).parse_args(list(args))
            for param, times in Counter(given).items():
                if times > 1 and isinstance(param, click.Option) and not (param.multiple or param.is_flag):
                    raise click.UsageError(f"{param.opts[0]} is given {times} times; give it once")
            ctx.allow_extra_args, allowed = True, ctx.allow_extra_args
            extra = super().parse_args(ctx, args)
            if extra and not allowed and not ctx.resilient_parsing:
                raise click.UsageError(f"{' '.join(extra)}: nothing is expected there; leave it out")
            return extra
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verb's own options; below them the names of the common ones."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        own = [record for o in options if o.help and "--help" not in o.opts and (record := o.get_help_record(ctx))]
        if own:
            with formatter.section("Options"):
                formatter.write_dl(own, col_max=OPTION_COLUMNS)
        names = [option.get_help_record(ctx) for option in options if not option.help]
        with formatter.section("Common options"):
            formatter.write_text(", ".join([*(one[0].replace(", ", "/") for one in names if one), "-h/--help"]))


class VerbGroup(click.Group):
    """A group of verbs, and a socket of its name into which add-ons plug further ones.

    ``labs``: the verbs that our labs plug in.
    """

    command_class = Verb

    def __init__(self, *args: Any, labs: tuple[str, ...] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._labs = labs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs by name, with those that are plugged in."""
        return sorted({*self.commands, *addons(str(self.name))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of that name, or None."""
        plugged: click.Command | None = addon(str(self.name), cmd_name)
        return super().get_command(ctx, cmd_name) or plugged

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As of any group; a verb of a lab that is not installed is a usage error which says so."""
        if args[0] in self._labs and self.get_command(ctx, args[0]) is None:
            ctx.fail(in_labs(f"the verb '{self.name} {args[0]}'"))
        return super().resolve_command(ctx, args)


verb: Callable[..., Callable[[Callable[..., Any]], Verb]] = partial(click.command, cls=Verb)
