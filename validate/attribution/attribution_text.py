"""An attribution in words, as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

from blis_replay.validate.attribution.attribute import Attribution, Cause, Estimate
from blis_replay.validate.attribution.resampled import QUANTITIES
from blis_replay.validate.terminal import Toned, milliseconds, table, tables, toned, wrap

# Errors of a mean below this are not worth a cause.
_WORTH_NAMING = 0.01
_NO_COMPONENT = "no component"


def explanations(attribution: Attribution) -> list[str]:
    """A sentence for each mean that is off by 1 % or more, the largest first: how much, why, what to do."""
    means = [i for i, (_, statistic) in enumerate(QUANTITIES) if statistic == "mean"]
    errors = {i: _fraction(attribution.error[i].value_us, attribution.observed_us[i]) for i in means}
    named = {i: error for i, error in errors.items() if error is not None and abs(error) >= _WORTH_NAMING}
    if named:
        return [_explained(attribution, i, named[i]) for i in sorted(named, key=lambda i: -abs(named[i]))]
    if all(error is None for error in errors.values()):
        return ["no mean was observed, so there is no error to explain"]
    return ["no mean is off by 1 % or more: there is nothing to blame"]


def attribution_text(attribution: Attribution) -> str:
    """The page: tables of shares of the means and of the p99s, what they rest on, and the sentences."""
    replaced = [f"- {cause.component.name}: {cause.component.basis}" for cause in attribution.causes]
    reasons = dict.fromkeys(attribution.not_replaced.values())
    left = [f"- {', '.join(n for n, w in attribution.not_replaced.items() if w == why)}: {why}" for why in reasons]
    parts = [
        f"{toned(attribution.alias, 'heading')}  ({attribution.slug})\n"
        + wrap(f"  coefficients: {attribution.release}; replay {attribution.mode}", "    ")
        + f"\n  {attribution.requests:,} requests; shares in % of the observed value, each with half of"
        + f"\n    its 95 % interval over {attribution.resamples} resamplings of the requests",
        *_shares_tables(attribution),
    ]
    if len(attribution.causes) > 1:
        parts.append(_one_by_one(attribution))
    if replaced:
        parts.append("\n".join([toned("each component in turn replaced by:", "heading"), *map(wrap, replaced)]))
    if left:
        parts.append("\n".join([toned("not replaced:", "heading"), *map(wrap, left)]))
    parts += [wrap(f"{name} must not be used: {why}") for name, why in attribution.unusable.items()]
    return "\n\n".join([*parts, "\n".join(map(_sentence, explanations(attribution)))])


def attribution_json(attribution: Attribution) -> dict[str, Any]:
    """The same for programs; times in ms, null where nothing was observed."""
    return {
        "experiment": attribution.slug,
        "alias": attribution.alias,
        "coefficients": attribution.release,
        "reference": attribution.reference,
        "replay": attribution.mode,
        "requests": attribution.requests,
        "resamples": attribution.resamples,
        "replays": attribution.replays,
        "overloaded_replays": attribution.overloaded,
        "errors": [_quantity_json(attribution, i) for i in range(len(QUANTITIES))],
        "components": [
            {"name": cause.component.name, "basis": cause.component.basis, "mend": cause.component.mend}
            for cause in attribution.causes
        ],
        "not_replaced": attribution.not_replaced,
        "unusable": attribution.unusable,
        "explanations": explanations(attribution),
    }


def _quantity_json(attribution: Attribution, i: int) -> dict[str, Any]:
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


def _explained(attribution: Attribution, i: int, error: float) -> str:
    metric = f"{QUANTITIES[i][0].upper()} {QUANTITIES[i][1]}"
    off = f"{metric} is {100 * abs(error):.1f} % {'too long' if error > 0 else 'short'}"
    sign = 1 if error > 0 else -1

    def part(cause: Cause) -> float:
        # Shares over orders in which the server is overloaded say how much it would be, not what is wrong now.
        return sign * (cause.changes if attribution.overloaded else cause.shares)[i].value_us

    largest = max(attribution.causes, key=part, default=None)
    if largest is None or part(largest) < max(sign * attribution.residual[i].value_us, 0.0):
        return f"{off}; most of it no component explains that this recording can replace."
    points = 100 * part(largest) / attribution.observed_us[i]
    return f"{off}, {points:.1f} points by {largest.component.name}: {largest.component.why}; {largest.component.mend}"


def _fraction(value_us: float, observed_us: float) -> float | None:
    return None if isnan(value_us) or isnan(observed_us) or observed_us == 0 else value_us / observed_us


def _sentence(sentence: str) -> str:
    """What is off stands out, up to the first comma or semicolon."""
    return wrap(sentence, mark=Toned(sentence.partition(",")[0].partition(";")[0], "heading"))


def _shares_tables(attribution: Attribution) -> list[str]:
    """Means beside p99s where there is room, else below each other."""
    columns = range(len(QUANTITIES))
    header = ["", *(f"{metric.upper()} {statistic}" for metric, statistic in QUANTITIES)]
    rows = [
        ["observed ms", *(milliseconds(_known(attribution.observed_us[i])) for i in columns)],
        ["simulated ms", *(milliseconds(_known(attribution.simulated_us[i])) for i in columns)],
        _shares_row("error", attribution.error, attribution, columns),
        *(_shares_row(f"  {cause.component.name}", cause.shares, attribution, columns) for cause in attribution.causes),
        _shares_row(f"  {_NO_COMPONENT}", attribution.residual, attribution, columns),
    ]
    parts = [[0, *(1 + i for i in columns if QUANTITIES[i][1] == statistic)] for statistic in ("mean", "p99")]
    return tables(header, rows, parts)


def _one_by_one(attribution: Attribution) -> str:
    """The means on the way from the replay to the recording, and why the way is worth a look."""
    columns = [i for i, quantity in enumerate(QUANTITIES) if quantity[1] == "mean"]
    reached, rows = list(attribution.simulated_us), []
    for cause in attribution.causes:
        reached = [value - change.value_us for value, change in zip(reached, cause.changes, strict=True)]
        moved = [_percent_of(-cause.changes[i].value_us, attribution.observed_us[i]) for i in columns]
        cells = [f"{milliseconds(_known(reached[i]))} {m:>9}" for i, m in zip(columns, moved, strict=True)]
        rows.append([f"- {cause.component.name}", *cells])
    simulated = [f"{milliseconds(_known(attribution.simulated_us[i]))} {'':9}" for i in columns]
    header = ["one after the other, ms", *(f"{QUANTITIES[i][0].upper()} mean" for i in columns)]
    observed = [f"{milliseconds(_known(attribution.observed_us[i]))} {'':9}" for i in columns]
    path = table(header, [["as replayed", *simulated], *rows, ["as recorded", *observed]])
    if not attribution.overloaded:
        return path
    hidden = (
        f"In {attribution.overloaded} of {attribution.replays} replays the simulated server does not keep up: some "
        "components are wrong in opposite directions and hide one another, so their shares are larger than the error. "
        "What each changes on one way from the replay to the recording:"
    )
    return f"{wrap(hidden, '')}\n\n{path}"


def _percent_of(change_us: float, observed_us: float) -> str:
    fraction = _fraction(change_us, observed_us)
    return "" if fraction is None else f"{100 * fraction + 0.0:+.1f} %"


def _shares_row(
    name: str, estimates: Sequence[Estimate], attribution: Attribution, columns: Sequence[int]
) -> list[str]:
    return [name, *(_share(estimates[i], attribution.observed_us[i]) for i in columns)]


def _share(estimate: Estimate, observed_us: float) -> str:
    """In % of what was observed; in ms where nothing was."""
    if isnan(estimate.value_us):
        return "-"
    scale, digits, unit = (1000, 2, "ms") if isnan(observed_us) else (observed_us / 100, 1, "%")
    half = abs(estimate.high_us - estimate.low_us) / 2 / scale
    shown = round(estimate.value_us / scale, digits) + 0.0  # no minus before a zero
    within = "" if isnan(half) else f" ±{half:.{digits}f}"
    return f"{shown:+.{digits}f}{within} {unit}"
