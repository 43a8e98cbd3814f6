"""The ground-truth store: one DuckDB file with recordings and findings (``schema.sql``).

What most callers need; all is in ``file`` (opens it) and ``recordings`` (reads them).  ``writing`` stores recordings,
in transactions, and is imported by what ingests them.

May import: base.errors, ingest.recording, ingest.rows, ingest.stream.
"""

from __future__ import annotations

from blis_replay.ingest.store.file import Store, open_for_reading, open_store
from blis_replay.ingest.store.recordings import list_experiments, read_stored

__all__ = ["Store", "list_experiments", "open_for_reading", "open_store", "read_stored"]
