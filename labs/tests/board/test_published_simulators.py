"""Published answers of other simulators: carried over rightly, and compared as their publishers did."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from blis_replay.fixtures.catalogue import bundled_slugs
from blis_replay.ingest.store import open_store
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.overview import mean_abs
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay_labs.board.published import (
    COLUMNS,
    PublishedTable,
    compare_published,
    held_out,
    published_answer,
    published_simulators,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PublishedTable]:
    with open_store(tmp_path_factory.mktemp("published") / "s.duckdb") as store:
        yield compare_published(store, load_release(DEFAULT_RELEASE))


@pytest.mark.parametrize(
    ("name", "experiments", "errors"),
    [
        # Sim-to-real study, means over its seven experiments that ship here; with the ITL against the true gap.
        ("BLIS trained-physics", 7, (9.5, 25, 9.4, 9.6)),
        ("BLIS evolved", 7, (7.6, 21, 7.4, 7.6)),
        ("BLIS roofline", 7, (30.2, 729, 39.8, 39.6)),
        ("AIConfigurator", 4, (53.1, 1309, 37.9, 37.7)),
        ("LLM-Optimizer", 7, (51.7, 1044, 64.8, 64.9)),
        # Step-model studies, means over ten experiments: published E2E / TTFT / ITL, and against the true gap.
        ("step-model regimes", 10, (427.8, 31906, 33.6, 39.6)),
        ("step-model trace replay", 10, (56.2, 78.8, 9.55, 55.1)),
        ("step-model CMA-ES", 10, (15.1, 67.6, 87.4, 13.0)),
        ("step-model direct", 10, (5.7, 54.2, 107.8, 5.1)),
    ],
)
def test_the_published_means_come_out(
    compared: PublishedTable, name: str, experiments: int, errors: tuple[float, ...]
) -> None:
    (row,) = [row for row in compared.rows if row.name == name]
    assert len(row.theirs) == len(row.ours) == experiments
    means = [100 * (mean_abs(error.get(column) for error in row.theirs.values()) or 0.0) for column in COLUMNS[:4]]
    assert means == pytest.approx(errors, rel=0.015, abs=0.06)


def test_ours_are_on_the_same_experiments_and_numbers(compared: PublishedTable) -> None:
    for row in compared.rows:
        assert {slug: set(errors) for slug, errors in row.ours.items()} == {
            slug: set(errors) for slug, errors in row.theirs.items()
        }


def test_ours_are_closer_to_the_true_numbers_than_any(compared: PublishedTable) -> None:
    """Against the halved ITL ours is 101 % off, as any true answer is."""
    for row in compared.rows:
        for column in ("e2e mean", "ttft mean", "itl mean, true gap"):
            ours, theirs = (mean_abs(of.get(column) for of in side.values()) for side in (row.ours, row.theirs))
            assert ours is not None and theirs is not None and ours < theirs
        if row.itl_truth == "reported":
            assert mean_abs(of.get("itl mean") for of in row.ours.values()) == pytest.approx(1.01, abs=0.02)


def test_held_out_experiments_are_those_that_the_release_was_not_fitted_on(compared: PublishedTable) -> None:
    """The release is fitted on codegen and general of each model, so the roleplay runs are left."""
    unseen = held_out(compared)
    assert {slug.rsplit("-", 1)[1] for slug in unseen.uses} == {"roleplay"}
    assert {slug for row in unseen.rows for side in (row.theirs, row.ours) for slug in side} == set(unseen.uses)
    assert unseen.rows and all(row.theirs for row in unseen.rows)


def test_the_answer_fits_a_terminal_and_has_each_experiment_as_json(compared: PublishedTable) -> None:
    assert max(len(line) for line in str(published_answer(compared)).splitlines()) <= 80
    document = published_answer(compared).document
    simulators = document["simulators"]
    assert isinstance(simulators, list)
    assert sum(len(entry["theirs"]) for entry in simulators) == 4 * 7 + 4 + 4 * 10
    assert set(document["coefficients_use"]) <= set(bundled_slugs())  # type: ignore[call-overload]


def test_the_figures_are_those_of_the_records(data_pack: Path) -> None:
    """Predicted values to six digits, from the records of the sim-to-real study."""
    names = {
        "blis-trained-physics": "BLIS trained-physics",
        "blis-evolved": "BLIS evolved",
        "blis-roofline": "BLIS roofline",
        "aiconfigurator-estimate": "AIConfigurator",
        "llm-optimizer-estimate": "LLM-Optimizer",
    }
    ours = {simulator.name: simulator.predicted_us for simulator in published_simulators().simulators}
    with (data_pack / "sim_to_real_overlap16.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 138
    for row in rows:
        predicted_us = ours[names[row["simulator"]]][row["experiment"]][row["metric"].replace("_", " ")]
        assert predicted_us == pytest.approx(1000 * float(row["predicted"]), rel=1e-5)
