"""All errors that a user can cause and act on, by room, and the exit codes of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
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


class SimulatorError(ExperimentError, ValueError):
    """The simulator cannot run this; the text is one line for the user."""


class TraceError(SimulatorError):
    """A request trace or engine configuration that the engine cannot run."""


def evicting_for_ever(now_us: int, requests: str = "requests") -> TraceError:
    """The error of an engine in which nothing will ever move again."""
    return TraceError(
        f"from {now_us} us on {requests} get no token: the KV blocks are too few for one of them, or they evict each "
        "other for ever; raise num_gpu_blocks, or break the ties in priority and arrival time"
    )


class ReleaseError(SimulatorError):
    """A coefficient release that is malformed, invalid, or has no entry for the model."""


def printable(text: str) -> str:
    r"""``text`` on one line, with what a terminal would obey or cannot show written out (``\x1b``)."""
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def counted(count: int, noun: str) -> str:
    """``1 request``, ``2,000 requests``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class IngestError(BlisReplayError):
    """A recording or a store is wrong; the text is one line for the user, free of control characters."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class RecordingError(IngestError):
    """A recorded file cannot be used.

    ``path``: the file; ``place``: where in it (``"line 12"``, ``"field load.stages"``,
    ``""`` for the whole file); ``problem``: what is wrong; ``remedy``: what to do.
    """

    def __init__(self, path: Path | str, place: str, problem: str, remedy: str) -> None:
        self.path, self.place, self.problem, self.remedy = Path(path), place, problem, remedy
        where = f"{path}, {place}" if place else f"{path}"
        super().__init__(f"{where}: {problem}; {remedy}")


class StoreError(IngestError):
    """The store cannot be opened, is newer than this program, or lacks what was asked for."""


class UnknownExperimentError(StoreError):
    """An unknown experiment, or an alias of several."""

    exit_code = WRONG_USE


class ReconstructionError(IngestError):
    """The steps or batches of a recording cannot be reconstructed, with the reason."""


class UnknownCheckError(IngestError):
    """An unknown instrument check."""

    exit_code = WRONG_USE


class ReplayError(ExperimentError):
    """A replay that cannot be made from this recording; the text is one line for the user."""


class UnreplayableError(ReplayError):
    """The recording lacks what any replay of it takes, so it carries no verdict."""


class FileExistsAlreadyError(ReplayError):
    """A file that would be overwritten without having been asked to."""

    exit_code = WRONG_USE


def exists_already(path: object) -> FileExistsAlreadyError:
    """The error of a file that is there, with what to do."""
    return FileExistsAlreadyError(f"{path}: is there already; give --force to replace it, or another --out")


class UnknownNameError(ReplayError):
    """A replay mode or a coefficient release that does not exist."""

    exit_code = WRONG_USE


def argument_not_known(experiment: str, argument: str) -> UnreplayableError:
    """The error of a replay that an engine argument is missing for, with how to give it."""
    return UnreplayableError(
        f"{experiment}: {argument} is not known; write `{argument}: VALUE` into a file and ingest the recording again "
        "with --engine FILE.yaml"
    )


class ValidateError(ExperimentError):
    """Nothing to judge, or nothing to fit; the text is one line for the user."""


class NothingToJudgeError(ValidateError):
    """No request is left to compare."""


class PolicyError(ValidateError):
    """A gate policy that cannot be used: the file, the field, what is wrong, what to do."""


class RecordError(ValidateError):
    """A server that cannot be recorded: the directory or the command, what is wrong, what to do."""
