"""Step errors as tables, a frame and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

from blis_replay.validate.calibration.step_errors import LineFit, StepError
from blis_replay.validate.terminal import milliseconds, percent, percent_plain, table, toned, wrap


def steps_text(title: str, cycle: Sequence[StepError], duration: Sequence[StepError], lines: Sequence[LineFit]) -> str:
    """Errors against the cycle, then against ``step.duration_us``; then lines fitted to each target."""
    fits = [
        [
            fit.target,
            f"{fit.steps:,}",
            *(f"{value:,.{digits}f}" for value, digits in zip(fit.coefficients_us, (0, 1, 1), strict=True)),
            percent_plain(fit.mape),
            percent_plain(fit.median_ape),
            f"{fit.r_squared:.2f}",
        ]
        for fit in lines
    ]
    return "\n".join(
        [
            toned(title, "heading"),
            "",
            _errors("against the step cycle", "cycle ms", cycle),
            "",
            wrap(
                "step cycle: start to start of consecutive sampled steps, with the batch of the later one; r: "
                "Pearson's correlation; signed: of the mean"
            ),
            "",
            _errors("against step.duration_us", "dur. ms", duration),
            "",
            wrap(
                "step.duration_us: CPU time inside the scheduling call, which is no step time; it stands here for "
                "comparison with work that was fitted to it"
            ),
            "",
            "A line fitted to each target by least squares, scored on the same steps:",
            "",
            table(["target", "n", "b0 us", "us/prefill", "us/decode", "MAPE", "median", "R2"], fits),
        ]
    )


def _errors(against: str, time: str, errors: Sequence[StepError]) -> str:
    rows = [
        [
            error.group,
            f"{error.steps:,}",
            milliseconds(error.recorded_us),
            percent_plain(error.mape),
            percent(error.signed),
            "-" if error.correlation is None else f"{error.correlation:.2f}",
        ]
        for error in errors
    ]
    return table([against, "n", time, "MAPE", "signed", "r"], rows)


def steps_json(
    cycle: Sequence[StepError], duration: Sequence[StepError], lines: Sequence[LineFit]
) -> dict[str, object]:
    """The same for programs; errors as fractions, times in us."""
    return {
        "cycle": [asdict(error) for error in cycle],
        "duration": [asdict(error) for error in duration],
        "lines": [asdict(fit) for fit in lines],
    }


def steps_frame(cycle: Sequence[StepError], duration: Sequence[StepError], lines: Sequence[LineFit]) -> pl.DataFrame:
    """A row a group of steps, and one a line (``line on ...``) with its own MAPE; errors as fractions, times in us."""
    against = (("cycle", cycle), ("duration", duration))
    errors = [{"against": target, **asdict(error)} for target, group in against for error in group]
    fits = [{"against": f"line on {f.target}", "group": "all", "steps": f.steps, "mape": f.mape} for f in lines]
    return pl.DataFrame([*errors, *fits], infer_schema_length=None)
