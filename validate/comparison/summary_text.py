"""The verdict on a replay as a sentence, and many verdicts as a table: a row each, with the errors looked at first.

And a comparison as JSON (times in ms, errors and MAPE as fractions), and as the table that the store keeps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import polars as pl

from blis_replay.ingest.recording import RECORDED
from blis_replay.ingest.tables import Cell, Column, Table, Tone, Toned
from blis_replay.replay.store import provenance_of
from blis_replay.validate.comparison.capacity import Measure
from blis_replay.validate.comparison.compare import Comparison, MetricCell, Verdict
from blis_replay.validate.comparison.saturation_text import saturation_json
from blis_replay.validate.comparison.spread import Draws, unsure_of
from blis_replay.validate.metrics.latency import METRIC_NAMES, METRICS, STATISTICS, THRESHOLDS
from blis_replay.validate.metrics.objectives import attainment_json, attainment_line
from blis_replay.validate.metrics.resampling import MetricStatistic
from blis_replay.validate.text.answer import RECONSTRUCTED, Block, Line, Part
from blis_replay.validate.text.cells import in_ms, percent, percent_plain


def verdict_tone(verdict: str) -> Tone:
    """The tone of a verdict or an outcome."""
    if verdict in ("pass", "fail"):
        return "good" if verdict == "pass" else "bad"
    return "caution"


def verdict_line(comparison: Comparison) -> Line:
    """The verdict as a page has it: the verdict itself in its tone."""
    sentence = verdict_sentence(comparison)
    verdict = re.match(r"verdict: [^(:,]*[^(:, ]", sentence)
    return Line(sentence, mark=Toned(verdict[0], verdict_tone(comparison.verdict)) if verdict else None)


def verdict_sentence(comparison: Comparison) -> str:
    """The verdict with the errors of the mean that it rests on."""
    if comparison.lost or (comparison.overloaded and not comparison.capacity):
        return f"verdict: could not be judged: {_why_not_judged(comparison)}"
    errors: list[tuple[str, float | None, float]]
    if comparison.overloaded:
        what = "overloaded, so judged by what was served"
        errors = [(measure.name, measure.error, comparison.limit(measure)) for measure in comparison.capacity or ()]
    else:
        what = "errors of the mean"
        errors = [(METRIC_NAMES[m], comparison.metrics[m]["mean"].error, comparison.limit(m)) for m in THRESHOLDS]
    judged = ", ".join(f"{name} {percent(error)} (limit ±{100 * limit:.3g} %)" for name, error, limit in errors)
    refused = _refused(comparison)
    if comparison.verdict == "not decided":
        why = f": {beyond_fit(comparison)}" if _open_for_these(comparison) else " by this reconstruction"
        return f"verdict: not decided{why} ({what}: {judged})"
    if comparison.verdict == "unusable":
        return f"verdict: could not be judged: {refused} ({what}: {judged})"
    also = f"; not judged: {refused}" if refused else ""
    return f"verdict: {comparison.verdict} ({what}: {judged}){also}"


def beyond_fit(comparison: Comparison) -> str:
    """How much steps outside of what the coefficients were fitted on leave open."""
    return f"steps beyond the fit may move the mean by ±{100 * unsure_of(comparison.replay):.0f} %"


def _open_for_these(comparison: Comparison) -> bool:
    """Whether a verdict is open for them alone, and not for how requests were reconstructed."""
    return comparison.verdict == "not decided" and "not decided" not in comparison.decisions(0.0).values()


def draws_sentence(comparison: Comparison) -> str:
    """Median and range of the errors of all reconstructions; empty where they decide nothing."""
    draws = comparison.draws
    if draws is None or not draws.count or _open_for_these(comparison):
        return ""
    ranges = {METRIC_NAMES[m]: draws.range_of((m, "mean")) for m in THRESHOLDS if (m, "mean") in draws.errors}
    named = [f"{m} {percent(mid)} ({percent(low)} to {percent(high)})" for m, (low, mid, high) in ranges.items()]
    return (
        f"When each request came was not published. {draws.count} reconstructions of it, median error of the mean "
        f"and range: {', '.join(named)}"
    )


def promised_lines(comparison: Comparison) -> list[str]:
    """What came of objectives, on the server and in the replay; nothing where none were given."""
    promised = comparison.promised
    if promised is None:
        return []
    sides = {"observed": promised.observed, "simulated": promised.simulated}
    return [f"{name}: {attainment_line(attainment_json(one))}" for name, one in sides.items()]


def noise_sentence(comparison: Comparison) -> str:
    """What recordings of this load differ by, and which errors are no larger; empty without repeats."""
    noise = comparison.noise
    if noise is None:
        return ""
    apart = {m: noise.apart[m, "mean"] for m in THRESHOLDS if (m, "mean") in noise.apart}
    named = ", ".join(f"{METRIC_NAMES[m]} {percent_plain(value)}" for m, value in apart.items())
    errors = {m: comparison.metrics[m]["mean"].error for m in apart}
    within = [METRIC_NAMES[m] for m, error in errors.items() if error is not None and abs(error) <= apart[m]]
    said = f"; the error of {', '.join(within)} is no larger" if within else ""
    return (
        f"{len(noise.recordings)} recordings of this load differ in the mean by up to {named} "
        f"({', '.join(noise.recordings)}); no error below that is a failure{said}"
    )


def _refused(comparison: Comparison) -> str:
    return "; ".join(f"{METRIC_NAMES[m]} unusable ({why})" for m, why in comparison.unusable.items())


def _why_not_judged(comparison: Comparison) -> str:
    if comparison.lost:
        return "; ".join(comparison.lost)
    if comparison.verdict == "unusable":
        return _refused(comparison)
    return f"overloaded, and {_nothing_served(comparison)}"


def _nothing_served(comparison: Comparison) -> str:
    if comparison.ground_truth != RECORDED:
        return "requests that failed are not known, so the load cannot be replayed"
    if comparison.selection.stage is not None:
        return "a load stage by itself is not judged"
    return "too few requests were served to judge by"


# -- Errors as columns ------------------------------------------------------------------

ERROR_COLUMNS = (*((metric, name) for metric in ("e2e", "ttft", "itl") for name in STATISTICS), ("tpot", "mean"))
# What 80 columns leave room for, and the others in the order in which they are wanted.
_ALWAYS = {("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99"), ("itl", "mean")}
WANTED = sorted(
    (cell for cell in ERROR_COLUMNS if cell not in _ALWAYS),
    key=lambda cell: ("p99", "p50", "p90", "mean").index(cell[1]),
)
# The metric's name stands over its mean.
ERRORS = tuple(
    Column(
        cell[0].upper() if cell[1] == "mean" else cell[1],
        "error_short",  # so that a row of an experiment has 80 columns
        wide=WANTED.index(cell) + 1 if cell in WANTED else 0,
        spare=int(cell == ("itl", "mean")),  # no verdict rests on it
    )
    for cell in ERROR_COLUMNS
)


def error_cells(comparison: Comparison) -> list[Cell]:
    """The errors of a comparison; those of means that are beyond their threshold stand out."""
    return [error_cell(comparison, metric, name) for metric, name in ERROR_COLUMNS]


def error_cell(comparison: Comparison, metric: str, name: str) -> Cell:
    """One error; that of a mean that is beyond its threshold stands out."""
    error = comparison.metrics[metric][name].error
    beyond = (
        name == "mean"
        and not comparison.overloaded
        and error is not None
        and metric in THRESHOLDS
        and abs(error) > comparison.limit(metric)
    )
    return Toned(error, "bad") if beyond else error


# -- Means over experiments: what was fitted on and what was held out apart --------------

# Coefficients that were fitted on the latencies of an experiment meet them; that says nothing of another one.
UNSEEN = ("held out", "fitted on no recording")
_KINDS = {"fitted on this run": "fitted", "unknown": "unknown"}


class Judged(Protocol):
    """What a mean over experiments takes of each: its verdict and its table."""

    @property
    def uses(self) -> str:
        """As ``Comparison.uses``."""

    @property
    def overloaded(self) -> bool:
        """As ``Comparison.overloaded``."""

    @property
    def verdict(self) -> Verdict:
        """As ``Comparison.verdict``."""

    @property
    def metrics(self) -> Mapping[str, Mapping[str, MetricCell]]:
        """As ``Comparison.metrics``."""


def mean_abs_errors(comparisons: Sequence[Judged]) -> dict[str, float | None]:
    """Per metric, the mean over judged experiments of the absolute error of the mean; overloaded ones do not count."""
    gated = [c for c in comparisons if c.verdict in ("pass", "fail", "not decided") and not c.overloaded]
    errors = {
        metric: [abs(e) for c in gated if (e := c.metrics[metric]["mean"].error) is not None] for metric in METRICS
    }
    return {metric: float(np.mean(values)) if values else None for metric, values in errors.items()}


def means_by_fit(comparisons: Sequence[Judged]) -> dict[str, dict[str, float | None]]:
    """The same of the experiments that were ``fitted``, ``held out`` or ``unknown``; absent without any."""
    kinds: dict[str, list[Judged]] = {}
    for comparison in comparisons:
        kinds.setdefault(_KINDS.get(comparison.uses, "held out"), []).append(comparison)
    means = {kind: mean_abs_errors(kinds[kind]) for kind in ("fitted", "held out", "unknown") if kind in kinds}
    return {kind: of for kind, of in means.items() if any(value is not None for value in of.values())}


# -- Many experiments, or the load stages of one -------------------------------------------

_NAMED = (Column("experiment", "text"), Column("fit on", "text"), *ERRORS)
_JUDGED = (
    *_NAMED,
    Column("verdict", "word"),
    Column("requests", "count", wide=len(WANTED) + 1),
    Column("slug", "text", wide=len(WANTED) + 2),
)


def stages_table(whole: Comparison, stages: Sequence[Comparison]) -> Table:
    """A row per load stage of the experiment, also where there was nothing to compare."""
    compared = {c.selection.stage: [c.requests, *error_cells(c)] for c in stages}
    nothing: list[Cell] = [0, *(None for _ in ERROR_COLUMNS)]
    columns = (Column(f"{whole.alias} by load stage", "text"), Column("requests", "count"), *ERRORS)
    return Table("", columns, [[f"stage {s.stage}", *compared.get(s.stage, nothing)] for s in whole.recording.stages])


def summary_page(comparisons: Sequence[Comparison], not_judged: Mapping[str, str]) -> list[Part]:
    """The table of all experiments, with means; the overloaded ones apart, with what they are judged by."""
    ordered = sorted(comparisons, key=lambda c: c.alias)
    means = [
        [
            f"mean, {kind}",
            "",
            *(percent_plain(of[m]) if s == "mean" else "" for m, s in ERROR_COLUMNS),
            "",
            "",
            "",
        ]
        for kind, of in means_by_fit(comparisons).items()
    ]
    gated = [[*_named(c), _verdict(c), c.requests, c.slug] for c in ordered if not c.overloaded]
    apart = [_served(c) for c in ordered if c.overloaded]
    return [
        Table("", _JUDGED, [*gated, *means]),
        *([Table("overloaded: judged by what was served, not by latencies", _SERVED, apart)] if apart else []),
        *([RECONSTRUCTED] if any(c.ground_truth != "recorded" for c in comparisons) else []),
        Block(_outcome(ordered, not_judged)),
    ]


def _outcome(ordered: Sequence[Comparison], not_judged: Mapping[str, str]) -> list[Part]:
    """How many experiments pass; then which do not, each reason once."""
    of_kind: dict[str, dict[str, list[str]]] = {"failed": {}, "open": {}, "not judged": {}}
    for c in ordered:
        if c.verdict == "fail":
            of_kind["failed"].setdefault(_beyond(c), []).append(c.alias)
        elif c.verdict == "not decided":
            of_kind["open"].setdefault(beyond_fit(c) if _open_for_these(c) else _OPEN, []).append(c.alias)
        elif c.verdict != "pass":
            of_kind["not judged"].setdefault(_why_not_judged(c), []).append(c.alias)
    for alias, why in not_judged.items():
        of_kind["not judged"].setdefault(why, []).append(alias)
    others = {kind: sum(map(len, reasons.values())) for kind, reasons in of_kind.items()}
    passed = sum(c.verdict == "pass" for c in ordered)
    counted = ", ".join(
        [f"{passed} of {passed + sum(others.values())} pass", *(f"{n} {k}" for k, n in others.items() if n)]
    )
    tones: dict[str, Tone] = {"failed": "bad", "open": "caution", "not judged": "caution"}
    named = [
        Line(f"{kind}: {', '.join(aliases)}: {why}", mark=Toned(kind, tones[kind]))
        for kind, reasons in of_kind.items()
        for why, aliases in reasons.items()
    ]
    return [Line(counted, mark=Toned(counted, "heading")), *named, "more of one: blis-replay validate NAME"]


def _beyond(c: Comparison) -> str:
    """The errors that are beyond their limits."""
    if c.overloaded:
        errors = [(m.name, m.error, c.limit(m)) for m in c.capacity or () if m.beyond]
    else:
        of_means = [(m, c.metrics[m]["mean"].error) for m in THRESHOLDS]
        errors = [(METRIC_NAMES[m], e, c.limit(m)) for m, e in of_means if e is not None and abs(e) > c.limit(m)]
    return ", ".join(f"{name} {percent(error)} (limit ±{100 * limit:.3g} %)" for name, error, limit in errors)


_MEASURES = {"tokens_per_s": "tokens/s", "makespan": "makespan", "itl": "ITL", "e2e_outside": "unqueued"}
_SERVED = (
    *(Column("experiment", "text"), Column("fit on", "text")),
    *(Column(heading, "error") for heading in _MEASURES.values()),
    Column("verdict", "word"),
)


def _served(c: Comparison) -> list[Cell]:
    """A row of the overloaded runs; what is beyond its threshold stands out."""
    measures = {measure.slug: measure for measure in c.capacity or ()}
    cells: list[Cell] = []
    for slug in _MEASURES:
        found = measures.get(slug)
        cells.append(None if found is None else Toned(found.error, "bad") if found.beyond else found.error)
    return [*_named(c)[:2], *cells, _verdict(c)]


_OPEN = "some reconstructions of the requests pass and others fail"


def _verdict(c: Comparison) -> Toned:
    """In few letters: the table has to fit 80 columns."""
    return Toned("open" if c.verdict == "not decided" else c.verdict, verdict_tone(c.verdict))


def _named(c: Comparison) -> list[Cell]:
    return [c.alias + ("" if c.ground_truth == "recorded" else "*"), c.uses.removeprefix("fitted on "), *error_cells(c)]


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """One experiment; times in ms, errors and MAPE as fractions."""
    noise = comparison.noise
    return {
        "slug": comparison.slug,
        "alias": comparison.alias,
        "ground_truth": comparison.ground_truth,
        "requests": comparison.requests,
        "excluded": comparison.excluded,
        "stage": comparison.selection.stage,
        "metrics": {
            metric: {name: _cell(cell) for name, cell in cells.items()} for metric, cells in comparison.metrics.items()
        },
        "paired": {metric: vars(pairing) for metric, pairing in comparison.paired.items()},
        "coefficients_use": comparison.uses,
        "verdict": comparison.verdict,
        "failed_thresholds": list(comparison.failed_thresholds),
        "capacity": None if comparison.capacity is None else [_measure_json(m) for m in comparison.capacity],
        "unusable": comparison.unusable,
        "repeats": noise and {"recordings": list(noise.recordings), "apart": _by_metric(noise.apart)},
        "slo": comparison.promised and {side: attainment_json(one) for side, one in vars(comparison.promised).items()},
        "reconstructions": comparison.draws and _draws_json(comparison.draws),
        "unsure": unsure_of(comparison.run),
        "warm_up": comparison.warming and vars(comparison.warming),
        "findings": [vars(finding) for finding in comparison.findings],
        "saturation": comparison.saturation and saturation_json(comparison.saturation),
        "open_arguments": [vars(argument) for argument in comparison.open_arguments],
        "schedule": comparison.schedule and comparison.schedule.document,
        "known_differences": list(comparison.run.simulated.differences),
        "not_simulated": list(comparison.run.not_simulated),
        "provenance": provenance_of(comparison.run),
    }


def _draws_json(draws: Draws) -> dict[str, object]:
    ranges = {cell: dict(zip(("low", "median", "high"), draws.range_of(cell), strict=True)) for cell in draws.errors}
    return {"count": draws.count, "errors": _by_metric(ranges)}


def _by_metric(values: Mapping[MetricStatistic, object]) -> dict[str, dict[str, object]]:
    named: dict[str, dict[str, object]] = {}
    for (metric, statistic), value in values.items():
        named.setdefault(metric, {})[statistic] = value
    return named


def _measure_json(measure: Measure) -> dict[str, object]:
    return {
        "measure": measure.slug,
        "unit": measure.unit,
        "observed_value": measure.observed,
        "simulated_value": measure.simulated,
        "error": measure.error,
        "limit": measure.limit,
    }


def _cell(cell: MetricCell) -> dict[str, object]:
    entry: dict[str, object] = {
        "observed_ms": in_ms(cell.a_us),
        "simulated_ms": in_ms(cell.b_us),
        "error": cell.error,
    }
    if cell.reason:
        entry["reason"] = cell.reason
    if cell.between_us:
        entry["observed_between_ms"] = [in_ms(bound) for bound in cell.between_us]
    return entry


def errors_frame(comparison: Comparison) -> pl.DataFrame:
    """The table of a comparison in the store's form."""
    return pl.DataFrame(
        [
            {
                "metric": metric,
                "statistic": statistic,
                "observed_us": cell.a_us,
                "simulated_us": cell.b_us,
                "error": cell.error,
                "reason": cell.reason,
            }
            for metric, cells in comparison.metrics.items()
            for statistic, cell in cells.items()
        ],
        infer_schema_length=None,
    )
