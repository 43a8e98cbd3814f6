"""The answer of a gate for a terminal, in 80 columns."""

from __future__ import annotations

from blis_replay.validate.comparison.error_columns import verdict_tone
from blis_replay.validate.gating.verdicts import Check, GateReport, Judgement
from blis_replay.validate.terminal import Cell, Toned, percent, table, tables, toned, wrap

VERDICTS = {"pass": "pass", "fail": "fail", "not judged": "could not be judged"}
_MOST_COLUMNS = 4


def gate_text(report: GateReport) -> str:
    """Head, errors by experiment, changes against the baseline, order and coverage, verdict with what led to it."""
    parts = [_head(report), *_error_tables(report), _changes(report), _whole(report), _apart(report), verdict(report)]
    return "\n\n".join(part for part in parts if part)


def verdict(report: GateReport) -> str:
    """The verdict, and a line for each check that stands in the way of a pass."""
    lines = [wrap(f"- {place(check)}: {check.message}") for check in in_the_way(report)]
    return "\n".join([toned(f"verdict: {VERDICTS[report.verdict]}", verdict_tone(report.verdict)), *lines])


def in_the_way(report: GateReport) -> list[Check]:
    """Checks that failed, then those that could not be judged."""
    return [check for outcome in ("fail", "not judged") for check in report.all_checks if check.outcome == outcome]


def place(check: Check) -> str:
    """Where a check belongs: experiment and rule."""
    return f"{check.experiment}, {check.rule}" if check.experiment else check.rule


def against(report: GateReport) -> str:
    """Candidate, baseline and policy in words."""
    baseline = report.baseline.name if report.baseline else "none"
    return f"candidate {report.candidate.name}; baseline {baseline}; policy {report.policy.name}"


def outcome(judgement: Judgement) -> str:
    """What became of an experiment: the worst of its checks, or why it is not gated."""
    return judgement.outcome or {"overloaded": "overloaded", "fitted": "not held out"}[judgement.standing]


def cell_name(metric: str, statistic: str) -> str:
    """The heading of a column: the mean goes without saying."""
    return metric.upper() if statistic == "mean" else f"{metric.upper()} {statistic}"


def changed(report: GateReport) -> list[Check]:
    """Regression checks with a number, where the baseline answered anything else than the candidate."""
    return [c for c in report.all_checks if c.rule == "regression" and c.value is not None and _moved(c)]


def _moved(check: Check) -> bool:
    return bool(check.value) or any(check.interval or ())


def _head(report: GateReport) -> str:
    return wrap(f"gate: {against(report)}")


def _error_tables(report: GateReport) -> list[str]:
    """Few columns each in 80 columns, all in one table where there is room."""
    cells = list(report.policy.thresholds)
    limits = ["at most", "", *(f"{100 * report.policy.thresholds[cell]:g} %" for cell in cells), ""]
    rows = [
        [_named(j), j.uses.removeprefix("own "), *(_error(j, cell) for cell in cells), _toned_outcome(outcome(j))]
        for j in report.judgements
    ]
    header = ["error of", "fit on", *(cell_name(*cell) for cell in cells), "outcome"]
    last = len(header) - 1
    parts = [[0, 1, *range(i, min(i + _MOST_COLUMNS, last)), last] for i in range(2, max(last, 3), _MOST_COLUMNS)]
    return tables(header, [limits, *rows], parts, left=(0, 1))


def _error(judgement: Judgement, cell: tuple[str, str]) -> Cell:
    """An error; one that the policy does not let pass stands out."""
    shown = percent(judgement.errors.get(cell))
    failed = [check for check in judgement.checks if check.rule == "threshold" and check.outcome == "fail"]
    return Toned(shown, "bad") if cell in {(check.metric, check.statistic) for check in failed} else shown


def _toned_outcome(named: str) -> Toned:
    return Toned(named, verdict_tone(named))


def _named(judgement: Judgement) -> str:
    return judgement.alias + ("" if judgement.ground_truth == "recorded" else "*")


def _changes(report: GateReport) -> str:
    if report.baseline is None:
        return ""
    rows = [_change_row(check) for check in changed(report)]
    judged = [c for c in report.all_checks if c.rule == "regression" and c.value is not None]
    same = f"{len(judged) - len(rows)} of {len(judged)} errors are those of the baseline to the last digit"
    if not rows:
        return wrap(f"against {report.baseline.name}: {same}")
    title = f"change of |error|, {100 * report.policy.regression.confidence:g} % interval"
    return "\n".join([table([title, "", "points", "interval", "outcome"], rows, left=2), same])


def _change_row(check: Check) -> list[Cell]:
    low, high = check.interval or (float("nan"), float("nan"))
    numbers = [f"{100 * (check.value or 0.0):+.2f}", f"{100 * low:+.2f} .. {100 * high:+.2f}"]
    return [check.experiment, cell_name(check.metric, check.statistic), *numbers, _toned_outcome(check.outcome)]


def _whole(report: GateReport) -> str:
    """What holds of the gate as a whole; what does not stands below the verdict."""
    return "\n".join(wrap(f"{check.rule}: {check.message}") for check in report.checks if check.outcome == "pass")


def _apart(report: GateReport) -> str:
    lines = [f"not gated: {j.alias}: {j.reason}" for j in report.judgements if j.outcome is None]
    lines += [f"left out: {alias}: {why}" for alias, why in report.left_out.items()]
    if any(j.ground_truth != "recorded" for j in report.judgements):
        lines.append(
            "* published aggregates: there are no recorded requests to resample, so intervals come from resampling "
            "the simulated ones, the published number held fixed"
        )
    return "\n".join(wrap(line) for line in lines)
