"""What the store holds about the server's prefix cache: identities of prompts, and KV-cache events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blis_replay.ingest import queries
from blis_replay.ingest.recording import KV_EVENT_SCHEMA, PROMPT_SCHEMA, REQUEST_PROMPT_SCHEMA, PromptTree, Recording
from blis_replay.ingest.store_file import Store, fetch, first_row, typed

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True)
class KvEventCount:
    """How often a kind of KV-cache event was recorded; ``blocks``, ``tokens`` are sums, None where none is known."""

    event: str
    medium: str | None
    target_medium: str | None
    events: int
    blocks: int | None
    tokens: int | None
    failed: int


def kv_event_counts(store: Store, slug: str) -> tuple[KvEventCount, ...]:
    """KV-cache events of an experiment by kind and medium; empty where none were recorded."""
    return tuple(KvEventCount(*row) for row in store.connection.execute(queries.KV_EVENT_COUNTS, [slug]).fetchall())


def read_prefix(store: Store, slug: str) -> PromptTree | None:
    """The identities of an experiment's prompts, None if it has none."""
    row = first_row(store.connection, queries.PREFIX_IDENTITY, [slug])
    if row is None:
        return None
    prompts = fetch(store.connection, queries.PROMPTS, {"slug": slug}, PROMPT_SCHEMA)
    requests = fetch(store.connection, queries.REQUEST_PROMPTS, {"slug": slug}, REQUEST_PROMPT_SCHEMA)
    return PromptTree(str(row[0]), prompts, requests)


def insert_cache_evidence(connection: duckdb.DuckDBPyConnection, recording: Recording) -> None:
    """Add prompt identities and KV-cache events of a recording, within the caller's transaction."""
    slug, prefix = recording.slug, recording.prefix
    if prefix is not None:
        connection.execute("INSERT INTO prefix_identity VALUES (?, ?)", [slug, prefix.source])
        connection.register("prompts_to_store", typed(prefix.prompts, PROMPT_SCHEMA).to_arrow())
        connection.execute(queries.INSERT_PROMPTS, [slug])
        connection.register("prompts_to_store", typed(prefix.requests, REQUEST_PROMPT_SCHEMA).to_arrow())
        connection.execute(queries.INSERT_REQUEST_PROMPTS, [slug])
        connection.unregister("prompts_to_store")
    if recording.kv_events is not None:
        columns = ", ".join(KV_EVENT_SCHEMA)
        connection.execute(
            f"INSERT INTO kv_events (slug, {columns}) SELECT ?, {columns} FROM read_parquet(?)",  # noqa: S608
            [slug, str(recording.kv_events)],
        )
