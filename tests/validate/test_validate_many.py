"""Many experiments at once: what is kept of each is small, and says the same."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from blis_replay.fixtures.planted import planted_recording
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import ARRIVALS
from blis_replay.ingest.store import Store, open_store
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.validate.comparison.as_json import report_json
from blis_replay.validate.comparison.comparison_text import comparison_text, stages_text, summary_text
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.experiment import by_stage, validate_experiment, validate_many

_PLANTED = planted_recording(seed=5)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store.duckdb") as opened:
        ingest_recording(opened, _PLANTED.recording)
        yield opened


def test_what_is_kept_says_the_same_and_does_not_grow_with_the_requests(store: Store) -> None:
    """600 requests and some 4,000 steps take 1 MB and more; what a table, a page and JSON are made of, 50 kB."""
    slug, release, mode = _PLANTED.recording.slug, _PLANTED.release, ReplayMode()
    whole = validate_experiment(store, slug, release, mode)
    stages = by_stage(store, whole)
    kept = validate_many(store, [slug], release, mode, (0.0, 1.0), EmbeddedEngine(release), stages=True)
    (light,) = kept.comparisons
    assert comparison_text(light) == comparison_text(whole)
    assert summary_text(kept.comparisons, {}) == summary_text([whole], {})
    assert stages_text(light, kept.stages[slug]) == stages_text(whole, stages)
    assert report_json([light], kept.stages, {}) == report_json([whole], {slug: stages}, {})
    assert len(pickle.dumps(whole)) > 1_000_000
    assert len(pickle.dumps(light)) < 50_000


def test_one_that_cannot_be_judged_is_named_or_raised(store: Store) -> None:
    slug, release = _PLANTED.recording.slug, _PLANTED.release
    store.connection.execute("UPDATE experiments SET ground_truth = ?", [ARRIVALS])
    asked = (store, [slug], release, ReplayMode(), (0.0, 1.0), EmbeddedEngine(release))
    assert "an arrival trace" in validate_many(*asked).not_judged["1b-general"]
    with pytest.raises(NothingToJudgeError, match="an arrival trace"):
        validate_many(*asked, tolerant=False)
