"""Gradient-boosted trees in the kernel: by hand, against LightGBM, in a release."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency.models import LEAF, Lifecycle, Tree, TreesModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release

# log 10,000 us, a tenth of that on top from 33 decodes on; then 0.5 more with more than 100 prefill tokens.
BASE = Tree((0, LEAF, LEAF), (32.0, 0.0, 0.0), (1, LEAF, LEAF), (2, LEAF, LEAF), (0.0, math.log(1e4), math.log(1.1e4)))
PREFILL = Tree((1, LEAF, LEAF), (100.0, 0.0, 0.0), (1, LEAF, LEAF), (2, LEAF, LEAF), (0.0, 0.0, 0.5))
MODEL = TreesModel(("decode_tokens", "prefill_tokens"), (BASE, PREFILL))


def duration_us(model: TreesModel, prefill: int, decode: int) -> int:
    batch = np.zeros(1, k.BATCH)
    batch["prefill_tokens"], batch["decode_tokens"] = prefill, decode
    return int(step_duration_us(*model.for_kernel(), batch, 0))


@pytest.mark.parametrize(
    ("prefill", "decode", "expected_us"),
    [(0, 32, 10_000), (100, 33, 11_000), (101, 0, 16_487), (101, 33, 18_135)],  # 10,000 * exp(0.5) = 16,487.2
)
def test_a_batch_goes_left_where_it_is_at_most_the_threshold(prefill: int, decode: int, expected_us: int) -> None:
    """The sum of a leaf of each tree, its exponential truncated (1.1e4 and 1e4 are a hair off in floats)."""
    assert abs(duration_us(MODEL, prefill, decode) - expected_us) <= 1


@given(st.integers(0, 4096), st.integers(0, 512))
def test_any_step_takes_between_a_us_and_an_hour(prefill: int, decode: int) -> None:
    endless = replace(BASE, value=(0.0, -1e3, 1e3))
    assert duration_us(replace(MODEL, trees=(endless,)), prefill, decode) == (1 if decode <= 32 else 3_600_000_000)


def test_the_kernel_is_lightgbm_to_the_last_bit() -> None:
    """On steps that it was not trained on, equal after truncation to whole us; times are a noisy line."""
    lightgbm = pytest.importorskip("lightgbm")
    assert lightgbm.__name__ == "lightgbm"
    from blis_replay.validate.fit.step_errors import RecordedSteps, predicted_us
    from blis_replay.validate.fit.trees import STEP_FEATURES, plain_trees, step_features, train

    random = np.random.default_rng(7)
    batch = np.column_stack([random.integers(0, most, 3000) for most in (2048, 128, 8, 90_000, 10**6)])
    time_us = np.rint(8_000 + 40 * batch[:, 0] + 60 * batch[:, 1] + random.normal(0, 200, 3000)).astype(np.int64)
    seen, unseen = (RecordedSteps(batch[part], time_us[part]) for part in (slice(2000), slice(2000, None)))
    booster = train(step_features(seen), seen.time_us)
    model = TreesModel(STEP_FEATURES, plain_trees(booster))
    theirs = np.exp(booster.predict(step_features(unseen)))
    assert np.abs(predicted_us(model, unseen) - theirs).max() < 1
    # Where an ulp decides on which side of a whole us a time lies, they may differ by one.
    assert (predicted_us(model, unseen) == np.trunc(theirs)).mean() > 0.999
    assert np.abs(theirs / unseen.time_us - 1).mean() < 0.03


def release_of(model: TreesModel) -> CoefficientRelease:
    entry = ModelEntry("org/model", 2, model, Lifecycle())
    return CoefficientRelease("t", "valid", "s", "t", "H100-SXM", "", (entry,), fitted_on=())


def test_a_release_of_trees_survives_being_written() -> None:
    assert parse_release(format_release(release_of(MODEL)), "t").models[0].latency == MODEL


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (replace(BASE, left=(0, LEAF, LEAF)), "tree 0 has a child of node 0 that does not come after it"),
        (replace(BASE, right=(3, LEAF, LEAF)), "tree 0 has a child of node 0 that does not come after it"),
        (replace(BASE, feature=(2, LEAF, LEAF)), "tree 0 names no feature at node 0"),
        (replace(BASE, feature=(-2, LEAF, LEAF)), "tree 0 names no feature at node 0"),
        (replace(BASE, value=(0.0, 1.0)), "tree 0 has no nodes, or lists of different lengths"),
        (Tree((), (), (), (), ()), "tree 0 has no nodes"),
    ],
)
def test_a_tree_that_has_no_end_is_refused(tree: Tree, complaint: str) -> None:
    with pytest.raises(ReleaseError, match=r"mine\.yaml, field models") as refused:
        parse_release(format_release(release_of(replace(MODEL, trees=(tree,)))), "mine.yaml")
    assert complaint in str(refused.value)


def test_no_trees_are_refused() -> None:
    with pytest.raises(ReleaseError, match=r"mine\.yaml, field models\[0\]\.latency: there are no trees; fit some"):
        parse_release(format_release(release_of(replace(MODEL, trees=()))), "mine.yaml")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("unit: log us", "unit: us", "latency.unit: is 'us'; write log us"),
        (
            "- decode_tokens",
            "- phase_of_the_moon",
            "features: names 'phase_of_the_moon', not a feature of a batch",
        ),
        ("- 32.0", "- .nan", "trees[0].threshold[0]: is nan; write a number"),
        ("- 32.0", "- often", "trees[0].threshold[0]: is 'often'; write a number"),
        ("left:\n      - 1", "left:\n      - 1.5", "trees[0].left[0]: is 1.5; write a whole number"),
        ("    - feature:", "    - features:", "trees[0].features: is not a field of a release; did you mean feature?"),
    ],
)
def test_what_is_wrong_with_a_release_of_trees_is_named(old: str, new: str, complaint: str) -> None:
    text = format_release(release_of(MODEL))
    assert old in text, text
    with pytest.raises(ReleaseError) as refused:
        parse_release(text.replace(old, new, 1), "mine.yaml")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
