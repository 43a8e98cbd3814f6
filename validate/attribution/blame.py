"""What an attribution blames for each mean that is off: the part of a sentence that names the cause, as data."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

from blis_replay.validate.attribution.attribute import Attribution, Cause
from blis_replay.validate.attribution.resampled import QUANTITIES

# Errors of a mean below this are not worth a cause.
WORTH_NAMING = 0.01
# Beside the largest cause of an error one of at least this share of it is named too; and where the mean is right, two
# that cancel are, if each adds so much of what was observed: less is what a tenth of the steps leaves unknown.
_BESIDE, _CANCELS = 0.25, 0.03


@dataclass(frozen=True)
class Blame:
    """The cause of the error of one mean.

    ``quantity``: its place in QUANTITIES.  ``error``: simulated over observed, less one.  ``cause``: None where most
    of the error no component explains.  ``explained``: the share of the error that is the cause's.  ``beside``: other
    causes of it, those that hide a part of it as well.
    """

    quantity: int
    error: float
    cause: Cause | None
    explained: float | None
    beside: tuple[Cause, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The component and those that explain the error as well, empty without one."""
        return () if self.cause is None else (self.cause.component.name, *self.cause.component.also)

    @property
    def beside_names(self) -> tuple[str, ...]:
        """The components of the causes beside the largest."""
        return tuple(cause.component.name for cause in self.beside)

    @property
    def metric(self) -> str:
        """``E2E mean``."""
        return f"{QUANTITIES[self.quantity][0].upper()} {QUANTITIES[self.quantity][1]}"


def blames(attribution: Attribution) -> list[Blame]:
    """The causes of each mean that is off by 1 % or more, the largest error first; then of means right by luck."""
    if attribution.lost:
        return []
    means = [i for i, (_, statistic) in enumerate(QUANTITIES) if statistic == "mean"]
    errors = {i: fraction(attribution.error[i].value_us, attribution.observed_us[i]) for i in means}
    named = {i: error for i, error in errors.items() if error is not None and abs(error) >= WORTH_NAMING}
    found = [_blamed(attribution, i, named[i]) for i in sorted(named, key=lambda i: -abs(named[i]))]
    right = {i: error for i, error in errors.items() if error is not None and i not in named}
    lucky = [_blamed(attribution, i, error) for i, error in right.items() if _by_luck(attribution, i)]
    return [*found, *lucky]


def _by_luck(attribution: Attribution, i: int) -> bool:
    """Whether a mean is right because two causes cancel."""
    parts = [part_of(attribution, cause, i) / attribution.observed_us[i] for cause in attribution.causes]
    return max(parts, default=0.0) >= _CANCELS and min(parts, default=0.0) <= -_CANCELS


def fraction(value_us: float, observed_us: float) -> float | None:
    """Of what was observed; None where that is not known."""
    return None if isnan(value_us) or isnan(observed_us) or observed_us == 0 else value_us / observed_us


def part_of(attribution: Attribution, cause: Cause, i: int) -> float:
    """What the cause adds to a quantity, us.

    Shares over orders in which the server is overloaded say how much it would be, not what is wrong now.
    """
    return (cause.changes if attribution.overloaded else cause.shares)[i].value_us


def _blamed(attribution: Attribution, i: int, error: float) -> Blame:
    sign = 1 if error > 0 else -1
    largest = max(attribution.causes, key=lambda cause: sign * part_of(attribution, cause, i), default=None)
    if largest is None or sign * part_of(attribution, largest, i) < max(sign * attribution.residual[i].value_us, 0.0):
        return Blame(i, error, None, None)
    least_us = max(
        _BESIDE * abs(part_of(attribution, largest, i)),
        WORTH_NAMING * attribution.observed_us[i],
        abs(attribution.residual[i].value_us),
    )
    others = [c for c in attribution.causes if c is not largest and abs(part_of(attribution, c, i)) >= least_us]
    beside = tuple(sorted(others, key=lambda cause: -abs(part_of(attribution, cause, i))))
    return Blame(i, error, largest, part_of(attribution, largest, i) / attribution.error[i].value_us, beside)
