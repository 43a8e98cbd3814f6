"""An attribution in words, as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from math import isnan
from typing import Any

from blis_replay.base.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.explain.attribute import (
    MEANS,
    MIN_BESIDE,
    MIN_CANCELLING,
    QUANTITIES,
    TAIL_WORTH_NAMING,
    WORTH_NAMING,
    Attribution,
    Blame,
    Cause,
    Estimate,
    blames,
    part_of,
)
from blis_replay.validate.explain.hypothesis import OPEN, PROVED_RIGHT, Hypothesis, Standing
from blis_replay.validate.metrics.uncertainty import MIN_REQUESTS
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import percent_span, predicted

_QUEUE = "the recording is overloaded, so its latencies measure how long the queue has grown"


# Measurements that a sentence lists; where more would decide, one recording has all of them.
_MOST_MEASURED = 3


@dataclass(frozen=True)
class Advice:
    """A sentence: what is off and why, and the ``remedy`` with its ``command``; empty if it is not known."""

    problem: str
    remedy: str = ""
    command: str = ""

    @property
    def _without_command(self) -> str:
        return f"{self.problem}; {self.remedy}:" if self.command else self.problem

    def __str__(self) -> str:
        return f"{self._without_command} {self.command}".rstrip()

    @property
    def line(self) -> Line:
        """What is off stands out, up to the first comma or semicolon."""
        mark = Toned(self.problem.partition(",")[0].partition(";")[0], "heading")
        return Line(self._without_command, mark=mark, command=self.command)


def explanations(attribution: Attribution) -> list[str]:
    """As ``advice_of``, in sentences."""
    return [str(advice) for advice in advice_of(attribution)]


def advice_of(attribution: Attribution) -> list[Advice]:
    """A sentence for each mean that is off by 1 % or more, the largest first: how much, why, what to do."""
    if attribution.lost:
        lost = [f"nothing is blamed: the recording itself is at fault: {why}" for why in attribution.lost]
        if attribution.steps_off is not None:
            more = "longer" if attribution.steps_off > 0 else "shorter"
            lost.append(
                f"apart from that, the simulator's steps take {100 * abs(attribution.steps_off):.0f} % {more} than the "
                "server's (median and sum of the recorded batches, whatever requests they were of)"
            )
        return [Advice(sentence) for sentence in lost]
    if _only_a_queue(attribution):
        return [Advice(f"{_QUEUE}, and it has no data to test the components: no error is explained")]
    if named := blames(attribution):
        explained: set[tuple[str, bool]] = set()
        return [_explained(attribution, blame, explained) for blame in named]
    if all(attribution.relative_error(i) is None for i in MEANS):
        return [Advice("no mean was observed, so there is no error to explain")]
    tails = [
        f"{metric.upper()} {statistic} is {predicted(error)}{known and f' (95 %: {known})'}"
        for i, (metric, statistic) in enumerate(QUANTITIES)
        if i not in MEANS and (error := attribution.relative_error(i)) is not None
        if abs(error) >= TAIL_WORTH_NAMING and not attribution.error[i].may_be_nothing
        for known in (_span(attribution, i),)
    ]
    but = f", but {' and '.join(tails)}: no cause is looked for" if tails else ": there is nothing to blame"
    return [Advice(f"no mean is off by 1 % or more{but}")]


def attribution_answer(attribution: Attribution) -> Answer:
    """Shares of the means and of the p99s, what they rest on, and the sentences; times in ms for programs.

    The rows: ``part`` is ``error``, each component, and ``unexplained``; ``share_us`` of a component is its Shapley
    value with bounds of 95 %.
    """
    replaced = [f"- {cause.component.name}: {cause.component.basis}" for cause in attribution.causes]
    names = {cause.component.name for cause in attribution.causes}
    others = [one for one in attribution.standings if one.name not in names and one.because]
    shares: list[Part] = [f"{_QUEUE}; the errors below are those of the queue"] if attribution.queue else []
    shares = [] if _only_a_queue(attribution) else [*shares, _shares(attribution)]
    page: list[Part] = [
        Block([advice.line for advice in advice_of(attribution)]),
        _head(attribution),
        *shares,
        Block(replaced, "each component in turn replaced by"),
        Block(_standing(others, PROVED_RIGHT), "proved right"),
        Block(_standing(others, OPEN), "not replaced"),
        *(f"{names} must not be used: {why}" for why, names in _by_reason(attribution.unusable.items()).items()),
    ]
    return Answer(page, _document(attribution), _rows(attribution))


def _only_a_queue(attribution: Attribution) -> bool:
    """Its latencies measure a queue, and nothing was recorded that could say why the queue grew otherwise."""
    return attribution.queue and not attribution.causes


def _standing(standings: Iterable[Standing], state: str) -> list[str]:
    reasons = _by_reason((one.name, one.because) for one in standings if one.state == state)
    return [f"- {names}: {why}" for why, names in reasons.items()]


def _by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names with a reason each, as the names that share each reason."""
    named: dict[str, list[str]] = {}
    for name, why in reasons:
        named.setdefault(why, []).append(name)
    return {why: ", ".join(names) for why, names in named.items()}


def _document(found: Attribution) -> dict[str, Any]:
    return {
        "experiment": found.slug,
        "alias": found.alias,
        "coefficients": found.release,
        "replay": found.mode,
        "requests": found.requests,
        "replays": found.replays,
        "errors": [
            {
                "metric": metric,
                "statistic": statistic,
                "observed_ms": _ms(found.observed_us[i]),
                "simulated_ms": _ms(found.simulated_us[i]),
                "error_ms": _in_ms(found.error[i]),
                "shares_ms": {cause.component.name: _in_ms(cause.shares[i]) for cause in found.causes},
                "residual_ms": _in_ms(found.residual[i]),
            }
            for i, (metric, statistic) in enumerate(QUANTITIES)
        ],
        "components": [
            {"name": one.name, "also": one.also, "basis": one.basis, "mend": one.advice}
            for one in (cause.component for cause in found.causes)
        ],
        "hypotheses": [asdict(one) for one in found.standings],
        "unusable": found.unusable,
        "explanations": explanations(found),
    }


def _in_ms(estimate: Estimate) -> dict[str, float | None]:
    return {name.removesuffix("_us"): _ms(value) for name, value in vars(estimate).items()}


def _ms(value_us: float) -> float | None:
    return None if isnan(value_us) else value_us / 1000


def _known(value: float) -> float | None:
    return None if isnan(value) else value


def _explained(attribution: Attribution, blame: Blame, explained: set[tuple[str, bool]]) -> Advice:
    """How much, by what, and what else adds to it or hides a part of it.

    ``explained``: causes whose reasons and remedies an earlier sentence gives; those of this one are added.  A cause
    that may be nothing has no remedy: coefficients would be fitted to chance.
    """
    i = blame.quantity
    off = f"{blame.metric} is {predicted(blame.error)}{_of_chance(attribution, i)}"
    if blame.cause is None:
        why = "no component that was replaced explains most of it"
        if not attribution.causes:
            why = "it is unexplained: this recording has no data to test the components"
        return Advice("; ".join([off, why, *_open(attribution, explained)]))
    if abs(blame.error) < WORTH_NAMING:
        off = f"{blame.metric} is right by luck, two causes cancel"
    said, remedies = [off], dict[str, Hypothesis]()
    points = []
    for cause in (blame.cause, *blame.beside):
        reason = (cause.component.name, part_of(cause, i) < 0)
        points.append(_points(attribution, cause, blame, with_reason=reason not in explained))
        if reason not in explained:
            explained.add(reason)
        advised = (cause.component.advice, True)
        if advised not in explained and not cause.shares[i].may_be_nothing:
            explained.add(advised)
            remedies[cause.component.advice] = cause.component
    said.append("; and ".join(points))
    residual_us, observed_us = attribution.residual[i].value_us, attribution.observed_us[i]
    if abs(residual_us) >= max(MIN_BESIDE * abs(blame.error), MIN_CANCELLING) * observed_us:
        way = " the other way" if residual_us * blame.error < 0 else ""
        said.append(f"{100 * abs(residual_us) / observed_us:.1f} points{way} are unexplained")
        said += _open(attribution, explained)
    # A command comes last: then it stands on a line of its own, as it can be given.
    ordered = sorted(remedies.values(), key=lambda component: bool(component.command))
    if ordered and (last := ordered[-1]).command:
        said += [component.advice for component in ordered[:-1] if component.remedy != last.remedy]
        return Advice("; ".join(said), last.remedy, last.command)
    return Advice("; ".join([*said, *(component.advice for component in ordered)]))


def _open(attribution: Attribution, explained: set[tuple[str, bool]]) -> list[str]:
    """Said once: what is open, and the measurements that would decide it."""
    decided = _by_reason((o.name, o.decides) for o in attribution.standings if o.state == OPEN and o.decides)
    if not decided or (OPEN, True) in explained:
        return []
    explained.add((OPEN, True))
    if len(decided) > _MOST_MEASURED and not attribution.causes:
        return ["what would decide: a recording by `blis-replay record`, which has the server's arguments and steps"]
    return [f"what would decide: {', '.join(f'{measured} ({names})' for measured, names in decided.items())}"]


def _of_chance(attribution: Attribution, i: int) -> str:
    """That an error may be nothing, with the interval that the verdict has; empty for others."""
    if attribution.requests < MIN_REQUESTS:
        return f", of {counted(attribution.requests, 'request')}: too few to tell it from chance"
    error = attribution.error[i]
    count = attribution.recordings
    of = "95 %" if count == 1 else f"95 % of the mean over {count} recordings"
    return f", which may be chance ({of}: {_span(attribution, i)})" if error.may_be_nothing else ""


def _span(attribution: Attribution, i: int) -> str:
    """Both ends of the interval of an error, in % of what was observed; empty where it is not known."""
    error, observed_us = attribution.error[i], attribution.observed_us[i]
    known = not isnan(error.low_us) and bool(observed_us)
    return percent_span(max(error.low_us / observed_us, -1.0), error.high_us / observed_us) if known else ""


def _points(attribution: Attribution, cause: Cause, blame: Blame, *, with_reason: bool) -> str:
    """The part of an error that is a cause's, and why."""
    component, i = cause.component, blame.quantity
    part = cause.shares[i]
    also = f" or {' or '.join(component.also)}, which this recording does not tell apart" if component.also else ""
    by_luck = blame.cause is not None and abs(blame.error) < WORTH_NAMING
    way = part_of(blame.cause, i) if by_luck and blame.cause is not None else blame.error
    other_way = way * part.value_us < 0
    points, half = (100 * abs(us) / attribution.observed_us[i] for us in (part.value_us, part.half_us))
    chance = f" (may be chance: {f'±{half:.1f}' if half < 100 else 'over 100'} %)" if part.may_be_nothing else ""
    come = f"{points:.1f} points{chance} {'the other way ' if other_way else ''}come from {component.name}{also}"
    why = component.less if component.less and part.value_us < 0 else component.why
    return f"{come}: {why}" if with_reason and not (also or part.may_be_nothing) else come


def _named(attribution: Attribution) -> str:
    alias, slug = attribution.alias, attribution.slug
    return alias if slug == alias else f"{alias}  ({slug})"


def _head(attribution: Attribution) -> Block:
    """What the shares are of, and their intervals, if there are some."""
    parts = (attribution.error, *(estimates for _, estimates in attribution.parts))
    has_intervals = any(not isnan(estimate.low_us) for estimates in parts for estimate in estimates)
    intervals = "; ± is half the 95 % interval, for another recording of the load"
    none = "" if attribution.queue else "; too few requests for intervals"
    replayed = "" if attribution.mode == "exact" else f"; replay {attribution.mode}"
    shares = f"; shares in % of observed{intervals if has_intervals else none}"
    if _only_a_queue(attribution):
        shares = ""
    return Block(
        [
            Line(_named(attribution), mark=Toned(attribution.alias, "heading")),
            Line(f"  coefficients: {attribution.release}{replayed}", "    "),
            Line(f"  {counted(attribution.requests, 'request')}{shares}", "    "),
        ]
    )


def _shares(attribution: Attribution) -> Table:
    """Means beside p99s where there is room, else below each other."""
    parts = {"mean": 1, "p99": 2}
    columns = [Column(f"{metric.upper()} {statistic}", "ms", part=parts[statistic]) for metric, statistic in QUANTITIES]
    errors = (Estimate(error.value_us) for error in attribution.error)
    estimated = [("error", errors), *((f"  {name}", shares) for name, shares in attribution.parts)]
    shares: list[list[Cell]] = [[name, *map(_share, of, attribution.observed_us)] for name, of in estimated]
    if any(span := [_span(attribution, i) for i in range(len(QUANTITIES))]):
        name = "95 % interval" if attribution.recordings == 1 else f"95 % of {attribution.recordings} runs"
        shares.insert(1, [name, *(one or "-" for one in span)])
    observed, simulated = (map(_known, us) for us in (attribution.observed_us, attribution.simulated_us))
    return Table("", (Column(""), *columns), [["observed ms", *observed], ["simulated ms", *simulated], *shares])


def _share(estimate: Estimate, observed_us: float) -> str:
    """In % of what was observed; in ms where nothing was."""
    if isnan(estimate.value_us):
        return "-"
    scale, digits, unit = (1000, 2, "ms") if isnan(observed_us) or not observed_us else (observed_us / 100, 1, "%")
    half = estimate.half_us / scale
    shown = round(estimate.value_us / scale, digits) + 0.0  # no minus before a zero
    within = "" if isnan(half) else f" ±{half:.{digits}f}"
    return f"{shown:+.{digits}f}{within} {unit}"


_COLUMNS = (
    *columns_named("metric", "statistic", "part", kind="data"),
    *columns_named("share_us", "low_us", "high_us", kind="real"),
)


def _rows(found: Attribution) -> Table:
    rows: list[list[Cell]] = [
        [*quantity, part, *map(_known, astuple(estimates[i]))]
        for i, quantity in enumerate(QUANTITIES)
        for part, estimates in [("error", found.error), *found.parts]
    ]
    return Table("", _COLUMNS, rows)
