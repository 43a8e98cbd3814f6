"""A judgement laid out: its first line, the table of what is judged, what would decide, the cause, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
    State,
    Subject,
    Use,
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
# Whether the coefficients were fitted on a run, in a column.
WAS_IT: Mapping[Use, str] = {
    "fitted on this run": "in the fit",
    "fitted on part of this run": "part in it",
    "fitted on another side of this run": "its other side",
    "held out": "held out",
    "fitted on no recording": "held out",
    "unknown": "unknown",
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


def tails_text(judgements: Iterable[Judgement]) -> tuple[str, str] | None:
    """How many p99s with an interval are outside their limit, and what they are; None without any."""
    tails = [tail for one in judgements if not one.overloaded for tail in one.tails if tail.interval is not None]
    outside, off = sum(tail.excess > 1 for tail in tails), sum(tail.state == "beyond" for tail in tails)
    what = f"p99s outside their limit (twice that of the mean), {off or 'none'} with the whole of its 95 % interval"
    return (f"{outside} of {len(tails)}", what) if tails else None


# Code of a remark -> what it says of many recordings.
_CAUTIONS = {
    "hardware": "not known to be of the hardware of the coefficients",
    "other_vllm": "of another vLLM than the coefficients",
    "other_layers": "replayed with other layers than the coefficients were fitted with",
    "extrapolated": "steps beyond the fit",
}


def cautions(judgements: Iterable[Judgement]) -> list[str]:
    """Which of many recordings have a remark that a reader of their verdicts should know."""
    having: dict[str, list[str]] = {}
    for one in judgements:
        for code in dict.fromkeys(remark.code for remark in one.remarks if remark.code in _CAUTIONS):
            having.setdefault(code, []).append(one.subject.alias)
    return [f"{_CAUTIONS[code]}: {', '.join(aliases)}" for code, aliases in having.items()]


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


def below_verdict(answer: Answer, comparison: Comparison) -> Answer:
    """An answer about a replay, below the verdict on it."""
    page = [judgement_parts(comparison)[0], *answer.page]
    return replace(answer, page=page, document={**answer.document, "judgement": judgement_json(comparison.judgement)})


def below_verdicts(answer: Answer, judged: Sequence[Comparison]) -> Answer:
    """An answer about several replays, below a line on each."""
    lines = Block([verdict_line(comparison.judgement) for comparison in judged])
    judgements = [judgement_json(comparison.judgement) for comparison in judged]
    return replace(answer, page=[lines, *answer.page], document={**answer.document, "judgements": judgements})


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


def error_cell(judgement: Judgement, cell: tuple[str, str], error: float | None) -> Cell:
    """An error in a table of many; one that is judged in the colour of its state, one that is within in none."""
    states = {(q.key, q.statistic): q.state for q in judgement.judged}
    return error if judgement.overloaded else toned_error(error, states.get(cell))


def toned_error(error: float | None, state: State | None) -> Cell:
    """An error in the colour of its state, if that is beyond or undecided."""
    return error if error is None or state not in ("beyond", "undecided") else Toned(error, _TONES[state])


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


# -- For programs ----------------------------------------------------------------------------------------------


def judgement_json(judgement: Judgement, options: str = "") -> dict[str, object]:
    """All of it; errors as fractions, times in ms."""
    return {
        "verdict": judgement.verdict,
        "reason": reason(judgement),
        "subject": vars(judgement.subject),
        "overloaded": judgement.overloaded,
        "judged": list(map(quantity_json, judgement.judged)),
        "tails": list(map(quantity_json, judgement.tails)),
        "refused": judgement.refused,
        "lost": [_remark_json(one) for one in judgement.lost],
        "decides": [_remark_json(one) for one in judgement.decides],
        "next": command_text(judgement.next, options),
    }


def _remark_json(one: Remark) -> dict[str, object]:
    return {"code": one.code, "values": one.values, "text": words(one)}


def quantity_json(quantity: Quantity) -> dict[str, object]:
    """One number held against its limit."""
    in_us = quantity.unit == "us"
    sides = [v / 1000 if in_us and v is not None else v for v in (quantity.observed, quantity.simulated)]
    return {
        "key": quantity.key,
        "statistic": quantity.statistic,
        "name": quantity.name,
        "unit": "ms" if in_us else quantity.unit,
        "observed": sides[0],
        "simulated": sides[1],
        "error": quantity.error,
        "interval": quantity.interval and list(quantity.interval),
        "limit": quantity.limit,
        "state": quantity.state,
        "derived": quantity.derived or None,
    }


def counts_text(verdicts: Sequence[str]) -> str:
    """``16 of 23 PASS, 2 FAIL``: verdicts in the order of the first line of a reader."""
    order = ("PASS", "FAIL", "UNDECIDED", "FITS", "NOT JUDGED")
    found = [(verdict, verdicts.count(verdict)) for verdict in order]
    first, *others = [(verdict, n) for verdict, n in found if n] or [("NOT JUDGED", 0)]
    head = f"{first[1]} of {len(verdicts)} {first[0]}"
    return ", ".join([head, *(f"{n} {verdict}" for verdict, n in others)])
