"""The verdict on a simulator, as data: what was judged, against which limit, and what came of it.

It is made once, by ``Comparison.judgement``.  Whatever a person or a program reads lays it out and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.validate.metrics.latency import METRICS, MetricStatistic, relative_error

Verdict = Literal["pass", "fail", "unusable", "not decided", "not judged"]
# ``open``: within its limit for some of what the error may be, and beyond it for the rest.
State = Literal["within", "beyond", "open", "absent"]


@dataclass(frozen=True)
class Draws:
    """Signed errors (float64[reconstructions]) by metric and statistic; of ITL only those of the mean."""

    errors: Mapping[MetricStatistic, Floats]

    @property
    def count(self) -> int:
        """How many reconstructions were replayed."""
        return max((len(errors) for errors in self.errors.values()), default=0)

    def range_of(self, cell: MetricStatistic) -> tuple[float, float, float]:
        """The smallest, the median and the largest error."""
        errors = self.errors[cell]
        return float(errors.min()), float(np.median(errors)), float(errors.max())


@dataclass(frozen=True)
class Quantity:
    """One number held against a limit.

    ``key``: the metric, or the measure of an overloaded run; ``metric``: whose limit it has.  ``observed``,
    ``simulated``: in ``unit``.  ``error``: simulated over observed less one, None where a side is missing.
    ``interval``: smallest and largest error over reconstructions, where there are any.  ``limit``: the largest absolute
    error that passes.  ``by_draws``: the state by reconstructions alone, without the margin of steps beyond the fit.
    """

    key: str
    metric: str
    statistic: str
    name: str
    unit: str
    observed: float | None
    simulated: float | None
    error: float | None
    interval: tuple[float, float] | None
    limit: float
    state: State
    by_draws: State

    @property
    def excess(self) -> float:
        """The size of the error over its limit; 0 without an error."""
        return abs(self.error or 0.0) / self.limit


def held(
    cell: MetricStatistic,
    limit: float,
    sides: tuple[float | None, float | None],
    *,
    name: str,
    unit: str = "us",
    metric: str = "",
    draws: Draws | None = None,
    unsure: float = 0.0,
) -> Quantity:
    """A number held against its limit; ``cell``: key and statistic, ``sides``: observed and simulated.

    ``unsure``: how far the simulated one may be off, as a share, because its steps lie beyond what was fitted.
    """
    observed, simulated = sides
    error = relative_error(observed, simulated)
    errors, interval = np.array([] if error is None else [error]), None
    if draws is not None and cell in draws.errors:
        errors = draws.errors[cell]
        interval = (float(errors.min()), float(errors.max()))
    states = [state_of(errors, limit, share) if error is not None else "absent" for share in (unsure, 0.0)]
    key, statistic = cell
    return Quantity(key, metric or key, statistic, name, unit, observed, simulated, error, interval, limit, *states)


def state_of(errors: Floats, limit: float, unsure: float = 0.0) -> State:
    """``within`` if all that signed errors may be is within the limit, ``beyond`` if none of it is, else ``open``.

    ``unsure``: an error e may be anything from (1 + e) (1 - unsure) - 1 to (1 + e) (1 + unsure) - 1.
    """
    low, high = ((1 + errors) * (1 + off) - 1 for off in (-unsure, unsure))
    if bool(((low >= -limit) & (high <= limit)).all()):
        return "within"
    return "beyond" if bool(((high < -limit) | (low > limit)).all()) else "open"


@dataclass(frozen=True)
class Remark:
    """Something to know of a judgement: ``text.messages`` words it, by its code."""

    code: str
    values: Mapping[str, Any]


def remark(code: str, **values: Any) -> Remark:
    """A remark of these values."""
    return Remark(code, values)


@dataclass(frozen=True)
class Command:
    """A command of ours that a reader wants next; ``of_release``: it takes the options of coefficients and replay."""

    verb: str
    alias: str
    more: str = ""
    of_release: bool = True


@dataclass(frozen=True)
class Judgement:
    """What is to be said of one replay.

    ``requests``: how many were compared.  ``uses``: what the coefficients were fitted on, as far as this run is
    concerned (``Comparison.uses``).  ``overloaded``: it is judged by what was served.  ``judged``: what the verdict
    rests on; ``tails``: p99s, which are reported only.  ``refused``: judged metrics that an instrument check forbids,
    with check and reason.  ``lost``: why the recording as a whole carries no verdict.  ``unsure``: as of ``held``.
    ``errors``: signed errors of all numbers.  ``of_queue``: the next command of a saturated run.  ``remarks``: what the
    numbers depend on and nobody recorded, who is not in them, and what changed one.
    """

    slug: str
    alias: str
    ground_truth: str
    requests: int
    uses: str
    overloaded: bool
    judged: tuple[Quantity, ...]
    tails: tuple[Quantity, ...]
    refused: Mapping[str, str]
    lost: tuple[str, ...]
    unsure: float
    errors: Mapping[MetricStatistic, float | None]
    of_queue: Command | None
    remarks: tuple[Remark, ...]

    @property
    def verdict(self) -> Verdict:
        """``not judged``: there is nothing to judge by, or it does not stand for the run.

        ``unusable``: a judged metric must not be used, and none of the others fails.  ``not decided``: what the error
        may be lies on both sides of a limit.
        """
        if self.lost:
            return "not judged"
        if self.beyond:
            return "fail"
        if self.refused:
            return "unusable"
        if any(quantity.state == "open" for quantity in self.judged):
            return "not decided"
        return "pass" if any(quantity.state == "within" for quantity in self.judged) else "not judged"

    @property
    def beyond(self) -> tuple[Quantity, ...]:
        """Judged numbers beyond their limits."""
        return tuple(quantity for quantity in self.judged if quantity.state == "beyond")

    @property
    def open_by_fit(self) -> bool:
        """Whether it is not decided because of steps beyond the fit alone, and not by reconstructed requests."""
        return self.verdict == "not decided" and all(quantity.by_draws != "open" for quantity in self.judged)

    @property
    def next(self) -> Command:
        """The command that a reader wants next."""
        if self.of_queue is not None:
            return self.of_queue
        if self.verdict == "fail" or self.tails_that_are("beyond"):
            return Command("explain", self.alias)
        if self.verdict == "pass":
            return Command("report", self.alias, " --out report.html")
        return Command("inspect", self.alias, of_release=False)

    @property
    def worst_first(self) -> list[Quantity]:
        """Judged numbers, the largest error for its limit first."""
        return sorted(self.judged, key=lambda quantity: -quantity.excess)

    def tails_that_are(self, state: State) -> tuple[Quantity, ...]:
        """P99s whose error is larger than their limit, ``beyond`` in all reconstructions or ``open``."""
        return tuple(tail for tail in self.tails if tail.state == state and tail.excess > 1)


def exit_code(verdicts: Sequence[str]) -> int:
    """0 all passed, 1 one failed, 3 nothing, or one not, could be judged."""
    if "fail" in verdicts:
        return 1
    return 0 if set(verdicts) == {"pass"} else 3


# -- Means over experiments: what was fitted on and what was held out apart ------------------------------------

# Coefficients that were fitted on the latencies of an experiment meet them; that says nothing of another one.
UNSEEN = ("held out", "fitted on no recording")
_KINDS = {"fitted on this run": "fitted", "unknown": "unknown"}


def mean_abs_errors(judgements: Sequence[Judgement]) -> dict[str, float | None]:
    """Per metric, the mean over judged experiments of the absolute error of the mean; overloaded ones do not count."""
    counted = [j for j in judgements if j.verdict in ("pass", "fail", "not decided") and not j.overloaded]
    errors = {metric: [abs(e) for j in counted if (e := j.errors[metric, "mean"]) is not None] for metric in METRICS}
    return {metric: float(np.mean(values)) if values else None for metric, values in errors.items()}


def means_by_fit(judgements: Sequence[Judgement]) -> dict[str, dict[str, float | None]]:
    """The same of the experiments that were ``fitted``, ``held out`` or ``unknown``; absent without any."""
    kinds: dict[str, list[Judgement]] = {"fitted": [], "held out": [], "unknown": []}
    for judgement in judgements:
        kinds[_KINDS.get(judgement.uses, "held out")].append(judgement)
    means = {kind: mean_abs_errors(of_kind) for kind, of_kind in kinds.items()}
    return {kind: of for kind, of in means.items() if any(value is not None for value in of.values())}
