"""The verdict on a simulator, as data: what was judged, against which limit, and what came of it.

It is made once, by ``Comparison.judged``.  Whatever a person or a program reads lays it out and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.validate.metrics.latency import MetricStatistic, relative_error
from blis_replay.validate.metrics.uncertainty import MIN_REQUESTS, Estimate, requests_needed

# The worst first.
Verdict = Literal["FAIL", "NOT JUDGED", "UNDECIDED", "FITS", "PASS"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# ``within`` or ``beyond`` its limit with its whole interval; ``undecided``: with a part of it; ``absent``: no error.
State = Literal["within", "beyond", "undecided", "absent"]
# What a number alone makes of a check.
OUTCOMES: Mapping[State, Verdict] = {
    **{"within": "PASS", "beyond": "FAIL"},
    **{"undecided": "UNDECIDED", "absent": "NOT JUDGED"},
}
# What the coefficients were fitted on, as far as a recording is concerned.
Use = Literal[
    "fitted on this run",
    "fitted on part of this run",
    "fitted on another side of this run",
    "held out",
    "fitted on no recording",
    "unknown",
]
FITTED: tuple[Use, ...] = ("fitted on this run", "fitted on part of this run", "fitted on another side of this run")
HELD_OUT: tuple[Use, ...] = ("held out", "fitted on no recording")

_EXIT_CODES = {"PASS": 0, "FITS": 0, "FAIL": 1, "UNDECIDED": 3, "NOT JUDGED": 4}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several verdicts; ``NOT JUDGED`` without any."""
    return min(verdicts, key=VERDICTS.index, default="NOT JUDGED")


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """0 for PASS and FITS, 1 if one is FAIL, 3 if the worst is UNDECIDED, 4 if it is NOT JUDGED."""
    return _EXIT_CODES[worst(verdicts)]


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
    ``estimate``: its 95 % interval.  ``limit``: the largest absolute error that passes.  ``derived``: how the observed
    number follows from others, empty where the recording states it.
    """

    key: str
    metric: str
    statistic: str
    name: str
    unit: str
    observed: float | None
    simulated: float | None
    error: float | None
    estimate: Estimate | None
    limit: float
    derived: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the error; None if not available."""
        one = self.estimate
        return None if one is None else one.possible

    @property
    def state(self) -> State:
        """Where its whole interval lies."""
        if self.error is None:
            return "absent"
        if self.interval is None:
            return "undecided"
        low, high = self.interval
        if -self.limit <= low and high <= self.limit:
            return "within"
        return "beyond" if high < -self.limit or low > self.limit else "undecided"

    @property
    def excess(self) -> float:
        """The size of the error over its limit; 0 without an error."""
        return abs(self.error or 0.0) / self.limit

    @property
    def reach(self) -> float:
        """The same of the end of the interval that is farther from 0."""
        return max(map(abs, self.interval)) / self.limit if self.interval else self.excess


def held(
    cell: MetricStatistic,
    limit: float,
    sides: tuple[float | None, float | None],
    estimate: Estimate | None,
    *,
    name: str,
    unit: str = "us",
    metric: str = "",
    derived: str = "",
) -> Quantity:
    """A number held against its limit; ``cell``: key and statistic, ``sides``: observed and simulated."""
    key, statistic = cell
    error = relative_error(*sides)
    return Quantity(key, metric or key, statistic, name, unit, *sides, error, estimate, limit, derived)


@dataclass(frozen=True)
class Remark:
    """Something to know of a judgement: ``text.messages`` words it, by its code."""

    code: str
    values: Mapping[str, Any]


def remark(code: str, **values: Any) -> Remark:
    """A remark of these values."""
    return Remark(code, values)


# Nobody records this many times as many requests.
_MOST_TIMES = 100
# What decides, by the widest part of an interval of those that no number of requests makes narrower.
_NEEDS = {
    **{"reconstructions": "needs_arrivals", "beyond the fit": "needs_steps"},
    **{"repeats": "needs_more_runs", "one stretch": "needs_no_event"},
}


# If an error varies over the run by this multiple of any other part, another recording decides; chosen, not measured.
_FAR_MORE = 2.0


def what_decides(name: str, estimate: Estimate | None, missing: float, requests: int) -> Remark:
    """What would turn UNDECIDED into a verdict on the quantity of that name.

    ``missing``: how long half of the interval may be.  ``requests``: how many it is of now.
    """
    if estimate is None or not isfinite(estimate.half):
        return remark("needs_longer_run", requests=requests, least=MIN_REQUESTS)
    needed = requests_needed(estimate, missing, requests)
    if needed is None:
        fixed = [part for part in estimate.parts if part != "requests"]
        widest = max(fixed, key=lambda part: estimate.parts[part], default="")
        if estimate.parts.get("requests", 0.0) > _FAR_MORE * estimate.parts.get(widest, 0.0) > 0:
            return remark("needs_again")
        return remark(_NEEDS.get(widest, "needs_repeat"))
    if needed > _MOST_TIMES * requests:
        return remark("at_limit", name=name, requests=_MOST_TIMES * requests)
    return remark("needs_requests", name=name, requests=needed)


def both_decided(one: Remark, other: Remark) -> Remark:
    """What would decide two quantities, where each needs the same: as many requests as the one that needs more.

    ``least``: how many decide the ``first`` of them.
    """
    if "name" not in one.values:
        return one
    name = f"{one.values['name'].replace(' and ', ', ')} and {other.values['name']}"
    values = {**one.values, "name": name}
    known = [of.values for of in (one, other) if "requests" in of.values]
    if known:
        values["requests"] = max(of["requests"] for of in known)
        least, first = min((of.get("least", of["requests"]), of.get("first", of["name"])) for of in known)
        values |= {"least": least, "first": first} if least < values["requests"] else {}
    return replace(one, values=values)


def quantity_decides(quantity: Quantity, requests: int) -> Remark:
    """The same of a number held against its limit."""
    missing = abs(quantity.limit - abs(quantity.error or 0.0))
    return what_decides(quantity.name, quantity.estimate, missing, requests)


@dataclass(frozen=True)
class Command:
    """A command of ours that a reader wants next; ``of_release``: it takes the options of coefficients and replay."""

    verb: str
    alias: str
    more: str = ""
    of_release: bool = True


@dataclass(frozen=True)
class Subject:
    """Who is judged on what.

    ``use``: what the coefficients were fitted on, as far as this run is concerned; ``fitted_on``: the experiments,
    None where the release does not say.  ``requests``: how many were compared; ``window``: from and until which share
    of the run they were sent.  ``recording``, ``release_hash``: SHA-256 of what was replayed, and of the release.
    ``replay``: the name of the replay mode, of a pair with the recording that prefilled and the costs that were given.
    """

    slug: str
    alias: str
    ground_truth: str
    requests: int
    simulator: str
    release: str
    use: Use
    fitted_on: tuple[str, ...] | None
    recording: str
    release_hash: str
    replay: str
    window: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Judgement:
    """What is to be said of one replay.

    ``overloaded``: it is judged by what was served.  ``judged``: what the verdict rests on; ``tails``: p99s, which
    raise an alarm and decide nothing.  ``refused``: judged metrics that an instrument check forbids, with check and
    reason.  ``lost``: why the recording as a whole carries no verdict.  ``decides``: what would decide, where nothing
    is decided.  ``errors``: signed errors of all numbers.  ``of_queue``: the next command of a saturated run.
    ``remarks``: the cause, what the numbers depend on and nobody recorded, who is not in them, and what changed one.
    """

    subject: Subject
    overloaded: bool
    judged: tuple[Quantity, ...]
    tails: tuple[Quantity, ...]
    refused: Mapping[str, str]
    lost: tuple[Remark, ...]
    decides: tuple[Remark, ...]
    errors: Mapping[MetricStatistic, float | None]
    of_queue: Command | None
    remarks: tuple[Remark, ...]

    @property
    def verdict(self) -> Verdict:
        """Beyond a limit is beyond it, whatever else; a pass needs all of the rest."""
        if self.lost:
            return "NOT JUDGED"
        if self.in_state("beyond"):
            return "FAIL"
        if self.refused or not any(quantity.error is not None for quantity in self.judged):
            return "NOT JUDGED"
        if self.in_state("undecided") or self.subject.use == "unknown":
            return "UNDECIDED"
        return "FITS" if self.subject.use in FITTED else "PASS"

    def in_state(self, state: State) -> tuple[Quantity, ...]:
        """Judged numbers of a state, the largest error for its limit first."""
        return tuple(quantity for quantity in self.worst_first if quantity.state == state)

    @property
    def beyond(self) -> tuple[Quantity, ...]:
        """Judged numbers beyond their limits."""
        return self.in_state("beyond")

    @property
    def worst_first(self) -> list[Quantity]:
        """Judged numbers with an error, the largest for its limit first."""
        return sorted((q for q in self.judged if q.error is not None), key=lambda quantity: -quantity.excess)

    @property
    def largest(self) -> Quantity | None:
        """The number that the verdict rests on most: the largest of those in the state that decides it."""
        for state in ("beyond", "undecided", "within"):
            if found := self.in_state(state):
                return max(found, key=lambda q: q.reach if state == "within" else q.excess)
        return None

    @property
    def turns_with_fit(self) -> bool:
        """Whether coefficients that fit as well could keep every limit that these miss, or miss one that these keep."""
        spans: Mapping[str, tuple[float, float]] = next(
            (one.values["between_us"] for one in self.remarks if one.code == "predicted"), {}
        )
        ends = [  # errors over their limits
            tuple((us / quantity.observed - 1) / quantity.limit for us in spans[quantity.key])
            for quantity in self.beyond or self.judged
            if quantity.key in spans and quantity.statistic == "mean" and quantity.observed and quantity.limit
        ]
        if self.beyond:
            return len(ends) == len(self.beyond) and all(low <= 1 and high >= -1 for low, high in ends)
        return any(max(-low, high) > 1 for low, high in ends)

    def tails_that_are(self, state: State) -> tuple[Quantity, ...]:
        """P99s of a state."""
        return tuple(tail for tail in self.tails if tail.state == state)

    @property
    def next(self) -> Command:
        """The command that a reader wants next; ``explain`` is of our engine, ``report`` of whole runs with it."""
        alias, (begins, ends) = self.subject.alias, self.subject.window
        if self.of_queue is not None:
            return self.of_queue
        if self.verdict == "NOT JUDGED":
            checks = [one.values["check"] for one in self.lost if one.code == "unusable"]
            checks += [why.partition(":")[0] for why in self.refused.values()]
            return Command("inspect", alias, f" --check {checks[0]}" if checks else "", of_release=False)
        part = "" if (begins, ends) == (0.0, 1.0) else f" --window {begins:g}:{ends:g}"
        is_off = self.verdict in ("FAIL", "UNDECIDED") or bool(self.tails_that_are("beyond"))
        if self.subject.simulator != "embedded" or (part and not is_off):
            return Command("validate", alias, f"{part} -v")
        if is_off:
            return Command("explain", alias, part)
        return Command("report", alias, " --out report.html")
