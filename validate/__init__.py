"""How far a simulator is from a recorded server, and why: the functions that the command line calls.

From Python they are in ``validate/api.py``.

May import: base, blis, fixtures, ingest, recorder, replay.
"""

from pathlib import Path

# Where a command looks for the ground-truth store, in the folder in which it runs.
STORE_DEFAULT = Path(".blis-replay") / "store.duckdb"
