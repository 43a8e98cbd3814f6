"""Gradient-boosted trees fitted to recorded steps with LightGBM, and beside linear models on steps left out.

What is left out is a model, or a workload.  Two targets: the step cycle, and the recorded ``step.duration_us``, which
is CPU time of the scheduler and what published step models were fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal

import numpy as np
import polars as pl

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.models import LEAF, Lifecycle, Tree, TreesModel
from blis_replay.blis.releases.release import CoefficientRelease, FittedOn, ModelEntry, format_release, parse_release
from blis_replay.compiled.arrays import Floats
from blis_replay.ingest.identity import requests_hash
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.errors import NothingToJudgeError, ValidateError
from blis_replay.validate.fit.step_errors import RecordedSteps, predicted_us, step_targets

# What a record of a step tells of its batch.  The KV tokens of its decodes it does not, and an average of the
# recording in their place would only name the recording; decoding requests are as many as decode tokens.
STEP_FEATURES = (
    *("prefill_tokens", "decode_tokens", "num_prefill_reqs", "scheduled_tokens", "prefill_x_decode"),
    *("prefill_sq",),
)

# Few and small: a release should stay readable, and more did not do better on steps left out.
TREES = 60
_PARAMETERS: Mapping[str, object] = {
    "objective": "regression",
    "num_leaves": 12,
    "learning_rate": 0.1,
    "min_data_in_leaf": 20,
    "seed": 42,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbosity": -1,
}


@dataclass(frozen=True)
class TreeFit:
    """Trees and what they rest on: ``importance`` is each feature's share of the gain of all splits, 1 in sum."""

    model: TreesModel
    importance: Mapping[str, float]


def step_features(steps: RecordedSteps) -> Floats:
    """float64[rows, 6]: ``STEP_FEATURES`` of recorded steps, as the kernel has them of a batch."""
    prefill, decode, prefills, _context, _attended = steps.batch.astype(np.float64).T
    return np.column_stack([prefill, decode, prefills, prefill + decode, prefill * decode, prefill**2])


def joined_steps(parts: Sequence[RecordedSteps]) -> RecordedSteps:
    """The steps of several recordings, one after the other."""
    return RecordedSteps(np.vstack([p.batch for p in parts]), np.concatenate([p.time_us for p in parts]))


def fit_trees(steps: RecordedSteps, rounds: int = TREES) -> TreeFit:
    """Trees for the logarithm of a step's time, so that relative errors count; equal input gives equal trees.

    Raises ``ValidateError`` if LightGBM is not installed.
    """
    booster = train(step_features(steps), steps.time_us, rounds)
    gain = np.asarray(booster.feature_importance("gain"), np.float64)
    share = gain / gain.sum() if gain.any() else gain
    model = TreesModel(STEP_FEATURES, plain_trees(booster))
    return TreeFit(model, dict(zip(STEP_FEATURES, map(float, share), strict=True)))


def train(features: Floats, time_us: Floats | np.ndarray[Any, np.dtype[np.int64]], rounds: int = TREES) -> Any:
    """The LightGBM booster itself; raises ``ValidateError`` if LightGBM is not installed."""
    try:
        import lightgbm  # an optional extra
    except ImportError:
        raise ValidateError(
            "LightGBM is not installed, which fits the trees; install it: pip install 'blis-replay[trees]'"
        ) from None
    data = lightgbm.Dataset(features, np.log(time_us), feature_name=list(STEP_FEATURES))
    return lightgbm.train(dict(_PARAMETERS), data, num_boost_round=rounds)


def plain_trees(booster: Any) -> tuple[Tree, ...]:
    """The trees of a booster as arrays: root first, each node before its children."""
    return tuple(_plain(tree["tree_structure"]) for tree in booster.dump_model()["tree_info"])


def _plain(root: Mapping[str, Any]) -> Tree:
    nodes, children, place = [root], [], 0
    while place < len(nodes):
        node = nodes[place]
        leaf = "leaf_value" in node
        children.append((LEAF, LEAF) if leaf else (len(nodes), len(nodes) + 1))
        nodes += [] if leaf else [node["left_child"], node["right_child"]]
        place += 1
    return Tree(
        feature=tuple(node.get("split_feature", LEAF) for node in nodes),
        threshold=tuple(float(node.get("threshold", 0.0)) for node in nodes),
        left=tuple(left for left, _right in children),
        right=tuple(right for _left, right in children),
        value=tuple(float(node.get("leaf_value", 0.0)) for node in nodes),
    )


def trees_release(recordings: Sequence[Recording], name: str, delays: CoefficientRelease) -> CoefficientRelease:
    """Trees for the step cycles of each model recorded, and the delays that ``delays`` has for it (none: 0).

    Raises ``ValidateError`` for no recordings, one without step cycles, or where LightGBM is not installed.
    """
    if not recordings:
        raise ValidateError("no recordings to fit trees to; name some with step records")
    by_model: dict[tuple[str, int], list[Recording]] = {}
    for recording in recordings:
        by_model.setdefault((model_of(recording), recording.tensor_parallelism or 1), []).append(recording)
    entries = []
    for (model, tensor_parallelism), parts in by_model.items():
        trees = fit_trees(joined_steps([step_targets(recording).cycle for recording in parts])).model
        entries.append(ModelEntry(model, tensor_parallelism, trees, _delays(parts[0], delays)))
    summary = f"Gradient-boosted trees fitted to step cycles of {', '.join(r.alias for r in recordings)}."
    source = f"LightGBM; delays of release {delays.name}"
    hardware = ", ".join(sorted({recording.hardware or "not stated" for recording in recordings}))
    fitted_on = tuple(FittedOn(r.slug, r.content_hash, "steps", requests_hash(r)) for r in recordings)
    release = CoefficientRelease(name, "valid", summary, source, hardware, models=tuple(entries), fitted_on=fitted_on)
    return parse_release(format_release(release), name)


def _delays(recording: Recording, release: CoefficientRelease) -> Lifecycle:
    try:
        return entry_of(release, recording).lifecycle
    except ReleaseError:
        return Lifecycle()


# -- Beside linear models, on steps left out ---------------------------------------------------

LeftOut = Literal["model", "workload"]
Target = Literal["cycle", "duration"]
Method = Literal["trees", "line", "linear"]
TARGETS: tuple[Target, ...] = ("cycle", "duration")
METHODS: tuple[Method, ...] = ("trees", "line", "linear")

# Below this many folds the order of features in them says nothing of the next one.
FEWEST_FOLDS = 3


Predict = Callable[[RecordedSteps], Floats]


@dataclass(frozen=True)
class StepErrors:
    """Over ``steps`` of a recording: mean absolute error, and signed error of the mean, in fractions."""

    steps: int
    mape: float
    signed: float


@dataclass(frozen=True)
class Stability:
    """How alike the folds order the features: mean Spearman correlation of their importances over pairs of folds.

    ``correlation``: None where it is not defined.
    """

    by: LeftOut
    target: Target
    folds: int
    correlation: float | None

    @property
    def conclusive(self) -> bool:
        """Whether the folds are enough to claim anything."""
        return self.correlation is not None and self.folds >= FEWEST_FOLDS


@dataclass(frozen=True)
class LeftOutScores:
    """``scores``: one row per fold, target, method and experiment left out.

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


def errors_left_out(
    recordings: Sequence[Recording], place: int, by: LeftOut, target: Target, method: Method
) -> StepErrors:
    """Of the recording at a place, after a fit to those of another model (workload).

    Raises ``NothingToJudgeError`` if there are none, otherwise as ``trees_left_out``.
    """
    group = _GROUPS[by]
    training = [recording for recording in recordings if group(recording) != group(recordings[place])]
    if not training:
        raise NothingToJudgeError(f"all recordings are of one {by}: nothing can be left out; give more")
    seen, unseen = (
        [getattr(step_targets(recording), target) for recording in part] for part in (training, [recordings[place]])
    )
    return _errors(_fitted(method, joined_steps(seen))(unseen[0]), unseen[0])


def _fold(steps: Mapping[str, RecordedSteps], left_out: set[str]) -> tuple[TreeFit, list[dict[str, object]]]:
    training = joined_steps([part for slug, part in steps.items() if slug not in left_out])
    trees = fit_trees(training)
    methods: dict[Method, Predict] = {"trees": partial(predicted_us, trees.model)}
    methods |= {method: _fitted(method, training) for method in METHODS if method != "trees"}
    return trees, [
        {"method": method, "experiment": slug, **vars(_errors(predict(steps[slug]), steps[slug]))}
        for slug in sorted(left_out)
        for method, predict in methods.items()
    ]


def _fitted(method: Method, training: RecordedSteps) -> Predict:
    if method == "trees":
        return partial(predicted_us, fit_trees(training).model)
    return _linear(training, ("prefill_tokens", "decode_tokens") if method == "line" else STEP_FEATURES)


def _linear(training: RecordedSteps, names: Sequence[str]) -> Predict:
    """Least squares of relative errors, at least 1 us; of features that stand in for each other, the least solution."""
    places = [STEP_FEATURES.index(name) for name in names]

    def design(steps: RecordedSteps) -> Floats:
        return np.column_stack([np.ones(len(steps.time_us)), step_features(steps)[:, places]])

    rows = design(training)
    scale = np.maximum(np.abs(rows).mean(axis=0), 1e-9)
    relative = rows / scale / training.time_us[:, None]
    solution = np.linalg.lstsq(relative, np.ones(len(rows)), rcond=1e-6)[0] / scale
    return lambda steps: np.maximum(design(steps) @ solution, 1.0)


def _errors(predicted: Floats, steps: RecordedSteps) -> StepErrors:
    return StepErrors(
        steps=len(predicted),
        mape=float(np.abs(predicted / steps.time_us - 1).mean()),
        signed=float(predicted.mean() / steps.time_us.mean() - 1),
    )


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


MEASURES = ("mape_percent", "signed_percent", "steps")


@dataclass(frozen=True)
class LeftOutRun:
    """What is left out, the target, and the method: as of ``LeftOutScores``."""

    left_out: LeftOut
    target: Target
    method: Method


def run(described: LeftOutRun, recordings: Sequence[Recording], place: int) -> Mapping[str, float]:
    """All of ``MEASURES`` by name: of the steps of the recording at a place, after a fit to those it may see."""
    errors = errors_left_out(recordings, place, described.left_out, described.target, described.method)
    return {"mape_percent": 100 * errors.mape, "signed_percent": 100 * errors.signed, "steps": errors.steps}
