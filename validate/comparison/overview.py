"""The table of many experiments, or of the load stages of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.verdict_text import reason, toned
from blis_replay.validate.judgement import FITTED, HELD_OUT, VERDICTS, Judgement, State, Use
from blis_replay.validate.metrics.latency import METRIC_NAMES, METRICS, STATISTICS, THRESHOLDS
from blis_replay.validate.text.answer import RECONSTRUCTED, Block, Line, Part
from blis_replay.validate.text.cells import percent_plain

ERROR_COLUMNS = (*((metric, name) for metric in ("e2e", "ttft", "itl") for name in STATISTICS), ("tpot", "mean"))
# What 80 columns leave room for, and the others in the order in which they are wanted.
_ALWAYS = {("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99"), ("itl", "mean")}
_WANTED = sorted(
    (cell for cell in ERROR_COLUMNS if cell not in _ALWAYS),
    key=lambda cell: (cell[1] == "mean", cell[1] != "p99", cell[1]),
)
# The metric's name stands over its mean.
_ERRORS = tuple(
    Column(
        cell[0].upper() if cell[1] == "mean" else cell[1],
        "error_short",  # so that a row of an experiment has 80 columns
        wide=_WANTED.index(cell) + 1 if cell in _WANTED else 0,
        spare=int(cell == ("itl", "mean")),  # no verdict rests on it
    )
    for cell in ERROR_COLUMNS
)
# Whether the coefficients were fitted on a run, in a column.
WAS_IT: Mapping[Use, str] = {
    "fitted on this run": "in the fit",
    "fitted on part of this run": "part in it",
    "fitted on another side of this run": "its other side",
    "held out": "held out",
    "fitted on no recording": "held out",
    "unknown": "unknown",
}
_NAMED = (Column("experiment", "text"), Column("run", "text"))
_JUDGED = (
    *(*_NAMED, *_ERRORS, Column("verdict", "word")),
    Column("requests", "count", wide=len(_WANTED) + 1),
    Column("slug", "text", wide=len(_WANTED) + 2),
    Column("coefficients", "text", wide=len(_WANTED) + 3),
)
_MEASURES = {"tokens_per_s": "tokens/s", "makespan": "makespan", "itl": "ITL", "e2e_outside": "unqueued"}
_SERVED = (*_NAMED, *columns_named(*_MEASURES.values(), kind="error"), Column("verdict", "word"))


def stages_table(whole: Comparison, stages: Sequence[Comparison]) -> Table:
    """A row per load stage of the experiment, also where there was nothing to compare."""
    compared = {c.selection.stage: [c.requests, *(c.metrics[m][s].error for m, s in ERROR_COLUMNS)] for c in stages}
    nothing: list[Cell] = [0, *(None for _ in ERROR_COLUMNS)]
    columns = (Column(f"{whole.alias} by load stage", "text"), Column("requests", "count"), *_ERRORS)
    return Table("", columns, [[f"stage {s.stage}", *compared.get(s.stage, nothing)] for s in whole.recording.stages])


def summary_page(comparisons: Sequence[Comparison], not_judged: Mapping[str, str]) -> list[Part]:
    """The table of all experiments, with means; the overloaded ones apart, with what they are judged by."""
    ordered = sorted(comparisons, key=lambda c: c.alias)
    gated = [
        [*_name(c), *_error_cells(c), toned(c.verdict), c.requests, c.slug, c.judgement.subject.release]
        for c in ordered
        if not c.overloaded
    ]
    apart = [_served(c) for c in ordered if c.overloaded]
    counts = counts_text([c.verdict for c in ordered] + ["NOT JUDGED"] * len(not_judged))
    releases = dict.fromkeys(c.judgement.subject.release for c in ordered)
    return [
        Block(
            [
                Line(counts, mark=Toned(counts, "heading")),
                *([f"coefficients {', '.join(releases)}"] if releases else []),
            ]
        ),
        Table("", _JUDGED, gated),
        Block(_means([c.judgement for c in ordered])),
        *([Table("overloaded: judged by what was served (unqueued: without a wait)", _SERVED, apart)] if apart else []),
        *([RECONSTRUCTED] if any(c.recording.ground_truth != "recorded" for c in comparisons) else []),
        Block(_reasons(ordered, not_judged)),
    ]


def _means(judgements: Sequence[Judgement]) -> list[str]:
    """Mean absolute errors of each release, runs in its fit apart; then the p99s that are off, beside all verdicts."""
    lines = []
    for named, of in means_by_fit(judgements, by_release=True).items():
        said = [f"{METRIC_NAMES[m]} {percent_plain(mean)}" for m in THRESHOLDS if (mean := of[m]) is not None]
        lines.append(f"mean |error|, {named}: {', '.join(said)}")
    if lines and (apart := [one.subject.alias for one in judgements if one.overloaded]):
        lines.append(f"overloaded, and in no mean: {', '.join(apart)}")
    off = tails_text(judgements)
    lines += [f"{' '.join(off)}; no verdict rests on them"] if off else []
    return lines + cautions(judgements)


def _reasons(ordered: Sequence[Comparison], not_judged: Mapping[str, str]) -> list[Part]:
    """The reason of each verdict that is neither PASS nor FITS, the worst first."""
    named: dict[tuple[str, str], list[str]] = {}
    for c in sorted(ordered, key=lambda c: VERDICTS.index(c.verdict)):
        if c.verdict not in ("PASS", "FITS"):
            named.setdefault((c.verdict, reason(c.judgement)), []).append(c.alias)
    for alias, why in not_judged.items():
        named.setdefault(("NOT JUDGED", why), []).append(alias)
    lines = [
        Line(f"{verdict}  {', '.join(aliases)}: {why}", mark=toned(verdict))
        for (verdict, why), aliases in named.items()
    ]
    return [*lines, Line("more of one:", command="blis-replay validate NAME")]


def _served(c: Comparison) -> list[Cell]:
    """A row of the overloaded runs; what is beyond its limit stands out."""
    measures = {quantity.key: quantity for quantity in c.judgement.judged}
    found = [measures.get(key) for key in _MEASURES]
    cells: list[Cell] = [
        None if q is None else Toned(q.error, "bad") if q.state == "beyond" else q.error for q in found
    ]
    return [*_name(c), *cells, toned(c.verdict)]


def _name(c: Comparison) -> list[Cell]:
    return [c.alias + ("" if c.recording.ground_truth == "recorded" else "*"), WAS_IT[c.judgement.subject.use]]


def _error_cells(comparison: Comparison) -> list[Cell]:
    judgement = comparison.judgement
    return [error_cell(judgement, cell, comparison.metrics[cell[0]][cell[1]].error) for cell in ERROR_COLUMNS]


def tails_text(judgements: Iterable[Judgement]) -> tuple[str, str] | None:
    """How many p99s with an interval are outside their limit, and what they are; None without any."""
    tails = [tail for one in judgements if not one.overloaded for tail in one.tails if tail.interval is not None]
    outside, off = sum(tail.excess > 1 for tail in tails), sum(tail.state == "beyond" for tail in tails)
    what = f"p99s outside their limit (twice that of the mean), {off or 'none'} for sure (by its whole 95 % interval)"
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


def counts_text(verdicts: Sequence[str]) -> str:
    """``16 of 23 PASS, 2 FAIL``: verdicts in the order of the first line of a reader."""
    order = ("PASS", "FAIL", "UNDECIDED", "FITS", "NOT JUDGED")
    found = [(verdict, verdicts.count(verdict)) for verdict in order]
    first, *others = [(verdict, n) for verdict, n in found if n] or [("NOT JUDGED", 0)]
    head = f"{first[1]} of {len(verdicts)} {first[0]}"
    return ", ".join([head, *(f"{n} {verdict}" for verdict, n in others)])


# -- Means over experiments: what was fitted on and what was held out apart ------------------------------------

_KINDS = ("held out", "fitted", "unknown")


def kind_of_use(use: Use) -> str:
    """``fitted``, ``held out`` or ``unknown``."""
    return "fitted" if use in FITTED else "held out" if use in HELD_OUT else "unknown"


def mean_abs_errors(judgements: Sequence[Judgement]) -> dict[str, float | None]:
    """Per metric, the mean over judged experiments of the absolute error of the mean; overloaded ones do not count."""
    counted = [j for j in judgements if j.verdict != "NOT JUDGED" and not j.overloaded]
    return {metric: mean_abs(one.errors[metric, "mean"] for one in counted) for metric in METRICS}


def mean_abs(values: Iterable[float | None]) -> float | None:
    """Mean of the absolute values that are known; None without any."""
    known = [abs(value) for value in values if value is not None]
    return float(np.mean(known)) if known else None


def means_by_fit(judgements: Sequence[Judgement], *, by_release: bool = False) -> dict[str, dict[str, float | None]]:
    """The same of the experiments that were ``held out``, ``fitted`` or ``unknown``; absent without any.

    ``by_release``: where there are several releases, each by itself (``held out with h100-vllm-0.15.1``).
    """
    named = by_release and len({one.subject.release for one in judgements}) > 1
    kinds: dict[str, list[Judgement]] = {}
    for one in sorted(judgements, key=lambda one: _KINDS.index(kind_of_use(one.subject.use))):
        kind = kind_of_use(one.subject.use)
        kinds.setdefault(f"{kind} with {one.subject.release}" if named else kind, []).append(one)
    means = {kind: mean_abs_errors(of_kind) for kind, of_kind in kinds.items()}
    return {kind: of for kind, of in means.items() if any(value is not None for value in of.values())}


def error_cell(judgement: Judgement, cell: tuple[str, str], error: float | None) -> Cell:
    """An error in a table of many; one that is judged in the colour of its state, one that is within in none."""
    states = {(q.key, q.statistic): q.state for q in judgement.judged}
    return error if judgement.overloaded else toned_error(error, states.get(cell))


def toned_error(error: float | None, state: State | None) -> Cell:
    """An error in the colour of its state, if that is beyond or undecided."""
    return error if error is None or state not in ("beyond", "undecided") else Toned(error, toned(state).tone)
