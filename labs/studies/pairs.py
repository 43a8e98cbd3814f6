"""Fits of one recording tried on others: errors of means, and whether the printed prediction intervals hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import erf, inf, log, sqrt
from pathlib import Path
from typing import Literal, Unpack

import numpy as np

from blis_replay.base.errors import ExperimentError, NothingToJudgeError
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import open_for_reading
from blis_replay.ingest.tables import Column, Table, columns_named, table_of
from blis_replay.replay.driver import replay
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.spread import drawn_samples, predicted_us
from blis_replay.validate.fit.calibrate import DEFAULT_SPLIT, Options, calibrate, groups_of, training_recordings
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay.validate.metrics.latency import number
from blis_replay.validate.metrics.observed import Selection, on_both_sides, samples_of, simulated_samples
from blis_replay.validate.text.answer import Answer, Block

Pace = Literal["modelled", "recorded"]
METRICS = ("e2e", "ttft", "itl")
# Of a reliability diagram: intervals of these levels should hold as many servers.
LEVELS = (0.2, 0.5, 0.8, 0.9, 0.95, 0.99)
_NORMAL_95 = 1.96
# Requests of the fits of a learning curve.
CURVE = (50, 100, 300, 1_000, 5_000)


@dataclass(frozen=True)
class Tried:
    """A mean of a recording beside what a fit predicted of it.

    ``requests``: fitted on.  ``error``: a fraction; ``low``, ``high``: the prediction interval of the simulated mean as
    errors against the observed one, so it holds the server if they are on either side of 0.
    """

    fitted_on: str
    requests: int
    tried_on: str
    pace: Pace
    metric: str
    error: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def level(self) -> float:
        """That of the interval which just reaches the server, by the printed one of 95 % (in logarithms, normal)."""
        end = self.high if self.error < 0 else self.low
        reach = abs(log((1 + end) / (1 + self.error))) if end > -1 else inf
        return erf(abs(log(1 + self.error)) / reach * _NORMAL_95 / sqrt(2)) if reach else float(bool(self.error))


@dataclass(frozen=True)
class NotFitted:
    """The first requests of a recording that no fit could be made of, and why."""

    fitted_on: str
    requests: int
    why: str


def tried(
    release: CoefficientRelease, fitted_on: str, requests: int, recording: Recording, since: float = 0.0
) -> Iterator[Tried]:
    """The means of a recording beside a fit, as replayed, and with the pace and the warm-up that the recording shows.

    ``since``: the share of the run by time from which requests count.
    """
    paces: tuple[Pace, ...] = ("modelled",)
    if not (recording.steps.is_empty() and recording.iterations.is_empty()):
        paces += ("recorded",)
    for pace in paces:
        try:
            # A server that stood still at its start is not slow, and the recording tells.
            run = replay(recording, release, ReplayMode(pace=pace, warm_up="recorded"))
        except ExperimentError:
            if pace == "modelled":
                raise
            continue  # too few of its steps are known
        chosen = on_both_sides(run) & Selection(window=(since, 1.0)).of(run.recording.requests)
        intervals = predicted_us(run, chosen, drawn_samples(run, chosen))
        sides = samples_of(run.recording, chosen), simulated_samples(run, chosen)
        for metric in METRICS:
            observed_us, simulated_us = (number(side, (metric, "mean")) for side in sides)
            between_us = intervals.get((metric, "mean"), (simulated_us, simulated_us))
            error, low, high = (us / observed_us - 1 for us in (simulated_us, *between_us))
            yield Tried(fitted_on, requests, recording.alias, pace, metric, error, low, high)


def recordings_of(store_path: Path, names: Sequence[str]) -> list[Recording]:
    """Recordings by name; of patterns those with recorded requests that may be fitted to."""
    with open_for_reading(store_path) as store:
        return training_recordings(store, names or ["*"])[0]


def pairs(recordings: Sequence[Recording], **pool: Unpack[Pool]) -> list[Tried]:
    """Every recording fitted, and tried on all others of its model; raises ``NothingToJudgeError`` without a pair."""
    jobs = [(one, group) for group in groups_of(recordings) for one in group if len(group) > 1]
    if not jobs:
        raise NothingToJudgeError("two recordings of one model are needed, one to fit and one to try it on")
    return [one for found in map_jobs(_pairs_of, jobs, **pool) for one in found]


def _pairs_of(job: tuple[Recording, Sequence[Recording]]) -> list[Tried]:
    fitted, group = job
    release = _fit(fitted, 1.0)
    others = [other for other in group if other.slug != fitted.slug]
    return [one for other in others for one in tried(release, fitted.alias, fitted.requests.height, other)]


def learning_curve(
    recordings: Sequence[Recording], on: Sequence[Recording] = (), **pool: Unpack[Pool]
) -> tuple[list[Tried], list[NotFitted]]:
    """The first 50 to 5,000 requests of each recording fitted, and tried on the rest of it and on other recordings."""
    jobs = [(recording, count) for recording in recordings for count in CURVE if count <= recording.requests.height]
    found = list(map_jobs(partial(_curve_of, on=on), jobs, **pool))
    left_out = [one for one in found if isinstance(one, NotFitted)]
    return [one for tries in found if not isinstance(tries, NotFitted) for one in tries], left_out


def _curve_of(job: tuple[Recording, int], on: Sequence[Recording]) -> list[Tried] | NotFitted:
    recording, count = job
    arrival_us = recording.requests["arrival_us"].to_numpy()
    until = min(float(arrival_us[count - 1] / max(int(arrival_us[-1]), 1)), 1.0)
    try:
        release = _fit(recording, until)
    except ExperimentError as error:
        return NotFitted(recording.alias, count, str(error))
    found = list(tried(release, recording.alias, count, recording, until)) if count < len(arrival_us) else []
    others = [other for other in on if len(groups_of([recording, other])) == 1]  # a fit is of one model
    return found + [one for other in others for one in tried(release, recording.alias, count, other)]


def _fit(recording: Recording, until: float) -> CoefficientRelease:
    # What it is tried on is the test, so all of it may be used.
    options = Options(load_release(DEFAULT_PRIOR), split=(DEFAULT_SPLIT[0], 1.0), window=(0.0, until))
    return calibrate([recording], "study", options)[0]


_COLUMNS = (
    *columns_named("fitted on", "tried on", kind="text"),
    Column("requests", "count"),
    Column("pace", "word"),
    *(column for m in METRICS for column in columns_named(m.upper(), "from", "to", kind="error")),
)


_RELIABILITY = (*columns_named("pace", "level", kind="word"), *columns_named(*map(str.upper, METRICS), kind="word"))


def _reliability(pace: str, found: Sequence[Tried]) -> list[dict[str, str | float | None]]:
    """A row a level: by metric, the share of the intervals of that level that hold the server."""
    of = {m: np.array([one.level for one in found if (one.pace, one.metric) == (pace, m)]) for m in METRICS}
    rows = [
        {"pace": pace, "level": level, **{m: float((v <= level).mean()) if len(v) else None for m, v in of.items()}}
        for level in LEVELS
    ]
    return rows if any(map(len, of.values())) else []


def tried_answer(found: Sequence[Tried], left_out: Sequence[NotFitted] = ()) -> Answer:
    """A row a fit, recording and pace, and how many of the intervals hold the recorded mean; fractions."""
    rows: dict[tuple[str, str, int, Pace], list[float]] = {}
    for one in found:
        rows.setdefault((one.fitted_on, one.tried_on, one.requests, one.pace), []).extend(
            (one.error, one.low, one.high)
        )
    lines, document = [], []
    for pace in ("modelled", "recorded"):
        for metric in METRICS:
            of = [one for one in found if (one.pace, one.metric) == (pace, metric)]
            if of:
                held, width = sum(one.holds for one in of), float(np.median([one.high - one.low for one in of]))
                document.append({"pace": pace, "metric": metric, "held": held, "of": len(of), "median_width": width})
                share = f"{held} of {len(of)} intervals hold the mean {metric.upper()}"
                lines.append(f"pace {pace}: {share} ({held / len(of):.0%}); their median width is {width:.0%}")
    lines += [f"{one.fitted_on}, first {one.requests:,} requests: not fitted: {one.why}" for one in left_out]
    table = Table("errors of means, and the interval that the fit leaves possible", _COLUMNS, _cells(rows))
    records = [asdict(one) | {"holds": one.holds, "level": one.level} for one in found]
    reliable = [row for pace in ("modelled", "recorded") for row in _reliability(pace, found)]
    shares = [["-" if row[m] is None else f"{row[m]:.0%}" for m in METRICS] for row in reliable]
    named = [[str(row["pace"]), f"{row['level']:.0%}", *of] for row, of in zip(reliable, shares, strict=True)]
    return Answer(
        [
            table,
            Table("reliability: intervals of this level, and how many hold the server", _RELIABILITY, named),
            Block(lines),
        ],
        {"coverage": document, "reliability": reliable, "tried": records, "not_fitted": list(map(asdict, left_out))},
        table_of(records),
    )


def _cells(rows: dict[tuple[str, str, int, Pace], list[float]]) -> list[list[str | int | float]]:
    return [[*names, *numbers] for names, numbers in rows.items()]
