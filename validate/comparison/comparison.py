"""Two sides compared, as data: every number of both, and the judgement of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from blis_replay.base.engine_packs import known_release
from blis_replay.blis.releases.release import UNKNOWN_HARDWARE
from blis_replay.ingest.recording import OVERLOAD_CHECK, PUBLISHED, RECORDED, Recording, SourceFile
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.engine import layers_in_words
from blis_replay.validate.comparison.arguments import OpenArgument, argument_remarks
from blis_replay.validate.judgement import (
    FITTED,
    HELD_OUT,
    Command,
    Draws,
    Judgement,
    Quantity,
    Remark,
    Subject,
    Use,
    Verdict,
    both_decided,
    held,
    quantity_decides,
    remark,
)
from blis_replay.validate.metrics.latency import (
    METRICS,
    TAIL_LIMITS,
    THRESHOLDS,
    MetricStatistic,
    cell_name,
    relative_error,
)
from blis_replay.validate.metrics.observed import Selection, overloaded
from blis_replay.validate.metrics.uncertainty import Estimate

if TYPE_CHECKING:
    from blis_replay.validate.comparison.repeats import Repeats
    from blis_replay.validate.comparison.saturation import Measure, Saturation
    from blis_replay.validate.comparison.warm_up import WarmUp
    from blis_replay.validate.metrics.objectives import Attainment
    from blis_replay.validate.metrics.skill import Skill
    from blis_replay.validate.schedule import ScheduleVerdict

_Value = TypeVar("_Value")

# With more requests than this without latencies, those that have some are not the run.
_MOST_WITHOUT = 0.1
# Without one request in a hundred the queue is another; fewer are a recorder's hiccup.
_MOST_REJECTED = 0.01
WITHOUT_LATENCIES = "without recorded latencies"
NO_SERVER = "sent while no server was there"


@dataclass(frozen=True)
class MetricCell:
    """One number on both sides, us.  Where a replay is compared with its recording, A is observed and B simulated.

    A side that cannot give it is None, with a ``reason``; ``between_us`` are bounds of A where it has only
    those.  ``unusable``: the instrument check that forbids A's number, which is then None.  ``derived``: how A's
    number follows from others, if not recorded directly.
    """

    a_us: float | None
    b_us: float | None
    reason: str | None = None
    between_us: tuple[float, float] | None = None
    unusable: str | None = None
    derived: str = ""

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

    ``recording``: of side A, of ``recorded`` requests.  ``replay``: side B, if it is a replay.  ``compared``: how many
    requests on each side.
    ``paired``: agreement by metric, empty where the sides do not have the same requests.  ``excluded``: requests
    of a replay that are left out, by reason.  ``open_arguments``: engine arguments that nobody recorded and that
    change the replay.  ``use``: what the coefficients were fitted on, as far as the recording is concerned.
    ``saturation``: of a replay of a whole run that queues, or whose recording does.  ``capacity``: what of a run that
    had more load than could be served is judged instead of its latencies, None for other runs.  ``schedule``:
    of a replay of a whole run, if every step was recorded.  ``draws``: of a run whose requests are reconstructed,
    the errors of many reconstructions.  ``repeats``: of this load, where others were recorded.
    ``promised``: by side, what came of objectives, where some were given; of published aggregates the statistics that
    were published, and no goodput.  ``warming``: of a replay of a whole run.
    ``pace``: by which share the server's steps take longer than the coefficients say, of a whole run with its steps.
    ``trend``: by how much the error grows over a run that is not overloaded, see ``error_trend``.
    ``predicted_us``: what the fit leaves possible of each simulated mean and p99, 95 %; they decide nothing.
    ``skill``: how near its single requests are, by metric, where they are known and the run is not overloaded.
    ``estimates``: of a replay, its errors with their 95 % intervals, where single requests are known.
    """

    recording: Recording
    replay: ReplayRun | None
    selection: Selection
    recorded: int
    compared: tuple[int, int]
    metrics: dict[str, dict[str, MetricCell]]
    paired: dict[str, Pairing]
    excluded: dict[str, int]
    saturation: Saturation | None = None
    capacity: tuple[Measure, ...] | None = None
    open_arguments: tuple[OpenArgument, ...] = ()
    schedule: ScheduleVerdict | None = None
    use: Use = "unknown"
    draws: Draws | None = None
    repeats: Repeats | None = None
    promised: Mapping[str, Attainment] | None = None
    warming: WarmUp | None = None
    pace: Estimate | None = None
    trend: Estimate | None = None
    predicted_us: Mapping[MetricStatistic, tuple[float, float]] = field(default_factory=dict)
    skill: Mapping[str, Skill] = field(default_factory=dict)
    estimates: Mapping[MetricStatistic, Estimate] = field(default_factory=dict)
    parts: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)

    @cached_property
    def cells(self) -> dict[MetricStatistic, MetricCell]:
        """Every number by metric and statistic."""
        return {(metric, name): cell for metric, cells in self.metrics.items() for name, cell in cells.items()}

    def interval(self, cell: MetricStatistic) -> tuple[float, float] | None:
        """The 95 % interval of the error of a number; None if not available."""
        estimate = self.estimates.get(cell)
        return None if estimate is None else estimate.possible

    @property
    def run(self) -> ReplayRun:
        """Side B as a replay; raises ``ValueError`` if it is a recording."""
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
    def requests(self) -> int:
        """How many were compared, of side B where A has published numbers only."""
        return self.compared[1]

    @property
    def overloaded(self) -> bool:
        """Whether the server had more load than it could serve, so that its latencies judge no simulator."""
        by_latencies = not {"e2e", "ttft"} & self.refused().keys()  # a queue is seen by these
        # Requests that were sent before the queue grew are judged by their latencies.
        before = self.saturation is not None and self.selection.window[1] <= self.saturation.share_before
        return by_latencies and overloaded(self.recording.findings) and not before

    def quantity(self, cell: MetricStatistic, limit: float) -> Quantity:
        """One number of the table against a limit."""
        number = self.cells[cell]
        sides, estimate = (number.a_us, number.b_us), self.estimates.get(cell)
        return held(cell, limit, sides, estimate, name=cell_name(cell), derived=number.derived)

    def served(self, measure: Measure, limit: float) -> Quantity:
        """One measure of an overloaded run against a limit."""
        cell = (measure.slug, "mean")
        sides, estimate = (measure.observed, measure.simulated), self.estimates.get(cell)
        return held(cell, limit, sides, estimate, name=measure.name, unit=measure.unit, metric=measure.metric)

    @cached_property
    def judgement(self) -> Judgement:
        """What is to be said of this replay, with the usual limits."""
        return self.judged()

    def judged(self, limits: Mapping[MetricStatistic, float] | None = None) -> Judgement:
        """What is to be said of this replay: worked out here, and nowhere else.

        ``limits``: the largest absolute errors that pass, by metric and statistic; None: the usual ones, of each metric
        that the recording states.
        """
        refused = self.refused(limits)
        if self.overloaded:
            of = {metric: (limits or {}).get((metric, "mean"), limit) for metric, limit in THRESHOLDS.items()}
            judged = [self.served(measure, of[measure.metric]) for measure in self.capacity or ()]
        else:
            judged = [self.quantity(cell, limit) for cell, limit in (limits or self._usual_limits).items()]
        judgement = Judgement(
            subject=self.subject,
            overloaded=self.overloaded,
            judged=tuple(judged),
            tails=tuple(self.quantity((metric, "p99"), limit) for metric, limit in TAIL_LIMITS.items()),
            refused=refused,
            lost=self.lost,
            decides=(),
            errors={cell: number.error for cell, number in self.cells.items()},
            of_queue=self._of_queue,
            remarks=tuple(_remarks(self)),
        )
        if judgement.verdict == "NOT JUDGED" and not judgement.lost and not refused:
            return replace(judgement, lost=(self._nothing,))
        return replace(judgement, decides=tuple(_what_decides(self, judgement)))

    @property
    def _usual_limits(self) -> dict[MetricStatistic, float]:
        """Of the means; of TPOT only where the recording does not state the ITL or E2E of its requests."""
        means = {metric: self.metrics[metric]["mean"] for metric in METRICS}
        limits = {(metric, "mean"): limit for metric, limit in THRESHOLDS.items()}
        if self.recording.ground_truth == PUBLISHED and any(means[metric].derived for metric in ("e2e", "itl")):
            limits["tpot", "mean"] = THRESHOLDS["itl"]
        return limits

    @property
    def subject(self) -> Subject:
        """Who is judged, on what."""
        release = self.run.release
        fits, mode, apart = release.fitted_on, self.run.mode.name, self.run.plan.apart
        return Subject(
            slug=self.slug,
            alias=self.alias,
            ground_truth=self.recording.ground_truth,
            requests=self.requests,
            simulator=self.run.simulator,
            release=release.name,
            use=self.use,
            fitted_on=None if fits is None else tuple(dict.fromkeys(fit.experiment for fit in fits)),
            recording=self.recording.content_hash,
            release_hash=release.sha256,
            replay=mode if apart is None else apart.named(mode),
            window=self.selection.window,
        )

    @property
    def before_the_queue(self) -> Command | None:
        """Compares what came before the server saturated; None if it did not, or too little came."""
        if not self.overloaded or self.saturation is None or not self.saturation.share_before:
            return None
        return Command("validate", self.alias, f" --window 0:{self.saturation.share_before:g}")

    @property
    def _of_queue(self) -> Command | None:
        """What a reader of an overloaded run wants next: causes of latencies that measure a queue are the queue's."""
        if not self.overloaded:
            return None
        return self.before_the_queue or Command("inspect", self.alias, f" --check {OVERLOAD_CHECK}", of_release=False)

    @property
    def verdict(self) -> Verdict:
        """As of its judgement."""
        return self.judgement.verdict

    def refused(self, limits: Mapping[MetricStatistic, float] | None = None) -> dict[str, str]:
        """Judged metrics (of ``limits``, None: the usual ones) that must not be used, each with check and reason."""
        cells = {metric: self.metrics[metric][s] for metric, s in limits or {(m, "mean"): 0.0 for m in THRESHOLDS}}
        return {m: (cell.reason or "").removeprefix("unusable: ") for m, cell in cells.items() if cell.unusable}

    @property
    def lost(self) -> tuple[Remark, ...]:
        """Why nothing can be judged by the recording as a whole: what can be replayed is not what was served."""
        not_simulated = self.replay.not_simulated if self.replay else ()
        reasons = [remark("not_simulated", what=what) for what in not_simulated]
        served: list[tuple[dict[str, str], Recording, int]] = [({}, self.recording, self.recorded)]
        if self.replay is not None and (apart := self.replay.plan.apart) is not None:
            served.append(({"of": f"{apart.prefill.alias}: "}, apart.prefill, apart.prefill.requests.height))
        for of_pair, recording, recorded in served:
            whole = [f for f in recording.findings if f.severity == "unusable" and not f.metric]
            reasons += [
                remark("unusable", **of_pair, check=finding.check, message=finding.message) for finding in whole
            ]
            rejected = sum(file.rejected_count for file in rejecting_files(recording))
            if rejected > _MOST_REJECTED * (recorded + rejected):
                reasons.append(remark("rejected", **of_pair, rejected=rejected, all=recorded + rejected))
        without = self.excluded.get(WITHOUT_LATENCIES, 0)
        if without > _MOST_WITHOUT * (without + self.requests):
            reasons.append(remark("without_latencies", requests=self.requests, all=without + self.requests))
        return tuple(reasons)

    @property
    def _nothing(self) -> Remark:
        """Why no number can be judged."""
        if not self.overloaded:
            return remark("no_number")
        if self.recording.ground_truth != RECORDED:
            return remark("failures_unknown")
        return remark("stage_alone" if self.selection.stage is not None else "too_few_served")


def rejecting_files(recording: Recording) -> list[SourceFile]:
    """Request files with rejected records."""
    rejecting = [file for file in recording.files if file.rejected_count]
    if not rejecting:
        return []
    from blis_replay.ingest.readers.formats import request_formats  # every reader, which few recordings need

    formats = {form.name for form in request_formats()}
    return [file for file in rejecting if file.kind.split(" ")[0] in formats]


def _what_decides(comparison: Comparison, judgement: Judgement) -> list[Remark]:
    """What would turn UNDECIDED into a verdict."""
    if judgement.verdict != "UNDECIDED":
        return []
    needs: dict[str, Remark] = {}
    for quantity in judgement.in_state("undecided"):
        one = quantity_decides(quantity, comparison.requests)
        before = needs.get(one.code)
        needs[one.code] = one if before is None else both_decided(before, one)
    if comparison.use == "unknown":
        needs["needs_fitted_on"] = remark("needs_fitted_on", release=comparison.run.release.name)
    return list(needs.values())


# A release that names no data type is taken for one of these, unless it was fitted on this run.
_SIXTEEN_BITS = ("auto", "bfloat16", "float16", "half")


def hardware_remarks(comparison: Comparison) -> list[Remark]:
    """Coefficients are of one GPU, data type and vLLM: the recording ran on another, or does not say on which GPU."""
    recording, run = comparison.recording, comparison.run
    release, entry, remarks = run.release, run.entry, []
    recorded = recording.hardware or UNKNOWN_HARDWARE
    said = release.hardware if UNKNOWN_HARDWARE not in release.hardware else None
    if recorded != release.hardware:
        from blis_replay.blis.latency.gpu_names import same_gpu  # most recordings name it as the release does

        remarks += [] if same_gpu(recorded, release.hardware) else [remark("hardware", recorded=recorded, release=said)]
    dtype = recording.served_dtype
    other = dtype is not None and dtype not in _SIXTEEN_BITS and comparison.use not in FITTED
    if other and entry is not None and entry.dtype is None:
        remarks.append(remark("data_type", recorded=dtype))
    fits = release.fitted_on or ()
    version = recording.engine.get("vllm_version")
    served_by = None if version is None else known_release(version.value)
    versions = {said: known for fit in fits if (said := fit.vllm_version) and (known := known_release(said))}
    # The first two numbers: further ones are repairs.
    if version is not None and served_by and versions and served_by[:2] not in {of[:2] for of in versions.values()}:
        remarks.append(remark("other_vllm", recorded=str(version.value), fitted=tuple(sorted(versions))))
    fitted = {fit.layers or "" for fit in fits}
    if fitted and "" not in fitted and (layers := layers_in_words(run.plan.engine.kv_cache_groups)) not in fitted:
        remarks.append(remark("other_layers", replayed=layers, fitted=tuple(sorted(fitted))))
    return remarks


def _means(values: Mapping[MetricStatistic, _Value]) -> dict[str, _Value]:
    """Of the judged metrics, what there is of the mean."""
    return {metric: values[metric, "mean"] for metric in THRESHOLDS if (metric, "mean") in values}


def draws_remarks(comparison: Comparison) -> list[Remark]:
    """Median and range of the errors of all reconstructions, where they decide something."""
    draws = comparison.draws
    if draws is None or not draws.count:
        return []
    return [remark("draws", count=draws.count, ranges={m: draws.range_of((m, "mean")) for m in _means(draws.errors)})]


# A pace nearer to that of the coefficients, or a smaller trend, moves no verdict.
_LEAST_PACE = 0.02


def change_remarks(code: str, change: Estimate | None) -> list[Remark]:
    """Of code ``pace`` or ``trend``, where its whole interval says so; see ``Comparison``."""
    if change is None or change.low <= 0 <= change.high or abs(change.error) < _LEAST_PACE:
        return []
    return [remark(code, change=change.error, low=change.low, high=change.high)]


def rejected_remarks(recording: Recording) -> list[Remark]:
    """Records that were rejected when they were read, where there are few of them."""
    return [remark("rejected_records", loss=file.loss()) for file in rejecting_files(recording)]


def _remarks(comparison: Comparison) -> list[Remark]:
    repeats, found, beyond = comparison.repeats, comparison.saturation, comparison.run.outside
    remarks = [remark("parts", parts=comparison.parts)] if comparison.parts else []
    remarks += change_remarks("pace", comparison.pace)
    remarks += [] if comparison.overloaded else change_remarks("trend", comparison.trend)
    if found is not None and (found.from_us, found.simulated.from_us) != (None, None):
        remarks.append(remark("saturation", verdict=found.remarks[0]))
    remarks += draws_remarks(comparison)
    if repeats is not None:
        remarks.append(remark("repeats", recordings=repeats.recordings, apart=_means(repeats.apart)))
    for side, attained in (comparison.promised or {}).items():
        remarks.append(remark("slo", side=side, attained=attained.document))
    remarks += hardware_remarks(comparison)
    if comparison.warming is not None:
        remarks.append(remark("warm_up", **vars(comparison.warming)))
    if beyond is not None and beyond.matters:
        remarks.append(remark("extrapolated", what=str(beyond)))
    entry = comparison.run.entry
    if entry is not None and comparison.use in HELD_OUT and (entry.fit is None or entry.fit.steps is None):
        remarks.append(remark("fit_range_unknown", release=comparison.run.release.name))
    between_us = _means(comparison.predicted_us)
    if comparison.overloaded:  # its latencies measure the queue
        between_us = {metric: us for metric, us in between_us.items() if metric == "itl"}
    if between_us:
        remarks.append(remark("predicted", between_us=between_us))
    if comparison.skill:
        remarks.append(remark("skill", skills=comparison.skill))
    remarks += argument_remarks(comparison.recording, comparison.open_arguments)
    refused = comparison.excluded.get(NO_SERVER, 0)
    if refused:
        remarks.append(remark("left_out", requests=refused, why=NO_SERVER))
    if left_out := sum(comparison.excluded.values()) - refused:
        remarks.append(remark("left_out", requests=left_out))
    remarks += rejected_remarks(comparison.recording)
    changed = [(f.severity, f.check, f.metric or "") for f in comparison.recording.findings if f.severity != "note"]
    return [*remarks, *([remark("checks", findings=changed)] if changed else [])]
