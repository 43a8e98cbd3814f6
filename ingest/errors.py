"""What can be wrong with a recording or a store, as errors a user can act on."""

from __future__ import annotations

from pathlib import Path

from blis_replay.base.errors import WRONG_USE, BlisReplayError


def printable(text: str) -> str:
    r"""``text`` on one line, with what a terminal would obey or cannot show written out (``\x1b``)."""
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def counted(count: int, noun: str) -> str:
    """``1 request``, ``2,000 requests``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class IngestError(BlisReplayError):
    """Base of the errors of this package; its text is one line for the user, free of control characters."""

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
