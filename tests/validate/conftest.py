"""The real recordings, ingested once for a test session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pack import JANUARY

from blis_replay.fixtures.catalogue import profile_of
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.store import Store, open_store


@pytest.fixture(scope="session")
def real_store(data_pack: Path, h100_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with the twelve H100 recordings and the three of vLLM 0.11 of the data pack."""
    path = Path(shutil.copy(h100_store, tmp_path_factory.mktemp("store")))
    for name in JANUARY:
        ingest_source(path, data_pack / "blis-eval" / name, profile=profile_of(name))
    with open_store(path) as store:
        yield store
