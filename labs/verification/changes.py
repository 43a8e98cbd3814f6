"""What changes are found: in the history of a simulator, and between two recordings of servers.

Series are noise around a level that changes by a known size at a known place.  Recordings are of noisy servers
(``verdicts``) whose steps take a known factor longer; each run also has a pace of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.signal import lfilter

from blis_replay.base.arrays import Floats
from blis_replay.replay.executors import Progress, map_jobs
from blis_replay.validate.comparison.bounds import Bound, parse_bound
from blis_replay.validate.comparison.changes import change_of_runs
from blis_replay.validate.metrics.change_points import changes
from blis_replay.validate.metrics.latency import LatencySamples, number
from blis_replay.validate.metrics.uncertainty import RUNS_APART, error_estimates
from blis_replay_labs.verification.verdicts import Draws, NoisyServer, noisy_servers
from blis_replay_labs.verification.workloads import VerificationRow

_NOISE = 0.01  # standard deviation of an error from commit to commit
LENGTHS, SIZES = (30, 60, 100, 200), (0.01, 0.02, 0.05, 0.10)
_NEAR = 5  # commits by which a change may be named too early or too late
_FIRST_LOOK = 10  # commits of a history when it is looked at first
_BOUNDS = tuple(map(parse_bound, ("e2e=+5%", "p99.ttft=+5%")))
# True changes of the bound's number, and the standard deviation of a run's own pace.
_TRUE, _PACES = (0.0, 0.04, 0.06, 0.10), (0.0, 0.01)
_RUNS = (1, 2, 3)


# -- Change points --------------------------------------------------------------------------


def noise(kind: str, count: int, rng: np.random.Generator) -> Floats:
    """float64[count] of standard deviation 1 %."""
    drawn = rng.normal(size=count)
    if kind == "memory":  # correlation of neighbours 0.5
        drawn = lfilter([1.0], [1.0, -0.5], rng.normal(size=count + 50))[50:] * np.sqrt(0.75)
    elif kind == "heavy tails":  # Student's t of 3 degrees of freedom has variance 3
        drawn = rng.standard_t(3, count) / np.sqrt(3)
    elif kind == "two modes":
        drawn = rng.choice([-1.0, 1.0], count)
    return np.asarray(_NOISE * drawn, np.float64)


@dataclass(frozen=True)
class _Histories:
    """So many series of a length, with a change in the middle; 0: none."""

    count: int
    length: int
    size: float
    kind: str = "normal"


def _found(of: _Histories) -> dict[str, list[float]]:
    """By measure, a value for each series."""
    rng = np.random.default_rng([of.length, round(1e4 * of.size), len(of.kind)])
    at = of.length // 2
    measured: dict[str, list[float]] = {name: [] for name in ("any", "found", "held", "others", "delay", "looks")}
    for _ in range(of.count):
        series = noise(of.kind, of.length, rng)
        series[at:] += of.size
        seen = changes(series)
        near = [one for one in seen if abs(one.at - at) <= _NEAR]
        measured["any"].append(bool(seen))
        measured["found"].append(bool(near))
        measured["others"].append(len(seen) - bool(near))
        measured["held"] += [one.earliest <= at <= one.latest for one in near[:1]]
        if of.size and near:
            looks = (n for n in range(at + 1, of.length + 1) if _is_seen(series[:n], at))
            measured["delay"].append(next(looks, of.length) - at)
        elif not of.size:
            measured["looks"].append(any(changes(series[:n]) for n in range(_FIRST_LOOK, of.length + 1)))
    return measured


def _is_seen(series: Floats, at: int) -> bool:
    return any(abs(one.at - at) <= _NEAR for one in changes(series))


def history_rows(quick: bool, progress: Progress | None = None) -> list[VerificationRow]:
    """False alarms, power, delay and the range of commits, by length and size."""
    count = 20 if quick else 60
    jobs = [_Histories(count, length, size) for length in LENGTHS for size in (0.0, *SIZES)]
    jobs += [
        _Histories(count, 100, size, kind) for kind in ("heavy tails", "two modes", "memory") for size in (0.0, 0.02)
    ]
    rows = []
    for of, measured in zip(jobs, map_jobs(_found, jobs, progress=progress), strict=True):
        where = f"{of.length} commits, {of.kind} noise of 1 %"
        if not of.size:
            most = 1.0 if of.kind == "memory" else 0.05
            rows.append(_row("history: a change where there is none", where, measured["any"], 0, most))
            rows.append(_row("history: the same, looked at after each commit", where, measured["looks"], 0, 1))
            continue
        known = of.kind != "memory"
        least = 0.9 if known and (of.size >= 0.05 or (of.size == 0.02 and of.length >= 60)) else 0.0
        delays = measured["delay"]
        more = (
            f"; median delay {np.median(delays):.0f} commits, 9 of 10 within {np.quantile(delays, 0.9):.0f}"
            if delays
            else ""
        )
        rows.append(_row(f"history: a change of {of.size:.0%} is found", where, measured["found"], least, 1, more))
        if least:
            rows.append(_row(f"history: its commit is in the range, {of.size:.0%}", where, measured["held"], 0.9, 1))
            rows.append(_row(f"history: others beside it, {of.size:.0%}", where, measured["others"], 0, 0.2))
    return rows


def _row(check: str, where: str, values: Sequence[float], low: float, high: float, more: str = "") -> VerificationRow:
    measured = float(np.mean(values)) if values else 0.0
    nearest = min(max(measured, low), high)
    bounds = f"{low:g} to {high:g}; {len(values):,} series{more}"
    return VerificationRow(check, where, measured, nearest, measured == nearest, bounds)


# -- Two recordings -------------------------------------------------------------------------


def _two(job: tuple[Bound, NoisyServer], draws: int) -> dict[tuple[float, int, float], list[str]]:
    """States of the bound by run-to-run noise, runs of a side and true change."""
    bound, noisy = job
    found, cell = Draws(noisy, draws), bound.cell
    factors = np.linspace(0.95, 1.20, 11)
    base = sum(number(found.simulated(1.0, i), cell) for i in range(draws))
    ratios = [sum(number(found.simulated(float(f), i), cell) for i in range(draws)) / base - 1 for f in factors]
    factor_of = PchipInterpolator(np.maximum.accumulate(ratios) + 1e-6 * factors, factors)
    states: dict[tuple[float, int, float], list[str]] = {}
    for draw in range(draws):
        rng = np.random.default_rng([noisy.server.seed, draw, 48])

        def served(true: float, pace: float) -> LatencySamples:
            factor = float(factor_of(true)) * (1 + pace * rng.normal())  # noqa: B023
            return found.served(found.traces[draw], rng, factor)  # noqa: B023

        for pace in _PACES:
            for runs in _RUNS:
                sides_a = [served(0.0, pace) for _ in range(runs)]
                for true in _TRUE:
                    sides = sides_a, [served(true, pace) for _ in range(runs)]
                    numbers = [[number(one, cell) for one in side] for side in sides]
                    error = numbers[1][0] / numbers[0][0] - 1
                    order = found.order(draw, sides[0][0])
                    once = error_estimates(order, sides[0][0], sides[1][0], {cell: error})[cell]
                    change = change_of_runs(once, numbers[0], numbers[1], RUNS_APART)
                    states.setdefault((pace, runs, true), []).append(bound.state(change.low, change.high))
    return states


def recording_rows(seed: int, quick: bool, progress: Progress | None = None) -> list[VerificationRow]:
    """How often ``--fail-if`` says what of E2E and of TTFT p99, by the true change."""
    servers, draws = (6, 4) if quick else (24, 8)
    jobs = [(bound, noisy) for bound in _BOUNDS for noisy in noisy_servers(seed, servers, 400)]
    answers = map_jobs(partial(_two, draws=draws), jobs, progress=progress)
    rows = []
    for bound, key in product(_BOUNDS, answers[0]):
        pace, runs, true = key
        states = [state for job, answer in zip(jobs, answers, strict=True) if job[0] == bound for state in answer[key]]
        where = f"{runs} and {runs} recordings of 400 requests, runs differ by {pace:.0%}"
        named, verdicts = f"{bound.name} +{true:.0%} held to +5 %", ("FAIL", "PASS")
        wrong, right = verdicts if true < bound.high else verdicts[::-1]
        shares = {"PASS": [state == "within" for state in states], "FAIL": [state == "beyond" for state in states]}
        rows.append(_row(f"{named}: wrong {wrong}", where, shares[wrong], 0, 0.05))
        rows.append(_row(f"{named}: {right}", where, shares[right], 0, 1))
    return rows
