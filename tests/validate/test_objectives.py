"""Service level objectives, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from blis_replay.base.errors import UnknownNameError
from blis_replay.validate.metrics.latency import LatencySamples
from blis_replay.validate.metrics.objectives import (
    Objective,
    attained,
    parse_objectives,
)
from blis_replay.validate.text.messages import attainment_line

# TTFT 100 to 400 ms; 11 tokens each, the gaps of a request 10, 20, 30, 40 ms.
SAMPLES = LatencySamples(
    np.array([100_000, 200_000, 300_000, 400_000]),
    np.array([200_000, 400_000, 600_000, 800_000]),
    np.full(4, 11),
)
GAPS = np.array([10_000, 20_000, 30_000, 40_000]), np.full(4, 10)


def test_objectives_as_they_are_written() -> None:
    assert parse_objectives("ttft.p95=0.5s, itl.mean=50ms,e2e.p999=3s") == (
        Objective("ttft", "p95", 500_000.0),
        Objective("itl", "mean", 50_000.0),
        Objective("e2e", "p999", 3_000_000.0),
    )


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft.p95=500", "ttft.p0=1s", "speed.p95=1s", "ttft.p95=0ms", "ttft.p95=1s,ttft.p95=2s"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(UnknownNameError, match="--slo"):
        parse_objectives(text)


def test_quantiles_are_of_all_and_goodput_of_each_request() -> None:
    """p50 of TTFT lies between 200 and 300 ms; 2 of 5 requests have TTFT <= 250 ms and gaps <= 25 ms of their own.

    The fifth request never finished.
    """
    found = attained(parse_objectives("ttft.p50=250ms,itl.p50=25ms"), SAMPLES, GAPS, 5)
    assert (found.values_us, found.met) == ((250_000.0, 25_000.0), True)
    assert (found.good, found.goodput) == (2, 0.4)


def test_the_furthest_miss_comes_first_and_what_is_not_known_is_missed() -> None:
    found = attained(parse_objectives("ttft.mean=200ms,e2e.mean=100ms,itl.p95=1s"), SAMPLES, None, 4)
    assert [objective.slug for objective in found.missed] == ["itl_p95", "e2e_mean", "ttft_mean"]
    line = attainment_line(found.document)
    assert line.startswith("SLO missed: TTFT mean 250 of 200 ms, E2E mean 500 of 100 ms, ITL p95 unknown of 1,000 ms")
    assert line.endswith("goodput 0.0% of the requests")
