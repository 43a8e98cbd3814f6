"""A configuration of a study: the roofline with one mode of mixed steps on a recorded load sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from blis_replay.blis.release_fields import Fields
from blis_replay.blis.roofline import Mixed
from blis_replay.ingest.recording import Recording
from blis_replay.validate.mixed_batches.sweep_points import LOAD_KINDS
from blis_replay.validate.studies.study import Run

MEASURES = (
    "e2e_error_percent",
    *(f"{kind}_error_percent" for kind in LOAD_KINDS),
    *(f"{kind}_signed_percent" for kind in LOAD_KINDS),
    "mixed_steps_percent",
    "per_layer_us",
)
_MIXED: tuple[Mixed, ...] = ("weighted", "token_proportional", "additive", "largest")


@dataclass(frozen=True)
class SweepRun:
    """``gpu``: of recordings that do not name theirs; ``levelled``: as of ``modes.level``."""

    mixed: Mixed
    gpu: str
    levelled: bool


def read(fields: Fields) -> Run:
    """The run that a mapping describes."""
    described = SweepRun(fields.choice("mixed", _MIXED), fields.text("gpu"), fields.flag("levelled"))
    fields.refuse_unknown()
    return partial(run, described)


def run(described: SweepRun, recordings: Sequence[Recording], place: int) -> Mapping[str, float]:
    """All of ``MEASURES`` by name, of the recording at a place: means over the points of its sweep.

    ``error``: of E2E, absolute; ``signed``: with its sign; nan where the sweep has no such load.
    """
    from blis_replay.blis.architecture import bundled_architectures
    from blis_replay.validate.mixed_batches.modes import level, mode_errors, roofline_of

    recording = recordings[place]
    model = roofline_of(recording, bundled_architectures(), described.gpu)
    if described.levelled:
        model = level(recording, model)
    rows = mode_errors({recording.slug: recording}, {recording.slug: model}, (recording.slug, described.mixed))
    errors = np.array([row["e2e"] for row in rows], np.float64)
    kinds = np.array([row["kind"] for row in rows])
    return {
        "e2e_error_percent": _mean(np.abs(errors)),
        **{f"{kind}_error_percent": _mean(np.abs(errors[kinds == kind])) for kind in LOAD_KINDS},
        **{f"{kind}_signed_percent": _mean(errors[kinds == kind]) for kind in LOAD_KINDS},
        "mixed_steps_percent": _mean(np.array([row["mixed_share"] for row in rows], np.float64)),
        "per_layer_us": model.per_layer_us,
    }


def _mean(fractions: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return 100 * float(fractions.mean()) if len(fractions) else float("nan")
