"""A configuration of a study: a step-time model on a recording whose model, or workload, it was not fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from blis_replay.blis.release_fields import Fields
from blis_replay.ingest.recording import Recording
from blis_replay.validate.studies.study import Run
from blis_replay.validate.trees.left_out import METHODS, TARGETS, LeftOut, Method, Target, errors_left_out

MEASURES = ("mape_percent", "signed_percent", "steps")
_LEFT_OUT: tuple[LeftOut, ...] = ("model", "workload")


@dataclass(frozen=True)
class LeftOutRun:
    """What is left out, the target, and the method: as of ``left_out.LeftOutScores``."""

    by: LeftOut
    target: Target
    method: Method


def read(fields: Fields) -> Run:
    """The run that a mapping describes."""
    described = LeftOutRun(
        fields.choice("left_out", _LEFT_OUT), fields.choice("target", TARGETS), fields.choice("method", METHODS)
    )
    fields.refuse_unknown()
    return partial(run, described)


def run(described: LeftOutRun, recordings: Sequence[Recording], place: int) -> Mapping[str, float]:
    """All of ``MEASURES`` by name: of the steps of the recording at a place, after a fit to those it may see."""
    errors = errors_left_out(recordings, place, described.by, described.target, described.method)
    return {"mape_percent": 100 * errors.mape, "signed_percent": 100 * errors.signed, "steps": errors.steps}
