"""Many experiments at once: what is kept of each is small, and says the same."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from planted import planted_recording

from blis_replay.base.errors import ReleaseError, StoreError
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import ARRIVALS
from blis_replay.ingest.store import open_store
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.validate.comparison import validated as module
from blis_replay.validate.comparison.pages import validation_answer
from blis_replay.validate.comparison.validated import (
    Validated,
    by_stage,
    compare_experiment,
    validate_many,
)
from blis_replay.validate.text.answer import page_text

pytestmark = pytest.mark.slow

_PLANTED = planted_recording(seed=5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with open_store(tmp_path / "store.duckdb") as opened:
        ingest_recording(opened, _PLANTED.recording)
    return tmp_path / "store.duckdb"


def validated(path: Path, *, stages: bool = False) -> Validated:
    slug, simulator = _PLANTED.recording.slug, EmbeddedEngine(_PLANTED.release)
    return validate_many(path, [slug], ReplayMode(), (0.0, 1.0), simulator, stages=stages)


def test_what_is_kept_says_the_same_and_does_not_grow_with_the_requests(path: Path) -> None:
    """The replay of 600 requests in some 4,000 steps takes 0.8 MB; what an answer is made of, less than 50 kB.

    The rows of the recording are in neither: they stay in the store.
    """
    slug = _PLANTED.recording.slug
    with open_store(path) as store:
        whole = compare_experiment(store, slug, _PLANTED.release, ReplayMode())
        stages = by_stage(store, whole)
    kept = validated(path, stages=True)
    (only,) = kept.comparisons
    for summary in (False, True):
        said, expected = (
            validation_answer(replace(kept, comparisons=[one], stages={slug: some}), summary=summary)
            for one, some in ((only, kept.stages[slug]), (whole, stages))
        )
        assert str(said) == str(expected)
        assert said.document == expected.document
        assert said.table == expected.table
    assert len(pickle.dumps(whole)) > 700_000
    assert len(pickle.dumps(only)) < 50_000


def test_one_that_cannot_be_judged_has_a_verdict(path: Path) -> None:
    with open_store(path) as store:
        store.connection.execute("UPDATE experiments SET ground_truth = ?", [ARRIVALS])
    answer = validation_answer(validated(path), summary=False)
    assert "an arrival trace" in answer.document["not_judged"]["1b-general"]
    assert (answer.document["verdict"], answer.exit_code) == ("NOT JUDGED", 4)
    for page in (answer.brief, answer.page):
        assert page_text(page).startswith("NOT JUDGED  1b-general: an arrival trace")


def test_a_release_without_the_model_is_no_verdict_on_the_recording(path: Path) -> None:
    simulator = EmbeddedEngine(load_release("h100-vllm-0.15.1"))
    with pytest.raises(ReleaseError, match="no coefficients"):
        validate_many(path, ["1b-general"], ReplayMode(), (0.0, 1.0), simulator)


def test_a_store_that_cannot_be_read_is_no_experiment_that_cannot_be_judged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a damaged block would leave an experiment out, and the others would pass."""

    def damaged(*_: object) -> None:
        raise StoreError("store.duckdb: it cannot be read")

    monkeypatch.setattr(module, "compare_experiment", damaged)
    with pytest.raises(StoreError):
        validated(path)


def test_one_that_cannot_be_judged_has_a_row_with_the_reason() -> None:
    table = validation_answer(Validated("embedded", [], {}, {"a": "an arrival trace"}), summary=True).table
    (row,) = (dict(zip(table.names, row, strict=True)) for row in table.rows)
    assert (row["alias"], row["verdict"], row["state"], row["reason"]) == ("a", "NOT JUDGED", None, "an arrival trace")
