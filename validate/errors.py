"""What can be wrong with a comparison, a calibration or a gate, as an error a user can act on."""

from __future__ import annotations

from blis_replay.base.errors import ExperimentError


class ValidateError(ExperimentError):
    """Nothing to judge, or nothing to fit; the text is one line for the user."""


class NothingToJudgeError(ValidateError):
    """No request is left to compare."""


class PolicyError(ValidateError):
    """A gate policy that is none: the file, the field, what is wrong, what to do."""


class RecordError(ValidateError):
    """A server that cannot be recorded: the directory or the command, what is wrong, what to do."""
