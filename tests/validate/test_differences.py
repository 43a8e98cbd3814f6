"""Two sides compared: planted differences are found, equal sides differ in nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gating_cases import LARGE, SMALL, release, written
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.base.errors import UnknownNameError
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, format_release, parse_release
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.store import Store, open_store
from blis_replay.validate.comparison.differences import Differences, differences, differences_answer
from blis_replay.validate.comparison.named_sides import Choice, side_of
from blis_replay.validate.metrics.latency import LatencySamples
from blis_replay.validate.metrics.uncertainty import half_width, in_order


def shifted(lifecycle: Lifecycle, **delays_us: float) -> CoefficientRelease:
    made = release("shifted")
    entries = tuple(replace(entry, lifecycle=replace(lifecycle, **delays_us)) for entry in made.models)
    return parse_release(format_release(replace(made, models=entries)), "shifted")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both synthetic recordings in a store, and three releases: true, 1.5 ms late on arrival, 5 % slow."""
    directory = tmp_path_factory.mktemp("compare")
    for spec in (SMALL, LARGE):
        ingest_source(directory / "s.duckdb", written(spec, directory), engine_file=directory / "engine.yaml")
    (directory / "true.yaml").write_text(format_release(release("true")))
    later = shifted(SMALL.lifecycle, pre_queue_us=SMALL.lifecycle.pre_queue_us + 1500)
    (directory / "late.yaml").write_text(format_release(replace(later, name="late")))
    (directory / "slow.yaml").write_text(format_release(release("slow", slower=SMALL.model, by=1.05)))
    return directory


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Store]:
    with open_store(folder / "s.duckdb") as opened:
        yield opened


def compared(store: Store, a: str, b: str) -> Differences:
    choice = Choice("1b-general", str(store.path.with_name("true.yaml")))
    return differences(side_of(store, a, choice), side_of(store, b, choice))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1b-general", "1b-general@{}/true.yaml", "{}/true.yaml", "embedded"])
def test_a_side_against_itself_differs_in_nothing(store: Store, folder: Path, name: str) -> None:
    name = name.format(folder)
    answer = compared(store, name, name)
    assert {cell.difference_us for cell in answer.comparison.cells.values()} == {0}
    assert {answer.intervals_us.get(cell) for cell in answer.comparison.cells} == {(0.0, 0.0), None}
    assert answer.changed == []
    assert [answer.comparison.paired[metric].mape for metric in ("e2e", "ttft")] == [0, 0]
    assert "inputs: nothing that both sides say differs" in str(differences_answer(answer))


def test_a_delay_on_arrival_of_1500_us_is_in_every_request_and_in_the_interval(store: Store, folder: Path) -> None:
    """All requests reach the engine 1,500 us later, so the whole schedule moves by that and no gap changes."""
    answer = compared(store, f"{folder}/true.yaml", f"{folder}/late.yaml")
    for metric in ("e2e", "ttft"):
        for statistic, cell in answer.comparison.metrics[metric].items():
            assert cell.difference_us == pytest.approx(1500, abs=1e-6)
            assert answer.intervals_us[metric, statistic] == pytest.approx((1500, 1500), abs=1e-6)
    assert answer.comparison.metrics["itl"]["mean"].difference_us == pytest.approx(0, abs=1e-9)
    assert answer.changed == [
        ("coefficients", *(f"{n} {sha(folder, n)}" for n in ("true", "late"))),
        ("delay pre_queue", "5000 us", "6500 us"),
    ]


def sha(folder: Path, name: str) -> str:
    return parse_release((folder / f"{name}.yaml").read_text(), name).sha256[:12]


def test_a_recording_against_its_replay_with_true_coefficients(store: Store, folder: Path) -> None:
    """The synthetic client stamps in whole us, so the replay is that of the recording to the rounding."""
    answer = compared(store, "1b-general", f"1b-general@{folder}/true.yaml")
    assert answer.resampled.startswith("of the differences of the same requests")
    assert answer.comparison.compared == (200, 200)
    for metric in ("e2e", "ttft"):
        assert abs(answer.comparison.metrics[metric]["mean"].difference_us or 0.0) < 20


def test_different_recordings_are_drawn_by_themselves(store: Store) -> None:
    """Two servers with 9 and 17 ms cycles: no request of one is one of the other; the interval holds the difference."""
    answer = compared(store, "1b-general", "2b-general")
    assert answer.resampled.startswith("of the requests of each side")
    assert answer.comparison.paired == {}
    low_us, high_us = answer.intervals_us["e2e", "mean"]
    assert low_us < (answer.comparison.metrics["e2e"]["mean"].difference_us or 0) < high_us
    assert {name for name, _, _ in answer.changed} == {"experiment", "recording", "model", "arrivals", "prompt tokens"}


@pytest.mark.slow
def test_published_numbers_stand_fixed(store: Store) -> None:
    choice = Choice(None)
    sides = [side_of(store, name, choice) for name in ("34b-general", "34b-general@h100-vllm-0.15.1", "34b-codegen")]
    one, none = differences(sides[0], sides[1]), differences(sides[0], sides[2])
    assert one.resampled.startswith("of the requests of the side that has them")
    low_us, high_us = one.intervals_us["e2e", "mean"]
    assert low_us < (one.comparison.metrics["e2e"]["mean"].difference_us or 0) < high_us
    assert "bracket" in (one.comparison.metrics["itl"]["p99"].reason or "")
    assert none.resampled.startswith("none")
    assert none.intervals_us == {}
    assert none.comparison.metrics["e2e"]["mean"].difference_us == pytest.approx(
        1000 * (3722.9 - 4092.5)
    )  # both as published


@pytest.mark.slow
def test_an_overloaded_recording_is_called_so_once(store: Store) -> None:
    """7b-reasoning is overloaded as published, with a median TTFT of 91.3 s; 34b-general is not."""
    choice = Choice(None)
    names = ("7b-reasoning", "34b-general")
    overloaded, calm = (side_of(store, name, choice) for name in names)
    for sides, times in (((overloaded, overloaded), 1), ((overloaded, calm), 1), ((calm, calm), 0)):
        answer = differences_answer(differences(*sides))
        text = " ".join(str(answer).split())
        assert text.count("7b-reasoning is overloaded: the published median TTFT is 91.3 s; its latencies") == times
        document: Any = answer.document
        assert [document[side]["overloaded"] for side in "ab"] == [side is overloaded for side in sides]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nothing", "is not a simulator .* a release; no experiment is called nothing"),
        ("abcdef012345", "is not a simulator"),
        ("h100-vllm-0.15.1", "the release h100-vllm-0.15.1 alone is nothing to compare; name an experiment"),
        ("blis", "the simulator blis alone is nothing to compare"),
        ("1b-general@none", "no release or file is called none"),
    ],
)
def test_what_a_name_cannot_mean_is_said(store: Store, name: str, complaint: str) -> None:
    choice = Choice(None)
    with pytest.raises(UnknownNameError, match=complaint):
        side_of(store, name, choice)


@pytest.mark.slow
def test_the_page_fits_a_terminal(store: Store, folder: Path) -> None:
    choice = Choice("34b-reasoning")
    pairs = [
        ("1b-general", f"1b-general@{folder}/slow.yaml"),
        ("34b-reasoning", "34b-reasoning@h100-vllm-0.15.1"),
        ("h100-vllm-0.15.1", "stepml-overhead-floor"),
    ]
    for a, b in pairs:
        answer = differences(side_of(store, a, choice), side_of(store, b, choice))
        assert max(len(line) for line in str(differences_answer(answer)).splitlines()) <= 80


def test_json_has_every_number(store: Store, folder: Path) -> None:
    document = differences_answer(compared(store, f"{folder}/true.yaml", f"{folder}/late.yaml")).document
    metrics, paired = document["metrics"], document["paired"]
    assert isinstance(metrics, dict) and isinstance(paired, dict)
    assert metrics["ttft"]["p99"]["difference_ms"] == pytest.approx(1.5)
    assert paired["ttft"]["correlation"] == pytest.approx(1)  # each request is later by the same time


@settings(max_examples=20, deadline=None)
@given(st.integers(-5000, 5000), st.integers(0, 1_000_000))
def test_a_constant_shift_has_no_interval(shift_us: int, seed: int) -> None:
    """It is the difference of every mean and quantile of E2E, whatever the requests."""
    e2e_us = np.random.default_rng(seed).integers(100_000, 900_000, 50)
    sides = [(w, LatencySamples(e2e_us // 9, e2e_us + extra, np.full(50, 9))) for w, extra in ((-1, 0), (1, shift_us))]
    for statistic in ("mean", "p99"):
        assert half_width(("e2e", statistic), sides, in_order(50))[0] == pytest.approx(0, abs=1e-6)
