"""Recordings of one load: what a server itself differs by, and what that does to an interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gating_cases import SMALL, release, written

from blis_replay.base.errors import NothingToJudgeError
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.releases.release import FittedOn
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.store import Store, open_store
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.validate.comparison.pages import validation_answer
from blis_replay.validate.comparison.repeats import repeats_of
from blis_replay.validate.comparison.validated import Validated, validate_many
from blis_replay.validate.gating.gate import gate

# The same requests on a machine that took 20 % longer for each step that day, and others at half the rate.
SLOW_DAY = replace(
    SMALL,
    slug="20260302-120000-synthetic-1b-tp1-general",
    latency=LatencyModel("blackbox", 9_600_000, 36_000, 72_000),
)
COPY = replace(SMALL, slug="20260304-120000-synthetic-1b-tp1-general")
OTHER_LOAD = replace(SMALL, slug="20260303-120000-synthetic-1b-tp1-general", requests=100)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repeats")
    for spec in (SMALL, SLOW_DAY, OTHER_LOAD, COPY):
        ingest_source(folder / "s.duckdb", written(spec, folder), engine_file=folder / "engine.yaml")
    return folder / "s.duckdb"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with open_store(path) as opened:
        yield opened


def validated(path: Path, by: float, *repeats: str) -> Validated:
    """The recording against a simulator whose steps take ``by`` times as long."""
    simulator = EmbeddedEngine(release("new", slower=SMALL.model, by=by))
    return validate_many(path, [SMALL.slug], ReplayMode(), (0.0, 1.0), simulator, repeats=repeats)


@pytest.mark.slow
def test_what_the_two_recordings_observed(store: Store) -> None:
    """Every step 20 % longer: E2E is steps but for 5.4 ms, so 18 to 25 % longer, ITL likewise."""
    repeats = repeats_of(store, [SMALL.slug], [SLOW_DAY.slug])[SMALL.slug]
    assert repeats.recordings == (SMALL.slug, SLOW_DAY.slug)
    assert 0.18 < repeats.apart["e2e", "mean"] < 0.25
    assert 0.18 < repeats.apart["itl", "mean"] < 0.25


def test_another_day_widens_the_interval_and_leaves_the_limit(path: Path) -> None:
    """15 % of a step are beyond E2E 10 % on the first day, and nothing is sure after the second, 20 % slower."""
    alone, repeated = (validated(path, 1.15, *repeats).comparisons[0] for repeats in ((), (SLOW_DAY.slug,)))
    assert alone.judgement.judged[0].limit == repeated.judgement.judged[0].limit == 0.10
    assert alone.estimates["e2e", "mean"].low > 0.10
    assert repeated.estimates["e2e", "mean"].low < -0.10 < 0.10 < repeated.estimates["e2e", "mean"].high
    assert repeated.repeats is not None and repeated.metrics["e2e"]["mean"].b_us is not None
    # What is printed is the mean error, which lies in the middle of the interval.
    errors = [repeated.metrics["e2e"]["mean"].b_us / us - 1 for us in repeated.repeats.numbers_us["e2e", "mean"]]
    assert repeated.metrics["e2e"]["mean"].error == pytest.approx(sum(errors) / 2)
    assert repeated.judgement.judged[0].error == pytest.approx(sum(repeated.judgement.judged[0].interval or ()) / 2)
    answer = validation_answer(validated(path, 1.15, SLOW_DAY.slug), summary=False)
    assert "2 recordings of this load differ in the mean by up to E2E" in " ".join(str(answer).split())
    (experiment,) = answer.document["experiments"]  # type: ignore[misc]
    assert experiment["repeats"]["recordings"] == [SMALL.slug, SLOW_DAY.slug]  # type: ignore[index]


@pytest.mark.slow
def test_a_gate_is_less_sure_with_it(store: Store) -> None:
    new, old = release("new", slower=SMALL.model, by=1.15), release("old")
    assert gate(store, new, old, selectors=[SMALL.slug]).verdict == "FAIL"
    report = gate(store, new, old, selectors=[SMALL.slug], repeats=[SLOW_DAY.slug])
    assert {check.outcome for check in report.all_checks if check.rule == "regression"} == {"UNDECIDED"}


def test_a_copy_is_no_repeat(store: Store) -> None:
    """It would make an undecided verdict sure."""
    with pytest.raises(NothingToJudgeError, match="100 % of its requests"):
        repeats_of(store, [SMALL.slug], [COPY.slug])


@pytest.mark.slow
def test_a_gate_counts_a_recording_once(store: Store) -> None:
    report = gate(store, release("old"), selectors=[COPY.slug, SMALL.slug])
    assert [judgement.slug for judgement in report.judgements] == [SMALL.slug]
    assert report.left_out.keys() == {COPY.slug}


@pytest.mark.slow
def test_recordings_of_one_load_in_a_gate_are_repeats_of_each_other(store: Store) -> None:
    """Right on the first day, 17 % too fast on the second: one of them by itself would be a lucky PASS."""
    days, new = [SMALL.slug, SLOW_DAY.slug], release("new")
    assert [gate(store, new, selectors=[slug]).verdict for slug in days] == ["PASS", "FAIL"]
    both = gate(store, new, selectors=days)
    assert {one.judgement.verdict for one in both.judgements} == {"UNDECIDED"}
    # What the release was fitted on is no repeat of a run that it did not see.
    fitted = release("new", fitted_on=[FittedOn(SLOW_DAY.slug, "h", "latencies")])
    assert gate(store, fitted, selectors=days).verdict == "PASS"


def test_another_load_is_no_repeat(store: Store) -> None:
    with pytest.raises(
        NothingToJudgeError, match=r"is not a repeat of an experiment that is judged .*100 requests, not 200"
    ):
        repeats_of(store, [SMALL.slug], [OTHER_LOAD.slug])
