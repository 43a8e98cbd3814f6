"""A judgement laid out: its first line, the table of what is judged, what would decide, and the cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from shlex import quote

from blis_replay.base.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, Tone, Toned
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.validated import Validated
from blis_replay.validate.judgement import (
    Command,
    Judgement,
    Quantity,
    Remark,
    Subject,
    Verdict,
    exit_code,
)
from blis_replay.validate.metrics.latency import METRIC_NAMES
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import limit_text, percent, percent_span, predicted, quantity_text
from blis_replay.validate.text.messages import words

_TONES: Mapping[str, Tone] = {
    **{"PASS": "good", "within": "good", "FAIL": "bad", "beyond": "bad"},
    **{"UNDECIDED": "caution", "undecided": "caution"},
}
INTERVALS = "intervals: 95 % of the error that another recording of the same load would show"
_JUDGED = (
    *(Column("", "text"), Column("observed", "word"), Column("simulated", "word"), Column("error", "error_brief")),
    *(Column("95 % interval", "word"), Column("limit", "word"), Column("", "word")),
)


def toned(word: str) -> Toned:
    """A verdict or a state in its colour: red is a failure, magenta is undecided, and each is nothing else."""
    return Toned(word, _TONES.get(word, "heading"))


def command_text(command: Command, options: str = "") -> str:
    """A command as it is typed; ``options`` of the command line that it repeats, its store last."""
    _, store, where = options.partition(" --store ")
    repeated = options if command.of_release else f"{store}{where}"
    return f"blis-replay {command.verb} {quote(command.alias)}{repeated}{command.more}"


def held_text(quantity: Quantity) -> str:
    """An error with its interval beside its limit."""
    interval = "" if quantity.interval is None else f" ({percent_span(*quantity.interval)})"
    return f"{quantity.name} {percent(quantity.error)}{interval}, limit {limit_text(quantity.limit)}"


def reason(judgement: Judgement) -> str:
    """The largest reason of a verdict."""
    named: dict[str, list[str]] = {}
    for metric, why in judgement.refused.items():
        named.setdefault(why, []).append(METRIC_NAMES[metric])
    lost = [words(one) for one in judgement.lost] or [
        f"{' and '.join(metrics)} unusable ({why})" for why, metrics in named.items()
    ]
    largest, verdict = judgement.largest, judgement.verdict
    if verdict == "NOT JUDGED" or largest is None:
        return "; ".join(lost)
    if verdict == "FAIL":
        others = len(judgement.beyond) - 1
        more = f"; and {others} more" if others else ""
        off = f"{largest.name} {predicted(largest.error or 0.0)}" if largest.key in METRIC_NAMES else _error(largest)
        return f"{off} (limit {limit_text(largest.limit)}){more}"
    if verdict == "UNDECIDED":
        needs = "; ".join(map(words, judgement.decides))
        if judgement.in_state("undecided"):
            return f"{held_text(largest)}; {needs}"
        return f"within the limits, and nobody knows whether it is held out; {needs}"
    end = largest.error if largest.interval is None else max(largest.interval, key=abs)
    up_to = "" if largest.interval is None else "up to "
    said = f"nearest limit: {largest.name} {up_to}{percent(end)} ({limit_text(largest.limit)})"
    return f"{judgement.subject.use}; {said}" if verdict == "FITS" else said


def _error(quantity: Quantity) -> str:
    return f"{quantity.name} {percent(quantity.error)}"


def verdict_line(judgement: Judgement, how: str = "") -> Line:
    """The first line of everything: verdict, subject, the largest reason; ``how``: words behind the subject."""
    overloaded = "overloaded: " if judgement.overloaded and judgement.verdict != "NOT JUDGED" else ""
    begins, ends = judgement.subject.window
    part = "" if (begins, ends) == (0.0, 1.0) else f", only {100 * begins:g} to {100 * ends:g} % of its run"
    part += "" if judgement.subject.replay == "exact" else f", replayed with {judgement.subject.replay}"
    said = f"{judgement.verdict}  {judgement.subject.alias}{how}{part}: {overloaded}{reason(judgement)}"
    return Line(said, mark=toned(judgement.verdict))


def basis_text(comparison: Comparison) -> str:
    """How many requests, by which simulator and release, and what that was fitted on."""
    subject, mode = comparison.judgement.subject, comparison.run.mode.name
    kind = "" if comparison.recording.ground_truth == "recorded" else "reconstructed "
    loop = comparison.run.mode.loop
    found = (f.measured for f in comparison.run.recording.findings if f.check == "stationarity")
    clients = [int(of["in_flight"] or 0) for of in found if "in_flight" in of]
    clients += [loop.concurrency] if loop else []
    of_loop = f" of a closed loop of {counted(max(clients), 'client')}" if clients else ""
    parts = [counted(comparison.requests, f"{kind}request") + of_loop]
    parts += [] if subject.simulator == "embedded" else [f"simulator {subject.simulator}"]
    return "; ".join([*parts, f"{subject.release}, {use_text(subject)}", *mode_text(mode)])


def mode_text(mode: str) -> list[str]:
    """What was replayed otherwise than recorded."""
    return [] if mode == "exact" else [f"replay {mode}"]


def use_text(subject: Subject) -> str:
    """What the coefficients were fitted on, as far as this run is concerned; which run it was, if another one."""
    if subject.use == "unknown":
        return "unknown whether held out"
    if subject.use == "held out" and subject.fitted_on and len(subject.fitted_on) == 1:
        return f"held out (fitted on {subject.fitted_on[0]})"
    return subject.use


def tail_lines(judgement: Judgement) -> list[Line]:
    """P99s that are off with their whole interval; they decide nothing."""
    off = [] if judgement.overloaded or judgement.verdict == "NOT JUDGED" else judgement.tails_that_are("beyond")
    if not off:
        return []
    said = f"TAIL OFF  {'; '.join(map(held_text, off))} (not part of the verdict)"
    return [Line(said, mark=Toned("TAIL OFF", "heading"))]


def judged_table(judgement: Judgement) -> Table:
    """What is judged, and nothing else: each number with its error, interval, limit and state."""
    return Table("", _JUDGED, [_judged_row(judgement, quantity) for quantity in judgement.judged])


def _judged_row(judgement: Judgement, quantity: Quantity) -> list[Cell]:
    sides = [quantity_text(value, quantity.unit) for value in (quantity.observed, quantity.simulated)]
    interval = None if quantity.interval is None else percent_span(*quantity.interval)
    absent = "unusable" if quantity.metric in judgement.refused else "not recorded"
    state = absent if quantity.state == "absent" else toned(quantity.state)
    return [quantity.name, *sides, quantity.error, interval, limit_text(quantity.limit), state]


def judgement_parts(comparison: Comparison) -> list[Part]:
    """First line, basis and tails; then what is judged."""
    judgement = comparison.judgement
    head = Block([verdict_line(judgement), *tail_lines(judgement), basis_text(comparison)])
    return [head, judged_table(judgement)] if judgement.judged and not judgement.lost else [head]


def cause_lines(judgement: Judgement) -> list[Line]:
    """The cause, where there is one to tell, and what the numbers depend on."""
    derived = [Remark("derived", {"name": q.name, "how": q.derived}) for q in judgement.judged if q.derived]
    return [marked(one) for one in (*judgement.remarks, *derived) if is_brief(judgement, one)]


def is_brief(judgement: Judgement, one: Remark) -> bool:
    """Whether a remark is on the first screen; what other coefficients say is, where they turn the verdict."""
    if one.code == "predicted":
        return judgement.verdict in ("PASS", "FITS", "FAIL") and judgement.turns_with_fit
    return one.code not in ("draws", "skill")  # draws are in the intervals, and skill decides nothing


def marked(one: Remark) -> Line:
    """A remark; that of saturation stands out."""
    return Line(words(one), mark=Toned("saturation:", "heading") if one.code == "saturation" else None)


# -- What a validation answers first -----------------------------------------------------------------------------

_MORE = "more: -v prints every number, assumption and finding"


def first_screen(comparison: Comparison, options: str = "", more: str = "") -> list[Part]:
    """Verdict, what is judged, the cause and the next command: in 80 columns, without assumptions in 12 lines.

    ``options``: of the command line, which the next command needs as well.  ``more``: a line before that command.
    """
    judgement = comparison.judgement
    following = Line("next:", command=command_text(judgement.next, options))
    return [*judgement_parts(comparison), Block([*cause_lines(judgement), *([more] if more else []), following])]


def first_screens(report: Validated, options: str) -> list[Part]:
    """The same of each experiment; of one that cannot be replayed, why."""
    screens = [part for comparison in report.comparisons for part in first_screen(comparison, options, _MORE)]
    return [*screens, *(refused_screen(name, why, options) for name, why in report.not_judged.items())]


def refused_screen(name: str, why: str, options: str) -> Part:
    """Why a recording cannot be replayed, and the next command."""
    following = Line("next:", command=command_text(Command("inspect", name, of_release=False), options))
    return Block([Line(f"NOT JUDGED  {name}: {why}", mark=toned("NOT JUDGED")), following])


def first_answer(report: Validated, options: str, whole: Callable[[], Answer]) -> Answer:
    """The first screens; ``whole`` lays out the rest."""
    verdicts: list[Verdict] = [comparison.verdict for comparison in report.comparisons]
    verdicts += ["NOT JUDGED" for _ in report.not_judged]
    return Answer(first_screens(report, options), {}, exit_code=exit_code(verdicts), whole=whole)
