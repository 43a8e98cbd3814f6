"""The page: every text escaped, nothing loaded from anywhere, no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from blis_replay.ingest.check_evidence import CheckEvidence
from blis_replay.ingest.checks.pictures import Table
from blis_replay.ingest.printable import printable
from blis_replay.validate.attribution.attribution_text import explanations
from blis_replay.validate.check_text import bar_lengths, cell_text
from blis_replay.validate.comparison.compare import mean_abs_errors
from blis_replay.validate.comparison.comparison_text import notes, pairs_sentence, verdict_sentence
from blis_replay.validate.comparison.saturation_text import saturation_sentences
from blis_replay.validate.report.charts import Charts, charts_of
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.overview import OverviewRow, by_worst, header, overview_row
from blis_replay.validate.report.svg import Chart, inline
from blis_replay.validate.report.tables import metric_table, provenance_tables, stage_table
from blis_replay.validate.terminal import percent_plain

if TYPE_CHECKING:
    from jinja2 import Environment

# A text of a recording can have any length; nobody reads more of it than this.
_LONGEST_TEXT = 2_000


@dataclass(frozen=True)
class Section:
    """One experiment as the page shows it: sentences and tables, not yet escaped.

    ``before``: the row with another release, or why there is none.  ``why``: what explains the verdict.
    ``notes``: what the numbers rest on.
    """

    row: OverviewRow
    before: OverviewRow | str | None
    verdict: str
    why: tuple[str, ...]
    notes: tuple[str, ...]
    metrics: Table
    stages: Table | None
    charts: Charts
    checks: tuple[CheckEvidence, ...]
    provenance: tuple[Table, ...]


def section_of(evidence: Evidence, command: str, before: OverviewRow | str | None = None) -> Section:
    """What the page says of an experiment; small, however large the recording."""
    comparison = evidence.comparison
    why = [] if evidence.attribution is None else explanations(evidence.attribution)
    why += [] if comparison.saturation is None else saturation_sentences(comparison.saturation)
    pairs = pairs_sentence(comparison)
    stages = stage_table(evidence)
    return Section(
        row=overview_row(comparison),
        before=before,
        verdict=verdict_sentence(comparison).removeprefix("verdict: "),
        why=tuple(why),
        notes=(*([pairs] if pairs else []), *notes(comparison)),
        metrics=metric_table(evidence),
        stages=stages,
        charts=charts_of(evidence),
        checks=evidence.checks,
        provenance=tuple(provenance_tables(evidence, command)),
    )


def page(
    sections: Sequence[Section], not_judged: Mapping[str, str], release: str, mode: str, baseline: str | None = None
) -> str:
    """The HTML document: the overview, worst first, and the experiments in its order; equal input, equal bytes."""
    ordered = sorted(sections, key=lambda section: by_worst(section.row))
    means = _means([section.row for section in sections])
    means_before = _means([section.before for section in sections if isinstance(section.before, OverviewRow)])
    return (
        _environment()
        .get_template("page.html")
        .render(
            header=header(),
            means=means,
            means_before=means_before,
            baseline=baseline,
            sections=ordered,
            not_judged=not_judged,
            release=release,
            mode=mode,
        )
    )


def _means(rows: Sequence[OverviewRow]) -> dict[str, str]:
    known = {metric: value for metric, value in mean_abs_errors(rows).items() if value is not None}
    return {metric.upper(): percent_plain(value) for metric, value in known.items()}


def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined
    from markupsafe import Markup

    folder = resources.files("blis_replay.validate.report")
    environment = Environment(
        loader=DictLoader({"page.html": (folder / "page.html").read_text("utf-8")}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Style sheet and drawings are this package's own text; they are all that is not escaped.
    environment.globals["style"] = Markup((folder / "page.css").read_text("utf-8"))  # noqa: S704

    def drawing(chart: Chart, prefix: str) -> Markup:
        return Markup(inline(chart, prefix))  # noqa: S704

    environment.filters |= {"drawing": drawing, "cell": cell_text, "bars": bar_lengths}
    return environment


def _safe(value: Any) -> Any:
    """Recorded text on one line, without control characters and of bounded length; what is marked safe as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    left = len(value) - _LONGEST_TEXT
    return printable(value) if left <= 0 else f"{printable(value[:_LONGEST_TEXT])}… ({left:,} characters more)"
