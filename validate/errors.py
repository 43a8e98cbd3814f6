"""What can be wrong with a comparison or a calibration, as an error a user can act on."""

from __future__ import annotations


class ValidateError(Exception):
    """Nothing to judge, or nothing to fit; the text is one line for the user."""


class NothingToJudgeError(ValidateError):
    """No request is left to compare."""
