"""An attribution in words, as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

from blis_replay.base.errors import counted
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.explain.attribute import (
    MEANS,
    MIN_BESIDE,
    MIN_CANCELLING,
    QUANTITIES,
    WORTH_NAMING,
    Attribution,
    Blame,
    Cause,
    Estimate,
    StepsOff,
    blames,
    fraction,
)
from blis_replay.validate.explain.hypothesis import OPEN, PROVED_RIGHT, Standing
from blis_replay.validate.metrics.uncertainty import MIN_REQUESTS
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import predicted

_NO_COMPONENT = "no component"
_QUEUE = (
    "the recording is overloaded, so its latencies measure how long the queue has grown; the errors below are those of "
    "the queue, and `blis-replay validate` judges what was served instead"
)


@dataclass(frozen=True)
class Advice:
    """A sentence: what is off and why, and the ``remedy`` with its ``command``; empty if it is not known."""

    problem: str
    remedy: str = ""
    command: str = ""

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}: {self.command}" if self.command else self.problem


def explanations(attribution: Attribution) -> list[str]:
    """As ``advice_of``, in sentences."""
    return [str(advice) for advice in advice_of(attribution)]


def advice_of(attribution: Attribution) -> list[Advice]:
    """A sentence for each mean that is off by 1 % or more, the largest first: how much, why, what to do."""
    if attribution.lost:
        lost = [f"nothing is blamed: the recording itself is at fault: {why}" for why in attribution.lost]
        lost += [] if attribution.steps_off is None else [_steps_off(attribution.steps_off)]
        return [Advice(sentence) for sentence in lost]
    if named := blames(attribution):
        explained: set[tuple[str, bool]] = set()
        return [_explained(attribution, blame, explained) for blame in named]
    if all(fraction(attribution.error[i].value_us, attribution.observed_us[i]) is None for i in MEANS):
        return [Advice("no mean was observed, so there is no error to explain")]
    return [Advice("no mean is off by 1 % or more: there is nothing to blame")]


def _steps_off(off: StepsOff) -> str:
    more = "longer" if off.excess > 0 else "shorter"
    return (
        f"apart from that, the simulator's steps take {100 * abs(off.excess):.0f} % {more} than the server's "
        f"(median and sum of {off.steps:,} recorded batches, whatever requests they were of)"
    )


def attribution_answer(attribution: Attribution) -> Answer:
    """Shares of the means and of the p99s, what they rest on, and the sentences; times in ms for programs.

    The rows: ``part`` is ``error``, each component, and ``no component``; ``share_us`` of a component is its Shapley
    value with bounds of 95 %.
    """
    replaced = [f"- {cause.component.name}: {cause.component.basis}" for cause in attribution.causes]
    names = {cause.component.name for cause in attribution.causes}
    others = [one for one in attribution.standings if one.name not in names and one.because]
    page: list[Part] = [
        _head(attribution),
        *([_sentence(Advice(_QUEUE))] if attribution.queue else []),
        _shares(attribution),
        Block(replaced, "each component in turn replaced by"),
        Block(_standing(others, PROVED_RIGHT), "proved right"),
        Block(_standing(others, OPEN), "not replaced"),
        *(f"{names} must not be used: {why}" for why, names in _by_reason(attribution.unusable.items()).items()),
        Block([_sentence(advice) for advice in advice_of(attribution)]),
    ]
    return Answer(page, _document(attribution), _rows(attribution))


def _standing(standings: Iterable[Standing], state: str) -> list[str]:
    reasons = _by_reason((one.name, one.because) for one in standings if one.state == state)
    return [f"- {names}: {why}" for why, names in reasons.items()]


def _by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names with a reason each, as the names that share each reason."""
    named: dict[str, list[str]] = {}
    for name, why in reasons:
        named.setdefault(why, []).append(name)
    return {why: ", ".join(names) for why, names in named.items()}


def _document(attribution: Attribution) -> dict[str, Any]:
    return {
        "experiment": attribution.slug,
        "alias": attribution.alias,
        "coefficients": attribution.release,
        "replay": attribution.mode,
        "requests": attribution.requests,
        "replays": attribution.replays,
        "errors": [_quantity(attribution, i) for i in range(len(QUANTITIES))],
        "components": [
            {"name": cause.component.name, "basis": cause.component.basis, "mend": cause.component.advice}
            for cause in attribution.causes
        ],
        "hypotheses": [asdict(one) for one in attribution.standings],
        "unusable": attribution.unusable,
        "explanations": explanations(attribution),
    }


def _quantity(attribution: Attribution, i: int) -> dict[str, Any]:
    metric, statistic = QUANTITIES[i]
    return {
        "metric": metric,
        "statistic": statistic,
        "observed_ms": _ms(attribution.observed_us[i]),
        "simulated_ms": _ms(attribution.simulated_us[i]),
        "error_ms": _estimate_json(attribution.error[i]),
        "shares_ms": {cause.component.name: _estimate_json(cause.shares[i]) for cause in attribution.causes},
        "residual_ms": _estimate_json(attribution.residual[i]),
    }


def _estimate_json(estimate: Estimate) -> dict[str, float | None]:
    values = {"value": estimate.value_us, "low": estimate.low_us, "high": estimate.high_us}
    return {name: _ms(value) for name, value in values.items()}


def _ms(value_us: float) -> float | None:
    return None if isnan(value_us) else value_us / 1000


def _known(value: float) -> float | None:
    return None if isnan(value) else value


def _explained(attribution: Attribution, blame: Blame, explained: set[tuple[str, bool]]) -> Advice:
    """How much, by what, and what else adds to it or hides a part of it.

    ``explained``: causes whose reasons and remedies an earlier sentence gives; those of this one are added.
    """
    off = f"{blame.metric} is {predicted(blame.error)}"
    off += _uncertainty(attribution, attribution.error[blame.quantity], blame.quantity, ", {}")
    if blame.cause is None:
        why = "no component that was replaced explains most of it"
        if not attribution.causes:
            why = "it is unexplained: this recording has no data to test the components"
        return Advice("; ".join([off, why, *_open(attribution, explained)]))
    if abs(blame.error) < WORTH_NAMING:
        off = f"{blame.metric} is right by luck, two causes cancel"
    causes = (blame.cause, *blame.beside)
    reasons = {(cause.component.name, _is_less(cause, blame)): cause for cause in causes}
    new = [cause for reason, cause in reasons.items() if reason not in explained]
    explained.update(reasons)
    points = "; and ".join(_points(attribution, cause, blame, with_reason=cause in new) for cause in causes)
    residual_us, observed_us = attribution.residual[blame.quantity].value_us, attribution.observed_us[blame.quantity]
    if abs(residual_us) >= max(MIN_BESIDE * abs(blame.error), MIN_CANCELLING) * observed_us:
        way = " the other way" if residual_us * blame.error < 0 else ""
        left = f"{100 * abs(residual_us) / observed_us:.1f} points{way} come from no component"
        points = "; ".join([points, left, *_open(attribution, explained)])
    # A command comes last: then it stands on a line of its own, as it can be given.
    remedies = {cause.component.advice: cause.component for cause in new}
    if not remedies:
        return Advice(f"{off}; {points}")
    *others, last = sorted(remedies.values(), key=lambda component: bool(component.command))
    said = [off, points, *(component.advice for component in others)]
    if not last.command:
        return Advice("; ".join([*said, last.advice]))
    return Advice("; ".join(said), last.remedy, last.command)


def _open(attribution: Attribution, explained: set[tuple[str, bool]]) -> list[str]:
    """Said once: what is open, and the measurements that would decide it."""
    decided = _by_reason((o.name, o.decides) for o in attribution.standings if o.state == OPEN and o.decides)
    if not decided or (OPEN, True) in explained:
        return []
    explained.add((OPEN, True))
    return [f"what would decide: {', '.join(f'{measured} ({names})' for measured, names in decided.items())}"]


def _uncertainty(attribution: Attribution, estimate: Estimate, i: int, form: str) -> str:
    """By how much a number is uncertain that may be nothing; empty for others."""
    if attribution.requests < MIN_REQUESTS:
        return form.format(f"of {counted(attribution.requests, 'request')}: too few to tell it from chance")
    if not estimate.may_be_nothing:
        return ""
    percent = 100 * estimate.half_us / attribution.observed_us[i]
    return form.format(f"within its uncertainty of {f'±{percent:.1f}' if percent < 100 else 'over 100'} %")


def _is_less(cause: Cause, blame: Blame) -> bool:
    return cause.shares[blame.quantity].value_us < 0


def _points(attribution: Attribution, cause: Cause, blame: Blame, *, with_reason: bool) -> str:
    """The part of an error that is a cause's, and why."""
    component, part = cause.component, cause.shares[blame.quantity]
    also = f" (or {', or '.join(component.also)}, which explain it as well)" if component.also else ""
    other_way = blame.cause is not None and blame.cause.shares[blame.quantity].value_us * part.value_us < 0
    points = 100 * abs(part.value_us) / attribution.observed_us[blame.quantity]
    share = f"{points:.1f} points{_uncertainty(attribution, part, blame.quantity, ' ({})')}"
    come = f"{share} {'the other way ' if other_way else ''}come from {component.name}{also}"
    why = component.less if component.less and _is_less(cause, blame) else component.why
    return f"{come}: {why}" if with_reason else come


def _head(attribution: Attribution) -> Block:
    """What the shares are of, and their intervals, if there are some."""
    parts = (attribution.error, attribution.residual, *(cause.shares for cause in attribution.causes))
    has_intervals = any(not isnan(estimate.low_us) for estimates in parts for estimate in estimates)
    shares = "shares in % of observed, ± half of the 95 % interval for another recording of the load"
    if not has_intervals:
        shares = "shares in % of observed; too few requests for intervals"
    return Block(
        [
            Line(f"{attribution.alias}  ({attribution.slug})", mark=Toned(attribution.alias, "heading")),
            Line(f"  coefficients: {attribution.release}; replay {attribution.mode}", "    "),
            Line(f"  {attribution.requests:,} requests; {shares}", "    "),
        ]
    )


def _sentence(advice: Advice) -> Line:
    """What is off stands out, up to the first comma or semicolon."""
    mark = Toned(advice.problem.partition(",")[0].partition(";")[0], "heading")
    said = f"{advice.problem}; {advice.remedy}:" if advice.command else advice.problem
    return Line(said, mark=mark, command=advice.command)


def _shares(attribution: Attribution) -> Table:
    """Means beside p99s where there is room, else below each other."""
    parts = {"mean": 1, "p99": 2}
    columns = [Column(f"{metric.upper()} {statistic}", "ms", part=parts[statistic]) for metric, statistic in QUANTITIES]
    rows: list[list[Cell]] = [
        ["observed ms", *map(_known, attribution.observed_us)],
        ["simulated ms", *map(_known, attribution.simulated_us)],
        ["error", *_share_cells(attribution.error, attribution)],
        *([f"  {cause.component.name}", *_share_cells(cause.shares, attribution)] for cause in attribution.causes),
        [f"  {_NO_COMPONENT}", *_share_cells(attribution.residual, attribution)],
    ]
    return Table("", (Column(""), *columns), rows)


def _share_cells(estimates: Sequence[Estimate], attribution: Attribution) -> list[Cell]:
    return [_share(*pair) for pair in zip(estimates, attribution.observed_us, strict=True)]


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
    def row(i: int, part: str, share: Estimate) -> list[Cell]:
        return [*QUANTITIES[i], part, *map(_known, (share.value_us, share.low_us, share.high_us))]

    rows = [
        cells
        for i in range(len(QUANTITIES))
        for cells in (
            row(i, "error", found.error[i]),
            *(row(i, c.component.name, c.shares[i]) for c in found.causes),
            row(i, _NO_COMPONENT, found.residual[i]),
        )
    ]
    return Table("", _COLUMNS, rows)
