"""Small recordings for replay and comparison tests."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from blis_replay.ingest.recording import (
    AGGREGATE_SCHEMA,
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    Recording,
    Setting,
    SharedPrefix,
    Stage,
)
from blis_replay.ingest.rows import no_rows, rows_of
from blis_replay.ingest.store.file import Store, fetch

ENGINE = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
    "block_size": 16,
    "async_scheduling": False,
}


def make_recording(
    columns: dict[str, Sequence[object]],
    *,
    shared_prefix: SharedPrefix | None = None,
    prefix_hit_rate: float | None = None,
    stages: tuple[Stage, ...] = (),
    engine: dict[str, int | bool] | None = None,
) -> Recording:
    """A recording of the model ``some/Model`` (alias ``some-test``) with these request columns.

    Requests are ok and have a decode length from the server unless told otherwise.
    """
    count = len(next(iter(columns.values())))
    defaults: dict[str, Sequence[object]] = {
        "request_index": range(count),
        "status": ["ok"] * count,
        "output_tokens_source": ["server usage"] * count,
    }
    given = defaults | columns
    requests = pl.DataFrame(
        {name: pl.Series(list(given.get(name, [None] * count)), dtype=kind) for name, kind in REQUEST_SCHEMA.items()}
    )
    return Recording(
        slug="20260101-000000-some-tp1-test",
        alias="some-test",
        workload="test",
        model="some/Model",
        hardware="H100",
        tensor_parallelism=1,
        ground_truth="recorded",
        content_hash="hash",
        engine={name: Setting(value, "recorded") for name, value in (ENGINE | (engine or {})).items()},
        stages=stages,
        shared_prefix=shared_prefix,
        ignore_eos=True,
        prefix_hit_rate=prefix_hit_rate,
        requests=rows_of(requests),
        token_events=None,
        steps=no_rows(STEP_SCHEMA),
        aggregates=pl.DataFrame(schema=AGGREGATE_SCHEMA),
        clocks=(),
        files=(),
        missing=(),
    )


def token_times(store: Store, slug: str) -> pl.DataFrame:
    """``request_index``, ``token_index``, ``time_us`` of the output tokens that the store numbers, in that order."""
    sql = "SELECT request_index, token_index, time_us FROM token_events WHERE slug = $slug AND token_index IS NOT NULL"
    schema = dict.fromkeys(("request_index", "token_index", "time_us"), pl.Int64)
    return fetch(store.connection, f"{sql} ORDER BY ALL", {"slug": slug}, schema)
