"""What a validation answers: the first screen of one experiment, the table of many, and all of it on demand."""

from __future__ import annotations

from collections.abc import Sequence

from blis_replay.ingest.tables import Table
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.pages import (
    DATA_COLUMNS,
    NO_NUMBER,
    comparison_page,
    data_rows,
    report_json,
    side_by_side_page,
    stages_table,
    summary_page,
)
from blis_replay.validate.comparison.validated import Validated
from blis_replay.validate.comparison.verdict_text import cause_lines, command_text, judgement_parts, toned
from blis_replay.validate.judgement import Command, Verdict, exit_code
from blis_replay.validate.text.answer import Answer, Block, Line, Part

_MORE = "more: -v prints every number, assumption and finding"


def first_screen(comparison: Comparison, options: str = "") -> list[Part]:
    """Verdict, what is judged, the cause and the next command: in 80 columns, without assumptions in 12 lines.

    ``options``: of the command line, which the next command needs as well.
    """
    judgement = comparison.judgement
    following = Line("next:", command=command_text(judgement.next, options))
    return [*judgement_parts(comparison), Block([*cause_lines(judgement), _MORE, following])]


def _refused_screen(name: str, why: str, options: str) -> list[Part]:
    """The same of a recording that cannot be replayed."""
    following = Line("next:", command=command_text(Command("inspect", name, of_release=False), options))
    return [Block([Line(f"NOT JUDGED  {name}: {why}", mark=toned("NOT JUDGED")), following])]


def validation_answer(reports: Sequence[Validated], *, summary: bool, again: Sequence[str] = ("", "")) -> Answer:
    """What one simulator, or two, answered: a table (``summary``, or of several briefly), or a page of each.

    Times are in ms, errors fractions.  The rows are those of ``data_rows``, named by experiment, stage (nothing: the
    whole run) and simulator; what could not be replayed has one with the reason.  ``again``: the options of
    ``first_screen``, for each simulator.
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
        refused = [_refused_screen(name, why, again[0]) for name, why in first.not_judged.items()]
        pages = [*each, *(pages if several else refused)]
        if not several:
            brief = [] if others else [*(first_screen(c, again[0]) for c in first.comparisons), *refused]
    stages: list[Part] = [
        Block([*([f"simulator {report.simulator}:"] if others else []), stages_table(c, report.stages[c.slug])])
        for report in reports
        for c in report.comparisons
        if report.stages and c.recording.stages
    ]
    document, *more = (report_json(report, options) for report, options in zip(reports, again, strict=False))
    named = {report.simulator: other for report, other in zip(reports[1:], more, strict=True)}
    shown = [c for r in reports for whole in r.comparisons for c in (whole, *r.stages.get(whole.slug, []))]
    verdicts: list[Verdict] = [c.verdict for r in reports for c in r.comparisons]
    verdicts += ["NOT JUDGED" for r in reports for _ in r.not_judged]
    rows = [row for comparison in shown for row in data_rows(comparison)]
    for report in reports:
        lost = ((name, name, report.simulator, None, "NOT JUDGED", why) for name, why in report.not_judged.items())
        rows += [[*subject, *NO_NUMBER, why] for *subject, why in lost]
    return Answer(
        [*(part for page in pages for part in page), *stages],
        {**document, **named},
        Table("", DATA_COLUMNS, rows),
        exit_code(verdicts),
        tuple(f"NOT JUDGED: {name}: {reason}" for r in reports for name, reason in r.not_judged.items()),
        [*(part for page in brief for part in page), *stages] if brief and not summary else (),
    )
