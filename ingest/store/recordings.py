"""Recordings in the store: read back, listed, named."""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.base.errors import StoreError, UnknownExperimentError
from blis_replay.ingest.recording import (
    Clock,
    Finding,
    GroundTruth,
    LoadProfile,
    PromptTree,
    Recording,
    Setting,
    SharedPrefix,
    SourceFile,
    Stage,
    columns_of,
)
from blis_replay.ingest.rows import FEW_ROWS, Rows, rows_of
from blis_replay.ingest.store.file import Store, fetch, first_row, is_being_written, read_table, reading

if TYPE_CHECKING:
    import duckdb

    from blis_replay.ingest.stream import TokenLayout


# Of more than these, whose columns take 10 MB each, a column is read whenever it is asked for.
_KEPT_REQUESTS = 1_000_000
# The tables whose rows are read when they are asked for, and what orders them.
TABLES = {
    "requests": "request_index",
    "steps": "start_us, step_id",
    "snapshots": "step_id, request_id",
    "lifecycles": "journey",
    "journey_events": "",  # as they were stored: DuckDB keeps that order, and sorts nothing
    "iterations": "engine, iteration",
}


# What a recording is, in the first columns of its row of experiments.
IDENTITY = ("slug", "alias", "workload", "model", "hardware", "tensor_parallelism", "ground_truth", "content_hash")

_HASHES = "SELECT content_hash, derived_hash FROM experiments WHERE slug = ?"


@dataclass(frozen=True)
class StoredTables:
    """The tables of one stored experiment: each look at them opens the store, unless this process has it open.

    ``hashes``: content and derived hash when the experiment was read; ``StoreError`` if it was ingested again since.
    """

    path: Path
    slug: str
    hashes: tuple[str, str]

    @contextmanager
    def connection(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection for one read."""
        with reading(self.path) as connection:
            if first_row(connection, _HASHES, [self.slug]) != self.hashes:
                raise StoreError(f"{self.path}: {self.slug} was ingested again meanwhile; run this again")
            yield connection

    def is_shared(self) -> bool:
        """Whether another process can read them too: not as long as this one has the store open for writing."""
        return not is_being_written(self.path)


def stored_rows(store: Store, slug: str, hashes: tuple[str, str], table: str) -> Rows:
    """The rows of one of TABLES of an experiment; those of few requests are read at once, and looked at often."""
    schema, order = columns_of(table), TABLES[table]
    sql = f"SELECT {', '.join(schema)} FROM {table} WHERE slug = $slug"  # noqa: S608 (constants)
    sql += f" ORDER BY {order}" if order else ""
    rows = Rows(schema, sql, StoredTables(store.path.resolve(), slug, hashes), bound={"slug": slug})
    if table != "requests":
        return rows
    if rows.height <= FEW_ROWS:
        return rows_of(rows.frame())
    return replace(rows, kept={}) if rows.height <= _KEPT_REQUESTS else rows


_CLOCK = ", ".join(field.name for field in fields(Clock))  # the table has the same columns in the same order


@dataclass(frozen=True)
class ExperimentRow:
    """One stored experiment in short: who it is, how many requests, how many findings.

    ``alias``: the slug where another stored experiment has the same.  ``unusable``: as a whole.
    """

    slug: str
    alias: str
    model: str | None
    hardware: str | None
    tensor_parallelism: int | None
    workload: str
    ground_truth: GroundTruth
    requests: int
    failed: int
    overloaded: bool
    unusable: bool
    findings: int


_LIST_EXPERIMENTS = """
SELECT e.slug, CASE WHEN count(*) OVER (PARTITION BY e.alias) > 1 THEN e.slug ELSE e.alias END AS alias,
       e.model, e.hardware, e.tensor_parallelism, e.workload, e.ground_truth,
       (SELECT count(*) FROM requests r WHERE r.slug = e.slug) AS requests,
       (SELECT count(*) FROM requests r WHERE r.slug = e.slug AND r.status NOT IN ('ok', 'aborted')) AS failed,
       EXISTS (SELECT 1 FROM findings f WHERE f.slug = e.slug AND f.check_name = 'overloaded') AS overloaded,
       EXISTS (SELECT 1 FROM findings WHERE slug = e.slug AND severity = 'unusable' AND metric = '') AS unusable,
       (SELECT count(*) FROM findings f WHERE f.slug = e.slug) AS findings
FROM experiments e ORDER BY e.slug
"""


def list_experiments(store: Store) -> list[ExperimentRow]:
    """All stored experiments, in order of slug."""
    rows = store.connection.execute(_LIST_EXPERIMENTS).fetchall()
    return [ExperimentRow(*row) for row in rows]


def experiments_named(store: Store) -> dict[str, str]:
    """The alias of each stored experiment by its slug, in order of slug; several may have one alias."""
    return dict(store.connection.execute("SELECT slug, alias FROM experiments ORDER BY slug").fetchall())


def resolve(aliases: Mapping[str, str], name: str) -> str:
    """The slug that ``name`` (a slug or an alias) stands for; ``aliases``: by slug.

    Raises ``UnknownExperimentError`` if several experiments have that alias (naming their slugs) or
    none has it (naming what comes close, or the verb that reads a path).
    """
    if name in aliases:
        return name
    slugs = [slug for slug, alias in aliases.items() if alias == name]
    if len(slugs) > 1:
        raise UnknownExperimentError(f"{name} could mean {', '.join(slugs)}; name one of them")
    if slugs:
        return slugs[0]
    known = list(dict.fromkeys([*sorted(aliases.values()), *sorted(aliases)]))
    if os.path.exists(name):  # noqa: PTH110 - pathlib would raise for a name that is too long for a path
        folder = Path(name).resolve().name
        ingest = f"read it first: `blis-replay ingest {shlex.quote(name)}`"
        remedy = f"its experiment is {folder}" if folder in known else ingest
        raise UnknownExperimentError(f"{name} is a path and not the name of an experiment; {remedy}")
    if "://" in name:
        raise UnknownExperimentError(f"{name} is an address; download it, then `blis-replay ingest FILE`")
    if "," in name:
        raise UnknownExperimentError(f"no experiment is called {name}; write a space between names, not a comma")
    close = [other for other in known if name.strip() and name.lower() in other.lower()][:3]
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "list them with `blis-replay list`"
    raise UnknownExperimentError(f"no experiment is called {name if name.strip() else repr(name)}; {hint}")


def read_stored(store: Store, slug: str) -> Recording:
    """The recording as stored; ``token_events`` is None (``token_times`` reads them).

    Its alias is the slug where another stored experiment has the same alias, so that what is printed is a name that
    is understood.  Raises ``UnknownExperimentError`` for a slug that is not stored.
    """
    row = _one(store, slug)
    namesakes = first_row(store.connection, "SELECT count(*) FROM experiments WHERE alias = ?", [row["alias"]])
    hashes = (row["content_hash"], row["derived_hash"])
    tables: dict[str, Any] = {table: stored_rows(store, slug, hashes, table) for table in TABLES}
    return Recording(
        **{name: row[name] for name in IDENTITY} | {"alias": row["alias"] if namesakes == (1,) else slug},
        engine=read_engine(store, slug),
        stages=tuple(Stage(*r) for r in _rows(store, "stage, rate_per_s, duration_us", "stages", slug, "stage")),
        shared_prefix=_shared_prefix(row),
        ignore_eos=row["ignore_eos"],
        prefix_hit_rate=row["prefix_hit_rate"],
        token_events=None,
        aggregates=read_table(store, "aggregates", "stage, metric, statistic", slug=slug),
        clocks=tuple(Clock(*r) for r in _rows(store, _CLOCK, "clocks", slug, "position")),
        files=_read_files(store, slug),
        missing=tuple(json.loads(row["missing"])),
        dropped_step_events=row["dropped_step_events"],
        load_profile=row["load_profile"] and msgspec.json.decode(row["load_profile"], type=LoadProfile),
        findings=read_findings(store, slug),
        prefix=_read_prefix(store, slug),
        **tables,
    )


def read_findings(store: Store, slug: str) -> tuple[Finding, ...]:
    """What the instrument checks found, in the order in which they ran."""
    rows = _rows(store, "check_name, severity, metric, message, measured, threshold", "findings", slug, "position")
    return tuple(Finding(r[0], r[1], r[2], r[3], json.loads(r[4]), r[5]) for r in rows)


def read_token_layout(store: Store, slug: str) -> TokenLayout:
    """How the stored experiment's client stamped its stream; ``UnknownExperimentError`` for an unknown slug."""
    from blis_replay.ingest.stream import LAYOUTS  # only ingest and its checks look at stream stamps

    name = _one(store, slug)["token_layout"]
    if name not in LAYOUTS:
        raise StoreError(f"{store.path}: {slug} has an unknown token layout {name!r}; ingest it again")
    return LAYOUTS[name]


def _one(store: Store, slug: str) -> dict[str, Any]:
    cursor = store.connection.execute("SELECT * FROM experiments WHERE slug = ?", [slug])
    names = [column[0] for column in cursor.description or ()]
    rows = cursor.fetchall()
    if not rows:
        raise UnknownExperimentError(f"{store.path}: no experiment {slug}; ingest it first")
    return dict(zip(names, rows[0], strict=True))


def _rows(store: Store, columns: str, table: str, slug: str, order: str) -> list[tuple[Any, ...]]:
    # Names come from this module only; the slug is bound.
    sql = f"SELECT {columns} FROM {table} WHERE slug = ? ORDER BY {order}"  # noqa: S608
    return store.connection.execute(sql, [slug]).fetchall()


def _read_prefix(store: Store, slug: str) -> PromptTree | None:
    source = first_row(store.connection, "SELECT source FROM prefix_identity WHERE slug = ?", [slug])
    tables = ("prompts", "prompt"), ("request_prompts", "request_index")
    if source is None:
        return None
    return PromptTree(str(source[0]), *(read_table(store, *table, slug=slug) for table in tables))


def read_engine(store: Store, slug: str) -> dict[str, Setting]:
    """The engine arguments of an experiment, each with its source."""
    rows = _rows(store, "name, value, source, detail", "engine_args", slug, "name")
    return {name: Setting(json.loads(value), source, detail) for name, value, source, detail in rows}


def _read_files(store: Store, slug: str) -> tuple[SourceFile, ...]:
    rejected: dict[int, list[tuple[str, str]]] = {}
    columns = "file_position, place, reason"
    for position, *record in _rows(store, columns, "rejected_records", slug, "file_position, position"):
        rejected.setdefault(position, []).append((record[0], record[1]))
    columns = "position, name, kind, bytes, sha256, records, rejected_count"
    rows = _rows(store, columns, "source_files", slug, "position")
    return tuple(replace(SourceFile(*row[1:]), rejected=tuple(rejected.get(row[0], ()))) for row in rows)


SHARED_PREFIX = tuple(field.name for field in fields(SharedPrefix))


def _shared_prefix(row: dict[str, Any]) -> SharedPrefix | None:
    return None if row["num_groups"] is None else SharedPrefix(*(row[name] for name in SHARED_PREFIX))


# -- Token times, corrected for how their client stamped them ---------------------------------------------

# ``chosen_requests``: a view that is registered where not all requests are pooled.
_OF_CHOSEN = "request_index IN (SELECT request_index FROM chosen_requests)"
_POOLED_OUTPUT_GAPS = """
WITH gaps AS (
    SELECT time_us - lag(time_us) OVER (PARTITION BY request_index ORDER BY token_index) AS gap_us
    FROM token_events
    WHERE slug = $slug AND token_index IS NOT NULL
      AND request_index IN (SELECT request_index FROM requests WHERE slug = $slug AND status = 'ok')
      AND {of_chosen} AND {of_first}
)
SELECT gap_us, count(*) AS count FROM gaps WHERE gap_us IS NOT NULL GROUP BY gap_us ORDER BY gap_us
"""


def inter_token_gaps(
    store: Store, slug: str, chosen: NDArray[np.bool_] | None = None, *, first: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pooled gaps between output tokens of completed requests: ``(gap_us, count)``, int64, gaps ascending and distinct.

    ``chosen``: bool[n] by ``request_index``, the requests to pool; None: all.  ``first``: only the gap between the
    first two tokens of each.  Empty without token times.  Pooled in SQL, so memory grows with distinct gaps, not with
    tokens.
    """
    some = None if chosen is None or chosen.all() else pl.DataFrame({"request_index": np.flatnonzero(chosen)})
    if some is not None:
        store.connection.register("chosen_requests", some.to_arrow())
    of_first = "token_index < 2" if first else "true"
    sql = _POOLED_OUTPUT_GAPS.format(of_chosen="true" if some is None else _OF_CHOSEN, of_first=of_first)
    gaps = fetch(store.connection, sql, {"slug": slug}, {"gap_us": pl.Int64, "count": pl.Int64})
    if some is not None:
        store.connection.unregister("chosen_requests")
    return gaps["gap_us"].to_numpy(), gaps["count"].to_numpy()
