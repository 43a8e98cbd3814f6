"""The report: experiments by name, replayed, explained, and put on one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from blis_replay.blis.errors import SimulatorError
from blis_replay.blis.release import CoefficientRelease
from blis_replay.ingest.store import Store
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.errors import NothingToJudgeError, ValidateError
from blis_replay.validate.experiment import DEFAULT_RELEASE, experiment_row, validate_experiment
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
    store: Store,
    slugs: Sequence[str],
    release: CoefficientRelease,
    mode: ReplayMode | None = None,
    *,
    baseline: CoefficientRelease | None = None,
    command: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """One self-contained HTML page over these stored experiments, the same for the same input.

    ``baseline``: another release, whose errors stand below those of ``release`` in the overview.  ``command``: what
    the page gives as the way to make it again.  ``progress``: told (done, all).  Those that cannot be judged are
    named with the reason; raises ``NothingToJudgeError`` if that is all of them, ``ReleaseError`` for an invalid
    release.
    """
    asked = _Asked(release, baseline, load_release(DEFAULT_RELEASE), mode or ReplayMode(), command)
    for used in (release, baseline):
        if used is not None:
            used.refuse_if_invalid()
    sections: list[Section] = []
    not_judged: dict[str, str] = {}
    for done, slug in enumerate(slugs):
        if progress:
            progress(done, len(slugs))
        try:
            # Only the section is kept: a recording and its replay are large.
            sections.append(_section(store, slug, asked))
        except (SimulatorError, ReplayError, ValidateError) as error:
            not_judged[slug] = str(error)
    if progress:
        progress(len(slugs), len(slugs))
    if not sections:
        raise NothingToJudgeError("; ".join(f"{experiment_row(store, s).alias}: {w}" for s, w in not_judged.items()))
    html = page(sections, not_judged, asked.release.name, asked.mode.name, baseline.name if baseline else None)
    return Report(html, {section.row.slug: section.row.verdict for section in sections}, not_judged)


@dataclass(frozen=True)
class _Asked:
    release: CoefficientRelease
    baseline: CoefficientRelease | None
    reference: CoefficientRelease
    mode: ReplayMode
    command: str


def _section(store: Store, slug: str, asked: _Asked) -> Section:
    evidence = gather(store, slug, asked.release, asked.mode, asked.reference)
    before = None if asked.baseline is None else _before(store, slug, asked.baseline, asked.mode)
    return section_of(evidence, asked.command, before)


def _before(store: Store, slug: str, baseline: CoefficientRelease, mode: ReplayMode) -> OverviewRow | str:
    """The row with the baseline, or why there is none."""
    try:
        return overview_row(validate_experiment(store, slug, baseline, mode))
    except (SimulatorError, ReplayError) as error:
        return str(error)
