"""Our own table of requests: every column as it is stored, and what their prompts share."""

from __future__ import annotations

import json
from pathlib import Path

from blis_replay.ingest.readers.simulators.parquet_requests import METADATA, PROMPT_COLUMNS
from blis_replay.ingest.recording import Recording


def write(recording: Recording, folder: Path) -> list[str]:
    """Write ``requests.parquet``; nothing of the requests is lost."""
    from pyarrow.parquet import write_table

    prefix, frame = recording.prefix, recording.requests
    clock = next((vars(c) for c in recording.clocks if c.name in ("client", "server")), None)
    told: dict[str, object] = {"model": recording.model, "clock": clock}
    if prefix is not None:
        told |= {"prefix_source": prefix.source}
        prompts = prefix.requests.join(prefix.prompts, on="prompt").rename(PROMPT_COLUMNS)
        frame = frame.join(prompts, on="request_index", how="left", maintain_order="left")
    table = frame.to_arrow()
    write_table(
        table.replace_schema_metadata({METADATA: json.dumps(told).encode()}),
        folder / "requests.parquet",
        compression="zstd",
    )
    return []
