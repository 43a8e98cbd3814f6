"""What a validation answers: the page of one experiment, the table of all, and two simulators side by side."""

from __future__ import annotations

from collections.abc import Sequence

from blis_replay.ingest.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.comparison.arguments import argument_lines
from blis_replay.validate.comparison.compare import Comparison, MetricCell
from blis_replay.validate.comparison.first_screen import first_screen, fit_words, other_hardware
from blis_replay.validate.comparison.saturation_text import saturation_block
from blis_replay.validate.comparison.summary_text import (
    comparison_json,
    draws_sentence,
    error_cell,
    mean_abs_errors,
    means_by_fit,
    noise_sentence,
    promised_lines,
    stages_table,
    summary_page,
    verdict_line,
    verdict_sentence,
    verdict_tone,
)
from blis_replay.validate.comparison.validated import Validated
from blis_replay.validate.metrics.latency import METRIC_NAMES, METRICS, THRESHOLDS
from blis_replay.validate.text.answer import Answer, Block, Line, Part, finding_line
from blis_replay.validate.text.cells import milliseconds, percent_plain

_SEVERITY_ORDER = ("unusable", "corrected")


def comparison_page(comparison: Comparison) -> list[Part]:
    """The page of one experiment: head, metric table, pairs, verdict, findings that changed a number."""
    changed = [f for severity in _SEVERITY_ORDER for f in comparison.findings if f.severity == severity]
    return [
        _head(comparison),
        _metric_table(comparison),
        pairs_sentence(comparison),
        Block(notes(comparison)),
        verdict_line(comparison),
        draws_sentence(comparison),
        noise_sentence(comparison),
        *promised_lines(comparison),
        *([saturation_block(comparison.saturation)] if comparison.saturation else []),
        Block([finding_line(finding) for finding in changed], "instrument findings that change a number"),
    ]


def _head(comparison: Comparison) -> Block:
    run = comparison.run
    truth = "recorded" if comparison.ground_truth == "recorded" else "published aggregates, requests reconstructed"
    by = "" if run.simulator == "embedded" else f"simulator: {run.simulator}; "
    scheduling = "asynchronous" if run.simulated.asynchronous else "synchronous"
    replayed = f"coefficients: {run.release.name} ({fit_words(comparison)}); replay {run.mode.name}"
    return Block(
        [
            Line(f"{comparison.alias}  ({comparison.slug})", mark=Toned(comparison.alias, "heading")),
            Line(f"  ground truth: {truth}; {counted(comparison.requests, 'request')} compared", "    "),
            Line(f"  {by}{replayed}, {scheduling} scheduling", "    "),
        ]
    )


_METRIC_COLUMNS = (
    *(Column(""), Column("observed ms", "ms"), Column("simulated ms", "ms"), Column("error", "error")),
    Column("difference ms", "ms_difference", wide=1),
)


def _metric_table(comparison: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for metric in METRICS:
        for name, cell in comparison.metrics[metric].items():
            numbers = [cell.b_us, error_cell(comparison, metric, name), cell.difference_us]
            shown = [""] * 3 if cell.unusable else numbers
            rows.append([f"{METRIC_NAMES[metric]} {name}", observed_cell(cell), *shown])
    return Table("", _METRIC_COLUMNS, rows)


def observed_cell(cell: MetricCell) -> str | float | None:
    """The observed value in us; as text its bounds in ms, or the check that forbids it."""
    if cell.unusable:
        return f"unusable: {cell.unusable}"
    if cell.between_us:
        return f"{milliseconds(cell.between_us[0])} .. {milliseconds(cell.between_us[1])}"
    return cell.a_us


def pairs_sentence(comparison: Comparison) -> str:
    """How well single requests agree; empty where none were recorded."""
    parts = [
        f"{METRIC_NAMES[metric]} MAPE {percent_plain(pair.mape)}, r {pair.correlation:.3f}"
        if pair.correlation is not None
        else f"{METRIC_NAMES[metric]} MAPE {percent_plain(pair.mape)}"
        for metric, pair in comparison.paired.items()
    ]
    return "request by request: " + "; ".join(parts) if parts else ""


def notes(comparison: Comparison) -> list[str]:
    """What the numbers rest on, who was left out, and why a number is missing, a line each."""
    lines = [f"{what}: {how}" for what, how in comparison.run.basis.items()]
    if comparison.schedule is not None:
        lines.append(f"schedule: {comparison.schedule.sentence}")
    lines += other_hardware(comparison)
    lines += argument_lines(comparison.recording, comparison.open_arguments)
    lines += [f"left out: {counted(count, 'request')} {reason}" for reason, count in comparison.excluded.items()]
    lines += [f"not simulated: {what}" for what in comparison.run.not_simulated]
    lines += [f"known difference: {difference}" for difference in comparison.run.simulated.differences]
    return [*lines, *_missing(comparison)]


def _missing(comparison: Comparison) -> list[str]:
    """Why numbers are missing: a line for those of a metric that share a reason."""
    missing: dict[tuple[str, str, str], list[str]] = {}
    for metric, cells in comparison.metrics.items():
        for name, cell in cells.items():
            if cell.reason and not cell.unusable:
                lacks = "observed" if cell.b_us is not None else "compared"
                missing.setdefault((METRIC_NAMES[metric], lacks, cell.reason), []).append(name)
    return [
        f"{metric} {', '.join(names)} not {lacks}: {why}" for (metric, lacks, why), names in sorted(missing.items())
    ]


def comparison_answer(comparison: Comparison) -> Answer:
    """What is said of one experiment; its rows are one per metric and statistic."""
    rows = Table("", _DATA_COLUMNS, _rows(comparison))
    return Answer(comparison_page(comparison), comparison_json(comparison), rows, exit_code([comparison.verdict]))


def brief_page(comparison: Comparison, again: str = "") -> list[Part]:
    """The first screen of one experiment; ``again``: options that the next command needs as well."""
    sentence = verdict_sentence(comparison).removeprefix("verdict: ")
    return first_screen(comparison, sentence, verdict_tone(comparison.verdict), again)


def validation_answer(reports: Sequence[Validated], *, summary: bool, again: str = "") -> Answer:
    """What one simulator, or two, answered: a table (``summary``, or of several briefly), or a page of each.

    Times are in ms, errors fractions.  The rows are one per metric and statistic, named by experiment, stage (nothing:
    the whole run) and simulator; what could not be judged has none.  ``again``: as for ``brief_page``.
    """
    first, *others = reports
    pages = brief = [
        [*([f"simulator {r.simulator}"] if others else []), *summary_page(r.comparisons, r.not_judged)] for r in reports
    ]
    if not summary:
        several = len(first.comparisons) + len(first.not_judged) > 1
        if others:
            second = {c.slug: c for c in others[0].comparisons}
            each = [side_by_side_page(c, second[c.slug]) for c in first.comparisons if c.slug in second]
        else:
            each = [comparison_page(comparison) for comparison in first.comparisons]
        pages = [*each, *(pages if several else [])]
        brief = brief if several else [] if others else [brief_page(c, again) for c in first.comparisons]
    stages: list[Part] = [
        Block([*([f"simulator {report.simulator}:"] if others else []), stages_table(c, report.stages[c.slug])])
        for report in reports
        for c in report.comparisons
        if report.stages and c.recording.stages
    ]
    document, *more = (_report_json(report) for report in reports)
    named = {report.simulator: other for report, other in zip(reports[1:], more, strict=True)}
    shown = [c for r in reports for whole in r.comparisons for c in (whole, *r.stages.get(whole.slug, []))]
    return Answer(
        [*(part for page in pages for part in page), *stages],
        {**document, **named},
        Table("", _DATA_COLUMNS, [row for comparison in shown for row in _rows(comparison)]),
        exit_code([verdict for report in reports for verdict in _verdicts(report)]),
        tuple(f"not judged: {name}: {reason}" for r in reports for name, reason in r.not_judged.items()),
        [*(part for page in brief for part in page), *stages] if brief and not summary else (),
    )


def _verdicts(report: Validated) -> list[str]:
    """Of each experiment, with those that could not be replayed at all."""
    return [*(c.verdict for c in report.comparisons), *("not judged" for _ in report.not_judged)]


def exit_code(verdicts: Sequence[str]) -> int:
    """0 all passed, 1 one failed, 3 nothing, or one not, could be judged."""
    if "fail" in verdicts:
        return 1
    return 0 if set(verdicts) == {"pass"} else 3


def side_by_side_page(embedded: Comparison, blis: Comparison) -> list[Part]:
    """The page of the embedded engine's comparison, then BLIS beside it and where it differs."""
    rows: list[list[Cell]] = []
    for metric in METRICS:
        for name, cell in embedded.metrics[metric].items():
            numbers = [
                n
                for side in (embedded, blis)
                for n in (side.metrics[metric][name].b_us, error_cell(side, metric, name))
            ]
            rows.append([f"{metric.upper()} {name}", observed_cell(cell), *([""] * 4 if cell.unusable else numbers)])
    ran = f"BLIS ran with coefficients: {blis.run.release.name}"
    return [
        *comparison_page(embedded),
        Table("", _SIDE_BY_SIDE_COLUMNS, rows),
        Block([ran, verdict_line(blis)]),
        Block([f"- {line}" for line in blis.run.simulated.differences], "where the engines differ")
        if blis.run.simulated.differences
        else "no known difference between the engines applies to these requests",
    ]


_SIDE_BY_SIDE_COLUMNS = (
    *(Column("side by side"), Column("observed ms", "ms"), Column("embedded ms", "ms"), Column("error", "error")),
    *(Column("BLIS ms", "ms"), Column("error", "error")),
)
_DATA_COLUMNS = (
    *columns_named("experiment", "alias", "simulator", "stage", "verdict", "metric", "statistic", kind="data"),
    *columns_named("observed_ms", "simulated_ms", "error", kind="real"),
    Column("reason", "data"),
)


def _rows(c: Comparison) -> list[list[Cell]]:
    named = (c.slug, c.alias, c.run.simulator, c.selection.stage, c.verdict)
    return [
        [
            *named,
            metric,
            name,
            *(None if us is None else us / 1000 for us in (cell.a_us, cell.b_us)),
            cell.error,
            cell.reason,
        ]
        for metric, cells in c.metrics.items()
        for name, cell in cells.items()
    ]


def _report_json(report: Validated) -> dict[str, object]:
    """Experiments, means over the gated ones, and what could not be judged."""
    experiments = []
    for comparison in report.comparisons:
        entry = comparison_json(comparison)
        if comparison.slug in report.stages:
            entry["stages"] = [comparison_json(stage) for stage in report.stages[comparison.slug]]
        experiments.append(entry)
    first = report.comparisons[0].run if report.comparisons else None
    return {
        "experiments": experiments,
        "mean_abs_error": mean_abs_errors(report.comparisons),
        "mean_abs_error_by_fit": means_by_fit(report.comparisons),
        "not_judged": report.not_judged,
        "thresholds": THRESHOLDS,
        "provenance": {
            "coefficients": first.release.name if first else None,
            "coefficients_hash": first.release.sha256 if first else None,
            "replay": first.mode.name if first else None,
        },
    }
