"""The report: experiments by name, replayed, explained, and put on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl

from blis_replay.blis.errors import SimulatorError
from blis_replay.blis.release import CoefficientRelease
from blis_replay.ingest.store import Store, open_store
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.executor_ledger import Progress
from blis_replay.replay.executors import map_jobs
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.errors import NothingToJudgeError, ValidateError
from blis_replay.validate.experiment import DEFAULT_RELEASE, compare_experiment
from blis_replay.validate.report.evidence import gather
from blis_replay.validate.report.overview import OverviewRow, overview_row
from blis_replay.validate.report.page import Section, page, section_of


@dataclass(frozen=True)
class Report:
    """``html``: the page.  ``verdicts``: by slug.  ``not_judged``: slugs that are not on it, with the reason."""

    html: str
    verdicts: dict[str, str]
    not_judged: dict[str, str]


def verdicts_frame(written: Report) -> pl.DataFrame:
    """``experiment, verdict, reason``: a row an experiment, those that could not be judged with the reason."""
    rows = [(slug, verdict, None) for slug, verdict in written.verdicts.items()]
    refused = [(slug, "not judged", why) for slug, why in written.not_judged.items()]
    columns = dict.fromkeys(("experiment", "verdict", "reason"), pl.String)
    return pl.DataFrame([*rows, *refused], orient="row", schema=columns)


def report(
    store: Path,
    slugs: Sequence[str],
    release: CoefficientRelease,
    mode: ReplayMode | None = None,
    *,
    baseline: CoefficientRelease | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> Report:
    """One self-contained HTML page over these stored experiments, the same for the same input.

    ``store``: the file, which this process must not have open: several processes read it side by side.
    ``baseline``: another release, whose errors stand below those of ``release`` in the overview.  ``command``: what
    the page gives as the way to make it again.  ``progress``: told (done, all).  Those that cannot be judged are
    named with the reason; raises ``NothingToJudgeError`` if that is all of them, ``ReleaseError`` for an invalid
    release.
    """
    asked = _Asked(store, release, baseline, load_release(DEFAULT_RELEASE), mode or ReplayMode(), command)
    for used in (release, baseline):
        if used is not None:
            used.refuse_if_invalid()
    answers = dict(zip(slugs, map_jobs(partial(_answer, asked), slugs, progress=progress), strict=True))
    not_judged = {slug: answer for slug, answer in answers.items() if isinstance(answer, str)}
    sections = [answer for answer in answers.values() if isinstance(answer, Section)]
    if not sections:
        raise NothingToJudgeError("; ".join(f"{slug}: {why}" for slug, why in not_judged.items()))
    html = page(sections, not_judged, asked.release.name, asked.mode.name, baseline.name if baseline else None)
    return Report(html, {section.row.slug: section.row.verdict for section in sections}, not_judged)


@dataclass(frozen=True)
class _Asked:
    store: Path
    release: CoefficientRelease
    baseline: CoefficientRelease | None
    reference: CoefficientRelease
    mode: ReplayMode
    command: str


def _answer(asked: _Asked, slug: str) -> Section | str:
    """The section of an experiment, or why it cannot be judged; a recording and its replay are large and not kept."""
    with open_store(asked.store, read_only=True) as store:
        try:
            evidence = gather(store, slug, asked.release, asked.mode, asked.reference)
            return section_of(evidence, asked.command, _before(store, slug, asked))
        except (SimulatorError, ReplayError, ValidateError) as error:
            return str(error)


def _before(store: Store, slug: str, asked: _Asked) -> OverviewRow | str | None:
    """The row with the baseline, or why there is none; None where none is asked for."""
    if asked.baseline is None:
        return None
    try:
        return overview_row(compare_experiment(store, slug, asked.baseline, asked.mode))
    except (SimulatorError, ReplayError) as error:
        return str(error)
