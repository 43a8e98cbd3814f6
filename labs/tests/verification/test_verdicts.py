"""Verdicts on simulators whose true error is known: a tenth of ``verify --verdicts``."""

from __future__ import annotations

import numpy as np
import pytest

from blis_replay_labs.verification.verdicts import KINDS, judged, noisy_servers, verdict_rows


def test_servers_are_of_all_kinds_and_other_seeds_have_others() -> None:
    servers, others = noisy_servers(1, 12, 400), noisy_servers(2, 12, 400)
    assert {noisy.kind for noisy in servers} == set(KINDS)
    assert {noisy.stages for noisy in servers} == {1, 2}
    assert not {noisy.server.seed for noisy in servers} & {noisy.server.seed for noisy in others}


def test_a_server_whose_noise_is_small_is_judged_rightly() -> None:
    """Two modes 1 to 4 % apart that change often: every verdict at half the limit and beyond it is sure."""
    (noisy,) = [one for one in noisy_servers(1, 6, 400) if one.kind == "two modes"]
    measures = {name: float(np.mean(values)) for name, values in judged(noisy, 4).items()}
    assert measures["pass 0.05"] == 1
    assert measures["pass 0.11"] == measures["fail 0.09"] == measures["no worse"] == 0
    assert measures["worse 0.10 off"] == 1


@pytest.mark.heavy
def test_no_verdict_is_wrong_more_often_than_the_page_allows() -> None:
    """The bars that say what must not happen; how often a verdict is missing depends on the noise of the servers."""
    rows = verdict_rows(1, quick=True)
    wrong = [row for row in rows if not row.passed and row.check.startswith(("PASS at limit +", "FAIL at", "equal"))]
    assert wrong == []
    coverage = [row.measured for row in rows if row.check.startswith("coverage") and "mean" in row.check]
    assert np.mean(coverage) >= 0.92
