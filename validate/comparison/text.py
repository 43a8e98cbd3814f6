"""What a validation answers: the first screen of one experiment, the table of many, and all of it on demand."""

from __future__ import annotations

from collections.abc import Sequence

from blis_replay.ingest.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.pages import (
    DATA_COLUMNS,
    comparison_page,
    data_rows,
    report_json,
    side_by_side_page,
    stages_table,
    summary_page,
)
from blis_replay.validate.comparison.validated import Validated
from blis_replay.validate.comparison.verdict_text import (
    command_text,
    fit_words,
    held_text,
    marked,
    toned_error,
    verdict_sentence,
    verdict_tone,
    verdict_words,
)
from blis_replay.validate.judgement import Judgement, exit_code
from blis_replay.validate.metrics.latency import METRIC_NAMES, TAIL_LIMITS, THRESHOLDS
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import limit_text, percent, predicted
from blis_replay.validate.text.messages import words

_MORE = "more: -v prints every number, assumption and finding"
_BRIEF_COLUMNS = (
    *(Column("", "text"), Column("observed mean", "time"), Column("simulated mean", "time")),
    *(Column("error", "error_brief"), Column("limit", "word")),
    *columns_named("p50", "p90", "p99", kind="error_brief"),
)


def first_screen(comparison: Comparison, options: str = "") -> list[Part]:
    """At most 12 lines of 80 columns where no assumption has to be named.

    ``options``: of the command line, which the next command needs as well.
    """
    judgement = comparison.judgement
    mark = Toned(judgement.verdict.upper(), verdict_tone(judgement.verdict))
    status = Line(f"{mark.value}  {comparison.alias}: {status_text(comparison)}", mark=mark)
    undecided = judgement.verdict == "not decided"
    remarks = [r for r in judgement.remarks if r.code != "draws" or (undecided and not judgement.open_by_fit)]
    following = Line("next:", command=command_text(judgement.next, options))
    return [
        Block([status, *_tails(judgement), _basis(comparison)]),
        Table("", _BRIEF_COLUMNS, [_brief_row(comparison, metric) for metric in THRESHOLDS]),
        Block([*(marked(words(r), r.code) for r in remarks), _MORE, following]),
    ]


def status_text(comparison: Comparison) -> str:
    """What passed or failed, without the status word."""
    judgement = comparison.judgement
    if judgement.overloaded and judgement.judged and judgement.verdict in ("pass", "fail"):
        first = judgement.worst_first[:2]
        of = "" if comparison.selection.everything else " in the whole run"
        others = " and others" if len(judgement.judged) > len(first) else ""
        return f"overloaded, judged by what was served{of}: {', '.join(map(held_text, first))}{others}"
    if judgement.verdict == "pass":
        return f"mean {_listed([q.name for q in judgement.judged if q.error is not None])} within limits"
    if judgement.verdict == "fail":
        if len(judgement.beyond) > 1:
            return f"mean {', '.join(f'{q.name} {percent(q.error)}' for q in judgement.beyond)} beyond limits"
        (one,) = judgement.beyond
        return f"mean {one.name} {predicted(one.error or 0.0)} (limit {limit_text(one.limit)})"
    verdict, why, errors = verdict_words(comparison)
    return f"{why} {errors}" if verdict == "not decided" else verdict_sentence(comparison)


def _tails(judgement: Judgement) -> list[Line]:
    if judgement.overloaded or judgement.verdict not in ("pass", "fail"):
        return []
    lines = []
    if off := judgement.tails_that_are("beyond"):
        shown = ", ".join(f"{METRIC_NAMES[q.metric]} {percent(q.error)}" for q in off)
        lines.append(Line(f"TAIL OFF  p99 error: {shown} (reported, not gated)", mark=Toned("TAIL OFF", "caution")))
    for tail in judgement.tails_that_are("open"):
        low, high = map(percent, tail.interval or (None, None))
        shown = f"{METRIC_NAMES[tail.metric]} {percent(tail.error)}, {low} to {high} by when each request came"
        lines.append(Line(f"TAIL OPEN  p99 error: {shown}", mark=Toned("TAIL OPEN", "caution")))
    return lines


def _basis(comparison: Comparison) -> str:
    run = comparison.run
    kind = "" if comparison.ground_truth == "recorded" else "reconstructed "
    by = "" if run.simulator == "embedded" else f"simulator {run.simulator}, "
    mode = "" if run.mode.name == "exact" else f"; replay {run.mode.name}"
    compared = counted(comparison.requests, f"{kind}request")
    return f"{compared}; {by}{run.release.name}, {fit_words(comparison.uses)}{mode}"


def _brief_row(comparison: Comparison, metric: str) -> list[Cell]:
    cells = comparison.metrics[metric]
    mean = cells["mean"]
    observed: Cell = "unusable" if mean.unusable else mean.a_us  # the line of the instrument checks says by which
    errors: list[Cell] = [cells[name].error for name in ("p50", "p90", "p99")]
    if comparison.overloaded:  # these measure how long the queue has grown
        return [METRIC_NAMES[metric], observed, mean.b_us, mean.error, "-", *errors]
    judged = next(quantity for quantity in comparison.judgement.judged if quantity.key == metric)
    tails = [comparison.held(metric, name, TAIL_LIMITS[metric], 0.0) for name in ("p50", "p90", "p99")]
    toned = [Toned(q.error, "good" if q.excess <= 1 else "caution") if q.error is not None else None for q in tails]
    limit = limit_text(judged.limit)
    return [METRIC_NAMES[metric], observed, mean.b_us, toned_error(judged), limit, *toned]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def validation_answer(reports: Sequence[Validated], *, summary: bool, again: str = "") -> Answer:
    """What one simulator, or two, answered: a table (``summary``, or of several briefly), or a page of each.

    Times are in ms, errors fractions.  The rows are one per metric and statistic, named by experiment, stage (nothing:
    the whole run) and simulator; what could not be judged has none.  ``again``: the options of ``first_screen``.
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
        brief = brief if several else [] if others else [first_screen(c, again) for c in first.comparisons]
    stages: list[Part] = [
        Block([*([f"simulator {report.simulator}:"] if others else []), stages_table(c, report.stages[c.slug])])
        for report in reports
        for c in report.comparisons
        if report.stages and c.recording.stages
    ]
    document, *more = (report_json(report) for report in reports)
    named = {report.simulator: other for report, other in zip(reports[1:], more, strict=True)}
    shown = [c for r in reports for whole in r.comparisons for c in (whole, *r.stages.get(whole.slug, []))]
    verdicts = [c.verdict for r in reports for c in r.comparisons]
    verdicts += ["not judged" for r in reports for _ in r.not_judged]
    return Answer(
        [*(part for page in pages for part in page), *stages],
        {**document, **named},
        Table("", DATA_COLUMNS, [row for comparison in shown for row in data_rows(comparison)]),
        exit_code(verdicts),
        tuple(f"not judged: {name}: {reason}" for r in reports for name, reason in r.not_judged.items()),
        [*(part for page in brief for part in page), *stages] if brief and not summary else (),
    )
