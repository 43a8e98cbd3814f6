"""Recorded step cycles against those of a latency model: what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.blis.latency.models import ObservedCycles
from blis_replay.replay.observed import stalled_us
from blis_replay.replay.pace import HELD_UP, ForcedSteps, at_pace, forced_steps, held_up, served_alike
from blis_replay.replay.plan import plan_replay
from blis_replay.validate.explain.hypothesis import Replayed
from blis_replay.validate.metrics.change_points import changes
from blis_replay.validate.metrics.observed import Selection
from blis_replay.validate.metrics.resampling import interval as interval_of
from blis_replay.validate.metrics.resampling import resampled, row_blocks
from blis_replay.validate.text.cells import step_times

# What one number may make of the difference between model and server: a factor of all that a step costs, or one cost.
PACE = "pace"
_STEP_COSTS = (PACE, "an empty step", "a prefill token", "a decode", "a context token")
MIN_INTERVALS = 200  # between two anchors
BLOCK = 25  # neighbouring intervals that are drawn together
ALIKE = 1.5  # only steps within this factor of the usual show which cost is wrong
SURE = 0.975  # share of the draws in which the best explanation must win
MIN_PACE = 0.02  # a factor nearer to 1 is not one of a machine
OTHER_PACE = 0.223  # natural logarithm of 1.25: the pace of machines that others use moves by a tenth
STRETCH = 3  # parts, of a second at least; what is shorter is a stall
MOST_PARTS = 300
MIN_ALL_ALONG = 0.4  # share of a factor that must be left in each quarter of the run


@dataclass(frozen=True)
class Stretch:
    """A part of a run, in seconds from the first send, in which steps take ``factor`` times what they do elsewhere.

    Both beside what the coefficients say of their batches.
    """

    from_s: float
    until_s: float
    factor: float

    @property
    def words(self) -> str:
        """When, and by how much."""
        return (
            f"from second {self.from_s:,.0f} to {self.until_s:,.0f} equal batches take {self.factor:.2f} times what "
            "they take in the rest of the run"
        )


@dataclass(frozen=True)
class Nature:
    """What one number explains most of the difference between recorded and modelled steps.

    ``cost``: of ``_STEP_COSTS``; None where the batches do not tell.  ``factor``: recorded over modelled time of steps
    that are not held up; ``low``, ``high``: its 95 % bounds, over draws of blocks of neighbouring steps.
    ``of_all``: the same ratio of all steps; ``held_up``, ``held_up_time``: shares of steps that are, and of their time.
    ``stretch``: a part of the run of another pace, if there is one.
    """

    cost: str | None
    factor: float
    low: float
    high: float
    of_all: float
    held_up: float
    held_up_time: float
    stretch: Stretch | None = None

    @property
    def is_off(self) -> bool:
        """Whether steps do take other times than modelled, taken together."""
        return (self.low > 1 or self.high < 1) and abs(self.factor - 1) >= MIN_PACE

    @property
    def is_held_up(self) -> bool:
        """Whether all steps together are off to the other side than those that are not held up."""
        return self.is_off and self.factor < 1 < self.of_all

    @property
    def is_pace(self) -> bool:
        """Whether all that a step costs is wrong by one factor, which is not 1."""
        return self.cost == PACE and self.is_off

    @property
    def words(self) -> str:
        """The factor with its bounds; after what is held up, where that turns it."""
        of = "95 % of draws of blocks of steps, those held up left out"
        others = f"take {step_times(self.factor - 1, self.low - 1, self.high - 1, of)}"
        if not self.is_held_up:
            return others if self.stretch is None else f"{others}; {self.stretch.words}"
        share = f"{100 * self.held_up:.1f} % of steps, {100 * self.held_up_time:.1f} % of all step time,"
        return f"{share} take over {HELD_UP:.0f} times what others do; the others {others}"


def recorded_nature(server: Replayed, cycles: ObservedCycles) -> Nature | None:
    """What is wrong with the modelled step times, over the steps that served the requests of the window.

    ``server``: a replay whose batches are the server's as nearly as can be.  A standstill is a cause of its own.
    """
    plan, requests = plan_replay(server.recording, server.mode, server.entry), server.recording.requests
    latency = server.entry.latency if plan.pace is None else at_pace(server.entry.latency, plan.pace)
    steps = forced_steps(plan.trace, plan.engine, server.entry.lifecycle, cycles, latency)
    served = requests.select("arrival_us", end=pl.col("arrival_us") + pl.col("e2e_us"))
    served = served.filter(Selection(window=server.window).of(requests))
    from_us, until_us = served["arrival_us"].to_numpy().min(), np.nanmax(served["end"].to_numpy().astype(np.float64))
    interval = np.searchsorted(cycles.from_us, steps.start_us, side="right")
    still = stalled_us(server.recording, cycles) > 0
    kept = ~still[np.maximum(interval - 1, 0)] & (steps.start_us >= from_us) & (steps.start_us <= until_us)
    kept &= served_alike(server.recording, cycles, steps)
    chosen = ForcedSteps(*(column[kept] for column in vars(steps).values()))
    nature = nature_of(chosen, interval[kept])
    return nature and replace(nature, stretch=stretch_of(chosen))


def nature_of(steps: ForcedSteps, interval: Int64s) -> Nature | None:
    """One factor of all steps, or one cost of a step: whichever leaves least in 97.5 % of draws; None of too few steps.

    ``interval``: int64[steps], between which two anchors each lies; of steps between two only the mean is known.
    """
    _, interval = np.unique(interval, return_inverse=True)
    count = np.bincount(interval)
    if len(count) < MIN_INTERVALS:
        return None
    columns = (steps.modelled_us, steps.observed_us, np.ones(len(interval)), *steps.batch.T)
    modelled_us, observed_us, *batch = (np.bincount(interval, column) / count for column in columns)
    ratio = observed_us / modelled_us
    off = np.abs(np.log(ratio / np.median(ratio)))
    causes = np.stack([modelled_us, *batch]) / modelled_us
    held = held_up(observed_us, modelled_us)
    # Steps by the time they take: the sum of recorded over that of modelled times, as in ``replay.pace``.
    factors, pairs = _one_by_one(causes[:1], ratio, np.where(held, 0, count * modelled_us))
    explained, _ = _one_by_one(causes, ratio, np.where(off < np.log(ALIKE), count, 0))
    low, high = interval_of(1 + factors[1:, 0, 0] / factors[1:, 1, 0])
    factor = 1 + float(factors[0, 0, 0] / factors[0, 1, 0])
    best = (explained[:, 0] ** 2 / np.maximum(explained[:, 1], 1e-12)).argmax(axis=1)
    cost = _STEP_COSTS[best[0]] if (best[1:] == best[0]).mean() >= SURE else None
    if cost == PACE and factor != 1:
        sums = [part[..., 0].sum(axis=0) for part in np.array_split(pairs, 4)]
        least = min(product / max(square, 1e-12) / (factor - 1) for product, square in sums)
        cost = PACE if least >= MIN_ALL_ALONG else None
    of_held = np.where(held, count, 0)
    of_time = float((of_held * observed_us).sum() / (count * observed_us).sum())
    of_all = float((count * observed_us).sum() / (count * modelled_us).sum())
    return Nature(cost, factor, low, high, of_all, float(of_held.sum() / count.sum()), of_time)


def stretch_of(steps: ForcedSteps) -> Stretch | None:
    """The part of a run whose pace differs most from that of the rest: at least by a quarter, for three seconds.

    Of a run beyond five minutes for a hundredth of it: the search takes the square of the number of parts.
    """
    part_us = max(1_000_000, int(np.ptp(steps.start_us)) // MOST_PARTS) if len(steps.start_us) else 1_000_000
    number, part = np.unique(steps.start_us // part_us, return_inverse=True)
    second = number * part_us / 1e6
    sums = (np.bincount(part, of_steps.astype(np.float64)) for of_steps in (steps.observed_us, steps.modelled_us))
    pace = np.log(np.divide(*sums))
    found = []
    places = [change.at for change in changes(pace, OTHER_PACE)]
    for begin, end in pairwise([0, *places, len(pace)]):
        inside = np.zeros(len(pace), np.bool_)
        inside[begin:end] = True
        if STRETCH <= end - begin <= len(pace) / 2:
            apart, until_s = float(np.median(pace[inside]) - np.median(pace[~inside])), second[end - 1] + part_us / 1e6
            found.append((abs(apart), Stretch(float(second[begin]), float(until_s), float(np.exp(apart)))))
    largest, stretch = max(found, key=lambda one: one[0], default=(0.0, None))
    return stretch if largest >= OTHER_PACE else None


def _one_by_one(causes: Floats, ratio: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """What least squares with one unknown need of each cause, float64[1 + draws, 2, causes], and of each block.

    Sums of weight times cause times (``ratio`` less one), and of weight times the square of the cause.
    """
    block = np.arange(len(ratio)) // BLOCK
    terms = [[np.bincount(block, weight * c * (ratio - 1)), np.bincount(block, weight * c**2)] for c in causes]
    pairs = np.array(terms).transpose(2, 1, 0)
    draws = resampled(row_blocks(np.zeros(len(pairs), np.int64), []))
    return np.stack([pairs.sum(axis=0), *(pairs[draw].sum(axis=0) for draw in draws)]), pairs
