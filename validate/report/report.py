"""The report: experiments by name, replayed, explained, and put on one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blis_replay.blis.errors import SimulatorError
from blis_replay.blis.release import CoefficientRelease
from blis_replay.ingest.store import Store
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.errors import NothingToJudgeError, ValidateError
from blis_replay.validate.experiment import DEFAULT_RELEASE, experiment_row
from blis_replay.validate.report.evidence import gather
from blis_replay.validate.report.page import Section, page, section_of


@dataclass(frozen=True)
class Report:
    """``html``: the page.  ``verdicts``: by slug.  ``not_judged``: slugs that are not on it, with the reason."""

    html: str
    verdicts: dict[str, str]
    not_judged: dict[str, str]


def report(
    store: Store,
    slugs: Sequence[str],
    release: CoefficientRelease,
    mode: ReplayMode | None = None,
    *,
    command: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """One self-contained HTML page over these stored experiments, the same for the same input.

    ``command``: what the page gives as the way to make it again.  ``progress``: told (done, all).  Those that
    cannot be judged are named with the reason; raises ``NothingToJudgeError`` if that is all of them.
    """
    mode, reference = mode or ReplayMode(), load_release(DEFAULT_RELEASE)
    release.refuse_if_invalid()
    sections: list[Section] = []
    not_judged: dict[str, str] = {}
    for done, slug in enumerate(slugs):
        if progress:
            progress(done, len(slugs))
        try:
            # Only the section is kept: a recording and its replay are large.
            sections.append(section_of(gather(store, slug, release, mode, reference), command))
        except (SimulatorError, ReplayError, ValidateError) as error:
            not_judged[slug] = str(error)
    if progress:
        progress(len(slugs), len(slugs))
    if not sections:
        alias = {slug: experiment_row(store, slug).alias for slug in not_judged}
        raise NothingToJudgeError("; ".join(f"{alias[slug]}: {why}" for slug, why in not_judged.items()))
    html = page(sections, not_judged, release.name, mode.name)
    return Report(html, {section.row.slug: section.row.verdict for section in sections}, not_judged)
