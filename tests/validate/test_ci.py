"""What a CI service shows: each file of ``validate --ci`` by its own rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blis_replay.validate.ci import _annotation, dots
from blis_replay.validate.judgement import Quantity, held
from blis_replay.validate.metrics.uncertainty import Estimate


def quantity(observed: float, simulated: float, estimate: Estimate | None = None) -> Quantity:
    return held(("e2e", "mean"), 0.1, (observed, simulated), estimate, name="E2E")


@pytest.mark.parametrize(
    ("simulated", "column"),
    [(100.0, 20), (110.0, 30), (90.0, 10), (105.0, 25), (200.0, 40), (10.0, 0)],
)
def test_a_dot_stands_at_its_error_from_twice_the_limit_below_to_twice_above(simulated: float, column: int) -> None:
    """41 columns for a limit of 10 %: one column is one point, and what is farther off stands at the edge."""
    assert dots(quantity(100.0, simulated)).index("●") == column


def test_a_missing_number_has_no_dot() -> None:
    line = dots(replace(quantity(100.0, 100.0), error=None))
    assert [line.index(mark) for mark in "|:"] == [10, 20]
    assert "●" not in line


def test_an_annotation_cannot_be_ended_by_what_it_says() -> None:
    """%, and in a title : and comma, are escaped as the runner of GitHub decodes them; a line end never comes out."""
    assert _annotation("a:b,c", "FAIL", "5 %\n::error::x") == "::error title=FAIL a%3Ab%2Cc::5 %25 ::error::x\n"
