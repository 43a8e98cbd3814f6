"""Our own table of requests: every column as it is stored, and the prompt's blocks."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from blis_replay.ingest.readers.parquet_requests import BLOCKS, METADATA
from blis_replay.ingest.recording import Recording


def write(recording: Recording, folder: Path) -> list[str]:
    """Write ``requests.parquet``; nothing of the requests is lost."""
    from pyarrow.parquet import write_table

    prefix, frame = recording.prefix, recording.requests
    clock = next((vars(c) for c in recording.clocks if c.name in ("client", "server")), None)
    told: dict[str, object] = {"model": recording.model, "clock": clock}
    if prefix is not None:
        told |= {"block_tokens": prefix.block_tokens, "prefix_source": prefix.source}
        blocks = prefix.blocks.group_by("request_index").agg(pl.col("block_key").sort_by("block_index").alias(BLOCKS))
        frame = frame.join(blocks, on="request_index", how="left", maintain_order="left")
    table = frame.to_arrow()
    write_table(
        table.replace_schema_metadata({METADATA: json.dumps(told).encode()}),
        folder / "requests.parquet",
        compression="zstd",
    )
    return []
