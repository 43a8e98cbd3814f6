"""Every simulator on the same recordings: how far each is off, what it was fitted on, what it took, what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ExperimentError, NothingToJudgeError
from blis_replay.ingest.recording import ARRIVALS
from blis_replay.ingest.store import Store
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.simulator import EmbeddedEngine, Simulator
from blis_replay.validate.comparison.compare import compare_replay, with_repeats
from blis_replay.validate.comparison.overview import mean_abs
from blis_replay.validate.comparison.repeats import Repeats
from blis_replay.validate.comparison.segments import segments_of
from blis_replay.validate.comparison.sides import recording_side
from blis_replay.validate.metrics.latency import STATISTICS, THRESHOLDS, correlation, relative_error
from blis_replay.validate.metrics.observed import Observed, Selection, on_both_sides, read_observed
from blis_replay.validate.metrics.skill import Skill
from blis_replay_labs.board.published import published_simulators
from blis_replay_labs.board.simulators import AS_SHIPPED

Number = tuple[str, str]
SHOWN = tuple((metric, statistic) for metric in ("e2e", "ttft", "itl") for statistic in STATISTICS)
_US_PER_S = 1e6
# Share of the latencies: an imitation that is further off says nothing about the simulator.
MOST_LEFT = 0.10
# Share of the means: a component below it in both counts as nothing.
LEAST_SHARE = 0.005


@dataclass(frozen=True)
class Cost:
    """Why a simulator's answers differ from those of our engine.

    ``shares``: by component, what it adds to the mean E2E and TTFT, as fractions of our engine's mean with the
    coefficients; they sum to the difference between the imitation and our engine.  ``left``: mean absolute difference
    between the simulator and its imitation, relative to its latencies.  ``evidence``: one sentence per component.
    ``tried``: the input that makes our engine answer like the simulator, None where coefficients suffice; ``also``:
    other inputs that do so equally well.
    """

    shares: Mapping[str, tuple[float, float]]
    left: float
    evidence: Mapping[str, str]
    tried: str | None = None
    also: tuple[str, ...] = ()

    @property
    def imitated(self) -> bool:
        """Whether the imitation is close enough to judge by."""
        return self.left <= MOST_LEFT

    @property
    def largest(self) -> str | None:
        """The component with the largest share of either mean; None if the imitation is too far, or no share counts."""
        name = max(self.shares, key=self._size)
        return name if self.imitated and self._size(name) >= LEAST_SHARE else None

    def _size(self, name: str) -> float:
        return max(map(abs, self.shares[name]))


@dataclass(frozen=True)
class Score:
    """One simulator on one recording.

    ``fitted``: how its coefficients were fitted on the recording, as ``Comparison.use``; ``as shipped``: on nothing of
    ours.  ``errors``: signed fractions by metric and statistic that both sides have.  ``throughput``: the error of
    output tokens per second over the run.  ``rank``: Spearman's correlation of the requests' latencies by metric.
    ``skill``: how near its single requests are, by metric, where it was not overloaded.
    ``passes``: whether the judged means are within their limits, None where that is not decided.  ``overloaded``: the
    server had more load than it could serve, so its latencies judge no simulator.  ``seconds``: planning and
    simulating; ``peak_bytes``: peak memory of the process that simulated.  ``segments``: what each part of a request's
    time adds to the error of the mean E2E, a signed fraction of the observed mean.  ``cost``: its largest cost, where
    asked for, or why that is unknown.  ``problem``: why a score is missing.
    """

    simulator: str
    slug: str
    alias: str
    coefficients: str = ""
    fitted: str = ""
    errors: Mapping[Number, float] = field(default_factory=dict)
    throughput: float | None = None
    rank: Mapping[str, float] = field(default_factory=dict)
    skill: Mapping[str, Skill] = field(default_factory=dict)
    passes: bool | None = None
    overloaded: bool = False
    seconds: float | None = None
    peak_bytes: int | None = None
    segments: Mapping[str, float] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    cost: Cost | str | None = None
    problem: str = ""

    @property
    def worst_segment(self) -> tuple[str, float] | None:
        """The segment that adds most to the error of the mean E2E, by absolute value."""
        return max(self.segments.items(), key=lambda part: abs(part[1]), default=None)


@dataclass(frozen=True)
class Board:
    """The scores, recording by recording, in the order of the simulators; ``absent``: simulators that did not run."""

    simulators: tuple[str, ...]
    scores: tuple[Score, ...]
    absent: Mapping[str, str]

    def of(self, simulator: str) -> list[Score]:
        """The scores of a simulator, without those that have a problem."""
        return [score for score in self.scores if score.simulator == simulator and not score.problem]

    def skill(self, simulator: str, metric: str) -> float | None:
        """1 less the CRPS over that of the straight line in the lengths, over all recordings; None without requests.

        1: every request is right; 0: no better than the line; negative: worse.
        """
        known = [s.skill[metric] for s in self.of(simulator) if metric in s.skill]
        of_line = sum(one.of_line_us / one.observed_us for one in known)
        return 1 - sum(one.share for one in known) / of_line if of_line else None

    def beside_repeats(self, simulator: str, metric: str) -> float | None:
        """CRPS over the difference of repeats, the mean over recordings that have some; None without any."""
        return mean_abs(s.skill[metric].beside_repeats for s in self.of(simulator) if metric in s.skill)


def joined(boards: Sequence[Board]) -> Board:
    """One board of several with different recordings; absent are simulators that are absent in all of them."""
    names = dict.fromkeys(name for board in boards for name in board.simulators)
    absent = {name: why for board in boards for name, why in board.absent.items() if name not in names}
    return Board(tuple(names), tuple(score for board in boards for score in board.scores), absent)


def leaderboard(
    store: Store,
    slugs: Sequence[str],
    simulators: Mapping[str, Simulator],
    absent: Mapping[str, str],
    *,
    published: bool = False,
    explain: Callable[[ReplayRun], Cost] | None = None,
    progress: Callable[[int, int], None] | None = None,
    repeated: Mapping[str, Repeats] | None = None,
) -> Board:
    """Replay stored experiments through each of the simulators.

    ``simulators``: by the name that is shown.  ``published``: with published answers for these recordings.
    ``repeated``: of each slug, as ``repeats_of``.  ``explain``: finds what costs a simulator most.  A recording
    without latencies is left out; a replay that fails becomes a score with a ``problem``.
    """
    scores: list[Score] = []
    names = list(simulators)
    for done, slug in enumerate(slugs):
        experiment = read_observed(store, slug)
        if not done:
            _warmed(experiment, simulators)
        if experiment.recording.ground_truth != ARRIVALS:
            of_it = (repeated or {}).get(slug)
            scores += [_score(experiment, name, simulator, explain, of_it) for name, simulator in simulators.items()]
            if published:
                scores += _published(experiment)
        if progress:
            progress(done + 1, len(slugs))
    names += dict.fromkeys(score.simulator for score in scores if score.simulator not in simulators)
    return Board(tuple(names), tuple(scores), absent)


def _warmed(experiment: Observed, simulators: Mapping[str, Simulator]) -> None:
    """Load compiled code before anything is timed."""
    for simulator in simulators.values():
        if isinstance(simulator, EmbeddedEngine):
            with suppress(ExperimentError):
                replay(experiment.recording, simulator.release, simulator=simulator)
            return


def _score(
    experiment: Observed,
    name: str,
    simulator: Simulator,
    explain: Callable[[ReplayRun], Cost] | None,
    repeats: Repeats | None,
) -> Score:
    recording = experiment.recording
    counts_peak = _forget_peak_memory()
    began = time.perf_counter()
    try:
        run = replay(recording, simulator.release, simulator=simulator)
        seconds, own_peak_bytes = time.perf_counter() - began, _peak_bytes() if counts_peak else None
        comparison = with_repeats(compare_replay(run, experiment.token_gaps), repeats)
    except ExperimentError as problem:
        return Score(name, recording.slug, recording.alias, problem=str(problem))
    both = on_both_sides(run)
    passes = {"PASS": True, "FITS": True, "FAIL": False}.get(comparison.verdict)
    return Score(
        simulator=name,
        slug=recording.slug,
        alias=recording.alias,
        coefficients=run.release.name,
        fitted=AS_SHIPPED if run.release.name == AS_SHIPPED else comparison.use,
        errors={(m, s): error for m, s in SHOWN if (error := comparison.metrics[m][s].error) is not None},
        throughput=_throughput(run, both),
        rank=_ranks(run, both),
        skill=comparison.skill,
        passes=None if comparison.overloaded else passes,
        overloaded=comparison.overloaded,
        seconds=seconds,
        peak_bytes=run.simulated.peak_bytes or own_peak_bytes,
        segments=_segments(run),
        lacks=run.simulated.differences,
        cost=_cost(run, explain),
    )


def _forget_peak_memory() -> bool:
    """Let Linux count the largest memory of this process from now on (proc(5), clear_refs); False if it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    except OSError:
        return False
    return True


def _peak_bytes() -> int | None:
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _cost(run: ReplayRun, explain: Callable[[ReplayRun], Cost] | None) -> Cost | str | None:
    """What costs the simulator most; a text says why that is unknown: no coefficients, or too few requests."""
    try:
        return None if explain is None else explain(run)
    except ExperimentError as problem:
        return str(problem)


def _throughput(run: ReplayRun, both: Bools) -> float | None:
    """Error of output tokens per second, first arrival to last end; None without latencies of requests."""
    if both.sum() < 2:
        return None
    requests = run.recording.requests
    arrival_us, e2e_us = (requests[name].to_numpy() for name in ("arrival_us", "e2e_us"))
    observed_s = _span_s(arrival_us[both], e2e_us[both])
    return relative_error(1 / observed_s, 1 / _span_s(run.arrival_us[both], run.e2e_us[both]))


def _span_s(arrival_us: Int64s, e2e_us: Int64s) -> float:
    return max(float((arrival_us + e2e_us).max() - arrival_us.min()), 1.0) / _US_PER_S


def _ranks(run: ReplayRun, both: Bools) -> dict[str, float]:
    """Of E2E and TTFT, what ``Score`` calls ``rank``; absent where a side is constant."""
    found: dict[str, float] = {}
    for metric, simulated_us in (("e2e", run.e2e_us[both]), ("ttft", run.ttft_us[both])):
        sides = (run.recording.requests[f"{metric}_us"].to_numpy()[both], simulated_us)
        ranks = [pl.Series(side).rank("average").to_numpy().astype(np.float64) for side in sides]
        if (r := correlation(*ranks)) is not None:
            found[metric] = r
    return found


def _segments(run: ReplayRun) -> dict[str, float]:
    try:
        found = segments_of(run)
    except NothingToJudgeError:
        return {}
    whole_us = float(found.whole.a_us.mean())
    return {part.name: float(part.difference_us.mean()) / whole_us for part in found.segments} if whole_us else {}


def _published(experiment: Observed) -> list[Score]:
    """Scores of published answers for this recording, against its observed numbers."""
    recording, found = experiment.recording, []
    side = recording_side(recording, experiment.token_gaps)
    samples = None if side.requests is None else side.latencies(side.requests)
    observed = side.measure(side.requests, samples, Selection())
    for simulator in published_simulators().simulators:
        predicted_us = simulator.predicted_us.get(recording.slug, {})
        errors = {
            (metric, statistic): error
            for metric, statistic in SHOWN
            if (us := predicted_us.get(f"{metric} {statistic}")) is not None
            and (error := relative_error(observed[metric][statistic].value_us, us)) is not None
        }
        means = {metric: abs(errors[metric, "mean"]) for metric in THRESHOLDS if (metric, "mean") in errors}
        if means:
            passes = all(error <= THRESHOLDS[metric] for metric, error in means.items())
            name = f"{simulator.name} (published)"
            found.append(Score(name, recording.slug, recording.alias, "", "unknown", errors, passes=passes))
    return found
