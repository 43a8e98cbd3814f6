"""The page: an overview with the worst experiment first, then a section per experiment.

Every text is escaped and nothing is loaded from anywhere.  The only script that may run is ours, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import isfinite
from typing import TYPE_CHECKING, Any

from blis_replay.ingest.checks.evidence import CheckEvidence
from blis_replay.ingest.tables import Cell, Table, Value, columns_named
from blis_replay.replay.store import provenance_of
from blis_replay.validate.comparison.comparison import draws_remarks
from blis_replay.validate.comparison.pages import notes, observed_cell, pairs_sentence
from blis_replay.validate.comparison.saturation import saturation_remarks
from blis_replay.validate.comparison.verdict_text import (
    basis_text,
    command_text,
    counts_text,
    held_text,
    reason,
    tail_lines,
    use_text,
)
from blis_replay.validate.explain.attribute import blames
from blis_replay.validate.explain.text import Advice, advice_of
from blis_replay.validate.judgement import Judgement, Quantity, means_by_fit
from blis_replay.validate.metrics.latency import METRICS, STATISTICS
from blis_replay.validate.report.charts import Charts, charts_of
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.html import html, html_text, html_verbatim
from blis_replay.validate.report.svg import Chart, inline
from blis_replay.validate.text.cells import (
    UNITS_US,
    cell_text,
    limit_text,
    number_text,
    percent,
    percent_plain,
    percent_span,
    quantity_text,
    time_text,
)
from blis_replay.validate.text.messages import words

if TYPE_CHECKING:
    from jinja2 import Environment


# Numbers of an overloaded run that have a card.
_MOST_CARDS = 4


@dataclass(frozen=True)
class Card:
    """One judged error: its texts, and its interval as a bar in % of a track that ends at ``_REACH`` limits.

    ``state``: as of ``Quantity``; without an error ``numbers`` has what there is.
    """

    title: str
    error: str
    interval: str
    state: str
    limit: str
    numbers: str
    at: float
    start: float
    length: float


def cards_of(judgement: Judgement) -> tuple[Card, ...]:
    """What is judged; of an overloaded run the largest errors for their limits first."""
    shown = judgement.worst_first[:_MOST_CARDS] if judgement.overloaded else judgement.judged
    return tuple(map(_card, () if judgement.lost else shown))


# Limits from the middle of a strip to its end; what lies farther is drawn there.
_REACH = 3.0


def _place(error: float, limit: float) -> float:
    """Where an error lies on a track, 0 to 1."""
    return 0.5 + 0.5 * min(max(error / limit / _REACH, -1.0), 1.0)


def _card(quantity: Quantity) -> Card:
    error, interval = quantity.error, quantity.interval
    low, high = (_place(end, quantity.limit) for end in interval or (error or 0.0, error or 0.0))
    observed, simulated = (quantity_text(value, quantity.unit) for value in (quantity.observed, quantity.simulated))
    number, _, unit = observed.partition(" ")
    return Card(
        title=f"{quantity.name[0].upper()}{quantity.name[1:]}",
        error="not available" if error is None else number_text(error, "error_brief"),
        interval="" if interval is None else f"95 %: {percent_span(*interval)}",
        state=quantity.state,
        limit=limit_text(quantity.limit),
        numbers=f"{number if unit and simulated.endswith(f' {unit}') else observed} → {simulated}",
        at=100 * _place(error or 0.0, quantity.limit),
        start=100 * low,
        length=100 * (high - low),
    )


_COLOURS = {"within": "pass", "beyond": "fail", "undecided": "undecided", "absent": "muted"}
_WIDTH, _HEIGHT = 440, 24


def strip(judgement: Judgement, name: str) -> str:
    """The judged errors as dots with their intervals, each divided by its own limit; p99s are hollow."""
    y, band = _HEIGHT / 2, _WIDTH / 2 / _REACH
    parts = [
        f'<path d="M {_WIDTH / 2 - band:.1f} 3 h {2 * band:.1f} V {_HEIGHT - 3} h {-2 * band:.1f} Z" '
        'style="fill: var(--pass); opacity: 0.14"/>',
        f'<path d="M {_WIDTH / 2} 1 V {_HEIGHT - 1}" style="fill: none; stroke: var(--muted); stroke-width: 1"/>',
    ]
    tails = () if judgement.overloaded else judgement.tails
    for quantity, is_tail in [*((q, True) for q in tails), *((q, False) for q in judgement.judged)]:
        if quantity.error is None:
            continue
        colour = "muted" if is_tail else _COLOURS[quantity.state]
        at = _WIDTH * _place(quantity.error, quantity.limit)
        if quantity.interval is not None:
            ends = " H ".join(f"{_WIDTH * _place(end, quantity.limit):.1f}" for end in quantity.interval)
            line = f"M {ends.replace(' H', f' {y} H')}"
            parts.append(f'<path d="{line}" style="fill: none; stroke: var(--{colour}); stroke-width: 1.6"/>')
        fill = "none" if is_tail else f"var(--{colour})"
        dot = f"M {at - 4:.1f} {y} a 4 4 0 1 0 8 0 a 4 4 0 1 0 -8 0"
        parts.append(f'<path d="{dot}" style="fill: {fill}; stroke: var(--{colour}); stroke-width: 1.2"/>')
    said = "; ".join(held_text(q) for q in judgement.judged if q.error is not None) or reason(judgement)
    head = f'<svg role="img" aria-labelledby="{name}-title" aria-describedby="{name}-desc" '
    head += (
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><title id="{name}-title">Errors of {html_verbatim(judgement.subject.alias)}'
    )
    return f'{head}</title><desc id="{name}-desc">{html_verbatim(said)}</desc>{"".join(parts)}</svg>'


_ORDER = ("FAIL", "UNDECIDED", "PASS", "FITS", "NOT JUDGED")


def by_worst(judgement: Judgement) -> tuple[int, float, str]:
    """FAIL, UNDECIDED, PASS, FITS, NOT JUDGED; of each the largest error for its limit first."""
    largest = max((quantity.excess for quantity in judgement.judged), default=0.0)
    return _ORDER.index(judgement.verdict), -largest, judgement.subject.slug


@dataclass(frozen=True)
class Overview:
    """The head of the page: a sentence, and numbers with what they count."""

    title: str
    counts: tuple[tuple[str, str, str], ...]


def overview_of(judgements: Sequence[Judgement], not_judged: int) -> Overview:
    """How many recordings have which verdict, the mean error of those held out, and the p99s that are off."""
    verdicts = [judgement.verdict for judgement in judgements] + ["NOT JUDGED"] * not_judged
    counts: list[tuple[str, str, str]] = [
        (str(verdicts.count(verdict)), verdict, verdict) for verdict in _ORDER if verdict in verdicts
    ]
    of_kind = means_by_fit(judgements)
    for kind in ("held out", "fitted"):
        known = {metric: value for metric, value in of_kind.get(kind, {}).items() if value is not None}
        if "e2e" in known:
            counts.append((percent_plain(known["e2e"]), f"mean |error| of E2E, {kind}", ""))
    tails = [t for j in judgements if not j.overloaded for t in j.tails if t.interval is not None]
    if tails:
        off = sum(tail.state == "beyond" for tail in tails)
        counts.append((f"{off} of {len(tails)}", "p99s off by more than their limit", ""))
    return Overview(counts_text(verdicts), tuple(counts))


# What is shown of each load stage.
COLUMNS = (("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99"), ("itl", "mean"))


_MOST_FILES = 200


def metric_table(evidence: Evidence) -> Table:
    """Every number observed and simulated, with its error and that error's interval."""
    rows = []
    for metric, statistic in ((m, s) for m in METRICS for s in STATISTICS):
        cell = evidence.comparison.metrics[metric][statistic]
        simulated = "" if cell.unusable else time_text(cell.b_us)
        estimate = evidence.comparison.estimates.get((metric, statistic))
        known = estimate is not None and isfinite(estimate.half)
        interval = percent_span(estimate.low, estimate.high) if estimate is not None and known else "-"
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
    note = "error: simulated over observed, less one; interval: 95 % of what another recording would show"
    return Table(title, columns_named("", "observed", "simulated", "error", "interval"), tuple(rows), note=note)


def stage_table(evidence: Evidence) -> Table | None:
    """Errors by load stage; None of a run with one stage."""
    if not evidence.stages:
        return None
    rows = tuple(
        (f"stage {c.selection.stage}", f"{c.requests:,}", *(percent(c.metrics[m][s].error) for m, s in COLUMNS))
        for c in evidence.stages
    )
    return Table("Errors by load stage", columns_named("", "requests", *(f"{m.upper()} {s}" for m, s in COLUMNS)), rows)


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
    reason: str
    tails: tuple[str, ...]
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
    beside = [pairs_sentence(comparison), *map(words, draws_remarks(comparison))]
    return Section(
        judgement=comparison.judgement,
        before=before,
        reason=reason(comparison.judgement),
        tails=tuple(line.text for line in tail_lines(comparison.judgement)),
        basis=basis_text(comparison),
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
    judgements = [section.judgement for section in sections]
    return (
        _environment()
        .get_template("page.html")
        .render(
            several=len(sections) > 1,
            overview=overview_of(judgements, len(not_judged)),
            baseline=baseline,
            sections=ordered,
            not_judged=not_judged,
            release=release,
            mode=mode,
        )
    )


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

    def errors(judgement: Judgement, name: str) -> Markup:
        return Markup(strip(judgement, name))  # noqa: S704

    def table(shown: Table) -> Markup:
        return Markup(html(shown))  # noqa: S704

    def verbatim(text: str) -> Markup:
        return Markup(html_verbatim(text))  # noqa: S704

    environment.filters |= {
        "drawing": drawing,
        "measured": measured_text,
        "reason": reason,
        "strip": errors,
        "table": table,
        "use": use_text,
        "verbatim": verbatim,
    }
    return environment


def measured_text(name: str, value: Value) -> str:
    """One number of a finding with its unit: ``largest_gap_us`` and 2500 are "largest gap: 2.50 ms"."""
    words, _, unit = name.rpartition("_")
    if unit in UNITS_US and (value is None or isinstance(value, int | float)):
        return f"{words.replace('_', ' ')}: {time_text(None if value is None else value * UNITS_US[unit])}"
    share = isinstance(value, float) and ("share" in name or name == "coverage")
    shown = percent_plain(float(value)) if share and isinstance(value, float) else cell_text(value)
    return f"{name.replace('_', ' ')}: {shown}"


def _safe(value: Any) -> Any:
    """Recorded text as a page may show it; what is marked safe as it is."""
    from markupsafe import Markup

    return value if not isinstance(value, str) or hasattr(value, "__html__") else Markup(html_text(value))  # noqa: S704
