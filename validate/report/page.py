"""The page: an overview with the worst experiment first, then a section per experiment.

Every text is escaped and nothing is loaded from anywhere.  The only script that may run is ours, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from blis_replay.ingest.checks.evidence import CheckEvidence
from blis_replay.ingest.errors import counted
from blis_replay.ingest.recording import GroundTruth
from blis_replay.ingest.tables import Cell, Table, Value, columns_named
from blis_replay.replay.store import provenance_of
from blis_replay.validate.comparison.capacity import Measure
from blis_replay.validate.comparison.compare import Comparison, MetricCell, Verdict
from blis_replay.validate.comparison.comparison_text import notes, observed_cell, pairs_sentence
from blis_replay.validate.comparison.first_screen import before_the_queue, fit_words, saturated
from blis_replay.validate.comparison.saturation_text import saturation_sentences
from blis_replay.validate.comparison.summary_text import draws_sentence, mean_abs_errors, verdict_sentence
from blis_replay.validate.explain.attribute import blames
from blis_replay.validate.explain.text import explanations
from blis_replay.validate.metrics.latency import METRIC_NAMES, METRICS, STATISTICS, TAIL_LIMITS, THRESHOLDS
from blis_replay.validate.report.charts import Charts, charts_of
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.svg import Chart, inline
from blis_replay.validate.text.answer import html, html_text, html_verbatim
from blis_replay.validate.text.cells import cell_text, percent, percent_brief, percent_plain, time_text

if TYPE_CHECKING:
    from jinja2 import Environment


# Statistic and limit of each card; a p99 is reported and never gated.
_CARDS = (
    *((metric, "mean", limit) for metric, limit in THRESHOLDS.items()),
    ("ttft", "p99", TAIL_LIMITS["ttft"]),
)


@dataclass(frozen=True)
class Card:
    """One error: its text, and its bar in % of a track that reaches from one limit to the other.

    ``state``: ``within``, ``beyond`` its limit, or ``absent`` (no error: ``numbers`` has what there is).
    """

    title: str
    error: str
    state: str
    limit: str
    numbers: str
    start: float
    length: float


def cards_of(comparison: Comparison) -> tuple[Card, ...]:
    """What is judged, and p99 of TTFT; of an overloaded run what was served, the largest error for its limit first."""
    if comparison.overloaded:
        measures = sorted(comparison.capacity or (), key=lambda m: -abs(m.error) / comparison.limit(m))
        return tuple(_served_card(measure, comparison.limit(measure)) for measure in measures[: len(_CARDS)])
    return tuple(_card_of(comparison, metric, statistic, limit) for metric, statistic, limit in _CARDS)


def basis_of(comparison: Comparison) -> str:
    """What was compared: requests, what the coefficients were fitted on, and with what it was replayed."""
    run = comparison.run
    parts = (
        counted(comparison.requests, "request"),
        fit_words(comparison),
        comparison.ground_truth,
        run.release.name,
        f"replay {run.mode.name}",
    )
    return " · ".join(parts)


def _card_of(comparison: Comparison, metric: str, statistic: str, limit: float) -> Card:
    cell = comparison.metrics[metric][statistic]
    title = f"{METRIC_NAMES[metric]} {statistic}{'' if statistic == 'mean' else ' (not gated)'}"
    return _card(title, cell.error, limit, _from_to(time_text(cell.a_us), time_text(cell.b_us)))


def _served_card(measure: Measure, limit: float) -> Card:
    if measure.unit in _UNITS_US:
        sides = [time_text(value * _UNITS_US[measure.unit]) for value in (measure.observed, measure.simulated)]
    else:
        sides = [f"{value:,.4g} {measure.unit}" for value in (measure.observed, measure.simulated)]
    return _card(f"{measure.name[0].upper()}{measure.name[1:]}", measure.error, limit, _from_to(*sides))


def _from_to(observed: str, simulated: str) -> str:
    """Both with their unit, once where it is the same."""
    number, _, unit = observed.partition(" ")
    return f"{number if unit and simulated.endswith(f' {unit}') else observed} → {simulated}"


def _card(title: str, error: float | None, limit: float, numbers: str) -> Card:
    reach = 0.0 if error is None else 50 * min(abs(error) / limit, 1.0)
    return Card(
        title=title,
        error="not available" if error is None else percent_brief(error),
        state="absent" if error is None else "beyond" if abs(error) > limit else "within",
        limit=cell_text(limit, "limit"),
        numbers=numbers,
        start=50 - reach if (error or 0.0) < 0 else 50.0,
        length=reach,
    )


# What is shown of each experiment, with the error at which a cell is as hot as can be.
COLUMNS = (
    *((("e2e", "mean"), THRESHOLDS["e2e"]), (("e2e", "p99"), 2 * THRESHOLDS["e2e"])),
    *((("ttft", "mean"), THRESHOLDS["ttft"]), (("ttft", "p99"), 2 * THRESHOLDS["ttft"])),
    (("itl", "mean"), THRESHOLDS["itl"]),
)
# Least share of that error for each degree of heat.
_DEGREES = (0.1, 0.25, 0.5, 1.0)
_VERDICTS = ("fail", "not decided", "pass", "unusable", "not judged")


@dataclass(frozen=True)
class HeatCell:
    """A signed error as text, and its heat: 0 (none) to 4 (beyond the threshold; beyond twice that for a p99)."""

    text: str
    heat: int


@dataclass(frozen=True)
class OverviewRow:
    """One experiment, as ``Comparison`` has it, without the requests of its recording and replay.

    ``fitted``: what the coefficients were fitted on, in words.  ``cells``: by COLUMNS.  ``worst``: the largest absolute
    error of a mean over its threshold.
    """

    slug: str
    alias: str
    verdict: Verdict
    overloaded: bool
    uses: str
    fitted: str
    ground_truth: GroundTruth
    metrics: Mapping[str, Mapping[str, MetricCell]]
    cells: tuple[HeatCell, ...]
    worst: float


def overview_row(comparison: Comparison) -> OverviewRow:
    """The row of an experiment."""
    metrics = comparison.metrics
    errors = [(metrics[metric][statistic].error, hottest) for (metric, statistic), hottest in COLUMNS]
    return OverviewRow(
        slug=comparison.slug,
        alias=comparison.alias,
        verdict=comparison.verdict,
        overloaded=comparison.overloaded,
        uses=comparison.uses,
        fitted=fit_words(comparison),
        ground_truth=comparison.ground_truth,
        metrics=metrics,
        cells=tuple(HeatCell(percent(e), 0 if comparison.overloaded else _heat(e, hottest)) for e, hottest in errors),
        worst=max(abs(metrics[m]["mean"].error or 0.0) / limit for m, limit in THRESHOLDS.items()),
    )


def by_worst(row: OverviewRow) -> tuple[int, bool, float, str]:
    """Failed, not decided, passed, unusable, not judged; of each the overloaded last, the worst first."""
    return _VERDICTS.index(row.verdict), row.overloaded, -row.worst, row.slug


def header() -> list[str]:
    """The columns in words."""
    return [f"{metric.upper()} {statistic}" for (metric, statistic), _ in COLUMNS]


def _heat(error: float | None, hottest: float) -> int:
    return 0 if error is None else sum(abs(error) / hottest >= degree for degree in _DEGREES)


_MOST_FILES = 200


def metric_table(evidence: Evidence) -> Table:
    """Every number observed and simulated, with its error and that error's interval."""
    rows = []
    for metric, statistic in ((m, s) for m in METRICS for s in STATISTICS):
        cell = evidence.comparison.metrics[metric][statistic]
        simulated = "" if cell.unusable else time_text(cell.b_us)
        within = evidence.intervals.get((metric, statistic))
        interval = "-" if within is None else f"{percent(within[0]).removesuffix(' %')} .. {percent(within[1])}"
        observed = cell_text(observed_cell(cell), "time")
        rows.append(
            (
                f"{metric.upper()} {statistic}",
                f"{observed} ms" if cell.between_us and not cell.unusable else observed,
                simulated,
                percent(cell.error),
                interval,
            )
        )
    title = f"Latencies of {evidence.comparison.requests:,} requests"
    note = "error: simulated over observed, less one; interval: 95 % over resampled blocks of requests"
    return Table(title, columns_named("", "observed", "simulated", "error", "interval"), tuple(rows), note=note)


def stage_table(evidence: Evidence) -> Table | None:
    """Errors by load stage; None of a run with one stage."""
    if not evidence.stages:
        return None
    rows = tuple(
        (f"stage {c.selection.stage}", f"{c.requests:,}", *(percent(c.metrics[m][s].error) for (m, s), _ in COLUMNS))
        for c in evidence.stages
    )
    return Table("Errors by load stage", columns_named("", "requests", *header()), rows)


def provenance_tables(evidence: Evidence, command: str) -> list[Table]:
    """What the numbers depend on: command, versions and hashes, engine arguments, files."""
    provenance = provenance_of(evidence.run)
    facts: list[tuple[Cell, ...]] = [("command", command)]
    facts += [(name, value) for name, value in provenance.items() if isinstance(value, str)]
    facts += _words("replayed", provenance["basis"]) + _words("delay", provenance["delays"])
    recording = evidence.run.recording
    facts += [("model", recording.model), ("hardware", recording.hardware)]
    facts.append(("tensor parallelism", recording.tensor_parallelism))
    settings = sorted(evidence.run.recording.engine.items())
    engine = tuple((name, str(s.value), s.source, s.detail) for name, s in settings)
    shown = recording.files[:_MOST_FILES]
    files = tuple((f.name, f.kind, f"{f.bytes:,}", f"{f.records:,}", f"{f.rejected_count:,}", f.sha256) for f in shown)
    left = len(recording.files) - len(shown)
    tables = [
        Table("Provenance", columns_named("", "value", kind="text"), tuple(facts)),
        Table(
            "Engine arguments of the recording",
            columns_named("argument", "value", "source", "from", kind="text"),
            engine,
        ),
        Table(
            "Files of the recording",
            (
                *columns_named("file", "kind", kind="text"),
                *columns_named("bytes", "records", "rejected"),
                *columns_named("SHA-256", kind="text"),
            ),
            files,
            note=f"and {left:,} more" if left else "",
        ),
    ]
    return [table for table in tables if table.rows]


def _words(kind: str, named: object) -> list[tuple[Cell, ...]]:
    return [(f"{kind}: {name}", str(text)) for name, text in named.items()] if isinstance(named, Mapping) else []


@dataclass(frozen=True)
class Section:
    """One experiment as the page shows it: sentences and tables, not yet escaped.

    ``before``: the row with another release, or why there is none.  ``cause``: of the largest error, in a few words.
    ``why``: what explains the verdict; ``remedy``: the command that fixes it, empty if there is none.  ``notes``: what
    the numbers rest on.
    """

    row: OverviewRow
    before: OverviewRow | str | None
    verdict: str
    basis: str
    cards: tuple[Card, ...]
    cause: str
    why: tuple[str, ...]
    remedy: str
    notes: tuple[str, ...]
    metrics: Table
    stages: Table | None
    charts: Charts
    checks: tuple[CheckEvidence, ...]
    provenance: tuple[Table, ...]


def section_of(evidence: Evidence, command: str, before: OverviewRow | str | None = None) -> Section:
    """What the page says of an experiment; small, however large the recording."""
    comparison = evidence.comparison
    cause, why, remedy = _explained(evidence)
    beside = [pairs_sentence(comparison), draws_sentence(comparison)]
    return Section(
        row=overview_row(comparison),
        before=before,
        verdict=verdict_sentence(comparison).removeprefix("verdict: "),
        basis=basis_of(comparison),
        cards=cards_of(comparison),
        cause=cause,
        why=why,
        remedy=remedy,
        notes=(*(sentence for sentence in beside if sentence), *notes(comparison)),
        metrics=metric_table(evidence),
        stages=stage_table(evidence),
        charts=charts_of(evidence),
        checks=evidence.checks,
        provenance=tuple(provenance_tables(evidence, command)),
    )


_OVERLOADED = (
    "the server was offered more than it could serve, so latencies measure how long the queue has grown; "
    "they are shown and not judged"
)


def _explained(evidence: Evidence) -> tuple[str, tuple[str, ...], str]:
    """Cause in a few words, sentences, and the command that fixes it.

    Of a saturated or overloaded run the saturation comes first, and no fit: its latencies measure how long the queue
    has grown, so coefficients fitted to them would be wrong.  The command compares what came before that.
    """
    attribution, saturation = evidence.attribution, evidence.comparison.saturation
    sentences = [] if attribution is None else explanations(attribution)
    blamed = [] if attribution is None else blames(attribution)
    cause = blamed[0].cause.component.name if blamed and blamed[0].cause is not None else ""
    found = [] if saturation is None else saturation_sentences(saturation)
    if saturated(evidence.comparison):
        said = found if saturation is not None and saturation.from_us is not None else [_OVERLOADED]
        return "saturation", tuple(said), before_the_queue(evidence.comparison)
    remedies = [command for sentence in sentences if (command := command_of(sentence))]
    return cause, (*map(without_command, sentences), *found), remedies[0] if remedies else ""


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
            several=len(sections) > 1,
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
    # Style sheet, script, drawings and tables are this package's own text; they are all that is not escaped here.
    environment.globals["style"] = Markup((folder / "page.css").read_text("utf-8"))  # noqa: S704
    script = (folder / "page.js").read_text("utf-8")
    environment.globals["script"] = Markup(script)  # noqa: S704
    environment.globals["script_hash"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    def drawing(chart: Chart, prefix: str) -> Markup:
        return Markup(inline(chart, prefix))  # noqa: S704

    def table(shown: Table) -> Markup:
        return Markup(html(shown))  # noqa: S704

    def verbatim(text: str) -> Markup:
        return Markup(html_verbatim(text))  # noqa: S704

    environment.filters |= {
        "drawing": drawing,
        "measured": measured_text,
        "table": table,
        "verbatim": verbatim,
    }
    return environment


_UNITS_US = {"us": 1.0, "ms": 1e3, "s": 1e6}


def measured_text(name: str, value: Value) -> str:
    """One number of a finding with its unit: ``largest_gap_us`` and 2500 are "largest gap: 2.50 ms"."""
    words, _, unit = name.rpartition("_")
    if unit in _UNITS_US and (value is None or isinstance(value, int | float)):
        return f"{words.replace('_', ' ')}: {time_text(None if value is None else value * _UNITS_US[unit])}"
    share = isinstance(value, float) and ("share" in name or name == "coverage")
    shown = percent_plain(float(value)) if share and isinstance(value, float) else cell_text(value)
    return f"{name.replace('_', ' ')}: {shown}"


_COMMAND = re.compile(r": (blis-replay [^:]*)$")


def command_of(sentence: str) -> str:
    """The command that a sentence ends with; empty if none."""
    found = _COMMAND.search(sentence)
    return found[1] if found else ""


def without_command(sentence: str) -> str:
    """A sentence without the command at its end; what the command is for becomes a sentence of its own."""
    said, commands = _COMMAND.subn("", sentence)
    problem, _, remedy = said.rpartition("; ")
    return f"{problem}. Next, {remedy}." if commands and problem else said


def _safe(value: Any) -> Any:
    """Recorded text as a page may show it; what is marked safe as it is."""
    from markupsafe import Markup

    return value if not isinstance(value, str) or hasattr(value, "__html__") else Markup(html_text(value))  # noqa: S704
