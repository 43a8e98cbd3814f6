"""Our errors beside those that other simulators published for the same recordings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from blis_replay.base.document import load_yaml
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.served import published
from blis_replay.ingest.store import Store
from blis_replay.ingest.tables import Cell, Column, Number, Table, columns_named
from blis_replay.replay.driver import replay
from blis_replay.replay.executors import map_jobs
from blis_replay.validate.comparison.compare import compare_replay, light
from blis_replay.validate.comparison.comparison import Comparison, MetricCell
from blis_replay.validate.comparison.overview import mean_abs
from blis_replay.validate.experiment import find_experiment
from blis_replay.validate.judgement import HELD_OUT
from blis_replay.validate.metrics.latency import relative_error
from blis_replay.validate.metrics.observed import Observed, read_observed
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.terminal import has_room

# Columns: the published numbers, ITL against the publisher's truth and against the true gap.
COLUMNS = ("e2e mean", "ttft mean", "itl mean", "itl mean, true gap", "e2e p99", "ttft p99")
_TRUE_GAP = COLUMNS[3]

Errors = Mapping[str, float]

_FILE = Path(__file__).parent / "published_simulators.yaml"


@dataclass(frozen=True)
class PublishedSimulator:
    """One simulator's published answers.

    ``predicted_us``: by slug, then by ``metric statistic`` (``e2e mean``); only published numbers.
    ``itl_truth``: what its publisher compared the ITL with: the ``reported`` one (half the true gap), or the gap by
    ``re-tokenised`` lengths.
    """

    name: str
    source: str
    itl_truth: Literal["reported", "re-tokenised"]
    predicted_us: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class PublishedSimulators:
    """All of them; ``re_tokenised_itl_us``: by slug, the mean gap that re-tokenised lengths give."""

    simulators: tuple[PublishedSimulator, ...]
    re_tokenised_itl_us: Mapping[str, float]


def published_simulators() -> PublishedSimulators:
    """The published answers that ship with the project, in the order of the file."""
    document: Any = load_yaml(_FILE.read_bytes())
    names = document["metrics"]
    return PublishedSimulators(
        simulators=tuple(
            PublishedSimulator(
                name=entry["name"],
                source=entry["source"],
                itl_truth=entry["itl_truth"],
                predicted_us={
                    slug: {
                        name: value_ms * 1000
                        for name, value_ms in zip(names, values_ms, strict=True)
                        if value_ms is not None
                    }
                    for slug, values_ms in entry["predicted_ms"].items()
                },
            )
            for entry in document["simulators"]
        ),
        re_tokenised_itl_us={slug: 1000 * value_ms for slug, value_ms in document["re_tokenised_itl_ms"].items()},
    )


@dataclass(frozen=True)
class PublishedRow:
    """One simulator beside ours, on the experiments that it covers.

    ``theirs``, ``ours``: by slug, the signed error of each number of ``COLUMNS`` that both sides have.
    """

    name: str
    source: str
    itl_truth: str
    theirs: Mapping[str, Errors]
    ours: Mapping[str, Errors]


@dataclass(frozen=True)
class PublishedTable:
    """One row per simulator; ``uses``: by slug, whether our coefficients were fitted on it."""

    coefficients: str
    rows: tuple[PublishedRow, ...]
    uses: Mapping[str, str]


def compare_published(
    store: Store, release: CoefficientRelease, progress: Callable[[int, int], None] | None = None
) -> PublishedTable:
    """Replay every recording with published answers, and compare the errors.

    Observed numbers are those of the stored recording, or the bundled aggregates.  Raises
    ``ReleaseError`` if the release is invalid or lacks one of the models.
    """
    known = published_simulators()
    slugs = sorted({slug for simulator in known.simulators for slug in simulator.predicted_us})
    release.refuse_if_invalid()
    experiments = [read_observed(store, find_experiment(store, slug)) for slug in slugs]
    compared = map_jobs(partial(_compared, release), experiments, progress=progress)
    comparisons = dict(zip(slugs, compared, strict=True))
    return PublishedTable(
        coefficients=release.name,
        rows=tuple(_row(simulator, known, comparisons) for simulator in known.simulators),
        uses={slug: comparison.use for slug, comparison in comparisons.items()},
    )


def held_out(compared: PublishedTable) -> PublishedTable:
    """The table of held-out experiments; simulators without any are left out."""
    kept = {slug: use for slug, use in compared.uses.items() if use in HELD_OUT}

    def unseen(side: Mapping[str, Errors]) -> dict[str, Errors]:
        return {slug: errors for slug, errors in side.items() if slug in kept}

    rows = [replace(row, theirs=unseen(row.theirs), ours=unseen(row.ours)) for row in compared.rows]
    return PublishedTable(compared.coefficients, tuple(row for row in rows if row.theirs), kept)


def _compared(release: CoefficientRelease, experiment: Observed) -> Comparison:
    return light(compare_replay(replay(experiment.recording, release), experiment.token_gaps))


def _row(
    simulator: PublishedSimulator, known: PublishedSimulators, comparisons: Mapping[str, Comparison]
) -> PublishedRow:
    theirs, ours = {}, {}
    for slug, predicted_us in simulator.predicted_us.items():
        truth_us = _truths(comparisons[slug], simulator, known)
        simulated_us = _simulated(comparisons[slug])
        predicted_us = {**predicted_us, _TRUE_GAP: predicted_us["itl mean"]}
        theirs[slug] = _errors(truth_us, predicted_us)
        ours[slug] = {name: e for name, e in _errors(truth_us, simulated_us).items() if name in theirs[slug]}
    return PublishedRow(simulator.name, simulator.source, simulator.itl_truth, theirs, ours)


def _truths(
    comparison: Comparison, simulator: PublishedSimulator, known: PublishedSimulators
) -> dict[str, float | None]:
    observed = {name: cell.a_us for name, cell in _cells_of(comparison).items()}
    if simulator.itl_truth == "reported":
        itl_us = published(comparison.recording.aggregates, -1, "itl_reported", "mean")
    else:
        itl_us = known.re_tokenised_itl_us[comparison.slug]
    return {**observed, "itl mean": itl_us, _TRUE_GAP: observed["itl mean"]}


def _simulated(comparison: Comparison) -> dict[str, float | None]:
    simulated = {name: cell.b_us for name, cell in _cells_of(comparison).items()}
    return {**simulated, _TRUE_GAP: simulated["itl mean"]}


def _cells_of(comparison: Comparison) -> dict[str, MetricCell]:
    named = [(name, *name.split()) for name in COLUMNS if name != _TRUE_GAP]
    return {name: comparison.metrics[metric][statistic] for name, metric, statistic in named}


def _errors(truth_us: Mapping[str, float | None], answer_us: Mapping[str, float | None]) -> dict[str, float]:
    errors = {name: relative_error(truth_us[name], answer_us.get(name)) for name in COLUMNS}
    return {name: error for name, error in errors.items() if error is not None}


def published_answer(compared: PublishedTable) -> Answer:
    """Each simulator, with ours on the same experiments beside each number; errors are signed fractions.

    The rows are one per simulator, experiment and number: ``theirs`` and ``ours``.
    """
    cells: list[list[Cell]] = []
    for row in compared.rows:
        theirs, ours = _means(row.theirs), _means(row.ours)
        cells.append([row.name, str(len(row.theirs)), *(side[c] for c in _SHOWN for side in (theirs, ours))])
    counts = Counter(sorted(compared.uses.values()))
    fits = ", ".join(f"{count} {use}" for use, count in counts.items())
    page: list[Part] = [
        Table("", _TEXT_COLUMNS, cells),
        Block(
            [
                f"ours: {compared.coefficients} on the same experiments ({fits})",
                Line("true gap: ITL against (E2E - TTFT) / (output tokens - 1), with the lengths that were decoded"),
                *([_PUBLISHED_ITL] if has_room() else []),
            ]
        ),
    ]
    document = {
        "coefficients": compared.coefficients,
        "coefficients_use": dict(compared.uses),
        "simulators": [
            {
                "name": row.name,
                "source": row.source,
                "itl_truth": row.itl_truth,
                **{name: {slug: dict(errors) for slug, errors in side.items()} for name, side in _sides(row).items()},
                "mean_abs_error": {name: _means(side) for name, side in _sides(row).items()},
            }
            for row in compared.rows
        ],
    }
    rows = [
        [row.name, slug, column, errors[column], row.ours[slug].get(column)]
        for row in compared.rows
        for slug, errors in row.theirs.items()
        for column in COLUMNS
        if column in errors
    ]
    names = columns_named("simulator", "experiment", "number", "theirs", "ours", kind="data")
    return Answer(page, document, Table("", names, rows))


# Column of the answer -> its heading on the page; those that do not fit 80 columns come last.
_SHOWN = {
    **{"e2e mean": "E2E", "ttft mean": "TTFT", _TRUE_GAP: "true gap"},
    **{"e2e p99": "E2E p99", "ttft p99": "TTFT p99", "itl mean": "itl mean"},
}
_IN_80_COLUMNS = 3
_PUBLISHED_ITL = Line(
    "itl mean: against what its publisher took for true, half the true gap (step-model studies) or the gap by "
    "re-tokenised lengths (the others)"
)
_TEXT_COLUMNS = (
    *columns_named("mean |error| in %", "n"),
    *(
        Column(name, Number(1, 100), wide=max(place - _IN_80_COLUMNS + 1, 0))
        for place, shown in enumerate(_SHOWN.values())
        for name in (shown, "ours")
    ),
)


def _sides(row: PublishedRow) -> dict[str, Mapping[str, Errors]]:
    return {"theirs": row.theirs, "ours": row.ours}


def _means(errors: Mapping[str, Errors]) -> dict[str, float | None]:
    return {column: mean_abs(of.get(column) for of in errors.values()) for column in COLUMNS}
