"""``coefficients`` as a user meets it: releases shown and made."""

from __future__ import annotations

import pytest
import yaml
from command_line import Run


@pytest.mark.parametrize("release", ["h100-physical", "stepml-direct", "cpu-vllm-0.32.0"])
def test_a_release_is_shown_in_80_columns_and_is_the_same(run: Run, release: str) -> None:
    shown = run("coefficients", "show", release, "-v").out
    # But for a hash, which is one word.
    assert max(len(line) for line in shown.splitlines() if "requests_hash" not in line) <= 80
    written = run("coefficients", "show", release, "--json").json
    of_all_answers = {name: written[name] for name in ("sha256", "version")}
    assert {**yaml.safe_load(shown), **of_all_answers} == written


def test_of_a_fitted_release_its_coefficients_with_their_bounds_are_shown(run: Run) -> None:
    """The file has 889 lines; 95 % of the intercept of the 34B model are 13,549.8 to 13,610.0 us in it."""
    shown = run("coefficients", "show", "h100-vllm-0.15.1").out.splitlines()
    assert len(shown) < 50
    assert ["intercept", "13,580", "13,550", "13,610", "fitted"] in [line.split() for line in shown]
