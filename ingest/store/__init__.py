"""The ground-truth store: one DuckDB file with recordings, findings and runs (``schema.sql``).

The public face; the work is in ``file`` (the file and its transactions), ``recordings`` (reads them) and ``runs``.
``writing`` stores recordings, and is imported by what ingests them.

May import: base.errors, ingest.recording, ingest.rows, ingest.stream.
"""

from __future__ import annotations

from blis_replay.ingest.store.file import SCHEMA_VERSION, Store, open_for_reading, open_store, transaction, writable
from blis_replay.ingest.store.recordings import (
    TABLES,
    ExperimentRow,
    NamedExperiment,
    experiments_named,
    inter_token_gaps,
    list_experiments,
    read_findings,
    read_stored,
    read_token_layout,
    resolve,
    token_times,
)
from blis_replay.ingest.store.runs import (
    ERROR_SCHEMA,
    RUN_REQUEST_SCHEMA,
    RUN_STEP_SCHEMA,
    RunRecord,
    is_stored,
    list_runs,
    read_run,
    write_run,
)

__all__ = [
    "ERROR_SCHEMA",
    "RUN_REQUEST_SCHEMA",
    "RUN_STEP_SCHEMA",
    "SCHEMA_VERSION",
    "TABLES",
    "ExperimentRow",
    "NamedExperiment",
    "RunRecord",
    "Store",
    "experiments_named",
    "inter_token_gaps",
    "is_stored",
    "list_experiments",
    "list_runs",
    "open_for_reading",
    "open_store",
    "read_findings",
    "read_run",
    "read_stored",
    "read_token_layout",
    "resolve",
    "token_times",
    "transaction",
    "writable",
    "write_run",
]
