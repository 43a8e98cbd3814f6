"""Step time by gradient-boosted trees, as plain arrays: no library is needed to run them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel import step_time
from blis_replay.strict.document import Number

LEAF = -1


@dataclass(frozen=True)
class Tree:
    """A binary tree, node by node, the root first and children after their parents.

    ``feature``: place in ``TreesModel.features``, ``LEAF`` for a leaf.  Where the feature is at most ``threshold``,
    ``left`` is the next node, else ``right``.  ``value``: of a leaf.
    """

    feature: tuple[int, ...]
    threshold: tuple[Number, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[Number, ...]


@dataclass(frozen=True)
class TreesModel:
    """Step time as the exponential of the sum of trees, in us, truncated, 1 us to an hour.

    ``features``: names of ``kernel.step_time.FEATURE_NAMES``.
    """

    features: tuple[str, ...]
    trees: tuple[Tree, ...]

    def for_kernel(self) -> step_time.KernelModel:
        """Kind, integer and float parameters of ``kernel.step_time``; ``ReleaseError`` for an unsound tree."""
        if not self.trees:
            raise ReleaseError("there are no trees; fit some")
        places = [step_time.FEATURE_NAMES.index(name) for name in self.features]
        for number, tree in enumerate(self.trees):
            if problem := _unsound(tree, len(places)):
                raise ReleaseError(f"tree {number} {problem}; fit the trees again")
        roots = np.cumsum([0, *(len(tree.feature) for tree in self.trees)])[:-1]
        nodes = [
            (LEAF, LEAF, LEAF, value) if feature == LEAF else (places[feature], root + left, root + right, threshold)
            for tree, root in zip(self.trees, roots, strict=True)
            for feature, threshold, left, right, value in zip(*vars(tree).values(), strict=True)
        ]
        feature, left, right, float_params = zip(*nodes, strict=True)
        int_params = np.concatenate([[len(self.trees)], roots, feature, left, right]).astype(np.int64)
        return step_time.TREES, int_params, np.array([*float_params, *[0.0] * step_time.FEATURES])


def _unsound(tree: Tree, features: int) -> str:
    """What is wrong with a tree, empty if nothing is: a walk from the root must end in a leaf."""
    size = len(tree.feature)
    columns = (tree.threshold, tree.left, tree.right, tree.value)
    if size == 0 or any(len(column) != size for column in columns):
        return "has no nodes, or lists of different lengths"
    for node, feature in enumerate(tree.feature):
        if feature == LEAF:
            if not math.isfinite(tree.value[node]):
                return f"has no finite value at node {node}"
        elif not 0 <= feature < features:
            return f"names no feature at node {node}"
        elif not all(node < child < size for child in (tree.left[node], tree.right[node])):
            return f"has a child of node {node} that does not come after it"
        elif not math.isfinite(tree.threshold[node]):
            return f"has no finite threshold at node {node}"
    return ""
