"""The range of the steps that coefficients were fitted on, and what lies outside of it."""

from __future__ import annotations

import numpy as np
import pytest

from blis_replay.base.errors import ReleaseError
from blis_replay.blis.grouping import attended_by
from blis_replay.blis.kernel.state import STEP
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.fit import FitRecord, StepRange, outside, range_of
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release
from blis_replay.blis.trace import KvCacheGroup

LINE = LatencyModel("blackbox", 1_000_000, 0, 0, per_context_token_ns=1_000)


def table(*rows: tuple[int, int, int]) -> np.ndarray:
    """Steps of so many decodes, context tokens of all of them, and prefill tokens."""
    steps = np.zeros(len(rows), STEP)
    for place, name in enumerate(("decode_tokens", "context_tokens", "prefill_tokens")):
        steps[name] = [row[place] for row in rows]
    return steps


def test_the_range_is_from_the_smallest_to_the_largest_over_all_runs() -> None:
    """Mean contexts 100 and 300; steps without decodes or without prefill have no context and no prefill."""
    found = range_of([table((10, 1_000, 0), (0, 0, 512)), table((4, 1_200, 16))])
    # Of three steps one has 8 to 15 decodes, one 512 to 1,023 prefill tokens, one 16 to 31 of them with 4 to 7 decodes.
    mixes = ((0, 8, 0.3333), (16, 4, 0.3333), (512, 0, 0.3333))
    assert found == StepRange((4, 10), (100, 300), (16, 512), mixes)
    assert range_of([table()]) is None


def test_a_quarter_of_the_steps_lies_outside() -> None:
    """Of four steps one has 20 decodes of 400 tokens each, which both are beyond; none has more prefill."""
    fitted = StepRange((1, 10), (100, 300), (1, 512))
    steps = table((10, 1_000, 0), (20, 8_000, 0), (1, 300, 512), (0, 0, 1))
    found = outside(steps, fitted, LINE)
    assert str(found) == (
        "25 % of steps lie outside of what the coefficients were fitted on "
        "(25 % with 20 decodes, fitted on 1 to 10; "
        "25 % with 400 tokens of mean context, fitted on 100 to 300); "
        "the model gives this excess 38 % of all step time, and no measurement backs that; "
        "intervals allow for 15 % of the mean step either way"
    )
    assert outside(steps[[0, 2, 3]], fitted, LINE) is None
    assert outside(np.concatenate([steps[1:2], *[steps[:1]] * 150]), fitted, LINE) is None  # one of 151


def test_what_the_excess_costs_is_what_the_model_says() -> None:
    """1 ms per step and 1 us a context token: 2 + 9 + 1.3 + 1 = 13.3 ms; cut to 10 decodes of 300 tokens it is 8.3 ms.

    The excess is 9 - 4 = 5 ms: 5 / 13.3.  A model to which contexts cost nothing says so.
    """
    fitted = StepRange((1, 10), (100, 300), (1, 512))
    steps = table((10, 1_000, 0), (20, 8_000, 0), (1, 300, 512), (0, 0, 1))
    found = outside(steps, fitted, LINE)
    assert found is not None
    assert found.time_share == pytest.approx(5 / 13.3, abs=1e-3)
    assert found.unsure == pytest.approx(0.4 * 5 / 13.3, abs=1e-3)  # KV bytes over bandwidth: 20 % is one deviation
    without = outside(steps, fitted, LatencyModel("blackbox", 1_000_000, 0, 0))
    assert without is not None
    assert str(without).endswith("; the model adds no time for it")
    assert without.unsure == 0


def test_steps_between_the_bounds_may_be_of_a_mix_that_was_rare() -> None:
    """Fitted on whole prompts of 2,000 tokens beside 10 decodes and one last chunk of 64 in a thousand steps.

    Three of four steps of a server that schedules 64 at a time have such a chunk: none is outside of the bounds.
    """
    whole, chunk, plain = (10, 1_000, 2_000), (10, 1_000, 64), (10, 1_000, 0)
    fitted = range_of([table(*[whole] * 99, chunk, *[plain] * 900)])
    assert fitted is not None
    found = outside(table(*[chunk] * 75, *[plain] * 25), fitted, LINE)
    assert found is not None
    assert (found.share, found.words, found.unsure) == (0.0, "", 0.0)
    assert found.matters
    assert "75 % 64 prefill tokens with 8 to 10 decodes, of those fitted on 0.1 %" in str(found)
    assert outside(table(*[chunk] * 9, *[plain] * 91), fitted, LINE) is None  # too few to decide a mean
    assert outside(table(*[whole] * 75, *[plain] * 25), fitted, LINE) is None  # 10 % were like that


def test_a_release_carries_the_range() -> None:
    fit = FitRecord(
        "line",
        0.6,
        0.8,
        "synchronous",
        "synchronous",
        "e",
        (),
        (),
        StepRange((1, 10), (100, 300), (0, 0), ((64, 8, 0.5),)),
    )
    entry = ModelEntry("m", 1, LatencyModel("blackbox", 1_000_000, 1, 1), Lifecycle(), fit=fit)
    text = format_release(CoefficientRelease("r", "valid", "s", "s", "h", "", (entry,), fitted_on=()))
    assert parse_release(text, "r").models[0].fit == fit
    assert "decodes: [1, 10]\n" in text
    with pytest.raises(ReleaseError, match=r"fit\.steps\.decodes: does not ascend from 0 on"):
        parse_release(text.replace("[1, 10]", "[1, 0.5]"), "r")


def test_contexts_beyond_the_fit_cost_what_a_mean_layer_attends_to() -> None:
    """One layer of ten keeps all, nine have windows of 100: of 400 tokens a mean layer attends to 130, of 300 to 120.

    So the steps take 1 + 2.6 ms; cut to 10 decodes of 300 tokens, 1 + 1.2.
    """
    groups = (*[KvCacheGroup("window", 100)] * 9, KvCacheGroup("full"))
    steps = table((20, 8_000, 0))
    found = outside(
        steps, StepRange((1, 10), (100, 300), (1, 512)), LINE, lambda context: attended_by(groups, context - 1, 1)
    )
    assert found is not None
    assert found.time_share == pytest.approx(1.4 / 3.6, abs=1e-3)
