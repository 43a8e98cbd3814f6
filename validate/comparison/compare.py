"""Two sides beside each other: every number of both, and how single requests agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from blis_replay.compiled.arrays import Bools
from blis_replay.ingest.fingerprint import requests_hash
from blis_replay.ingest.recording import Finding, GroundTruth, Recording
from blis_replay.replay.driver import ReplayRun, without_rows
from blis_replay.validate.comparison.arguments import OpenArgument, open_arguments
from blis_replay.validate.comparison.saturation import Saturation, saturation
from blis_replay.validate.comparison.sides import Side, recording_side, replay_side
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
from blis_replay.validate.metrics.observed import Gaps, Number, Selection, overloaded
from blis_replay.validate.schedule import ScheduleVerdict, schedule_verdict

Verdict = Literal["pass", "fail", "overloaded", "unusable", "not judged"]


@dataclass(frozen=True)
class Cell:
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
class Comparison:
    """Two sides compared.

    ``recording``: of side A.  ``replay``: side B, if it is a replay.  ``compared``: how many requests on each side.
    ``paired``: agreement by metric, empty where the sides do not have the same requests.  ``excluded``: requests
    of a replay that are left out, by reason.  ``open_arguments``: engine arguments that nobody recorded and that
    change the replay.  ``requests_hash``: of a recording that the release of the replay does not name.
    ``saturation``: of a replay of a whole run that queues, or whose recording does.  ``schedule``: of a replay of a
    whole run of which every step was recorded.
    """

    recording: Recording
    replay: ReplayRun | None
    selection: Selection
    compared: tuple[int, int]
    metrics: dict[str, dict[str, Cell]]
    paired: dict[str, Pairing]
    excluded: dict[str, int]
    saturation: Saturation | None = None
    open_arguments: tuple[OpenArgument, ...] = ()
    schedule: ScheduleVerdict | None = None
    requests_hash: str = ""

    @property
    def run(self) -> ReplayRun:
        """The replay that side B is; raises ``ValueError`` if it is none."""
        if self.replay is None:
            raise ValueError("side B of this comparison is no replay")
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
    def failed_thresholds(self) -> tuple[str, ...]:
        """Metrics whose mean is off by more than its threshold."""
        return tuple(m for m, limit in THRESHOLDS.items() if abs(self.metrics[m]["mean"].error or 0.0) > limit)

    @property
    def unusable(self) -> dict[str, str]:
        """Gated metrics whose mean must not be used, each with check and reason."""
        means = {metric: self.metrics[metric]["mean"] for metric in THRESHOLDS}
        return {m: (cell.reason or "").removeprefix("unusable: ") for m, cell in means.items() if cell.unusable}

    @property
    def lost(self) -> tuple[str, ...]:
        """Why nothing can be judged by the recording as a whole: what can be replayed is not what was served."""
        unusable = (f"{f.check}: {f.message}" for f in self.findings if f.severity == "unusable" and not f.metric)
        not_simulated = self.replay.simulated.not_simulated if self.replay else ()
        return (*(f"not simulated: {what}" for what in not_simulated), *unusable)

    @property
    def verdict(self) -> Verdict:
        """Of a replay: ``overloaded`` is reported, not gated; ``not judged``: no gated metric has an observed value.

        ``unusable``: a gated metric must not be used, and none of the others fails.
        """
        if self.lost:
            return "not judged"
        if overloaded(self.findings):
            return "overloaded"
        if self.unusable and not self.failed_thresholds:
            return "unusable"
        if all(self.metrics[metric]["mean"].error is None for metric in THRESHOLDS):
            return "not judged"
        return "fail" if self.failed_thresholds else "pass"

    @property
    def uses(self) -> str:
        """What of this experiment the coefficients were fitted on.

        ``own steps``, ``own latencies``, ``held out``, or ``not stated`` by the release.
        """
        release, recording = self.run.release, self.recording
        if not release.fitted_on:
            return "not stated"
        used = release.used(recording.slug, recording.content_hash, self.requests_hash)
        return {"steps": "own steps", "latencies": "own latencies", None: "held out"}[used]


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
    schedule = schedule_verdict(run.recording, run.plan.engine)
    return replace(comparison, saturation=saturation(run), schedule=schedule)


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


def _cell(a: Number, b: Number) -> Cell:
    missing = {number.reason for number in (a, b) if number.value_us is None and number.reason}
    unusable = a.unusable or b.unusable
    return Cell(a.value_us, b.value_us, "; ".join(sorted(missing)) or None, a.between_us, unusable)


def latency_pairs(a: LatencySamples, b: LatencySamples) -> dict[str, Pairing]:
    """How the same requests agree on two sides, by metric."""
    pairs = {"e2e": (a.e2e_us, b.e2e_us), "ttft": (a.ttft_us, b.ttft_us), "tpot": (a.tpot_us, b.tpot_us)}
    return {metric: Pairing(paired_mape(*pair), correlation(*pair)) for metric, pair in pairs.items()}


def _pairings(
    samples: Sequence[LatencySamples | None], metrics: Mapping[str, Mapping[str, Cell]]
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
        "without recorded latencies": int((selected & ~failed & ~recorded).sum()) if recorded.any() else 0,
        "not finished by the simulator": int((selected & recorded & unfinished).sum()),
    }
    return {reason: count for reason, count in counts.items() if count}


class Judged(Protocol):
    """What a mean over experiments takes of each: its verdict and its table."""

    @property
    def verdict(self) -> Verdict:
        """As ``Comparison.verdict``."""

    @property
    def metrics(self) -> Mapping[str, Mapping[str, Cell]]:
        """As ``Comparison.metrics``."""


def mean_abs_errors(comparisons: Sequence[Judged]) -> dict[str, float | None]:
    """Per metric, the mean over gated experiments of the absolute error of the mean."""
    gated = [c for c in comparisons if c.verdict in ("pass", "fail")]
    errors = {
        metric: [abs(e) for c in gated if (e := c.metrics[metric]["mean"].error) is not None] for metric in METRICS
    }
    return {metric: float(np.mean(values)) if values else None for metric, values in errors.items()}
