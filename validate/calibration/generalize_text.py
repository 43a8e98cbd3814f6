"""A generalisation as tables, as a frame and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.ingest.recording import RECORDED
from blis_replay.validate.calibration.generalize import FoldResult, Generalisation, LeaveOut, Score
from blis_replay.validate.calibration.physical_fit import PRIORS, PhysicalFit
from blis_replay.validate.terminal import table, toned, wrap

_COLUMNS = (("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99"), ("itl", "mean"))
_MORE = (("e2e", "p50"), ("ttft", "p50"), ("itl", "p50"), ("tpot", "mean"))
_HEADER = (
    *("experiment", "E2E", "p99", "TTFT", "p99", "ITL", "step", "seen E2E", "TTFT", "step"),
    *("E2E p50", "TTFT p50", "ITL p50", "TPOT", "slug"),
)
_WIDE = (10, 11, 12, 13, 14)


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


def generalisation_text(result: Generalisation) -> str:
    """The folds, the overloaded runs apart, the coefficients of each fit, and published errors beside ours."""
    seen = {score.slug: score for score in result.in_distribution.scores}
    scores = [score for fold in result.folds for score in fold.scores]
    apart = [score for score in scores if score.overloaded and not score.problem]
    parts = [
        wrap(
            f"One {result.by} left out at a time, model form {result.form}. Signed errors in %; step: mean absolute "
            "error of single step cycles, where there are step records; seen: by a fit to all experiments"
        ),
        table(_HEADER, [row for fold in result.folds for row in _fold_rows(fold, seen)], (0, 14), _WIDE),
    ]
    if apart:
        rows = [_row(score, seen.get(score.slug)) for score in apart]
        parts.append(
            toned("overloaded, reported and not averaged:", "heading") + "\n" + table(_HEADER, rows, (0, 14), _WIDE)
        )
    problems = {score.alias: score.problem for score in scores if score.problem} | dict(result.not_used)
    if problems:
        parts.append(
            toned("not predicted:", "heading")
            + "\n"
            + "\n".join(wrap(f"{alias}: {why}") for alias, why in problems.items())
        )
    if any(score.ground_truth != RECORDED for score in scores):
        parts.append("* ground truth: published aggregates, requests reconstructed from them")
    parts += [text for text in (_coefficients_text(result), _published_text(result)) if text]
    return "\n\n".join(parts)


def mean_abs_error(scores: Sequence[Score], metric: str, statistic: str = "mean") -> float | None:
    """Mean over experiments that are not overloaded of the absolute error; ``metric`` ``step``: of the step MAPE."""
    counted = [score for score in scores if not score.overloaded]
    if metric == "step":
        errors = [score.step_mape for score in counted]
    else:
        errors = [score.errors.get(metric, {}).get(statistic) for score in counted]
    known = [abs(error) for error in errors if error is not None]
    return float(np.mean(known)) if known else None


def generalisation_json(result: Generalisation) -> dict[str, object]:
    """As ``docs/json.md`` describes it: errors are fractions."""
    scores = [score for fold in result.folds for score in fold.scores]
    return {
        "left_out": result.by,
        "model_form": result.form,
        "folds": [_fold_json(fold) for fold in result.folds],
        "in_distribution": _fold_json(result.in_distribution),
        "mean_abs_error": _means_json(scores),
        "not_used": dict(result.not_used),
        "published": [vars(p) for p in PUBLISHED_SCORES if p.left_out == result.by],
        "published_source": PUBLISHED_SOURCE,
    }


_FRAME_COLUMNS = {
    **dict.fromkeys(("left_out", "experiment", "alias", "ground_truth"), pl.String),
    "overloaded": pl.Boolean,
    **dict.fromkeys(("metric", "statistic"), pl.String),
    **dict.fromkeys(("error", "seen_error"), pl.Float64),
    "problem": pl.String,
}


def generalisation_frame(result: Generalisation) -> pl.DataFrame:
    """A row a number of an experiment that was left out; ``seen_error``: by a fit to all; ``step`` is a MAPE."""
    seen = {score.slug: _score_errors(score) for score in result.in_distribution.scores}
    rows = [
        (fold.name, score.slug, score.alias, score.ground_truth, score.overloaded, *cell, error, before, score.problem)
        for fold in result.folds
        for score in fold.scores
        for cell, error in _score_errors(score).items()
        for before in [seen.get(score.slug, {}).get(cell)]
    ]
    return pl.DataFrame(rows, orient="row", schema=_FRAME_COLUMNS)


def _score_errors(score: Score) -> dict[tuple[str, str], float | None]:
    errors = {(metric, name): error for metric, cells in score.errors.items() for name, error in cells.items()}
    return {**errors, ("step", "mape"): score.step_mape}


def _fold_rows(fold: FoldResult, seen: dict[str, Score]) -> list[list[str]]:
    judged = [score for score in fold.scores if not score.overloaded and not score.problem]
    rows = [_row(score, seen.get(score.slug)) for score in sorted(judged, key=lambda score: score.alias)]
    if len(rows) > 1:
        rows.append(_mean_row("  mean |error|", judged, seen))
    return rows


def _row(score: Score, seen: Score | None) -> list[str]:
    mark = "" if score.ground_truth == RECORDED else "*"
    errors = [_percent(score.errors[metric][statistic]) for metric, statistic in _COLUMNS]
    known = seen.errors if seen else {}
    before = [_percent(known.get(metric, {}).get("mean")) for metric in ("e2e", "ttft")]
    step = [_plain(score.step_mape), *before, _plain(seen.step_mape if seen else None)]
    more = [_percent(score.errors.get(metric, {}).get(statistic)) for metric, statistic in _MORE]
    return [score.alias + mark, *errors, *step, *more, score.slug]


def _mean_row(label: str, scores: Sequence[Score], seen: dict[str, Score]) -> list[str]:
    before = [seen[score.slug] for score in scores if score.slug in seen]
    errors = [_plain(mean_abs_error(scores, metric, statistic)) for metric, statistic in _COLUMNS]
    step = _plain(mean_abs_error(scores, "step"))
    seen_errors = [_plain(mean_abs_error(before, metric)) for metric in ("e2e", "ttft", "step")]
    more = [_plain(mean_abs_error(scores, metric, statistic)) for metric, statistic in _MORE]
    return [label, *errors, step, *seen_errors, *more, ""]


def _published_text(result: Generalisation) -> str:
    scores = [score for fold in result.folds for score in fold.scores]
    header = ["mean |error| on what was left out, %", "E2E", "TTFT", "ITL", "step"]
    ours = [_plain(mean_abs_error(scores, metric)) for metric in ("e2e", "ttft", "itl", "step")]
    rows = [[f"this fit, {result.form}", *ours]]
    for published in PUBLISHED_SCORES:
        if published.left_out == result.by:
            cells = [_plain(published.error if metric == published.metric else None) for metric in ("e2e", "step")]
            rows.append([f"{published.study}, published", cells[0], "-", "-", cells[1]])
    return table(header, rows) + "\n" + wrap(f"published: {PUBLISHED_SOURCE}")


def _coefficients_text(result: Generalisation) -> str:
    fits = {fold.name: fold.fit for fold in (*result.folds, result.in_distribution) if fold.fit is not None}
    if not fits:
        return ""
    names = list(PRIORS)
    rows = [
        [name, *(_number(getattr(fit.coefficients, name), fit.identified[name]) for fit in fits.values())]
        for name in names
    ]
    header = ["coefficient", *(f"-{name[:12]}" if name != "all" else name for name in fits)]
    note = wrap("~: the recordings did not halve the prior's uncertainty; the value is mostly the prior's")
    return table(header, rows) + "\n" + note


def _fold_json(fold: FoldResult) -> dict[str, object]:
    return {
        "name": fold.name,
        "trained_on": list(fold.trained_on),
        "coefficients": _coefficients_json(fold.fit),
        "release_hash": fold.release.sha256 if fold.release else None,
        "experiments": [_score_json(score) for score in fold.scores],
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


def _score_json(score: Score) -> dict[str, object]:
    return {
        "slug": score.slug,
        "alias": score.alias,
        "ground_truth": score.ground_truth,
        "overloaded": score.overloaded,
        "errors": {metric: dict(cells) for metric, cells in score.errors.items()},
        "step_mape": score.step_mape,
        "problem": score.problem,
    }


def _means_json(scores: Sequence[Score]) -> dict[str, float | None]:
    return {metric: mean_abs_error(scores, metric) for metric in ("e2e", "ttft", "itl", "step")}


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:+.1f}"


def _plain(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def _number(value: float, identified: bool) -> str:
    return f"{value:.4g}" + ("" if identified else "~")
