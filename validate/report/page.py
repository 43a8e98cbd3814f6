"""The page: an overview with the worst experiment first, then a section per experiment.

Every text is escaped and nothing is loaded from anywhere.  The only script that may run is ours, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from shlex import quote
from typing import TYPE_CHECKING, Any

from blis_replay.ingest.checks.evidence import CheckEvidence
from blis_replay.ingest.tables import Cell, Number, Table, columns_named
from blis_replay.validate.comparison.changes import error_changes
from blis_replay.validate.comparison.compare import light
from blis_replay.validate.comparison.comparison import Comparison, draws_remarks
from blis_replay.validate.comparison.overview import means_by_fit, stages_table, tails_text
from blis_replay.validate.comparison.pages import metric_table, notes, pairs_sentence, provenance_of
from blis_replay.validate.comparison.sweep import sweep_text, sweeps_of
from blis_replay.validate.comparison.verdict_text import (
    INTERVALS,
    basis_text,
    cause_lines,
    command_text,
    held_text,
    judged_table,
    reason,
    tail_lines,
    use_text,
)
from blis_replay.validate.explain.attribute import blames
from blis_replay.validate.explain.text import advice_of
from blis_replay.validate.judgement import Command, Judgement, Quantity
from blis_replay.validate.metrics.latency import METRIC_NAMES
from blis_replay.validate.report.charts import Charts, charts_of
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.html import html, html_text, html_verbatim
from blis_replay.validate.report.latency_charts import REACH
from blis_replay.validate.report.svg import described, inline, path, stroke
from blis_replay.validate.report.sweep_chart import sweep_chart
from blis_replay.validate.report.worst import worst_html
from blis_replay.validate.text.cells import number_text, percent_plain
from blis_replay.validate.text.messages import words

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


_WIDTH, _HEIGHT, _DOT = 440, 24, 4.0


def _place(error: float, limit: float) -> float:
    """Where an error lies on a strip."""
    return _WIDTH / 2 + (_WIDTH / 2 - _DOT - 1) * min(max(error / limit / REACH, -1.0), 1.0)


_COLOURS = {"within": "pass", "beyond": "fail", "undecided": "undecided", "absent": "muted"}


def strip(quantities: Sequence[Quantity], tails: Sequence[Quantity], name: str, title: str) -> str:
    """Errors as dots with their intervals, each divided by its own limit; ``tails``, which judge nothing, are hollow.

    ``name``: of the drawing, unique on a page; ``title``: what a screen reader says first.
    """
    y, band = _HEIGHT / 2, _place(1.0, 1.0) - _WIDTH / 2
    within = f"M {_WIDTH / 2 - band:.1f} 3 h {2 * band:.1f} V {_HEIGHT - 3} h {-2 * band:.1f} Z"
    parts = [
        path(within, "fill: var(--pass); opacity: 0.14"),
        path(f"M {_WIDTH / 2} 1 V {_HEIGHT - 1}", stroke("muted", 1)),
    ]
    for quantity, is_tail in [*((q, True) for q in tails), *((q, False) for q in quantities)]:
        if quantity.error is None:
            continue
        colour = "muted" if is_tail else _COLOURS[quantity.state]
        at = _place(quantity.error, quantity.limit)
        if quantity.interval is not None and not is_tail:
            low, high = (_place(end, quantity.limit) for end in quantity.interval)
            parts.append(path(f"M {low:.1f} {y} H {high:.1f}", stroke(colour, 1.6)))
            for end, x in zip(quantity.interval, (low, high), strict=True):
                if abs(end) > REACH * quantity.limit:  # it goes on beyond the strip
                    back = x - math.copysign(5.0, end)
                    parts.append(path(f"M {back:.1f} {y - 5} L {x:.1f} {y} L {back:.1f} {y + 5}", stroke(colour, 1.6)))
        fill = "none" if is_tail else f"var(--{colour})"
        dot = f"M {at - _DOT:.1f} {y} a 4 4 0 1 0 8 0 a 4 4 0 1 0 -8 0"
        parts.append(path(dot, f"fill: {fill}; stroke: var(--{colour}); stroke-width: 1.2"))
    said = "; ".join(held_text(q) for q in quantities if q.error is not None) or "0 errors are known"
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return described(name, html_verbatim(title), html_verbatim(said), box, f"{''.join(parts)}</svg>")


def strip_of_all(judgement: Judgement, name: str) -> str:
    """The strip of an experiment."""
    tails = () if judgement.overloaded else judgement.tails
    return strip(judgement.judged, tails, name, f"Errors of {judgement.subject.alias}")


def judged_html(judgement: Judgement, name: str) -> str:
    """What is judged as a table, with a strip in each row; nothing of a recording that carries no verdict."""
    if judgement.lost or not judgement.judged:
        return ""
    table = judged_table(judgement)
    # The state, last in a terminal, follows the name here: a narrow screen shows the columns on the left.
    metric, *numbers, state = table.columns
    rows = [[row[0], row[-1], *row[1:-1]] for row in table.rows]
    table = replace(table, columns=(metric, state, *numbers), rows=rows, title="What is judged", note=INTERVALS)
    strips = [
        f'<td class="strip">{strip((q,), (), f"{name}-{i}", f"Error of {q.name}")}</td>'
        for i, q in enumerate(judgement.judged)
    ]
    return html(table, "error over limit, -3 to +3", strips)


def card(comparison: Comparison) -> str:
    """The verdict on an experiment as on the page, with the style of the page, for a notebook."""
    judgement = comparison.judgement
    verdict, name = judgement.verdict, hashlib.sha256(judgement.subject.slug.encode()).hexdigest()[:8]
    chip = f'<strong class="chip {verdict.lower().replace(" ", "-")}">{verdict}</strong>'
    said = f"<p>{chip} {html_text(f'{judgement.subject.alias}: {reason(judgement)}')}</p>"
    style = f"<style>@scope {{ {_text_of('page.css')} }}</style>"
    basis = f'<p class="of">{html_text(basis_text(comparison))}</p>'
    return f'<div class="card">{style}{said}{basis}{judged_html(judgement, f"card-{name}")}</div>'


def _text_of(file: str) -> str:
    return (resources.files("blis_replay.validate.report") / file).read_text("utf-8")


_COMMAND = re.compile("`([^`]+)`")  # as a sentence of the terminal marks one
_ORDER = ("FAIL", "UNDECIDED", "NOT JUDGED", "PASS", "FITS")


def by_worst(judgement: Judgement) -> tuple[int, float, str]:
    """FAIL, UNDECIDED, NOT JUDGED, PASS, FITS; of each the largest error for its limit first."""
    largest = max((quantity.excess for quantity in judgement.judged), default=0.0)
    return _ORDER.index(judgement.verdict), -largest, judgement.subject.slug


def _counts(judgements: Sequence[Judgement], verdicts: Sequence[str]) -> list[tuple[str, str, str]]:
    """How many recordings have which verdict, the mean error of those held out, and the p99s that are off."""
    counts: list[tuple[str, str, str]] = [
        (str(verdicts.count(verdict)), verdict, verdict) for verdict in _ORDER if verdict in verdicts
    ]
    but = ", overloaded runs left out" if any(one.overloaded for one in judgements) else ""
    for named, of in means_by_fit(judgements, by_release=True).items():
        if (error := of["e2e"]) is not None:
            counts.append((percent_plain(error), f"mean |error| of E2E, {named}{but}", ""))
    tails = tails_text(judgements)
    return [*counts, (*tails, "")] if tails else counts


_SAID = {
    "FAIL": ("fails", "fail"),
    "UNDECIDED": ("is undecided", "are undecided"),
    "PASS": ("passes", "pass"),
    "FITS": ("fits (not held out)", "fit (not held out)"),
    "NOT JUDGED": ("is not judged", "are not judged"),
}


def headline(verdicts: Sequence[str]) -> str:
    """The answer in a sentence: ``2 of 12 recordings fail, 2 are undecided, 8 pass``."""
    counts = [verdicts.count(verdict) for verdict in _ORDER]
    first, *others = [f"{n} {_SAID[verdict][n > 1]}" for verdict, n in zip(_ORDER, counts, strict=True) if n]
    number, _, said = first.partition(" ")
    alone = {"NOT JUDGED": "The recording", "UNDECIDED": "The verdict"}.get(verdicts[0], "The simulator")
    subject = f"{number} of {len(verdicts)} recordings" if len(verdicts) > 1 else alone
    return ", ".join([f"{subject} {said}", *others])


_MOST_FILES = 200
_ARGUMENT = ("argument", "value", "source", "from")


def provenance_tables(evidence: Evidence, command: str) -> list[Table]:
    """What the numbers depend on: command, versions and hashes, engine arguments, files."""
    provenance = provenance_of(evidence.run)
    facts: list[tuple[Cell, ...]] = [("command", command)]
    facts += [(name, value) for name, value in provenance.items() if isinstance(value, str)]
    facts += _words("replayed", provenance["basis"]) + _words("delay", provenance["delays"])
    recording = evidence.run.recording
    facts += [("model", recording.model), ("hardware", recording.hardware)]
    facts.append(("tensor parallelism", recording.tensor_parallelism))
    engine = tuple((name, str(s.value), s.source, s.detail) for name, s in sorted(recording.engine.items()))
    shown = recording.files[:_MOST_FILES]
    files = tuple((f.name, f.kind, f"{f.bytes:,}", f"{f.records:,}", f"{f.rejected_count:,}", f.sha256) for f in shown)
    left = len(recording.files) - len(shown)
    of_files = columns_named("file", "kind", kind="text") + columns_named("bytes", "records", "rejected")
    note = f"and {left:,} more" if left else ""
    tables = [
        Table("Provenance", columns_named("", "value", kind="text"), tuple(facts)),
        Table("Engine arguments of the recording", columns_named(*_ARGUMENT, kind="text"), engine),
        Table("Files of the recording", (*of_files, *columns_named("SHA-256", kind="text")), files, note=note),
    ]
    return [table for table in tables if table.rows]


def _words(kind: str, named: object) -> list[tuple[Cell, ...]]:
    return [(f"{kind}: {name}", str(text)) for name, text in named.items()] if isinstance(named, Mapping) else []


@dataclass(frozen=True)
class Section:
    """One experiment as the page shows it: sentences and tables, not yet escaped.

    ``comparison``: without requests and steps (``light``).  ``before``: the row with another release, or why it is
    missing.  ``cause``: of the largest error, in a few words.  ``why``: what explains the verdict; ``remedy``: the
    command to run next, or empty.  ``cautions``: what the verdict depends on; ``notes``: the rest of what the numbers
    rest on.  ``trace``: the command that writes the timeline of the worst request.
    """

    judgement: Judgement
    comparison: Comparison
    before: Before | str | None
    tails: tuple[str, ...]
    basis: str
    cautions: tuple[str, ...]
    cause: str
    why: tuple[str, ...]
    remedy: str
    notes: tuple[str, ...]
    metrics: Table | None
    stages: Table | None
    charts: Charts
    checks: tuple[CheckEvidence, ...]
    provenance: tuple[Table, ...]
    trace: str


@dataclass(frozen=True)
class Before:
    """The verdict with another release, and how the errors have changed since; empty where nothing is compared."""

    judgement: Judgement
    change: str


# Percentage points, of a difference of two errors.
_POINTS = Number(1, 100, signed=True)


def before_of(candidate: Comparison, baseline: Comparison) -> Before:
    """The baseline on the same requests; the latencies of an overloaded run are not compared."""
    cells = [] if candidate.overloaded else [(q.key, q.statistic) for q in candidate.judgement.judged]
    changes = [
        f"{METRIC_NAMES[metric]} {number_text(change.error, _POINTS)} "
        f"({number_text(change.low, _POINTS)} .. {number_text(change.high, _POINTS)})"
        for (metric, _), change in error_changes(candidate, baseline.run, cells).items()
    ]
    return Before(baseline.judgement, f"change of |error| since, points: {', '.join(changes)}" if changes else "")


def section_of(evidence: Evidence, command: str, before: Before | str | None = None, options: str = "") -> Section:
    """What the page says of an experiment; small, however large the recording.

    ``options``: of the command line, which the next commands need as well.
    """
    comparison, judgement = evidence.comparison, evidence.comparison.judgement
    cause, why, remedy = _explained(evidence, options)
    charts = charts_of(evidence)
    trace = ""
    if charts.worst is not None:
        alias, request = comparison.alias, charts.worst.index[0]
        asked = Command("timeline", alias, f" --request {request} -o {quote(f'{alias}-{request}.json')}")
        trace = command_text(asked, options)
    # The latencies of an overloaded run measure its queue: only what is judged has numbers.
    latencies = not comparison.overloaded
    beside = [pairs_sentence(comparison), *map(words, draws_remarks(comparison))] if latencies else []
    stages = stages_table(comparison, evidence.stages) if latencies and evidence.stages else None
    return Section(
        judgement=judgement,
        comparison=light(comparison),
        before=before,
        tails=tuple(line.text for line in tail_lines(judgement)),
        basis=basis_text(comparison),
        cautions=tuple(line.text for line in cause_lines(judgement) if line.mark is None),
        cause=cause,
        why=why,
        remedy=remedy,
        notes=(*filter(None, beside), *(words(one) for one in notes(comparison) if one not in judgement.remarks)),
        metrics=replace(metric_table(comparison), note=INTERVALS) if latencies else None,
        stages=stages and replace(stages, title="errors by load stage"),
        charts=charts,
        checks=evidence.checks,
        provenance=tuple(provenance_tables(evidence, command)),
        trace=trace,
    )


_OVERLOADED = "the server was offered more than it could serve, so latencies measure how long the queue has grown"


def _explained(evidence: Evidence, options: str) -> tuple[str, tuple[str, ...], str]:
    """Cause in a few words, sentences, and the command to run next.

    Of a saturated or overloaded run the saturation comes first, and no fit: its latencies measure how long the queue
    has grown, so coefficients fitted to them would be wrong.  The command compares what came before that.
    """
    attribution, comparison = evidence.attribution, evidence.comparison
    queue = [] if comparison.saturation is None else [words(r) for r in comparison.saturation.remarks]
    if comparison.overloaded:
        found = comparison.saturation is not None and comparison.saturation.from_us is not None
        before = comparison.before_the_queue
        following = before or comparison.judgement.next
        return "saturation", tuple(queue if found else [_OVERLOADED]), _following(following, options)
    advised = [] if isinstance(attribution, str) else advice_of(attribution)
    blamed = [] if isinstance(attribution, str) else blames(attribution)
    cause = blamed[0].cause.component.name if blamed and blamed[0].cause is not None else ""
    # `calibrate` takes no latencies that a check calls unusable.
    unusable = {"e2e", "ttft"} & set(comparison.refused())
    remedies = [advice for advice in advised if advice.command and not unusable]
    sentences = [advice.problem for advice in advised]
    if remedies:
        sentences[0] += f". Next, {remedies[0].remedy}."
    command = remedies[0].command if remedies else _following(comparison.judgement.next, options)
    return cause, (*sentences, *queue), command


def _following(command: Command, options: str) -> str:
    """The next command as it is typed; empty where it would write this page."""
    return "" if command.verb == "report" else command_text(command, options)


def page(
    sections: Sequence[Section], not_judged: Mapping[str, str], release: str, mode: str, baseline: str | None = None
) -> str:
    """The HTML document: the overview, worst first, and the experiments in its order; equal input, equal bytes."""
    ordered = sorted(sections, key=lambda section: by_worst(section.judgement))
    judgements = [section.judgement for section in sections]
    verdicts = [judgement.verdict for judgement in judgements] + ["NOT JUDGED"] * len(not_judged)
    return (
        _environment()
        .get_template("page.html")
        .render(
            several=len(sections) > 1,
            title=headline(verdicts),
            counts=_counts(judgements, verdicts),
            baseline=baseline,
            sections=ordered,
            sweeps=sweeps_of([section.comparison for section in sections]),
            not_judged=not_judged,
            release=release,
            mode=mode,
        )
    )


def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=DictLoader({"page.html": _text_of("page.html")}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Style sheet, script, drawings and tables are this package's own text; they are all that is not escaped here.
    environment.globals["style"] = Markup(_text_of("page.css"))  # noqa: S704
    script = _text_of("page.js")
    environment.globals["script"] = Markup(script)  # noqa: S704
    environment.globals["script_hash"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    environment.filters |= {"reason": reason, "use": use_text, "sweep_text": sweep_text, "sweep_chart": sweep_chart}
    for draw in (html, html_verbatim, inline, judged_html, strip_of_all, worst_html):
        environment.filters[draw.__name__] = _markup(draw)
    return environment


def _markup(draw: Callable[..., str]) -> Callable[..., Markup]:
    """A filter whose text is this package's own markup."""
    from markupsafe import Markup

    return lambda *given: Markup(draw(*given))  # noqa: S704


def _safe(value: Any) -> Any:
    """Recorded text as a page may show it, a command in its sentence as code; what is marked safe as it is."""
    from markupsafe import Markup

    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return Markup(_COMMAND.sub(r"<code>\1</code>", html_text(value)))  # noqa: S704
