"""Step errors as tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from blis_replay.validate.calibration.step_errors import LineFit, StepError
from blis_replay.validate.terminal import milliseconds, percent, percent_plain, table, wrap


def steps_text(title: str, cycle: Sequence[StepError], duration: Sequence[StepError], lines: Sequence[LineFit]) -> str:
    """Errors against the cycle and, beside them, against ``step.duration_us``; then lines fitted to each target."""
    by_group = {error.group: error for error in duration}
    rows = [
        [
            error.group,
            f"{error.steps:,}",
            milliseconds(error.recorded_us),
            percent_plain(error.mape),
            percent(error.signed),
            "-" if error.correlation is None else f"{error.correlation:.2f}",
            percent_plain(by_group[error.group].mape) if error.group in by_group else "-",
        ]
        for error in cycle
    ]
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
            title,
            "",
            table(["steps", "n", "cycle ms", "MAPE", "signed", "r", "MAPE of dur."], rows),
            "",
            wrap(
                "step cycle: start to start of consecutive sampled steps, with the batch of the later one; dur.: "
                "step.duration_us, CPU time inside the scheduling call, which is no step time and stands here for "
                "comparison with work that was fitted to it"
            ),
            "",
            "A line fitted to each target by least squares, scored on the same steps:",
            "",
            table(["target", "n", "b0 us", "us/prefill", "us/decode", "MAPE", "median", "R2"], fits),
        ]
    )


def steps_json(
    cycle: Sequence[StepError], duration: Sequence[StepError], lines: Sequence[LineFit]
) -> dict[str, object]:
    """The same for programs; errors as fractions, times in us."""
    return {
        "cycle": [asdict(error) for error in cycle],
        "duration": [asdict(error) for error in duration],
        "lines": [asdict(fit) for fit in lines],
    }
