"""Gradient-boosted trees in a release's YAML, both ways: a list a column, a node in each place."""

from __future__ import annotations

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel.step_time import FEATURE_NAMES
from blis_replay.blis.release_fields import Fields
from blis_replay.blis.trees import Tree, TreesModel

_COLUMNS = ("feature", "threshold", "left", "right", "value")
_WHOLE = ("feature", "left", "right")


def parse_trees(fields: Fields) -> TreesModel:
    """The trees of a release entry.  Raises ``ReleaseError`` naming the field or the tree."""
    fields.choice("unit", ("log us",))
    names = fields.values.get("features")
    fields.seen.add("features")
    if not isinstance(names, list) or not names or not all(name in FEATURE_NAMES for name in names):
        fields.refuse("features", "are no list of features of a batch", f"use {', '.join(FEATURE_NAMES)}")
    model = TreesModel(tuple(map(str, names)), tuple(_parse_tree(tree) for tree in fields.list("trees")))
    fields.refuse_unknown()
    try:
        model.for_kernel()
    except ReleaseError as error:
        raise ReleaseError(f"{fields.origin}, field {fields.path.rstrip('.')}: {error}") from None
    return model


def format_trees(model: TreesModel) -> dict[str, object]:
    """The fields that ``parse_trees`` reads."""
    return {
        "kind": "trees",
        "unit": "log us",
        "features": list(model.features),
        "trees": [{name: list(getattr(tree, name)) for name in _COLUMNS} for tree in model.trees],
    }


def _parse_tree(fields: Fields) -> Tree:
    columns = {name: fields.numbers_of(name) for name in _COLUMNS}
    fields.refuse_unknown()
    for name in _WHOLE:
        if any(value != int(value) for value in columns[name]):
            fields.refuse(name, "is no list of whole numbers", "fit the trees again")
    feature, left, right = (tuple(int(value) for value in columns[name]) for name in _WHOLE)
    return Tree(feature, columns["threshold"], left, right, columns["value"])
