"""Two sides beside each other: every number of both, and how single requests agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from blis_replay.compiled.arrays import Bools
from blis_replay.ingest.identity import requests_hash
from blis_replay.ingest.recording import PUBLISHED, Finding, GroundTruth, Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.simulator import Simulator
from blis_replay.replay.store import without_rows
from blis_replay.validate.comparison.arguments import OpenArgument, open_arguments
from blis_replay.validate.comparison.capacity import Measure, capacity
from blis_replay.validate.comparison.saturation import Saturation, saturation
from blis_replay.validate.comparison.sides import (
    Side,
    observed_attainment,
    recording_side,
    replay_side,
    simulated_attainment,
)
from blis_replay.validate.comparison.spread import Decision, Draws, NoiseFloor, decided, draw_errors, unsure_of
from blis_replay.validate.comparison.warm_up import WarmUp, warm_up
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.metrics.latency import (
    METRICS,
    STATISTICS,
    THRESHOLDS,
    LatencySamples,
    correlation,
    paired_mape,
    relative_error,
)
from blis_replay.validate.metrics.objectives import Attainment, Objectives
from blis_replay.validate.metrics.observed import Gaps, Number, Selection, overloaded

if TYPE_CHECKING:
    from blis_replay.validate.schedule import ScheduleVerdict

Verdict = Literal["pass", "fail", "unusable", "not decided", "not judged"]
# With more requests than this without latencies, those that have some are not the run.
_MOST_WITHOUT = 0.1
WITHOUT_LATENCIES = "without recorded latencies"


@dataclass(frozen=True)
class MetricCell:
    """One number on both sides, us.  Where a replay is compared with its recording, A is observed and B simulated.

    A side that cannot give it is None, with a ``reason``; ``between_us`` are bounds of A where it has only
    those.  ``unusable``: the instrument check that forbids A's number, which is then None.
    """

    a_us: float | None
    b_us: float | None
    reason: str | None = None
    between_us: tuple[float, float] | None = None
    unusable: str | None = None

    @property
    def error(self) -> float | None:
        """B / A - 1, None if a side is missing."""
        return relative_error(self.a_us, self.b_us)

    @property
    def difference_us(self) -> float | None:
        """B less A, None if a side is missing."""
        return None if self.a_us is None or self.b_us is None else self.b_us - self.a_us


@dataclass(frozen=True)
class Pairing:
    """Request-by-request agreement of one metric: MAPE as a fraction, Pearson's r."""

    mape: float | None
    correlation: float | None


@dataclass(frozen=True)
class Promised:
    """What came of objectives on the server and in the replay.

    Of published aggregates only the statistics that were published are known, and no goodput.
    """

    observed: Attainment
    simulated: Attainment


@dataclass(frozen=True)
class Comparison:
    """Two sides compared.

    ``recording``: of side A.  ``replay``: side B, if it is a replay.  ``compared``: how many requests on each side.
    ``paired``: agreement by metric, empty where the sides do not have the same requests.  ``excluded``: requests
    of a replay that are left out, by reason.  ``open_arguments``: engine arguments that nobody recorded and that
    change the replay.  ``requests_hash``: of a recording that the release of the replay does not name.
    ``saturation``: of a replay of a whole run that queues, or whose recording does.  ``capacity``: what of a run that
    had more load than could be served is judged instead of its latencies, None for other runs.  ``schedule``:
    of a replay of a whole run of which every step was recorded.  ``draws``: of a run whose requests are reconstructed,
    the errors of many reconstructions.  ``noise``: what recordings of this load differ by; no threshold is below it.
    ``promised``: what came of objectives, where some were given.  ``warming``: of a replay of a whole run.
    """

    recording: Recording
    replay: ReplayRun | None
    selection: Selection
    compared: tuple[int, int]
    metrics: dict[str, dict[str, MetricCell]]
    paired: dict[str, Pairing]
    excluded: dict[str, int]
    saturation: Saturation | None = None
    capacity: tuple[Measure, ...] | None = None
    open_arguments: tuple[OpenArgument, ...] = ()
    schedule: ScheduleVerdict | None = None
    requests_hash: str = ""
    draws: Draws | None = None
    noise: NoiseFloor | None = None
    promised: Promised | None = None
    warming: WarmUp | None = None

    @property
    def run(self) -> ReplayRun:
        """The replay that side B is; raises ``ValueError`` if it is none."""
        if self.replay is None:
            raise ValueError("side B of this comparison is not a replay")
        return self.replay

    @property
    def slug(self) -> str:
        """Of the recording of side A."""
        return self.recording.slug

    @property
    def alias(self) -> str:
        """Of the recording of side A."""
        return self.recording.alias

    @property
    def ground_truth(self) -> GroundTruth:
        """Of the recording of side A."""
        return self.recording.ground_truth

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of the recording of side A."""
        return self.recording.findings

    @property
    def requests(self) -> int:
        """How many were compared, of side B where A has published numbers only."""
        return self.compared[1]

    @property
    def overloaded(self) -> bool:
        """Whether the server had more load than it could serve, so that its latencies judge no simulator."""
        return not self.is_before_the_queue and (self.capacity is not None or overloaded(self.findings))

    @property
    def is_before_the_queue(self) -> bool:
        """Whether only requests are compared that were sent before the queue grew: latencies judge these."""
        return self.saturation is not None and self.selection.window[1] <= self.saturation.share_before

    @property
    def failed_thresholds(self) -> tuple[str, ...]:
        """Metrics whose mean is off by more than its threshold; of an overloaded run the measures that are."""
        return tuple(name for name, decision in self.decisions().items() if decision == "fail")

    @property
    def undecided(self) -> tuple[str, ...]:
        """Those that some reconstructions of the requests pass and others fail, or that steps beyond the fit may."""
        return tuple(name for name, decision in self.decisions().items() if decision == "not decided")

    def decisions(self, share: float | None = None) -> dict[str, Decision]:
        """By metric, or measure if overloaded; ``share``: how far simulated means may be off, None as of the fit."""
        unsure = unsure_of(self.replay) if share is None else share
        if self.overloaded:
            judged = [(measure.slug, measure.error, self.limit(measure)) for measure in self.capacity or ()]
        else:
            errors = {metric: self.metrics[metric]["mean"].error for metric in THRESHOLDS}
            judged = [(m, error, self.limit(m)) for m, error in errors.items() if error is not None]
        return {name: self.decide((name, "mean"), error, limit, unsure) for name, error, limit in judged}

    def limit(self, judged: str | Measure) -> float:
        """The largest absolute error of the mean of a metric, or of a measure, that passes."""
        if isinstance(judged, Measure):  # of these only the ITL does not grow with a queue
            return self.limit("itl") if judged.slug == "itl" else judged.limit
        limit = THRESHOLDS[judged]
        return limit if self.noise is None else self.noise.at_least((judged, "mean"), limit)

    def decide(self, cell: tuple[str, str], error: float, limit: float, unsure: float) -> Decision:
        """What an error of a metric or measure comes to, or those of all reconstructions (``decided``)."""
        if self.draws is not None and cell in self.draws.errors:
            return self.draws.decide(cell, limit, unsure)
        return decided(np.array([error]), limit, unsure)

    @property
    def unusable(self) -> dict[str, str]:
        """Gated metrics whose mean must not be used, each with check and reason."""
        means = {metric: self.metrics[metric]["mean"] for metric in THRESHOLDS}
        return {m: (cell.reason or "").removeprefix("unusable: ") for m, cell in means.items() if cell.unusable}

    @property
    def lost(self) -> tuple[str, ...]:
        """Why nothing can be judged by the recording as a whole: what can be replayed is not what was served."""
        not_simulated = self.replay.not_simulated if self.replay else ()
        reasons = [f"not simulated: {what}" for what in not_simulated]
        reasons += [f"{f.check}: {f.message}" for f in self.findings if f.severity == "unusable" and not f.metric]
        without = self.excluded.get(WITHOUT_LATENCIES, 0)
        if without > _MOST_WITHOUT * (without + self.requests):
            reasons.append(f"only {self.requests:,} of {without + self.requests:,} requests have latencies")
        return tuple(reasons)

    @property
    def verdict(self) -> Verdict:
        """Of a replay: ``not judged``: there is nothing to judge by, or it does not stand for the run.

        ``unusable``: a gated metric must not be used, and none of the others fails.  ``not decided``: it passes with
        some reconstructions of the requests, and fails with others, or what lies outside of the fit may decide it.
        """
        if self.lost:
            return "not judged"
        if self.failed_thresholds:
            return "fail"
        if self.unusable:
            return "unusable"
        if self.undecided:
            return "not decided"
        return "pass" if self.decisions() else "not judged"

    @property
    def uses(self) -> str:
        """``fitted on this run`` (its latencies), ``its steps`` or ``no recording``; ``held out``; ``unknown``."""
        release, recording = self.run.release, self.recording
        if not release.fitted_on:
            return "unknown" if release.fitted_on is None else "fitted on no recording"
        used = release.used(recording.slug, recording.content_hash, self.requests_hash)
        return {"steps": "fitted on its steps", "latencies": "fitted on this run", None: "held out"}[used]


def compare(a: Side, b: Side, selection: Selection | None = None) -> Comparison:
    """Compare two sides over the requests that both have, if they are of one recording; else each over its own.

    Beside published numbers, which are over successes, only requests that succeeded count.  Raises
    ``ValidateError`` for a window of published aggregates.
    """
    selection = selection or Selection()
    both = requests_of_both(a, b, selection)
    chosen = tuple(_chosen(side, other, selection) if both is None else both for side, other in ((a, b), (b, a)))
    samples = [None if part is None else side.latencies(part) for side, part in zip((a, b), chosen, strict=True)]
    numbers = [
        side.measure(part, of_part, selection) for side, part, of_part in zip((a, b), chosen, samples, strict=True)
    ]
    metrics = {m: {s: _cell(numbers[0][m][s], numbers[1][m][s]) for s in STATISTICS} for m in METRICS}
    return Comparison(
        recording=a.recording,
        replay=b.run,
        selection=selection,
        compared=(_count(a, chosen[0]), _count(b, chosen[1])),
        metrics=metrics,
        paired={} if both is None or None in samples else _pairings(samples, metrics),
        excluded={} if b.run is None else _excluded(a, b.run, selection),
    )


def compare_replay(
    run: ReplayRun, token_gaps: Gaps | None = None, selection: Selection | None = None, *, queues: bool = False
) -> Comparison:
    """Compare a replay with its recording, over the requests that both finished.

    ``token_gaps``: observed pooled inter-token gaps of the selection, where recorded.  ``queues``: say what
    queues there are, and how far the schedule is the recorded one.  Raises ``NothingToJudgeError`` if no request is
    left to compare, ``ValidateError`` for a window of published aggregates.
    """
    selection = selection or Selection()
    observed, simulated = recording_side(run.recording, token_gaps), replay_side(run)
    succeeded = (run.recording.requests["status"] == "ok").to_numpy()
    left = selection.of(run.recording.requests) & run.simulated.completed & succeeded
    if observed.requests is not None:
        left &= observed.requests
    if not left.any() or (observed.requests is None and not run.recording.is_summed_up):
        raise NothingToJudgeError(
            f"{run.recording.slug}: no request that succeeded with recorded latencies in the selection, "
            "nothing to judge"
        )
    named = run.release.used(run.recording.slug) or not run.release.fitted_on
    comparison = replace(
        compare(observed, simulated, selection),
        open_arguments=open_arguments(run),
        requests_hash="" if named else requests_hash(run.recording),
    )
    if not queues:
        return comparison
    return replace(_with_capacity(comparison), schedule=_schedule(run), warming=warm_up(run, selection))


def _schedule(run: ReplayRun) -> ScheduleVerdict | None:
    """How far the schedule is the recorded one; None without recorded steps."""
    if run.recording.steps.is_empty():
        return None
    from blis_replay.validate.schedule import schedule_verdict  # a sixth of all modules, which few runs need

    return schedule_verdict(run.recording, run.plan.engine)


def _with_capacity(comparison: Comparison) -> Comparison:
    """With what there is to say of queues; and, of an overloaded run, with what is judged instead of latencies."""
    found = saturation(comparison.run)
    seen = (
        found is not None and found.judges_by_capacity and not {"e2e", "ttft"} & comparison.unusable.keys()
    )  # a queue is seen by these
    comparison = replace(comparison, saturation=found)
    if not seen and not comparison.overloaded:
        return comparison
    itl = comparison.metrics["itl"]["mean"]
    measures = capacity(comparison.run, found, comparison.requests, (itl.a_us, itl.b_us), comparison.unusable)
    if found is not None and found.from_us is not None and any(measure.beyond for measure in measures):
        found = replace(found, explains="simulator")
    comparison = replace(comparison, saturation=found, capacity=measures)
    return comparison if comparison.overloaded else replace(comparison, capacity=None)


def with_draws(comparison: Comparison, simulator: Simulator) -> Comparison:
    """With the errors of many reconstructions, where the requests of a whole run are reconstructed."""
    run = comparison.run
    if not comparison.selection.everything or comparison.ground_truth != PUBLISHED:
        return comparison
    published_us = {(m, s): cell.a_us for m, cells in comparison.metrics.items() for s, cell in cells.items()}
    return replace(comparison, draws=draw_errors(run.recording, run.release, run.mode, simulator, published_us))


def with_objectives(comparison: Comparison, objectives: Objectives, gaps: Gaps | None) -> Comparison:
    """With what came of objectives on both sides, over all requests of the selection; ``gaps``: as recorded."""
    if not objectives:
        return comparison
    run = comparison.run
    chosen = comparison.selection.of(run.recording.requests)
    simulated = simulated_attainment(run, objectives, chosen)
    observed = observed_attainment(run.recording, objectives, gaps, chosen)
    if observed is None:
        cells = (comparison.metrics[o.metric].get(o.statistic) for o in objectives)
        observed = Attainment(objectives, tuple(None if cell is None else cell.a_us for cell in cells), 0, 0)
    return replace(comparison, promised=Promised(observed, simulated))


def light(comparison: Comparison) -> Comparison:
    """The same without the requests and steps of recording and replay, small enough to keep hundreds."""
    run = without_rows(comparison.run)
    return replace(comparison, recording=run.recording, replay=run)


def requests_of_both(a: Side, b: Side, selection: Selection) -> Bools | None:
    """bool[n]: requests of the selection that both sides have; None of different recordings, or if there are none."""
    if a.requests is None or b.requests is None or a.recording.content_hash != b.recording.content_hash:
        return None
    both = a.requests & b.requests & selection.of(a.recording.requests)
    return both if both.any() else None


def _chosen(side: Side, other: Side, selection: Selection) -> Bools | None:
    if side.requests is None:
        return None
    chosen = side.requests & selection.of(side.recording.requests)
    if other.requests is None:
        chosen &= (side.recording.requests["status"] == "ok").to_numpy()
    return chosen


def _count(side: Side, chosen: Bools | None) -> int:
    return side.recording.requests.height if chosen is None else int(chosen.sum())


def _cell(a: Number, b: Number) -> MetricCell:
    missing = {number.reason for number in (a, b) if number.value_us is None and number.reason}
    unusable = a.unusable or b.unusable
    return MetricCell(a.value_us, b.value_us, "; ".join(sorted(missing)) or None, a.between_us, unusable)


def latency_pairs(a: LatencySamples, b: LatencySamples) -> dict[str, Pairing]:
    """How the same requests agree on two sides, by metric."""
    pairs = {"e2e": (a.e2e_us, b.e2e_us), "ttft": (a.ttft_us, b.ttft_us), "tpot": (a.tpot_us, b.tpot_us)}
    return {metric: Pairing(paired_mape(*pair), correlation(*pair)) for metric, pair in pairs.items()}


def _pairings(
    samples: Sequence[LatencySamples | None], metrics: Mapping[str, Mapping[str, MetricCell]]
) -> dict[str, Pairing]:
    a, b = samples
    if a is None or b is None:
        return {}
    usable = {metric: not metrics[metric]["mean"].unusable for metric in METRICS}
    return {m: pairing if usable[m] else Pairing(None, None) for m, pairing in latency_pairs(a, b).items()}


def _excluded(observed: Side, run: ReplayRun, selection: Selection) -> dict[str, int]:
    selected = selection.of(run.recording.requests)
    failed = (run.recording.requests["status"] != "ok").to_numpy()
    recorded = np.zeros(len(failed), np.bool_) if observed.requests is None else observed.requests
    unfinished = ~(run.simulated.completed & ~failed)
    counts = {
        "failed in the recording": int((selected & failed).sum()),
        "outside the selection": int((~selected).sum()),
        WITHOUT_LATENCIES: int((selected & ~failed & ~recorded).sum()) if recorded.any() else 0,
        "not finished by the simulator": int((selected & recorded & unfinished).sum()),
    }
    return {reason: count for reason, count in counts.items() if count}
