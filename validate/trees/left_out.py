"""Trees beside linear models on the steps of a model, or of a workload, that neither was fitted to.

Two targets: the step cycle, and the recorded ``step.duration_us``, which is CPU time of the scheduler and what
published step models were fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import polars as pl

from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import model_of
from blis_replay.validate.calibration.cycle_rows import Floats
from blis_replay.validate.calibration.step_errors import RecordedSteps, predicted_us, step_targets
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.trees.fit import STEP_FEATURES, TreeFit, fit_trees, joined_steps, step_features

LeftOut = Literal["model", "workload"]
Target = Literal["cycle", "duration"]
TARGETS: tuple[Target, ...] = ("cycle", "duration")

# Below this many folds the order of features in them says nothing of the next one.
FEWEST_FOLDS = 3


@dataclass(frozen=True)
class Stability:
    """How alike the folds order the features: mean Spearman correlation of their importances over pairs of folds.

    ``correlation`` None where it is not defined.  ``told``: whether there are ``FEWEST_FOLDS``, so that it is a claim.
    """

    by: LeftOut
    target: Target
    folds: int
    correlation: float | None

    @property
    def told(self) -> bool:
        """Whether the folds are enough to claim anything."""
        return self.correlation is not None and self.folds >= FEWEST_FOLDS


@dataclass(frozen=True)
class LeftOutScores:
    """``scores``: a row a fold, target, method and experiment left out.

    ``by``, ``left_out``, ``target``, ``method`` (``trees``; ``line`` in prefill and decode tokens; ``linear`` in all
    features), ``experiment``, ``steps``, ``mape`` and ``signed`` (of the mean), both fractions.
    ``importance``: ``by``, ``left_out``, ``target``, ``feature``, ``share`` of the gain of all splits.
    """

    scores: pl.DataFrame
    importance: pl.DataFrame
    stability: tuple[Stability, ...]


def trees_left_out(recordings: Sequence[Recording]) -> LeftOutScores:
    """Leave each model out in turn, then each workload, on both targets.

    Raises ``NothingToJudgeError`` for recordings of one model and one workload, ``ValidateError`` for one
    without step cycles or where LightGBM is not installed.
    """
    targets = {recording.slug: step_targets(recording) for recording in recordings}
    scores: list[dict[str, object]] = []
    importance: list[dict[str, object]] = []
    for by, group in _GROUPS.items():
        groups = {recording.slug: group(recording) for recording in recordings}
        if len(set(groups.values())) < 2:
            continue
        for left_out in sorted(set(groups.values())):
            for target in TARGETS:
                steps = {slug: getattr(targets[slug], target) for slug in groups}
                fold = {"by": by, "left_out": left_out, "target": target}
                trees, rows = _fold(steps, {slug for slug, name in groups.items() if name == left_out})
                scores += [fold | row for row in rows]
                importance += [fold | {"feature": f, "share": share} for f, share in trees.importance.items()]
    if not scores:
        raise NothingToJudgeError("recordings of one model and one workload: nothing can be left out; give more")
    frame = pl.DataFrame(importance)
    return LeftOutScores(pl.DataFrame(scores), frame, _stability(frame))


_GROUPS: Mapping[LeftOut, Callable[[Recording], str]] = {"model": model_of, "workload": lambda r: r.workload}


def _fold(steps: Mapping[str, RecordedSteps], left_out: set[str]) -> tuple[TreeFit, list[dict[str, object]]]:
    training = joined_steps([part for slug, part in steps.items() if slug not in left_out])
    trees = fit_trees(training)
    methods: dict[str, Callable[[RecordedSteps], Floats]] = {
        "trees": lambda part: predicted_us(trees.model, part),
        "line": _linear(training, ("prefill_tokens", "decode_tokens")),
        "linear": _linear(training, STEP_FEATURES),
    }
    return trees, [
        {"method": method, "experiment": slug, **_errors(predict(steps[slug]), steps[slug])}
        for slug in sorted(left_out)
        for method, predict in methods.items()
    ]


def _linear(training: RecordedSteps, names: Sequence[str]) -> Callable[[RecordedSteps], Floats]:
    """Least squares of relative errors, at least 1 us; of features that stand in for each other, the least solution."""
    places = [STEP_FEATURES.index(name) for name in names]

    def design(steps: RecordedSteps) -> Floats:
        return np.column_stack([np.ones(len(steps.time_us)), step_features(steps)[:, places]])

    rows = design(training)
    scale = np.maximum(np.abs(rows).mean(axis=0), 1e-9)
    relative = rows / scale / training.time_us[:, None]
    solution = np.linalg.lstsq(relative, np.ones(len(rows)), rcond=1e-6)[0] / scale
    return lambda steps: np.maximum(design(steps) @ solution, 1.0)


def _errors(predicted: Floats, steps: RecordedSteps) -> dict[str, object]:
    return {
        "steps": len(predicted),
        "mape": float(np.abs(predicted / steps.time_us - 1).mean()),
        "signed": float(predicted.mean() / steps.time_us.mean() - 1),
    }


def _stability(importance: pl.DataFrame) -> tuple[Stability, ...]:
    found = []
    for (by, target), rows in importance.group_by("by", "target", maintain_order=True):
        shares = [fold["share"].to_numpy() for _name, fold in rows.group_by("left_out", maintain_order=True)]
        pairs = [rank_correlation(one, other) for one, other in combinations(shares, 2)]
        known = [value for value in pairs if value is not None]
        found.append(Stability(by, target, len(shares), float(np.mean(known)) if known else None))
    return tuple(found)


def rank_correlation(one: Floats, other: Floats) -> float | None:
    """Spearman's correlation, ties at their mean rank; None where one side does not vary."""
    from scipy.stats import rankdata  # heavy, and only studies need it

    ranks = rankdata(one), rankdata(other)
    if any(np.ptp(side) == 0 for side in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])
