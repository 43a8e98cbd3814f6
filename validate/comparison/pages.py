"""What a validation answers in full: the page of an experiment, and the same for programs.

Times of a table are in us and written in ms; JSON has ms, and errors as fractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from blis_replay.base.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, columns_named
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.comparison.arguments import argument_remarks
from blis_replay.validate.comparison.comparison import Comparison, MetricCell, hardware_remarks, rejected_remarks
from blis_replay.validate.comparison.overview import (
    error_cell,
    mean_abs_errors,
    means_by_fit,
    stages_table,
    summary_page,
)
from blis_replay.validate.comparison.validated import Validated
from blis_replay.validate.comparison.verdict_text import (
    INTERVALS,
    command_text,
    first_screen,
    first_screens,
    is_brief,
    judgement_parts,
    marked,
    reason,
    refused_screen,
    verdict_line,
)
from blis_replay.validate.judgement import Draws, Judgement, Quantity, Remark, Verdict, exit_code, remark, worst
from blis_replay.validate.metrics.latency import METRIC_NAMES, THRESHOLDS, MetricStatistic
from blis_replay.validate.text.answer import Answer, Block, Line, Part, finding_line
from blis_replay.validate.text.cells import UNITS_US, in_ms, milliseconds, percent, percent_plain, percent_span
from blis_replay.validate.text.messages import words

if TYPE_CHECKING:
    from blis_replay.validate.comparison.saturation import Saturation

# -- The whole page of one experiment --------------------------------------------------------------------------

_METRIC_COLUMNS = (
    *(Column(""), Column("observed", "time"), Column("simulated", "time"), Column("error", "error")),
    *(Column("95 % interval", "word"), Column("difference ms", "ms_difference", wide=1)),
)


def comparison_page(comparison: Comparison, options: str = "") -> list[Part]:
    """The first screen, then every number, what it rests on, and findings that changed one."""
    changed = [
        f for severity in ("unusable", "corrected") for f in comparison.recording.findings if f.severity == severity
    ]
    judgement = comparison.judgement
    beside = [marked(one) for one in judgement.remarks if not is_brief(judgement, one)]
    return [
        *first_screen(comparison, options),
        _head(comparison),
        metric_table(comparison),
        "" if judgement.overloaded else pairs_sentence(comparison),
        Block([words(note) for note in notes(comparison) if note not in judgement.remarks]),
        Block([*beside, INTERVALS]),
        *([_saturation_block(comparison.saturation)] if comparison.saturation else []),
        Block([finding_line(finding) for finding in changed], "instrument findings that change a number"),
    ]


def metric_table(comparison: Comparison) -> Table:
    """Every number on both sides with its error and that error's interval; not latencies that measure a queue."""
    judgement = comparison.judgement
    rows: list[list[Cell]] = []
    for (metric, statistic), cell in comparison.cells.items():
        interval = comparison.interval((metric, statistic))
        sides = [observed_cell(cell), "" if cell.unusable else cell.b_us]
        error = "" if cell.unusable else error_cell(judgement, (metric, statistic), cell.error)
        known = "" if interval is None else percent_span(*interval)
        if not (judgement.overloaded and metric in ("e2e", "ttft")):
            rows.append([f"{METRIC_NAMES[metric]} {statistic}", *sides, error, known, cell.difference_us])
    return Table(f"latencies of {counted(comparison.requests, 'request')}", _METRIC_COLUMNS, rows)


def notes(comparison: Comparison) -> list[Remark]:
    """What the numbers rest on, who was left out, and why a number is missing."""
    simulated = comparison.run.simulated
    missing: dict[tuple[str, str, str, str], list[str]] = {}
    for (metric, name), cell in comparison.cells.items():
        if cell.reason and not cell.unusable:
            lacks = "observed" if cell.b_us is not None else "compared"
            missing.setdefault((METRIC_NAMES[metric], metric, lacks, cell.reason), []).append(name)
    return [
        *(remark("basis", what=what, how=how) for what, how in comparison.run.basis.items()),
        *([remark("schedule", sentence=comparison.schedule.sentence)] if comparison.schedule else []),
        *hardware_remarks(comparison),
        *argument_remarks(comparison.recording, comparison.open_arguments),
        *(remark("left_out", requests=count, why=why) for why, count in comparison.excluded.items()),
        *rejected_remarks(comparison.recording),
        *(remark("not_simulated", what=what) for what in comparison.run.not_simulated),
        *(remark("known_difference", what=what) for what in simulated.differences),
        *(
            remark("missing", metric=metric, statistics=names, lacks=lacks, why=why)
            for (_, metric, lacks, why), names in sorted(missing.items())
        ),
    ]


def _head(comparison: Comparison) -> Block:
    run = comparison.run
    truth = (
        "recorded"
        if comparison.recording.ground_truth == "recorded"
        else "published aggregates, requests reconstructed"
    )
    scheduling = "asynchronous" if run.simulated.asynchronous else "synchronous"
    return Block(
        [
            f"experiment: {comparison.slug}",
            f"ground truth: {truth}; {counted(comparison.requests, 'request')} compared",
            f"replay: {run.mode.name}, {scheduling} scheduling",
        ]
    )


def _saturation_block(found: Saturation) -> Block:
    verdict, *reasons = found.remarks
    return Block([marked(remark("saturation", verdict=verdict)), *(f"- {words(reason)}" for reason in reasons)])


def observed_cell(cell: MetricCell) -> str | float | None:
    """The observed value in us; as text its bounds in ms, or the check that forbids it."""
    if cell.unusable:
        return f"unusable: {cell.unusable}"
    if cell.between_us:
        return f"{milliseconds(cell.between_us[0])} .. {milliseconds(cell.between_us[1])} ms"
    return cell.a_us


def pairs_sentence(comparison: Comparison) -> str:
    """How well single requests agree; empty where none were recorded."""
    parts = [
        f"{METRIC_NAMES[metric]} MAPE {percent_plain(pair.mape)}"
        + ("" if pair.correlation is None else f", r {pair.correlation:.3f}")
        for metric, pair in comparison.paired.items()
    ]
    return "request by request: " + "; ".join(parts) if parts else ""


# -- What a validation answers ----------------------------------------------------------------------------------


def validation_answer(report: Validated, *, summary: bool, again: str = "") -> Answer:
    """What a simulator answered: a table (``summary``, or of several briefly), or a page of each.

    Times are in ms, errors fractions.  The rows are those of ``data_rows``, named by experiment and stage (nothing: the
    whole run); what could not be replayed has one with the reason.  ``again``: the options of ``first_screen``.
    """
    document, several = report_json(report, again), len(report.comparisons) + len(report.not_judged) > 1
    overview: list[Part] = []
    stages: list[Part] = []
    if summary or several or report.stages:
        overview = summary_page(report.comparisons, report.not_judged)
        staged = [c for c in report.comparisons if report.stages and c.recording.stages]
        stages += [stages_table(comparison, report.stages[comparison.slug]) for comparison in staged]
    if len(report.comparisons) > 1:
        from blis_replay.validate.comparison.sweep import sweep_json, sweep_parts, sweeps_of

        sweeps = sweeps_of(report.comparisons)
        overview = [*(part for sweep in sweeps for part in sweep_parts(sweep)), *overview]
        document["sweeps"] = [sweep_json(sweep) for sweep in sweeps]
    page, brief = overview, []
    if not summary:
        pages = [part for comparison in report.comparisons for part in comparison_page(comparison, again)]
        refused = [refused_screen(name, why, again) for name, why in report.not_judged.items()]
        page = [*pages, *(overview if several else refused)]
        brief = overview if several else first_screens(report, again)
    shown = [c for whole in report.comparisons for c in (whole, *report.stages.get(whole.slug, []))]
    verdicts: list[Verdict] = [c.verdict for c in report.comparisons]
    rows = [row for comparison in shown for row in data_rows(comparison)]
    for name, why in report.not_judged.items():
        verdicts.append("NOT JUDGED")
        rows.append([name, name, report.simulator, None, "NOT JUDGED", *NO_NUMBER, why])
    return Answer(
        [*page, *stages],
        document,
        Table("", DATA_COLUMNS, rows),
        exit_code(verdicts),
        tuple(f"NOT JUDGED: {name}: {why}" for name, why in report.not_judged.items()),
        [*brief, *stages] if brief else (),
    )


# -- For programs -----------------------------------------------------------------------------------------------

_SUBJECT = columns_named("experiment", "alias", "simulator", "stage", "verdict", kind="data")
_NUMBER = (
    *columns_named("metric", "statistic", kind="data"),
    *columns_named("observed_ms", "simulated_ms", "observed_per_s", "simulated_per_s", kind="real"),
    *columns_named("error", "low", "high", "limit", kind="real"),
    Column("state", "data"),
)
DATA_COLUMNS = (*_SUBJECT, *_NUMBER, Column("reason", "data"))
NO_NUMBER = (None,) * len(_NUMBER)


def comparison_answer(comparison: Comparison) -> Answer:
    """What is said of one experiment; its rows are one per number."""
    rows = Table("", DATA_COLUMNS, data_rows(comparison))
    return Answer(comparison_page(comparison), comparison_json(comparison), rows, exit_code([comparison.verdict]))


def data_rows(c: Comparison) -> list[list[Cell]]:
    """A row per metric and statistic; of an overloaded run one per number that is judged, or one that says why none is.

    Limit and state are of what is judged.
    """
    judgement = c.judgement
    named = (c.slug, c.alias, c.run.simulator, c.selection.stage, c.verdict)
    judged = {} if judgement.lost else {(q.key, q.statistic): q for q in judgement.judged}
    if judgement.overloaded:
        rows = [[*named, *_served_row(quantity)] for quantity in judged.values()]
        return rows or [[*named, *NO_NUMBER, reason(judgement)]]
    rows = []
    for name, cell in c.cells.items():
        sides = [us and us / 1000 for us in (cell.a_us, cell.b_us)]
        limited = judged.get(name)
        against = (None, None) if limited is None else (limited.limit, limited.state)
        numbers = (*sides, None, None, cell.error, *(c.interval(name) or (None, None)), *against)
        rows.append([*named, *name, *numbers, cell.reason])
    return rows


def _served_row(quantity: Quantity) -> list[Cell]:
    """A measure of an overloaded run: a time in ms, or a rate."""
    sides, factor = (quantity.observed, quantity.simulated), UNITS_US.get(quantity.unit, 0.0) / 1000
    times = [None if value is None or not factor else value * factor for value in sides]
    rates = [None if factor else value for value in sides]
    interval = quantity.interval or (None, None)
    numbers = (*times, *rates, quantity.error, *interval, quantity.limit)
    return [quantity.key, quantity.statistic, *numbers, quantity.state, None]


def report_json(report: Validated, options: str = "") -> dict[str, object]:
    """Experiments, means over the judged ones, and what could not be replayed; ``options``: of the next command."""
    experiments = []
    for comparison in report.comparisons:
        entry = comparison_json(comparison, options)
        if comparison.slug in report.stages:
            entry["stages"] = [comparison_json(stage, options) for stage in report.stages[comparison.slug]]
        experiments.append(entry)
    first = report.comparisons[0].run if report.comparisons else None
    judgements = [comparison.judgement for comparison in report.comparisons]
    refused: list[Verdict] = ["NOT JUDGED" for _ in report.not_judged]
    return {
        "verdict": worst([*(one.verdict for one in judgements), *refused]),
        "experiments": experiments,
        "mean_abs_error": mean_abs_errors(judgements),
        "mean_abs_error_by_fit": means_by_fit(judgements),
        "not_judged": report.not_judged,
        "thresholds": THRESHOLDS,
        "provenance": {
            "coefficients": first.release.name if first else None,
            "coefficients_hash": first.release.sha256 if first else None,
            "replay": first.mode.name if first else None,
        },
    }


def comparison_json(comparison: Comparison, options: str = "") -> dict[str, object]:
    """One experiment; times in ms, errors and MAPE as fractions."""
    judgement, repeats, pace, trend = comparison.judgement, comparison.repeats, comparison.pace, comparison.trend
    return {
        "slug": comparison.slug,
        "alias": comparison.alias,
        "ground_truth": comparison.recording.ground_truth,
        "requests": comparison.requests,
        "excluded": comparison.excluded,
        "stage": comparison.selection.stage,
        "verdict": judgement.verdict,
        "judgement": judgement_json(judgement, options),
        "metrics": _by_metric({cell: _cell_json(comparison, cell) for cell in comparison.cells}),
        "paired": {metric: vars(pairing) for metric, pairing in comparison.paired.items()},
        "repeats": repeats and {"recordings": list(repeats.recordings), "apart": _by_metric(repeats.apart)},
        "slo": comparison.promised and {side: one.document for side, one in comparison.promised.items()},
        "reconstructions": comparison.draws and _draws_json(comparison.draws),
        "warm_up": comparison.warming and vars(comparison.warming),
        "skill": {metric: one.document for metric, one in comparison.skill.items()},
        "pace": pace and {"factor": 1 + pace.error, "low": 1 + pace.low, "high": 1 + pace.high},
        "trend": trend and {"change": trend.error, "low": trend.low, "high": trend.high},
        "findings": [vars(finding) for finding in comparison.recording.findings],
        "saturation": comparison.saturation and comparison.saturation.document,
        "parts": {
            name: {"observed_ms": in_ms(seen), "simulated_ms": in_ms(simulated)}
            for name, (seen, simulated) in comparison.parts.items()
        },
        "open_arguments": [vars(argument) for argument in comparison.open_arguments],
        "schedule": comparison.schedule and comparison.schedule.document,
        "known_differences": list(comparison.run.simulated.differences),
        "not_simulated": list(comparison.run.not_simulated),
        "provenance": provenance_of(comparison.run),
    }


def _draws_json(draws: Draws) -> dict[str, object]:
    ranges = {cell: dict(zip(("low", "median", "high"), draws.range_of(cell), strict=True)) for cell in draws.errors}
    return {"count": draws.count, "errors": _by_metric(ranges)}


def _by_metric(values: Mapping[MetricStatistic, object]) -> dict[str, dict[str, object]]:
    named: dict[str, dict[str, object]] = {}
    for (metric, statistic), value in values.items():
        named.setdefault(metric, {})[statistic] = value
    return named


def _cell_json(comparison: Comparison, cell: MetricStatistic) -> dict[str, object]:
    number, interval = comparison.cells[cell], comparison.interval(cell)
    predicted = comparison.predicted_us.get(cell)
    return {
        "observed_ms": in_ms(number.a_us),
        "simulated_ms": in_ms(number.b_us),
        **({} if predicted is None else {"simulated_between_ms": [in_ms(bound) for bound in predicted]}),
        "error": number.error,
        "interval": interval and list(interval),
        **({"reason": number.reason} if number.reason else {}),
        **({"observed_between_ms": [in_ms(bound) for bound in number.between_us]} if number.between_us else {}),
    }


def below_verdict(answer: Answer, comparison: Comparison) -> Answer:
    """An answer about a replay, below the verdict on it."""
    page = [judgement_parts(comparison)[0], *answer.page]
    return replace(answer, page=page, document={**answer.document, "judgement": judgement_json(comparison.judgement)})


def below_verdicts(answer: Answer, judged: Sequence[Comparison]) -> Answer:
    """An answer about several replays, below a line on each with its errors."""
    lines: list[Part] = []
    for judgement in (comparison.judgement for comparison in judged):
        errors = ", ".join(f"{q.name} {percent(q.error)}" for q in judgement.judged if q.error is not None)
        lines += [verdict_line(judgement, f" by {judgement.subject.release}"), Line(f"off by {errors}", "  ")]
    judgements = [judgement_json(comparison.judgement) for comparison in judged]
    return replace(answer, page=[Block(lines), *answer.page], document={**answer.document, "judgements": judgements})


def judgement_json(judgement: Judgement, options: str = "") -> dict[str, object]:
    """All of it; errors as fractions, times in ms."""
    return {
        "verdict": judgement.verdict,
        "reason": reason(judgement),
        "subject": vars(judgement.subject),
        "overloaded": judgement.overloaded,
        "judged": list(map(quantity_json, judgement.judged)),
        "tails": list(map(quantity_json, judgement.tails)),
        "refused": judgement.refused,
        "lost": [_remark_json(one) for one in judgement.lost],
        "decides": [_remark_json(one) for one in judgement.decides],
        "next": command_text(judgement.next, options),
    }


def _remark_json(one: Remark) -> dict[str, object]:
    return {"code": one.code, "values": one.values, "text": words(one)}


def quantity_json(quantity: Quantity) -> dict[str, object]:
    """One number held against its limit."""
    in_us = quantity.unit == "us"
    sides = [v / 1000 if in_us and v is not None else v for v in (quantity.observed, quantity.simulated)]
    return {
        "key": quantity.key,
        "statistic": quantity.statistic,
        "name": quantity.name,
        "unit": "ms" if in_us else quantity.unit,
        "observed": sides[0],
        "simulated": sides[1],
        "error": quantity.error,
        "interval": quantity.interval and list(quantity.interval),
        "limit": quantity.limit,
        "state": quantity.state,
        "derived": quantity.derived or None,
    }


def provenance_of(run: ReplayRun) -> dict[str, object]:
    """Everything a result depends on: versions, hashes, substitutions, engine arguments."""
    prefill = {} if run.plan.apart is None else {"prefill_hash": run.plan.apart.prefill.content_hash}
    return {
        "blis_replay": version("blis-replay"),
        "simulator": run.simulator,
        "recording_hash": run.recording.content_hash,
        **prefill,
        "coefficients": run.release.name,
        "coefficients_hash": run.release.sha256,
        "replay": run.mode.name,
        "basis": run.basis,
        "scheduling": "asynchronous" if run.simulated.asynchronous else "synchronous",
        "engine": {name: {"value": s.value, "source": s.source} for name, s in sorted(run.plan.arguments.items())},
        "delays": dict((run.entry.sources if run.entry else None) or {}),
    }
