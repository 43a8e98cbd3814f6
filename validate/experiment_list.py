"""The experiments of the store and those that ship: as rows, a frame and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from blis_replay.fixtures.catalogue import bundled_aliases, load_document
from blis_replay.ingest.store import list_experiments, open_store
from blis_replay.validate.terminal import Toned, table

_HEADER = ["alias", "model", "tp", "requests", "failed", "ground truth", "", "workload", "findings", "slug"]
_WIDE = (9, 7, 8)


def experiment_list(store_path: Path) -> list[dict[str, Any]]:
    """An entry an experiment, sorted by slug, as ``docs/json.md`` describes it; nothing is stored by looking."""
    stored: list[dict[str, Any]] = []
    if store_path.exists():
        with open_store(store_path, read_only=True) as store:
            stored = [{**vars(row), "stored": True} for row in list_experiments(store)]
    slugs = {row["slug"] for row in stored}
    bundled = [_bundled(alias, slug) for alias, slug in bundled_aliases().items() if slug not in slugs]
    return sorted([*stored, *bundled], key=lambda row: str(row["slug"]))


def experiments_frame(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """The same as a frame, a row an experiment."""
    return pl.DataFrame(rows, infer_schema_length=None)


def experiments_text(rows: Sequence[dict[str, Any]]) -> str:
    """The same as a table."""
    return table(_HEADER, [_line(row) for row in rows], left=(0, 1, 7, 9), wide=_WIDE)


def _bundled(alias: str, slug: str) -> dict[str, Any]:
    document = load_document(slug)
    stages = document["load"]["stages"]
    return {
        "slug": slug,
        "alias": alias,
        "model": document["model"],
        "hardware": document["hardware"],
        "tensor_parallelism": document["tensor_parallelism"],
        "workload": document["workload"],
        "ground_truth": "published aggregates",
        "requests": sum(stage["requests"] for stage in stages),
        "failed": sum(stage["failures"] for stage in stages),
        "overloaded": None,  # the checks run when it is first used
        "findings": None,
        "stored": False,
    }


def _line(row: dict[str, Any]) -> list[str | Toned]:
    return [
        row["alias"],
        str(row["model"] or "not recorded").split("/")[-1],
        str(row["tensor_parallelism"] or "-"),
        f"{row['requests']:,}",
        f"{row['failed']:,}",
        str(row["ground_truth"]).split()[0],  # recorded, published, arrival
        Toned("overloaded", "caution") if row["overloaded"] else "",
        str(row["workload"] or "-"),
        "-" if row["findings"] is None else f"{row['findings']:,}",
        row["slug"],
    ]
