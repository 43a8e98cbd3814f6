"""The table of many experiments, or of the load stages of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.verdict_text import (
    WAS_IT,
    cautions,
    counts_text,
    error_cell,
    reason,
    tails_text,
    toned,
)
from blis_replay.validate.judgement import VERDICTS, Judgement, means_by_fit
from blis_replay.validate.metrics.latency import METRIC_NAMES, STATISTICS, THRESHOLDS
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
