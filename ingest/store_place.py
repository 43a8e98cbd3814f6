"""Where the ground-truth store is, if nobody says."""

from __future__ import annotations

from pathlib import Path

STORE_DEFAULT = Path(".blis-replay") / "store.duckdb"
