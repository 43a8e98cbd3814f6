"""The real recordings, ingested once for a test session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blis_replay.fixtures.catalogue import profile_of
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.store import Store, open_store


@pytest.fixture(scope="session")
def real_store(data_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with the twelve H100 recordings and the three of vLLM 0.11 of the data pack."""
    path = tmp_path_factory.mktemp("store") / "store.duckdb"
    january = ["jan20-codellama-train-1", "jan20-prefill-llama7b-tp1-1", "jan21-llama7b-train-1"]
    for directory in [*sorted((data_pack / "h100").iterdir()), *(data_pack / "blis-eval" / name for name in january)]:
        ingest_source(path, directory, profile=profile_of(directory.name))
    with open_store(path) as store:
        yield store
