"""The report: experiments by name, replayed, explained, and put on one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from blis_replay.base.errors import ExperimentError, NothingToJudgeError, faults_named, require_extra
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.store import open_store
from blis_replay.ingest.tables import Table, columns_named
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.comparison.validated import compare_experiment
from blis_replay.validate.experiment import release_for, release_that_ships
from blis_replay.validate.history import History
from blis_replay.validate.report.evidence import gather
from blis_replay.validate.report.history_chart import history_chart
from blis_replay.validate.report.page import Before, Section, before_of, page, section_of
from blis_replay.validate.text.answer import Answer, Verbatim

# What the extra `report` installs.
REPORT_MODULES = ("jinja2", "markupsafe")


@dataclass(frozen=True)
class Report:
    """``html``: the page.  ``verdicts``: by slug.  ``not_judged``: by slug, why it is not on it."""

    html: str
    verdicts: dict[str, str]
    not_judged: dict[str, str]


def report_answer(written: Report, path: Path, size: int) -> Answer:
    """The file, its size in bytes, and a row per experiment; those that could not be judged with the reason."""
    counts = Counter([*written.verdicts.values(), *("NOT JUDGED" for _ in written.not_judged)])
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    rows = [(slug, verdict, None) for slug, verdict in written.verdicts.items()]
    refused = [(slug, "NOT JUDGED", why) for slug, why in written.not_judged.items()]
    return Answer(
        [Verbatim(f"{path}: {verdicts}; {size / 1e6:.2f} MB")],
        {"file": str(path), "bytes": size, "verdicts": written.verdicts, "not_judged": written.not_judged},
        Table("", columns_named("experiment", "verdict", "reason", kind="data"), [*rows, *refused]),
    )


def report(
    store: Path,
    slugs: Sequence[str],
    release: CoefficientRelease,
    mode: ReplayMode | None = None,
    *,
    baseline: CoefficientRelease | None = None,
    history: History | None = None,
    ships: bool = False,
    command: str = "",
    options: str = "",
    **pool: Unpack[Pool],
) -> Report:
    """One self-contained HTML page over these stored experiments, the same for the same input.

    ``store``: the file, which this process must not have open: several processes read it side by side.
    ``baseline``: another release, whose errors stand below those of ``release`` in the overview.  ``history``: what
    was judged before, drawn in the section of each experiment that it has.  ``ships``: take the release that ships for
    each experiment in place of ``release``.  ``command``: what the page gives as the way to make it again.
    ``options``: what its next commands repeat of that.  ``pool``: of ``map_jobs``.
    Those that cannot be judged are named with the reason; raises ``NothingToJudgeError`` if that is all of them,
    ``ReleaseError`` for an invalid release.
    """
    require_extra("report", "the report", *REPORT_MODULES)
    mode = mode or ReplayMode()
    for used in (release, baseline):
        if used is not None:
            used.refuse_if_invalid()
    section = partial(_section, store, None if ships else release, baseline, mode, command, options)
    answers = dict(zip(slugs, map_jobs(section, slugs, **pool), strict=True))
    # An error names its experiment, and so does each place that shows one.
    not_judged = {slug: why.removeprefix(f"{slug}: ") for slug, why in answers.items() if isinstance(why, str)}
    sections = [answer for answer in answers.values() if isinstance(answer, Section)]
    sections = [_with_history(section, history) for section in sections]
    if not sections:
        raise NothingToJudgeError("; ".join(f"{slug}: {why}" for slug, why in not_judged.items()))
    names = dict.fromkeys(release_that_ships([slug]) for slug in answers) if ships else [release.name]
    html = page(sections, not_judged, ", ".join(names), mode.name, baseline.name if baseline else None)
    return Report(html, {section.judgement.subject.slug: section.judgement.verdict for section in sections}, not_judged)


def _section(
    path: Path,
    release: CoefficientRelease | None,
    baseline: CoefficientRelease | None,
    mode: ReplayMode,
    command: str,
    options: str,
    slug: str,
) -> Section | str:
    """The section of an experiment, or why it cannot be judged; a recording and its replay are large and not kept."""
    with open_store(path, read_only=True) as store:
        try:
            with faults_named(slug):
                evidence = gather(store, slug, release or release_for(None, [slug]), mode, options)
                before: Before | str | None = None
                try:
                    if baseline is not None:
                        before = before_of(evidence.comparison, compare_experiment(store, slug, baseline, mode))
                except ExperimentError as error:
                    before = str(error)
                return section_of(evidence, command, before, options)
        except ExperimentError as error:
            return str(error)


def _with_history(section: Section, history: History | None) -> Section:
    chart = None if history is None else history_chart(history, section.judgement.subject.slug)
    if chart is None:
        return section
    return replace(section, charts=replace(section.charts, shown=(chart, *section.charts.shown)))
