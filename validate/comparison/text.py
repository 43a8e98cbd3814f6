"""What a validation answers: the first screen of one experiment, the table of many, and all of it on demand."""

from __future__ import annotations

from blis_replay.ingest.tables import Table
from blis_replay.validate.comparison.pages import (
    DATA_COLUMNS,
    NO_NUMBER,
    comparison_page,
    data_rows,
    first_screen,
    report_json,
    stages_table,
    summary_page,
)
from blis_replay.validate.comparison.validated import Validated
from blis_replay.validate.comparison.verdict_text import command_text, toned
from blis_replay.validate.judgement import Command, Verdict, exit_code
from blis_replay.validate.text.answer import Answer, Block, Line, Part

_MORE = "more: -v prints every number, assumption and finding"


def _refused_screen(name: str, why: str, options: str) -> list[Part]:
    """The same of a recording that cannot be replayed."""
    following = Line("next:", command=command_text(Command("inspect", name, of_release=False), options))
    return [Block([Line(f"NOT JUDGED  {name}: {why}", mark=toned("NOT JUDGED")), following])]


def validation_answer(report: Validated, *, summary: bool, again: str = "") -> Answer:
    """What a simulator answered: a table (``summary``, or of several briefly), or a page of each.

    Times are in ms, errors fractions.  The rows are those of ``data_rows``, named by experiment and stage (nothing: the
    whole run); what could not be replayed has one with the reason.  ``again``: the options of ``first_screen``.
    """
    overview, document = summary_page(report.comparisons, report.not_judged), report_json(report, again)
    if len(report.comparisons) > 1:
        from blis_replay.validate.comparison.sweep import sweep_json, sweep_parts, sweeps_of  # which one run is not

        sweeps = sweeps_of(report.comparisons)
        overview = [*(part for sweep in sweeps for part in sweep_parts(sweep)), *overview]
        document["sweeps"] = [sweep_json(sweep) for sweep in sweeps]
    page: list[Part] = overview
    brief: list[Part] = []
    if not summary:
        pages = [part for comparison in report.comparisons for part in comparison_page(comparison, again)]
        refused = [part for name, why in report.not_judged.items() for part in _refused_screen(name, why, again)]
        several = len(report.comparisons) + len(report.not_judged) > 1
        screens = [part for comparison in report.comparisons for part in first_screen(comparison, again, _MORE)]
        page = [*pages, *(overview if several else refused)]
        brief = overview if several else [*screens, *refused]
    staged = [c for c in report.comparisons if report.stages and c.recording.stages]
    stages = [stages_table(comparison, report.stages[comparison.slug]) for comparison in staged]
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
