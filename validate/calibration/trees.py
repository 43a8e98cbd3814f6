"""Fitting gradient-boosted trees to recorded steps with LightGBM, and taking them out of it as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.models import LEAF, Lifecycle, Tree, TreesModel
from blis_replay.blis.releases.release import CoefficientRelease, FittedOn, ModelEntry, format_release, parse_release
from blis_replay.compiled.arrays import Floats
from blis_replay.ingest.identity import requests_hash
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.calibration.step_errors import RecordedSteps, step_targets
from blis_replay.validate.errors import ValidateError

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
    release = CoefficientRelease(
        name=name,
        status="valid",
        summary=f"Gradient-boosted trees fitted to step cycles of {', '.join(r.alias for r in recordings)}.",
        source=f"LightGBM; delays of release {delays.name}",
        hardware=", ".join(sorted({recording.hardware or "not stated" for recording in recordings})),
        sha256="",
        models=tuple(entries),
        fitted_on=tuple(FittedOn(r.slug, r.content_hash, "steps", requests_hash(r)) for r in recordings),
        published_replay={},
        published_errors={},
    )
    return parse_release(format_release(release), name)


def _delays(recording: Recording, release: CoefficientRelease) -> Lifecycle:
    try:
        return entry_of(release, recording).lifecycle
    except ReleaseError:
        return Lifecycle()
