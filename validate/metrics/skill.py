"""How near predictions of single requests are, beside a straight line in the lengths and beside the server itself.

CRPS (Gneiting and Raftery 2007) of a request is ``mean |x - o| - mean |x - x'| / 2``: o is what was observed, x and x'
are what was predicted.  Where a simulator predicts one value it is the absolute error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.validate.metrics.latency import LatencySamples, values_of

SCORED = ("e2e", "ttft")


@dataclass(frozen=True)
class FloorLine:
    """TTFT = ``first_us`` + ``prompt_us`` per prompt token; E2E = TTFT + ``rest_us`` + ``gap_us`` per further token."""

    first_us: float
    prompt_us: float
    rest_us: float
    gap_us: float

    def ttft_e2e_us(self, prompt_tokens: Int64s, gaps: Int64s) -> tuple[Int64s, Int64s]:
        """Of requests with these lengths, int64[n] each."""
        ttft_us = np.rint(self.first_us + self.prompt_us * prompt_tokens).astype(np.int64)
        return ttft_us, ttft_us + np.rint(self.rest_us + self.gap_us * gaps).astype(np.int64)


def line_through(prompt_tokens: Floats, gaps: Floats, ttft_us: Floats, e2e_us: Floats, weights: Floats) -> FloorLine:
    """Least squares, float64[n] each; a slope that is negative or not determined is 0."""
    mean_us, mean_tokens = (float(np.average(values, weights=weights)) for values in (ttft_us, prompt_tokens))
    spread = float((weights * (prompt_tokens - mean_tokens) ** 2).sum())
    together = float((weights * (prompt_tokens - mean_tokens) * (ttft_us - mean_us)).sum())
    slope = together / spread if spread > 0 else 0.0
    slope = min(max(slope, 0.0), mean_us / mean_tokens if mean_tokens else 0.0)
    gap_us = float((weights * (e2e_us - ttft_us)).sum()) / max(float((weights * gaps).sum()), 1.0)
    return FloorLine(mean_us - slope * mean_tokens, slope, 0.0, gap_us)


@dataclass(frozen=True)
class Skill:
    """How near the predictions of one metric are, means over the requests.

    ``observed_us``: of the metric; ``crps_us``: of the predictions; ``of_line_us``: of the straight line in the lengths
    that fits this recording best.  ``of_repeats_us``: by how much the same requests differ between two recordings of
    this load; None without any.
    """

    observed_us: float
    crps_us: float
    of_line_us: float
    of_repeats_us: float | None = None

    @property
    def share(self) -> float:
        """CRPS over the observed mean."""
        return self.crps_us / self.observed_us

    @property
    def document(self) -> dict[str, float | None]:
        """For programs."""
        return {"beside_line": self.beside_line, "crps": self.share, "beside_repeats": self.beside_repeats}

    @property
    def beside_line(self) -> float | None:
        """1: every request is right; 0: no better than the line; negative: worse.  None where the line is exact."""
        return 1 - self.crps_us / self.of_line_us if self.of_line_us else None

    @property
    def beside_repeats(self) -> float | None:
        """CRPS over the difference of repeats: at 1 or less it is as near as the server is to itself."""
        return self.crps_us / self.of_repeats_us if self.of_repeats_us else None


def crps_us(observed_us: Floats, predicted_us: Floats) -> float:
    """Mean over n requests; ``observed_us``: float64[n], ``predicted_us``: float64[k, n], k predictions of each."""
    ranked, count = np.sort(predicted_us, axis=0), len(predicted_us)
    # The sum of |x - x'| over all pairs, each twice: that of rank i is added i times, and taken away k - 1 - i times.
    apart = 2 * ((2 * np.arange(count) - count + 1)[:, None] * ranked).sum(axis=0)
    return float((np.abs(predicted_us - observed_us).mean(axis=0) - apart / (2 * count**2)).mean())


def skills(prompt_tokens: Int64s, observed: LatencySamples, predicted: Sequence[LatencySamples]) -> Mapping[str, Skill]:
    """By metric, of the same n requests in every sample; ``prompt_tokens``: int64[n].  Empty without requests."""
    if not len(prompt_tokens):
        return {}
    seen_us = {metric: values_of(observed, metric).astype(np.float64) for metric in SCORED}
    tokens, gaps = prompt_tokens.astype(np.float64), observed.gaps.astype(np.float64)
    line = line_through(tokens, gaps, seen_us["ttft"], seen_us["e2e"], np.ones(len(tokens)))
    straight_us = dict(zip(("ttft", "e2e"), line.ttft_e2e_us(prompt_tokens, observed.gaps), strict=True))
    found = {}
    for metric, us in seen_us.items():
        if not us.any():
            continue
        drawn_us = np.array([values_of(one, metric) for one in predicted], np.float64)
        of_line_us = float(np.abs(straight_us[metric] - us).mean())
        found[metric] = Skill(float(us.mean()), crps_us(us, drawn_us), of_line_us)
    return found
