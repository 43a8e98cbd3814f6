"""Means over experiments of the error of the mean; of what was fitted on and of what was held out apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from blis_replay.validate.comparison.compare import Cell, Verdict
from blis_replay.validate.metrics.latency import METRICS

# Coefficients that were fitted on the latencies of an experiment meet them; that says nothing of another one.
_KINDS = {"own latencies": "fitted", "not stated": "not stated"}


class Judged(Protocol):
    """What a mean over experiments takes of each: its verdict and its table."""

    @property
    def uses(self) -> str:
        """As ``Comparison.uses``."""

    @property
    def overloaded(self) -> bool:
        """As ``Comparison.overloaded``."""

    @property
    def verdict(self) -> Verdict:
        """As ``Comparison.verdict``."""

    @property
    def metrics(self) -> Mapping[str, Mapping[str, Cell]]:
        """As ``Comparison.metrics``."""


def mean_abs_errors(comparisons: Sequence[Judged]) -> dict[str, float | None]:
    """Per metric, the mean over judged experiments of the absolute error of the mean; overloaded ones do not count."""
    gated = [c for c in comparisons if c.verdict in ("pass", "fail", "not decided") and not c.overloaded]
    errors = {
        metric: [abs(e) for c in gated if (e := c.metrics[metric]["mean"].error) is not None] for metric in METRICS
    }
    return {metric: float(np.mean(values)) if values else None for metric, values in errors.items()}


def means_by_fit(comparisons: Sequence[Judged]) -> dict[str, dict[str, float | None]]:
    """The same of the experiments that were ``fitted``, ``held out`` or ``not stated``; absent without any."""
    kinds: dict[str, list[Judged]] = {}
    for comparison in comparisons:
        kinds.setdefault(_KINDS.get(comparison.uses, "held out"), []).append(comparison)
    means = {kind: mean_abs_errors(kinds[kind]) for kind in ("fitted", "held out", "not stated") if kind in kinds}
    return {kind: of for kind, of in means.items() if any(value is not None for value in of.values())}
