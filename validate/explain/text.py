"""An attribution in words, as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.explain.attribute import (
    MEANS,
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
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import milliseconds, predicted

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
    value with bounds of 95 %, and ``change_us`` what it changes one after the other in this order.
    """
    replaced = [f"- {cause.component.name}: {cause.component.basis}" for cause in attribution.causes]
    reasons = dict.fromkeys(attribution.not_replaced.values())
    left = [f"- {', '.join(n for n, w in attribution.not_replaced.items() if w == why)}: {why}" for why in reasons]
    page = [
        _head(attribution),
        *([_sentence(Advice(_QUEUE))] if attribution.queue else []),
        _shares(attribution),
        *(_one_by_one(attribution) if len(attribution.causes) > 1 else ()),
        Block(replaced, "each component in turn replaced by"),
        Block(left, "not replaced"),
        *(f"{name} must not be used: {why}" for name, why in attribution.unusable.items()),
        Block([_sentence(advice) for advice in advice_of(attribution)]),
    ]
    return Answer(page, _document(attribution), _rows(attribution))


def _document(attribution: Attribution) -> dict[str, Any]:
    return {
        "experiment": attribution.slug,
        "alias": attribution.alias,
        "coefficients": attribution.release,
        "reference": attribution.reference,
        "replay": attribution.mode,
        "requests": attribution.requests,
        "replays": attribution.replays,
        "overloaded_replays": attribution.overloaded,
        "errors": [_quantity(attribution, i) for i in range(len(QUANTITIES))],
        "components": [
            {"name": cause.component.name, "basis": cause.component.basis, "mend": cause.component.advice}
            for cause in attribution.causes
        ],
        "not_replaced": attribution.not_replaced,
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
        "changes_ms": {cause.component.name: _estimate_json(cause.changes[i]) for cause in attribution.causes},
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
        if attribution.causes:
            return Advice(f"{off}; no component that was replaced explains most of it")
        return Advice(f"{off}; it is unexplained: this recording has no data to test the components")
    if abs(blame.error) < WORTH_NAMING:
        off = f"{blame.metric} is right by luck, two causes cancel"
    causes = (blame.cause, *blame.beside)
    reasons = {(cause.component.name, _is_less(attribution, cause, blame)): cause for cause in causes}
    new = [cause for reason, cause in reasons.items() if reason not in explained]
    explained.update(reasons)
    points = "; and ".join(_points(attribution, cause, blame, with_reason=cause in new) for cause in causes)
    # A command comes last: then it stands on a line of its own, as it can be given.
    remedies = {cause.component.advice: cause.component for cause in new}
    if not remedies:
        return Advice(f"{off}; {points}")
    *others, last = sorted(remedies.values(), key=lambda component: bool(component.command))
    said = [off, points, *(component.advice for component in others)]
    if not last.command:
        return Advice("; ".join([*said, last.advice]))
    return Advice("; ".join(said), last.remedy, last.command)


def _uncertainty(attribution: Attribution, estimate: Estimate, i: int, form: str) -> str:
    """By how much a number is uncertain that may be nothing; empty for others."""
    if not estimate.may_be_nothing:
        return ""
    percent = 100 * estimate.half_us / attribution.observed_us[i]
    return form.format(f"within its uncertainty of {f'±{percent:.1f}' if percent < 100 else 'over 100'} %")


def _is_less(attribution: Attribution, cause: Cause, blame: Blame) -> bool:
    return attribution.part(cause, blame.quantity).value_us < 0


def _points(attribution: Attribution, cause: Cause, blame: Blame, *, with_reason: bool) -> str:
    """The part of an error that is a cause's, and why."""
    component, part = cause.component, attribution.part(cause, blame.quantity)
    also = f" (or {', or '.join(component.also)}, which explain it as well)" if component.also else ""
    other_way = blame.cause is not None and attribution.part(blame.cause, blame.quantity).value_us * part.value_us < 0
    points = 100 * abs(part.value_us) / attribution.observed_us[blame.quantity]
    share = f"{points:.1f} points{_uncertainty(attribution, part, blame.quantity, ' ({})')}"
    come = f"{share} {'the other way ' if other_way else ''}come from {component.name}{also}"
    why = component.less if component.less and _is_less(attribution, cause, blame) else component.why
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


def _one_by_one(attribution: Attribution) -> list[Part]:
    """The means as one component after the other is replaced, and why the order matters."""

    def row(name: str, values_us: Sequence[float], changes_us: Sequence[float] | None = None) -> list[str]:
        moved = ["" if changes_us is None else _percent_of(-changes_us[i], attribution.observed_us[i]) for i in MEANS]
        return [name, *(f"{milliseconds(_known(values_us[i]))} {m:>9}" for i, m in zip(MEANS, moved, strict=True))]

    reached, rows = list(attribution.simulated_us), [row("as replayed", attribution.simulated_us)]
    for cause in attribution.causes:
        changes_us = [change.value_us for change in cause.changes]
        reached = [value - change for value, change in zip(reached, changes_us, strict=True)]
        rows.append(row(f"- {cause.component.name}", reached, changes_us))
    rows.append(row("as recorded", attribution.observed_us))
    path = Table(
        "", columns_named("one after the other, ms", *(f"{QUANTITIES[i][0].upper()} mean" for i in MEANS)), rows
    )
    if not attribution.overloaded:
        inputs = "The sentences name what each part changes on this way, on which wrong inputs are put right first:"
        return [Line(inputs, ""), path] if attribution.is_one_way else [path]
    hidden = (
        f"In {attribution.overloaded} of {attribution.replays} replays the simulated server does not keep up: some "
        "components are wrong in opposite directions and hide one another, so their shares are larger than the error. "
        "What each changes on one way from the replay to the recording:"
    )
    return [Line(hidden, ""), path]


def _percent_of(change_us: float, observed_us: float) -> str:
    moved = fraction(change_us, observed_us)
    return "" if moved is None else f"{100 * moved + 0.0:+.1f} %"


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
    *columns_named("share_us", "low_us", "high_us", "change_us", kind="real"),
)


def _rows(found: Attribution) -> Table:
    def row(i: int, part: str, share: Estimate, change_us: float | None = None) -> list[Cell]:
        numbers = (share.value_us, share.low_us, share.high_us, change_us)
        return [*QUANTITIES[i], part, *(None if value is None else _known(value) for value in numbers)]

    rows = [
        cells
        for i in range(len(QUANTITIES))
        for cells in (
            row(i, "error", found.error[i]),
            *(row(i, c.component.name, c.shares[i], c.changes[i].value_us) for c in found.causes),
            row(i, _NO_COMPONENT, found.residual[i]),
        )
    ]
    return Table("", _COLUMNS, rows)
