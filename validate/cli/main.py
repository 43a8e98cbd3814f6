"""The ``blis-replay`` command: verbs are imported when they are used, so help is instant."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import click

from blis_replay.base.addons import addon, addons, in_labs
from blis_replay.base.errors import BAD_DATA, FAULT, INTERRUPTED, WRONG_USE, BlisReplayError, fault_text, printable

# Under their headings, in the order of a first visit: verb -> (module, one line of help).  The command of a verb is
# called like it, `list_verb`.
SECTIONS = {
    "Judge": {
        "validate": ("validate", "How far is the simulator from a recorded experiment?"),
        "explain": ("explain", "Which component of the simulator does its error come from?"),
        "compare": ("compare", "Two recordings, releases or simulators side by side."),
        "report": ("explain", "One HTML page with the verdicts and all of their evidence."),
        "timeline": ("explain", "A part of a run for a trace viewer, both sides on one clock."),
        "gate": ("calibrate", "May a coefficient release be used?"),
    },
    "Recordings": {
        "record": ("recordings", "Run a vLLM server and record what its engine does."),
        "ingest": ("recordings", "Read recordings of a real server into the store."),
        "list": ("recordings", "List stored and bundled experiments."),
        "inspect": ("recordings", "What a recording holds, and whether it can be trusted."),
    },
    "Coefficients": {
        "calibrate": ("calibrate", "Fit coefficients to recordings."),
        "coefficients": ("coefficients", "Coefficient releases: list, show, make, convert, test."),
    },
    "More": {
        "simulate": ("simulate", "Requests with other engine arguments, or another load."),
        "doctor": ("tool", "What is installed, and what stands in the way."),
    },
}
VERBS = {name: known for verbs in SECTIONS.values() for name, known in verbs.items()}
# Verbs of our labs, which plug them in as add-ons, in the same order: verb -> one line of help.
LABS = {
    "verify": "Check the simulator, verdicts, blame and fits themselves.",
    "study": "Do coefficients hold where they were not fitted?",
}

EXIT_PASS = 0
# As a shell reports the signal: no verdict.
EXIT_READER_GONE = 141

# How many objects must be new before garbage is sought: imports and a replay make fewer.
_OBJECTS_BEFORE_GARBAGE = 200_000


class ReaderGoneError(Exception):
    """Whoever read the output (head, less) has seen enough."""


class LazyGroup(click.Group):
    """A group that imports a verb's module when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of a first visit; then those that are plugged in."""
        return [*VERBS, *_plugged_in()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, or None for an unknown name."""
        if cmd_name not in VERBS:
            plugged: click.Command | None = addon("verb", cmd_name)
            return plugged
        module = import_module(f"blis_replay.validate.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_verb")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As of any group; its own options are understood behind the verb, too."""
        return super().parse_args(ctx, _options_first(args))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As of any group; a wrong name is answered with the closest."""
        name = args[0] if args else ""
        verbs = self.list_commands(ctx)
        if name in LABS and name not in verbs:
            ctx.fail(in_labs(f"the verb {name!r}"))
        if name and name not in verbs and not name.startswith("-"):
            close = get_close_matches(name, verbs, 1)
            ctx.fail(f"there is no verb {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """As of any group; its help may be read by a closed pipe as well."""
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError as error:
            raise ReaderGoneError from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb and hand all output over; click itself would end a closed pipe with 1, a FAIL."""
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError as error:
            raise ReaderGoneError from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception:
            if ctx.params["debug"]:
                click.echo(traceback.format_exc(), err=True)
            raise
        return result

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs under their headings, without importing them."""
        from blis_replay.validate.cli.options import COMMON

        labs = _plugged_in()
        width = max(map(len, (*VERBS, *labs)))
        sections = {title: {name: text for name, (_, text) in verbs.items()} for title, verbs in SECTIONS.items()}
        for title, listed in {**sections, "Labs": labs}.items():
            if listed:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), text) for name, text in listed.items()])
        with formatter.section("Common options of verbs"):
            formatter.write_dl([*COMMON.items()])


def _plugged_in() -> dict[str, str]:
    """Verbs of installed add-ons, ours first: verb -> one line of help."""
    names = addons("verb")
    ours = {name: text for name, text in LABS.items() if name in names}
    return ours | {name: f"See `blis-replay {name} --help`." for name in names if name not in ours}


def _options_first(words: Sequence[str]) -> list[str]:
    """A command line with the options of the program before its verb; what stands behind ``--`` is not looked at."""
    end = words.index("--") if "--" in words else len(words)
    first: list[str] = []
    rest: list[str] = []
    given = iter(words[:end])
    for word in given:
        name, equals, _ = word.partition("=")
        option = next((param for param in cli.params if name in param.opts and name != "--version"), None)
        if isinstance(option, click.Option):
            first += [word, *([] if option.is_flag or equals else islice(given, 1))]
        else:
            rest.append(word)
    return [*first, *rest, *words[end:]]


def _a_number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """The value; click lets nan pass a range."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds; write e.g. 60", ctx, param)
    return value


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="blis-replay")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colour, or none.  [default: auto]",
)
@click.option(
    "--lock-timeout",
    type=click.FloatRange(0),
    callback=_a_number,
    metavar="SECONDS",
    help="Wait for a store in use.  [default: 60]",
)
@click.pass_context
def cli(ctx: click.Context, debug: bool, color: str, lock_timeout: float | None) -> None:
    """Replay a recording of a real vLLM server through a simulator, and see how far
    the simulator is from it.

    \b
    Examples:
      blis-replay validate 34b-general
      blis-replay ingest runs/20260218-150304-codellama-34b-tp2-general
      blis-replay validate --all --json

    Exit codes: 0 PASS or FITS, 1 FAIL, 2 wrong use, 3 UNDECIDED, 4 bad data or NOT JUDGED,
    70 a fault of this program. explain, report and simulate end with 0 whatever the verdict.
    """
    ctx.color = _in_colour(color)
    if lock_timeout is not None:
        os.environ["BLIS_REPLAY_LOCK_TIMEOUT"] = str(lock_timeout)  # for the workers as well


def _in_colour(choice: str) -> bool | None:
    """Whether output is coloured; None: where it goes to a terminal."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return False if os.environ.get("TERM") == "dumb" else None


def program() -> None:
    """``main`` as a process of its own, which collects garbage rarely."""
    gc.set_threshold(_OBJECTS_BEFORE_GARBAGE, *gc.get_threshold()[1:])
    main()


def main() -> None:
    """Run the command line; errors a user can cause are one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal of few characters gets a question mark, never a traceback.
            stream.reconfigure(errors="replace")
    # Of libraries, to whoever writes this program: where they are made errors (tests), they still are.
    warnings.showwarning = lambda *_warning, **_where: None
    # numpy reads it when it is imported.  Our matrices are small: further threads wait for one another, which takes up
    # to half of the processor time, and how many there are decides the last digit of a sum.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        with _noted_interrupts() as interrupts:
            code = _exit_code(interrupts)
    except (BrokenPipeError, ReaderGoneError):
        _drop_output()
        code = EXIT_READER_GONE
    sys.exit(code)


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Every Ctrl-C meanwhile: a library may turn its ``KeyboardInterrupt`` into another error (DuckDB does)."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _exit_code(interrupts: Sequence[int]) -> int:
    given: dict[str, Path] = {}
    try:
        code = cli(prog_name="blis-replay", standalone_mode=False, obj=given)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return WRONG_USE
    except click.UsageError as error:
        return _complain(_with_help(error), WRONG_USE)
    except click.ClickException as error:
        return _complain(error.format_message(), BAD_DATA)
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()
    except BlisReplayError as error:
        from blis_replay.validate.cli.options import with_store

        return _complain(with_store(str(error), cli, given), error.exit_code)
    except (BrokenPipeError, ReaderGoneError):
        raise
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}; check the path and the room left there", BAD_DATA)
    except MemoryError as error:
        return _complain(f"memory is short ({error or 'no more is given'}); free some, or ask for less", BAD_DATA)
    except (Exception, SystemExit) as error:  # SystemExit: a library that would end the program with 1
        if interrupts:
            return _interrupted()
        _drop_output()
        return _complain(fault_text(error), FAULT)
    return code if type(code) is int else EXIT_PASS  # a verb that answers True has judged nothing


def _interrupted() -> int:
    said = "interrupted; what was finished is stored whole, the rest not at all"
    click.echo(said, err=True)
    _answer_in_json(said, INTERRUPTED)
    return INTERRUPTED


def _with_help(error: click.UsageError) -> str:
    """What is wrong, and the command that says what is right."""
    command = error.ctx.command_path if error.ctx else "blis-replay"
    message = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption) and command == "blis-replay":
        from blis_replay.validate.cli.options import COMMON

        if error.option_name in {word for names in COMMON for word in names.replace(",", "").split()}:
            message = f"{error.option_name} belongs behind the verb"
    return f"{message}{'' if message.endswith('?') else ';'} see `{command} --help`"


def _complain(text: str, code: int) -> int:
    from blis_replay.validate.text.terminal import wrap

    _answer_in_json(printable(text), code)
    said = f"error: {printable(text)}"
    shown = wrap(said) if sys.stderr is not None and sys.stderr.isatty() else said
    shown = shown.replace("error:", click.style("error:", fg="red", bold=True), 1)
    click.echo(shown, err=True, color=_in_colour("auto"))
    return code


def _answer_in_json(text: str, code: int) -> None:
    """Print the error as JSON to standard output, where the command line asks for it, even one that is wrong."""
    if "--json" not in sys.argv[1:] or {"--csv", "--markdown"} & {*sys.argv[1:]}:
        return
    from blis_replay.validate.cli.answers import error_json

    with suppress(OSError):
        click.echo(error_json(code, text))


def _drop_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter does not fail on it again at its end."""
    with suppress(OSError, AttributeError):  # descriptor or standard output missing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
