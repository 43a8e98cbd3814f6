"""Fits as tables, sentences, a frame and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

from blis_replay.blis.release_fit import CoefficientFit, PartScore
from blis_replay.validate.calibration.calibrate import ModelFit
from blis_replay.validate.terminal import Cell, Toned, percent, percent_plain, table, toned, wrap


def fits_text(fits: Sequence[ModelFit], aliases: dict[str, str]) -> str:
    """For each model its coefficients with bounds, the scheduling mode told from the data, and scores by part.

    ``aliases``: slug to alias.
    """
    return "\n\n".join(_fit_text(fit, aliases) for fit in fits)


def _fit_text(fit: ModelFit, aliases: dict[str, str]) -> str:
    record, entry = fit.record, fit.entry
    agreement = ", ".join(f"{name.upper() if name != 'cycle' else name} {v:.1f} %" for name, v in fit.agreement.items())
    parts = [
        f"{toned(f'{entry.model} tp {entry.tensor_parallelism}', 'heading')}: {record.form}",
        wrap(f"  {fit.rows:,} windows; mean absolute error of a window: {agreement}", "    "),
        table(["coefficient", "us", "95 % from", "to", "status"], [_row(c) for c in record.coefficients]),
        *(wrap(f"  {c.name}: {c.remark}", "    ") for c in record.coefficients if c.status != "fitted"),
        *_scheduling(fit),
    ]
    if record.scores:
        header = ["experiment", "part", "E2E", "p99", "TTFT", "p99", "ITL", "requests", "of the run", "slug"]
        scores = [_score(s, aliases) for s in record.scores]
        parts += ["", table(header, scores, left=(0, 1, 9), wide=(7, 8, 9))]
    return "\n".join(parts)


def _scheduling(fit: ModelFit) -> list[str]:
    told = fit.scheduling
    if told is None:
        return []
    lines = [
        wrap(
            f"  scheduling: {told.used} used; {told.told} by the latencies, {told.configured} by the recording "
            f"({told.configured_source})",
            "    ",
        ),
        wrap(f"    {told.text}", "    "),
    ]
    if told.contradicts:
        value = str(told.told == "asynchronous").lower()
        lines.append(
            wrap(
                "  warning: the latencies contradict the engine argument; if it is wrong, ingest again with "
                f"--engine FILE.yaml that says async_scheduling: {value}",
                "    ",
                Toned("warning:", "bad"),
            )
        )
    return lines


def _row(fit: CoefficientFit) -> list[Cell]:
    digits = 3 if fit.value_us < 1 else 1 if fit.value_us < 1000 else 0
    held = fit.status == "prior"
    bounds = ["-", "-"] if held else [f"{v:,.{digits}f}" for v in (fit.low_us, fit.high_us)]
    return [
        fit.name,
        f"{fit.value_us:,.{digits}f}",
        *bounds,
        Toned("prior: not identified", "caution") if held else fit.status,
    ]


def _score(score: PartScore, aliases: dict[str, str]) -> list[str]:
    errors = [percent(score.errors.get(name)) for name in ("e2e", "e2e_p99", "ttft", "ttft_p99", "itl")]
    part = " to ".join(percent_plain(share) for share in score.window)
    named = [aliases.get(score.experiment, score.experiment), score.part]
    return [*named, *errors, f"{score.requests:,}", part, score.experiment]


def fits_json(fits: Sequence[ModelFit]) -> list[dict[str, object]]:
    """Fits for ``--json``: coefficients in us, errors of windows in percent, scores as fractions."""
    return [
        {
            "model": fit.entry.model,
            "tensor_parallelism": fit.entry.tensor_parallelism,
            "used": [{"experiment": recording.slug, "data": kind} for recording, kind in fit.used],
            "windows": fit.rows,
            "window_error_percent": fit.agreement,
            **asdict(fit.record),
            "scheduling_configured": None if fit.scheduling is None else fit.scheduling.configured,
            "scheduling_contradicts": fit.scheduling is not None and fit.scheduling.contradicts,
        }
        for fit in fits
    ]


def fits_frame(fits: Sequence[ModelFit]) -> pl.DataFrame:
    """A row a coefficient of a model: ``name, value_us, low_us, high_us, status, remark``."""
    return pl.DataFrame(
        [
            {"model": fit.entry.model, "tensor_parallelism": fit.entry.tensor_parallelism, **asdict(coefficient)}
            for fit in fits
            for coefficient in fit.record.coefficients
        ],
        infer_schema_length=None,
    )
