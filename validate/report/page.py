"""The page: an overview with the worst experiment first, then a section per experiment.

Every text is escaped and nothing is loaded from anywhere.  The only script that may run is ours, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from blis_replay.ingest.checks.evidence import CheckEvidence
from blis_replay.ingest.errors import counted
from blis_replay.ingest.tables import Cell, Table, Value, columns_named
from blis_replay.replay.store import provenance_of
from blis_replay.validate.comparison.comparison import Comparison, draws_remarks
from blis_replay.validate.comparison.pages import notes, observed_cell, pairs_sentence
from blis_replay.validate.comparison.saturation import saturation_remarks
from blis_replay.validate.comparison.verdict_text import command_text, fit_words, verdict_sentence
from blis_replay.validate.explain.attribute import blames
from blis_replay.validate.explain.text import Advice, advice_of
from blis_replay.validate.judgement import Judgement, Quantity, mean_abs_errors
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, THRESHOLDS
from blis_replay.validate.report.charts import Charts, charts_of
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.html import html, html_text, html_verbatim
from blis_replay.validate.report.svg import Chart, inline
from blis_replay.validate.text.cells import cell_text, limit_text, number_text, percent, percent_plain, time_text
from blis_replay.validate.text.messages import words

if TYPE_CHECKING:
    from jinja2 import Environment


# Numbers of an overloaded run that have a card.
_MOST_CARDS = 4


@dataclass(frozen=True)
class Card:
    """One error: its text, and its bar in % of a track that reaches from one limit to the other.

    ``state``: as of ``Quantity``; without an error ``numbers`` has what there is.
    """

    title: str
    error: str
    state: str
    limit: str
    numbers: str
    start: float
    length: float


def cards_of(judgement: Judgement) -> tuple[Card, ...]:
    """What is judged, and p99 of TTFT; of an overloaded run what was served, the largest error for its limit first."""
    if judgement.overloaded:
        return tuple(_card(f"{q.name[0].upper()}{q.name[1:]}", q) for q in judgement.worst_first[:_MOST_CARDS])
    tails = [tail for tail in judgement.tails if tail.metric == "ttft"]
    return (
        *(_card(f"{quantity.name} mean", quantity) for quantity in judgement.judged),
        *(_card(f"{tail.name} (not gated)", tail) for tail in tails),
    )


def basis_of(comparison: Comparison) -> str:
    """What was compared: requests, what the coefficients were fitted on, and with what it was replayed."""
    run = comparison.run
    parts = (
        counted(comparison.requests, "request"),
        fit_words(comparison.uses),
        comparison.ground_truth,
        run.release.name,
        f"replay {run.mode.name}",
    )
    return " · ".join(parts)


def _from_to(observed: str, simulated: str) -> str:
    """Both with their unit, once where it is the same."""
    number, _, unit = observed.partition(" ")
    return f"{number if unit and simulated.endswith(f' {unit}') else observed} → {simulated}"


def _card(title: str, quantity: Quantity) -> Card:
    error = quantity.error
    reach = 50 * min(quantity.excess, 1.0)
    return Card(
        title=title,
        error="not available" if error is None else number_text(error, "error_brief"),
        state=quantity.state,
        limit=limit_text(quantity.limit),
        numbers=_from_to(*(_number(value, quantity.unit) for value in (quantity.observed, quantity.simulated))),
        start=50 - reach if (error or 0.0) < 0 else 50.0,
        length=reach,
    )


def _number(value: float | None, unit: str) -> str:
    if value is None or unit in _UNITS_US:
        return time_text(None if value is None else value * _UNITS_US[unit])
    return f"{value:,.4g} {unit}"


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


def heat_cells(judgement: Judgement) -> tuple[HeatCell, ...]:
    """The errors of a row by COLUMNS; those of an overloaded run are cold."""
    errors = [(judgement.errors[cell], hottest) for cell, hottest in COLUMNS]
    return tuple(HeatCell(percent(e), 0 if judgement.overloaded else _heat(e, hottest)) for e, hottest in errors)


def by_worst(judgement: Judgement) -> tuple[int, bool, float, str]:
    """Failed, not decided, passed, unusable, not judged; of each the overloaded last, the worst first."""
    worst = max(abs(judgement.errors[m, "mean"] or 0.0) / limit for m, limit in THRESHOLDS.items())
    return _VERDICTS.index(judgement.verdict), judgement.overloaded, -worst, judgement.slug


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

    judgement: Judgement
    before: Judgement | str | None
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


def section_of(evidence: Evidence, command: str, before: Judgement | str | None = None) -> Section:
    """What the page says of an experiment; small, however large the recording."""
    comparison = evidence.comparison
    cause, why, remedy = _explained(evidence)
    draws = [] if comparison.judgement.open_by_fit else draws_remarks(comparison)
    beside = [pairs_sentence(comparison), *map(words, draws)]
    return Section(
        judgement=comparison.judgement,
        before=before,
        verdict=verdict_sentence(comparison),
        basis=basis_of(comparison),
        cards=cards_of(comparison.judgement),
        cause=cause,
        why=why,
        remedy=remedy,
        notes=(*(sentence for sentence in beside if sentence), *map(words, notes(comparison))),
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
    attribution, comparison = evidence.attribution, evidence.comparison
    queue = [] if comparison.saturation is None else [words(r) for r in saturation_remarks(comparison.saturation)]
    if comparison.overloaded:
        found = comparison.saturation is not None and comparison.saturation.from_us is not None
        before = comparison.before_the_queue
        return "saturation", tuple(queue if found else [_OVERLOADED]), command_text(before) if before else ""
    advised = [] if attribution is None else advice_of(attribution)
    blamed = [] if attribution is None else blames(attribution)
    cause = blamed[0].cause.component.name if blamed and blamed[0].cause is not None else ""
    remedies = [advice.command for advice in advised if advice.command]
    return cause, (*map(_without_command, advised), *queue), remedies[0] if remedies else ""


def _without_command(advice: Advice) -> str:
    """What the command is for becomes a sentence of its own."""
    return f"{advice.problem}. Next, {advice.remedy}." if advice.command else advice.problem


def page(
    sections: Sequence[Section], not_judged: Mapping[str, str], release: str, mode: str, baseline: str | None = None
) -> str:
    """The HTML document: the overview, worst first, and the experiments in its order; equal input, equal bytes."""
    ordered = sorted(sections, key=lambda section: by_worst(section.judgement))
    means = _means([section.judgement for section in sections])
    means_before = _means([section.before for section in sections if isinstance(section.before, Judgement)])
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


def _means(judgements: Sequence[Judgement]) -> dict[str, str]:
    known = {metric: value for metric, value in mean_abs_errors(judgements).items() if value is not None}
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
        "fit": fit_words,
        "heat": heat_cells,
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


def _safe(value: Any) -> Any:
    """Recorded text as a page may show it; what is marked safe as it is."""
    from markupsafe import Markup

    return value if not isinstance(value, str) or hasattr(value, "__html__") else Markup(html_text(value))  # noqa: S704
