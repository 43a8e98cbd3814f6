"""The root of all errors that a user can cause, and the exit codes of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import ClassVar

WRONG_USE, BAD_DATA, FAULT, INTERRUPTED = 2, 4, 70, 130


class BlisReplayError(Exception):
    """An error that a user can act on; its text is one line that says what is wrong, where, and what to do.

    ``exit_code``: what the command line ends with.
    """

    exit_code: ClassVar[int] = BAD_DATA


class MissingExtraError(BlisReplayError):
    """A package that only one part of this program needs is not installed."""

    exit_code = WRONG_USE


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Raise ``MissingExtraError`` if one of these modules is missing; ``extra``: the extra that installs them."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {' and '.join(missing)}, not installed here; pip install 'blis-replay[{extra}]'"
        )


class ExperimentError(BlisReplayError):
    """One experiment cannot be simulated, replayed or judged; a verb that is about several names it and goes on.

    A store or a file that cannot be read ends the verb instead.
    """


class FaultError(ExperimentError):
    """What should never happen did, in the work on one experiment."""

    exit_code = FAULT


def fault_text(error: BaseException) -> str:
    """One line about an error that nobody foresaw: whose it is, what it says, and what to do with it."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (
        f"a fault of blis-replay: {type(error).__name__}{': ' if said else ''}{said[:200]}; nothing is judged by it: "
        "report it to its makers with what `blis-replay --debug VERB ...` prints"
    )


@contextmanager
def faults_named(name: str) -> Iterator[None]:
    """Work on the experiment of that name: what nobody foresaw in it is a ``FaultError``, so that others go on.

    Errors of a store, of files and of memory are those of all experiments and leave as they are.
    """
    try:
        yield
    except (BlisReplayError, OSError, MemoryError):
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("duckdb", "_duckdb"):
            raise
        raise FaultError(f"{name}: {fault_text(error)}") from error
