"""Many experiments, or the load stages of one, as tables: a row each, with the errors that are looked at first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blis_replay.ingest.tables import Cell, Column, Table, Toned
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.comparison.error_columns import ERROR_COLUMNS, ERRORS, WANTED, error_cells
from blis_replay.validate.comparison.means import means_by_fit
from blis_replay.validate.comparison.verdict_text import verdict_tone
from blis_replay.validate.text.answer import RECONSTRUCTED, Block, Part
from blis_replay.validate.text.cells import percent_plain

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
        _OPEN if any(c.verdict == "not decided" for c in ordered) else "",
        Block([f"{alias}: {why}" for alias, why in not_judged.items()], "not judged"),
        *([RECONSTRUCTED] if any(c.ground_truth != "recorded" for c in comparisons) else []),
    ]


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


_OPEN = "open: some reconstructions of the requests pass and others fail (see `blis-replay validate NAME`)"


def _verdict(c: Comparison) -> Toned:
    """In few letters: the table has to fit 80 columns."""
    return Toned("open" if c.verdict == "not decided" else c.verdict, verdict_tone(c.verdict))


def _named(c: Comparison) -> list[Cell]:
    return [c.alias + ("" if c.ground_truth == "recorded" else "*"), c.uses.removeprefix("own "), *error_cells(c)]
