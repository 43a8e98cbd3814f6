"""What can be wrong with a replay, as an error a user can act on."""

from __future__ import annotations

from blis_replay.base.errors import WRONG_USE, ExperimentError


class ReplayError(ExperimentError):
    """A replay that cannot be made from this recording; the text is one line for the user."""


class FileExistsAlreadyError(ReplayError):
    """A file that would be overwritten without having been asked to."""

    exit_code = WRONG_USE


def exists_already(path: object) -> FileExistsAlreadyError:
    """The error of a file that is there, with what to do."""
    return FileExistsAlreadyError(f"{path}: is there already; give --force to replace it, or another --out")


class UnknownNameError(ReplayError):
    """A replay mode or a coefficient release that does not exist."""

    exit_code = WRONG_USE


def argument_not_known(experiment: str, argument: str) -> ReplayError:
    """The error of a replay that an engine argument is missing for, with how to give it."""
    return ReplayError(
        f"{experiment}: {argument} is not known; write `{argument}: VALUE` into a file and ingest the recording again "
        "with --engine FILE.yaml"
    )
