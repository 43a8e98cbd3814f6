"""What ``study generalize`` answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from blis_replay.ingest.recording import RECORDED
from blis_replay.ingest.tables import Cell, Column, Number, Table, columns_named
from blis_replay.validate.comparison.overview import mean_abs
from blis_replay.validate.text.answer import RECONSTRUCTED, Answer, Block, Part
from blis_replay.validate.text.cells import cell_text
from blis_replay_labs.silicon.physical_fit import PRIORS, PhysicalFit
from blis_replay_labs.studies.generalize import FoldResult, Generalisation, LeaveOut, Score

# What is shown of each experiment, and where there is more room.
_SHOWN = (("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99"), ("itl", "mean"))
_MORE = (("e2e", "p50"), ("ttft", "p50"), ("itl", "p50"), ("tpot", "mean"))
_SIGNED, _POINTS = Number(1, 100, signed=True), Number(1, 100)  # percent, without its sign
_COLUMNS = (
    Column("experiment", "text"),
    *columns_named("E2E", "p99", "TTFT", "p99", "ITL", kind=_SIGNED),
    Column("step", _POINTS),
    *columns_named("seen E2E", "TTFT", kind=_SIGNED),
    Column("step", _POINTS),
    *(Column(name, _SIGNED, wide=i) for i, name in enumerate(("E2E p50", "TTFT p50", "ITL p50", "TPOT"), 1)),
    Column("slug", "text", wide=5),
)


@dataclass(frozen=True)
class PublishedScore:
    """A published generalisation error: its study, what was left out, mean absolute error as a fraction."""

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
        return mean_abs(score.step_mape for score in counted)
    return mean_abs(score.errors.get(metric, {}).get(statistic) for score in counted)


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
    return [label, *(cell_text(mean, _POINTS) for mean in means), ""]


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
    columns = (title, *columns_named("E2E", "TTFT", "ITL", "step", kind=_POINTS))
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
