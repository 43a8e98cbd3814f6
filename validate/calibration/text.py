"""What a calibration, a comparison of single steps, and a generalisation answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any

import numpy as np

from blis_replay.blis.releases.fit import CoefficientFit, PartScore
from blis_replay.ingest.recording import RECORDED, UNKNOWN, Recording
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named, table_of
from blis_replay.validate.calibration.calibrate import ModelFit
from blis_replay.validate.calibration.every_step import FORM
from blis_replay.validate.calibration.evidence import is_load_level
from blis_replay.validate.calibration.generalize import FoldResult, Generalisation, LeaveOut, Score
from blis_replay.validate.calibration.physical import PRIORS, PhysicalFit
from blis_replay.validate.calibration.step_errors import LineFit, StepError
from blis_replay.validate.text.answer import RECONSTRUCTED, Answer, Block, Line, Part, Verbatim
from blis_replay.validate.text.cells import cell_text, percent_plain

_COEFFICIENT_COLUMNS = columns_named("coefficient", "us", "95 % from", "to", "status")
_SCORED = ("e2e", "e2e_p99", "ttft", "ttft_p99", "itl")
_SCORE_COLUMNS = (
    *columns_named("experiment", "part", kind="text"),
    *columns_named("E2E", "p99", "TTFT", "p99", "ITL", kind="error"),
    Column("requests", "count", wide=1),
    Column("of the run", "word", wide=2),
    Column("slug", "text", wide=3),
)


def calibration_answer(
    release: str, fits: Sequence[ModelFit], recordings: Sequence[Recording], again: str, *, written: bool
) -> Answer:
    """For each model its coefficients with bounds, the scheduling mode, and scores by part; a row per coefficient.

    ``release``: the file, ``written`` or not: a fit that misses its own training data is not, and the exit code is 1.
    ``recordings``: what it was fitted to; ``again``: options that name the release, and the store if not the usual
    one.  In the document coefficients are in us, errors of windows in percent, and scores are fractions.
    """
    aliases = {recording.slug: recording.alias for recording in recordings}
    again = f"blis-replay validate --experiment {quote(recordings[0].alias)}{again}"
    rows = [
        {"model": fit.entry.model, "tensor_parallelism": fit.entry.tensor_parallelism, **asdict(coefficient)}
        for fit in fits
        for coefficient in fit.record.coefficients
    ]
    misses = [f"{fit.entry.model}: misses its own training data: {'; '.join(fit.missed)}" for fit in fits if fit.missed]
    done = Verbatim(f"wrote {release}; try it:\n  {again}") if written else Line(f"{release} not written; {_REMEDY}")
    document = {"release": release, "written": written, "fits": [_document(fit) for fit in fits]}
    page: list[Part] = []
    for fit in fits:
        page += [Block(_fit(fit)), *_scores(fit, aliases)]
    ended: Part = Block([*(Line(miss, mark=Toned("misses", "bad")) for miss in misses), done])
    return Answer([*page, ended], document, table_of(rows), int(not written), tuple(misses))


_REMEDY = "check the engine arguments (KV blocks, max_num_seqs), or write it anyway with --force"


def _document(fit: ModelFit) -> dict[str, Any]:
    return {
        "model": fit.entry.model,
        "tensor_parallelism": fit.entry.tensor_parallelism,
        "used": [{"experiment": recording.slug, "data": kind} for recording, kind in fit.used],
        "windows": fit.rows,
        "window_error_percent": fit.agreement,
        "missed": list(fit.missed),
        **asdict(fit.record),
        "scheduling_configured": None if fit.scheduling is None else fit.scheduling.configured,
        "scheduling_contradicts": fit.scheduling is not None and fit.scheduling.contradicts,
    }


def _fit(fit: ModelFit) -> list[Part]:
    record, title = fit.record, f"{fit.entry.model} tp {fit.entry.tensor_parallelism}"
    agreement = ", ".join(f"{name.upper() if name != 'cycle' else name} {v:.1f} %" for name, v in fit.agreement.items())
    remarks = [f"  {c.name}: {c.remark}" for c in record.coefficients if c.status != "fitted"]
    levels = all(is_load_level(recording) for recording, _data in fit.used)
    row = "load level" if levels else "step" if record.form == FORM else "window"
    drawn = "draws of load levels" if levels else f"draws of blocks of neighbouring {row}s"
    return [
        Line(f"{title}: {record.form}", mark=Toned(title, "heading")),
        Line(f"  {fit.rows:,} {row}s; mean absolute error of a {row}: {agreement}", "    "),
        Line(f"  95 %: bounds of a coefficient over {drawn}", "    "),
        Table("", _COEFFICIENT_COLUMNS, [_coefficient(c) for c in record.coefficients]),
        *(Line(remark, "    ") for remark in remarks),
        *_scheduling(fit),
    ]


def _scores(fit: ModelFit, aliases: Mapping[str, str]) -> list[Table]:
    rows = [_score(score, aliases) for score in fit.record.scores]
    return [Table("", _SCORE_COLUMNS, rows)] if rows else []


def _scheduling(fit: ModelFit) -> list[Line]:
    seen = fit.scheduling
    if seen is None:
        return []
    recorded = seen.configured_source != UNKNOWN
    known = f"by the recording ({seen.configured_source})" if recorded else "assumed (not recorded)"
    lines = [
        Line(
            f"  scheduling: {seen.used} used; {seen.told} by the latencies, {seen.configured} {known}",
            "    ",
        ),
        Line(f"    {seen.text}", "    "),
    ]
    if seen.contradicts:
        value = str(seen.told == "asynchronous").lower()
        warning = (
            "  warning: the latencies contradict the engine argument; if it is wrong, ingest again with "
            f"--engine FILE.yaml that says async_scheduling: {value}"
        )
        lines.append(Line(warning, "    ", Toned("warning:", "bad")))
    return lines


def _coefficient(fit: CoefficientFit) -> list[Cell]:
    digits = 3 if fit.value_us < 1 else 1 if fit.value_us < 1000 else 0
    held = fit.status == "prior"
    bounds = [None, None] if held else [f"{v:,.{digits}f}" for v in (fit.low_us, fit.high_us)]
    status = Toned("prior: not identified", "caution") if held else fit.status
    return [fit.name, f"{fit.value_us:,.{digits}f}", *bounds, status]


def _score(score: PartScore, aliases: Mapping[str, str]) -> list[Cell]:
    part = " to ".join(percent_plain(share) for share in score.window)
    named = (aliases.get(score.experiment, score.experiment), score.part)
    return [*named, *(score.errors.get(name) for name in _SCORED), score.requests, part, score.experiment]


_LINE_COLUMNS = columns_named("target", "n", "b0 us", "us/prefill", "us/decode", "MAPE", "median", "R2")


def steps_answer(
    title: str,
    experiment: Mapping[str, str],
    cycle: Sequence[StepError],
    duration: Sequence[StepError],
    lines: Sequence[LineFit],
) -> Answer:
    """Errors against the cycle and against ``step.duration_us``, and lines fitted to each; fractions and us.

    ``experiment``: what the document says of the recording and the release.  The rows are one per group of steps, and
    one per line (``line on ...``) with its own MAPE.
    """
    against = {"cycle": cycle, "duration": duration}
    fits: list[list[Cell]] = [
        [
            *(fit.target, fit.steps),
            *(f"{value:,.{digits}f}" for value, digits in zip(fit.coefficients_us, (0, 1, 1), strict=True)),
            *(percent_plain(fit.mape), percent_plain(fit.median_ape), f"{fit.r_squared:.2f}"),
        ]
        for fit in lines
    ]
    page: list[Part] = [
        Line(title, mark=Toned(title, "heading")),
        _errors("against the step cycle", "cycle ms", cycle),
        "step cycle: start to start of consecutive sampled steps, with the batch of the earlier one, or of the later "
        "one under asynchronous scheduling; r: Pearson's correlation; signed: of the mean",
        _errors("against step.duration_us", "dur. ms", duration),
        "step.duration_us: CPU time inside the scheduling call, not a step time; it stands here for comparison "
        "with work that was fitted to it",
        "A line fitted to each target by least squares, scored on the same steps:",
        Table("", _LINE_COLUMNS, fits),
    ]
    document = {
        **experiment,
        **{target: [asdict(error) for error in errors] for target, errors in against.items()},
        "lines": [asdict(fit) for fit in lines],
    }
    rows = [{"against": target, **asdict(error)} for target, errors in against.items() for error in errors]
    scored = [{"against": f"line on {f.target}", "group": "all", "steps": f.steps, "mape": f.mape} for f in lines]
    names = rows[0] if rows else scored[0] if scored else ()
    return Answer(page, document, table_of([dict.fromkeys(names) | row for row in [*rows, *scored]]))


def _errors(against: str, time: str, errors: Sequence[StepError]) -> Table:
    columns = (
        Column(against),
        *(Column("n", "count"), Column(time, "ms"), Column("MAPE", "share")),
        *(Column("signed", "error"), Column("r", "decimal")),
    )
    return Table("", columns, [[e.group, e.steps, e.recorded_us, e.mape, e.signed, e.correlation] for e in errors])


# What is shown of each experiment, and where there is more room.
_SHOWN = (("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99"), ("itl", "mean"))
_MORE = (("e2e", "p50"), ("ttft", "p50"), ("itl", "p50"), ("tpot", "mean"))
_COLUMNS = (
    Column("experiment", "text"),
    *columns_named("E2E", "p99", "TTFT", "p99", "ITL", kind="points"),
    Column("step", "points_plain"),
    *columns_named("seen E2E", "TTFT", kind="points"),
    Column("step", "points_plain"),
    *(Column(name, "points", wide=i) for i, name in enumerate(("E2E p50", "TTFT p50", "ITL p50", "TPOT"), 1)),
    Column("slug", "text", wide=5),
)


@dataclass(frozen=True)
class PublishedScore:
    """A published generalisation error: of which study, what was left out, mean absolute error as a fraction."""

    study: str
    left_out: LeaveOut
    metric: str
    error: float


PUBLISHED_SOURCE = (
    "StepML leaderboard of all rounds, on the H100 experiments that are bundled here; its step MAPE is against "
    "step.duration_us, which is not the step cycle"
)
PUBLISHED_SCORES = (
    PublishedScore("regime ensemble (round 2)", "model", "step", 1.086),
    PublishedScore("regime ensemble (round 2)", "workload", "step", 1.174),
    PublishedScore("CMA-ES calibration (round 3)", "model", "e2e", 0.148),
    PublishedScore("direct calibration (round 4)", "model", "e2e", 0.307),
)


def generalisation_answer(result: Generalisation) -> Answer:
    """The folds, the overloaded runs apart, the coefficients of each fit, and published errors beside ours.

    Errors are fractions.  The rows are one per number of an experiment that was left out; ``seen_error``: by a fit to
    all; ``step`` is a MAPE.
    """
    seen = {score.slug: score for score in result.in_distribution.scores}
    scores = [score for fold in result.folds for score in fold.scores]
    apart = [_row(score, seen.get(score.slug)) for score in scores if score.overloaded and not score.problem]
    problems = {score.alias: score.problem for score in scores if score.problem} | dict(result.not_used)
    page: list[Part] = [
        f"One {result.by} left out at a time, model form {result.form}. Signed errors in %; step: mean absolute error "
        "of single step cycles, where there are step records; seen: by a fit to all experiments",
        Table("", _COLUMNS, [row for fold in result.folds for row in _fold_rows(fold, seen)]),
        *([Table("overloaded, reported and not averaged", _COLUMNS, apart)] if apart else []),
        Block([f"{alias}: {why}" for alias, why in problems.items()], "not predicted"),
        *([RECONSTRUCTED] if any(score.ground_truth != RECORDED for score in scores) else []),
        *_coefficients(result),
        _published(result),
    ]
    document = {
        "left_out": result.by,
        "model_form": result.form,
        "folds": [_fold_json(fold) for fold in result.folds],
        "in_distribution": _fold_json(result.in_distribution),
        "mean_abs_error": _means_json(scores),
        "not_used": dict(result.not_used),
        "published": [vars(p) for p in PUBLISHED_SCORES if p.left_out == result.by],
        "published_source": PUBLISHED_SOURCE,
    }
    return Answer(page, document, _rows(result))


def mean_abs_error(scores: Sequence[Score], metric: str, statistic: str = "mean") -> float | None:
    """Mean over experiments that are not overloaded of the absolute error; ``metric`` ``step``: of the step MAPE."""
    counted = [score for score in scores if not score.overloaded]
    if metric == "step":
        errors = [score.step_mape for score in counted]
    else:
        errors = [score.errors.get(metric, {}).get(statistic) for score in counted]
    known = [abs(error) for error in errors if error is not None]
    return float(np.mean(known)) if known else None


_DATA_COLUMNS = (
    *columns_named("left_out", "experiment", "alias", "ground_truth", "overloaded", "metric", "statistic", kind="data"),
    *columns_named("error", "seen_error", kind="real"),
    Column("problem", "data"),
)


def _rows(result: Generalisation) -> Table:
    seen = {score.slug: _score_errors(score) for score in result.in_distribution.scores}
    rows = [
        (fold.name, score.slug, score.alias, score.ground_truth, score.overloaded, *cell, error, before, score.problem)
        for fold in result.folds
        for score in fold.scores
        for cell, error in _score_errors(score).items()
        for before in [seen.get(score.slug, {}).get(cell)]
    ]
    return Table("", _DATA_COLUMNS, rows)


def _score_errors(score: Score) -> dict[tuple[str, str], float | None]:
    errors = {(metric, name): error for metric, cells in score.errors.items() for name, error in cells.items()}
    return {**errors, ("step", "mape"): score.step_mape}


def _fold_rows(fold: FoldResult, seen: dict[str, Score]) -> list[list[Cell]]:
    judged = [score for score in fold.scores if not score.overloaded and not score.problem]
    rows = [_row(score, seen.get(score.slug)) for score in sorted(judged, key=lambda score: score.alias)]
    return [*rows, _mean_row("  mean |error|", judged, seen)] if len(rows) > 1 else rows


def _row(score: Score, seen: Score | None) -> list[Cell]:
    def errors(of: Score | None, cells: Sequence[tuple[str, str]]) -> list[Cell]:
        return [None if of is None else of.errors.get(metric, {}).get(statistic) for metric, statistic in cells]

    mark = "" if score.ground_truth == RECORDED else "*"
    before = [*errors(seen, (("e2e", "mean"), ("ttft", "mean"))), seen.step_mape if seen else None]
    shown = errors(score, _SHOWN)
    return [score.alias + mark, *shown, score.step_mape, *before, *errors(score, _MORE), score.slug]


def _mean_row(label: str, scores: Sequence[Score], seen: dict[str, Score]) -> list[Cell]:
    """Means of absolute errors, which have no sign."""
    before = [seen[score.slug] for score in scores if score.slug in seen]
    means = [
        *(mean_abs_error(scores, metric, statistic) for metric, statistic in _SHOWN),
        mean_abs_error(scores, "step"),
        *(mean_abs_error(before, metric) for metric in ("e2e", "ttft", "step")),
        *(mean_abs_error(scores, metric, statistic) for metric, statistic in _MORE),
    ]
    return [label, *(cell_text(mean, "points_plain") for mean in means), ""]


def _published(result: Generalisation) -> Block:
    scores = [score for fold in result.folds for score in fold.scores]
    metrics = ("e2e", "ttft", "itl", "step")
    rows: list[list[Cell]] = [[f"this fit, {result.form}", *(mean_abs_error(scores, metric) for metric in metrics)]]
    rows += [
        [f"{p.study}, published", *(p.error if metric == p.metric else None for metric in metrics)]
        for p in PUBLISHED_SCORES
        if p.left_out == result.by
    ]
    title = Column("mean |error| on what was left out, %", "text")
    columns = (title, *columns_named("E2E", "TTFT", "ITL", "step", kind="points_plain"))
    return Block([Table("", columns, rows), f"published: {PUBLISHED_SOURCE}"])


def _coefficients(result: Generalisation) -> list[Block]:
    fits = {fold.name: fold.fit for fold in (*result.folds, result.in_distribution) if fold.fit is not None}
    rows = [
        [
            name,
            *(f"{getattr(fit.coefficients, name):.4g}{'' if fit.identified[name] else '~'}" for fit in fits.values()),
        ]
        for name in PRIORS
    ]
    columns = columns_named("coefficient", *(f"-{name[:12]}" if name != "all" else name for name in fits))
    note = "~: the recordings did not halve the prior's uncertainty; the value is mostly the prior's"
    return [Block([Table("", columns, rows), note])] if fits else []


def _fold_json(fold: FoldResult) -> dict[str, object]:
    return {
        "name": fold.name,
        "trained_on": list(fold.trained_on),
        "coefficients": _coefficients_json(fold.fit),
        "release_hash": fold.release.sha256 if fold.release else None,
        "experiments": [asdict(score) for score in fold.scores],
        "mean_abs_error": _means_json(fold.scores),
    }


def _coefficients_json(fit: PhysicalFit | None) -> dict[str, object] | None:
    if fit is None:
        return None
    return {
        name: {
            "value": getattr(fit.coefficients, name),
            "spread": fit.spread[name],
            "identified": fit.identified[name],
            "prior": prior.value,
            "prior_spread": prior.spread,
            "prior_source": prior.why,
        }
        for name, prior in PRIORS.items()
    }


def _means_json(scores: Sequence[Score]) -> dict[str, float | None]:
    return {metric: mean_abs_error(scores, metric) for metric in ("e2e", "ttft", "itl", "step")}
