"""A comparison as text: the page of one experiment, the table of all."""

from __future__ import annotations

import re
from collections.abc import Sequence

from blis_replay.validate.check_text import finding_line
from blis_replay.validate.comparison.compare import THRESHOLDS, Cell, Comparison, mean_abs_errors
from blis_replay.validate.comparison.error_columns import (
    ERROR_COLUMNS,
    error_cell,
    error_cells,
    error_header,
    verdict_tone,
    wide_columns,
)
from blis_replay.validate.comparison.saturation_text import saturation_text
from blis_replay.validate.metrics import METRICS
from blis_replay.validate.terminal import Toned, milliseconds, percent, percent_plain, table, toned, wrap

_NAMES = {"e2e": "E2E", "ttft": "TTFT", "itl": "ITL", "tpot": "TPOT"}
_SEVERITY_ORDER = ("unusable", "corrected")


def comparison_text(comparison: Comparison) -> str:
    """The page of one experiment: head, metric table, pairs, verdict, findings that changed a number."""
    parts = [_head(comparison), _metric_table(comparison), wrap(pairs_sentence(comparison))]
    parts += ["\n".join(map(wrap, notes(comparison))), verdict_line(comparison)]
    parts += [saturation_text(comparison.saturation)] if comparison.saturation else []
    parts += [_findings(comparison)]
    return "\n\n".join(part for part in parts if part)


def stages_text(whole: Comparison, stages: Sequence[Comparison]) -> str:
    """A table with a row a load stage of the experiment, also where there was nothing to compare."""
    compared = {c.selection.stage: [f"{c.requests:,}", *error_cells(c)] for c in stages}
    nothing = ["0", *("-" for _ in ERROR_COLUMNS)]
    rows = [[f"stage {s.stage}", *compared.get(s.stage, nothing)] for s in whole.run.recording.stages]
    return table([f"{whole.alias} by load stage", "requests", *error_header()], rows, wide=wide_columns(2))


def summary_text(comparisons: Sequence[Comparison], not_judged: dict[str, str]) -> str:
    """The table of all experiments, the overloaded ones apart, with means."""
    ordered = sorted(comparisons, key=lambda c: c.alias)
    gated = [c for c in ordered if c.verdict != "overloaded"]
    apart = [c for c in ordered if c.verdict == "overloaded"]
    means = mean_abs_errors(comparisons)
    mean_row = [percent_plain(means[metric]) if name == "mean" else "" for metric, name in ERROR_COLUMNS]
    rows = [[*_summary_row(c), Toned(c.verdict, verdict_tone(c.verdict)), *_identity(c)] for c in gated]
    header = ["experiment", "fit on", *error_header()]
    last = len(header) + 1
    left, wide = (0, 1, last + 1), [*wide_columns(2), last, last + 1]
    mean = ["mean |error|", "", *mean_row, "", "", ""]
    parts = [table([*header, "verdict", "requests", "slug"], [*rows, mean], left, wide)]
    if apart:
        parts.append(
            toned("overloaded, reported and not gated:", "heading")
            + "\n"
            + table(header, [_summary_row(c) for c in apart], 2, wide_columns(2))
        )
    if not_judged:
        parts.append(
            toned("not judged:", "heading")
            + "\n"
            + "\n".join(wrap(f"{alias}: {why}") for alias, why in not_judged.items())
        )
    if any(c.ground_truth != "recorded" for c in comparisons):
        parts.append("* ground truth: published aggregates, requests reconstructed from them")
    return "\n\n".join(parts)


def verdict_line(comparison: Comparison) -> str:
    """The verdict as a page has it: the verdict itself in its tone."""
    sentence = verdict_sentence(comparison)
    verdict = re.match(r"verdict: [^(:,]*[^(:, ]", sentence)
    mark = Toned(verdict[0], verdict_tone(comparison.verdict)) if verdict else None
    return wrap(sentence, mark=mark)


def verdict_sentence(comparison: Comparison) -> str:
    """The verdict with the errors of the mean that it rests on."""
    if comparison.verdict == "overloaded":
        return "verdict: overloaded recording, reported and not gated (see `inspect`)"
    judged = ", ".join(
        f"{_NAMES[m]} {percent(comparison.metrics[m]['mean'].error)} of ±{limit:.0%}".replace("%", " %").replace(
            "  ", " "
        )
        for m, limit in THRESHOLDS.items()
    )
    refused = "; ".join(f"{_NAMES[m]} unusable ({why})" for m, why in comparison.unusable.items())
    if comparison.verdict == "unusable":
        return f"verdict: could not be judged: {refused} (errors of the mean: {judged})"
    also = f"; not judged: {refused}" if refused else ""
    return f"verdict: {comparison.verdict} (errors of the mean: {judged}){also}"


def _head(comparison: Comparison) -> str:
    run = comparison.run
    truth = "recorded" if comparison.ground_truth == "recorded" else "published aggregates, requests reconstructed"
    by = "" if run.simulator == "embedded" else f"simulator: {run.simulator}; "
    scheduling = "asynchronous" if run.simulated.asynchronous else "synchronous"
    lines = [
        f"{toned(comparison.alias, 'heading')}  ({comparison.slug})",
        wrap(f"  ground truth: {truth}; {comparison.requests:,} requests compared", "    "),
        wrap(
            f"  {by}coefficients: {run.release.name} (fit: {comparison.uses}); replay {run.mode.name}, "
            f"{scheduling} scheduling",
            "    ",
        ),
    ]
    return "\n".join(lines)


def _metric_table(comparison: Comparison) -> str:
    rows: list[list[str | Toned]] = []
    for metric in METRICS:
        for name, cell in comparison.metrics[metric].items():
            numbers = [milliseconds(cell.simulated_us), error_cell(comparison, metric, name), _difference(cell)]
            shown = ["" for _ in numbers] if cell.unusable else numbers
            rows.append([f"{_NAMES[metric]} {name}", observed_text(cell), *shown])
    return table(["", "observed ms", "simulated ms", "error", "difference ms"], rows, wide=(4,))


def _difference(cell: Cell) -> str:
    if cell.observed_us is None or cell.simulated_us is None:
        return "-"
    return f"{(cell.simulated_us - cell.observed_us) / 1000:+,.2f}"


def observed_text(cell: Cell) -> str:
    """The observed value in ms, its bounds, or the check that forbids it."""
    if cell.unusable:
        return f"unusable: {cell.unusable}"
    if cell.between_us:
        return f"{milliseconds(cell.between_us[0])} .. {milliseconds(cell.between_us[1])}"
    return milliseconds(cell.observed_us)


def pairs_sentence(comparison: Comparison) -> str:
    """How well single requests agree; empty where none were recorded."""
    parts = [
        f"{_NAMES[metric]} MAPE {percent_plain(pair.mape)}, r {pair.correlation:.3f}"
        if pair.correlation is not None
        else f"{_NAMES[metric]} MAPE {percent_plain(pair.mape)}"
        for metric, pair in comparison.paired.items()
    ]
    return "request by request: " + "; ".join(parts) if parts else ""


def notes(comparison: Comparison) -> list[str]:
    """What the numbers rest on, who was left out, and why a number is missing, a line each."""
    lines = [f"{what}: {how}" for what, how in comparison.run.plan.basis.items()]
    lines += _other_hardware(comparison)
    lines += [f"left out: {count:,} requests {reason}" for reason, count in comparison.excluded.items()]
    lines += [f"known difference: {difference}" for difference in comparison.run.simulated.differences]
    return [*lines, *_missing(comparison)]


def _other_hardware(comparison: Comparison) -> list[str]:
    """Coefficients are of one GPU: said where the recording ran on another, or does not tell on which."""
    recorded, fitted = comparison.run.recording.hardware or "not recorded", comparison.run.release.hardware
    # A recording may say H100 where a release says H100-SXM-80GB, which is no contradiction.
    if any(recorded.lower() in name or name in recorded.lower() for name in fitted.lower().split(", ")):
        return []
    return [f"hardware: {recorded}; the coefficients are for {fitted}"]


def _missing(comparison: Comparison) -> list[str]:
    """Why numbers are missing: a line for those of a metric that share a reason."""
    missing: dict[tuple[str, str, str], list[str]] = {}
    for metric, cells in comparison.metrics.items():
        for name, cell in cells.items():
            if cell.reason and not cell.unusable:
                lacks = "observed" if cell.simulated_us is not None else "compared"
                missing.setdefault((_NAMES[metric], lacks, cell.reason), []).append(name)
    return [
        f"{metric} {', '.join(names)} not {lacks}: {why}" for (metric, lacks, why), names in sorted(missing.items())
    ]


def _findings(comparison: Comparison) -> str:
    changed = [f for severity in _SEVERITY_ORDER for f in comparison.findings if f.severity == severity]
    if not changed:
        return ""
    return "\n".join([toned("instrument findings that change a number:", "heading"), *map(finding_line, changed)])


def _summary_row(c: Comparison) -> list[str | Toned]:
    mark = "" if c.ground_truth == "recorded" else "*"
    return [c.alias + mark, c.uses.removeprefix("own "), *error_cells(c)]


def _identity(c: Comparison) -> list[str]:
    return [f"{c.requests:,}", c.slug]
