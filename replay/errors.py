"""What can be wrong with a replay, as an error a user can act on."""

from __future__ import annotations


class ReplayError(Exception):
    """A replay that cannot be made from this recording; the text is one line for the user."""


class FileExistsAlreadyError(ReplayError):
    """A file that would be overwritten without having been asked to."""


class UnknownNameError(ReplayError):
    """A replay mode or a coefficient release that does not exist."""
