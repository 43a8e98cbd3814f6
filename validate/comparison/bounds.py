"""Bounds of a change, as ``--fail-if`` names them: ``p99.ttft=+5%``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, isfinite

from blis_replay.base.errors import UnknownNameError
from blis_replay.validate.judgement import State
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, MetricStatistic, cell_name, of_requests

_BOUND = re.compile(r"([a-z0-9]+)(?:\.([a-z0-9]+))?=([+-]?)([0-9]{1,4}(?:\.[0-9]{1,4})?)%", re.ASCII)


@dataclass(frozen=True)
class Bound:
    """How far a number may change: from ``low`` to ``high``, fractions, infinite where nothing is asked."""

    cell: MetricStatistic
    low: float
    high: float

    @property
    def name(self) -> str:
        """``TTFT p99``."""
        return cell_name(self.cell)

    @property
    def text(self) -> str:
        """``at most +5 %``, ``at least -5 %`` or ``±5 %``."""
        if not isfinite(self.low):
            return f"at most +{100 * self.high:.4g} %"
        return f"at least {100 * self.low:.4g} %" if not isfinite(self.high) else f"±{100 * self.high:.4g} %"

    def state(self, low: float, high: float) -> State:
        """Where the interval of a change lies: PASS and FAIL need all of it."""
        if self.low <= low and high <= self.high:
            return "within"
        return "beyond" if high < self.low or low > self.high else "undecided"


def parse_bound(text: str) -> Bound:
    """The bound that a text names: ``p99.ttft=+5%``, ``ttft.p99=+5%``, ``e2e=5%`` (the mean, either way).

    Raises ``UnknownNameError`` with what to write.
    """
    found = _BOUND.fullmatch(text.strip())
    metric, statistic = (found[1], found[2] or "mean") if found else ("", "")
    if metric in STATISTICS:
        metric, statistic = statistic, metric
    if found is None or metric not in METRICS or statistic not in STATISTICS:
        known = f"{', '.join(METRICS)}; {', '.join(STATISTICS)}"
        raise UnknownNameError(f"{text!r} cannot be read as a bound; write e.g. p99.ttft=+5% or e2e=5%, of: {known}")
    if not of_requests((metric, statistic)):
        raise UnknownNameError(f"{text!r}: quantiles of ITL have no interval; use itl or a quantile of tpot")
    size = float(found[4]) / 100
    return Bound((metric, statistic), -inf if found[3] == "+" else -size, inf if found[3] == "-" else size)
