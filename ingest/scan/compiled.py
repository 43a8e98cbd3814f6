"""How the scans are compiled."""

from __future__ import annotations

from pathlib import Path

from blis_replay.compiled.cache import cache_folder
from blis_replay.compiled.functions import decorators

_FOLDER = Path(__file__).parent

entry, compiled = decorators(_FOLDER)
_, inlined = decorators(_FOLDER, inline=True)  # small functions


def kept_in() -> Path | None:
    """The folder of the compiled scans, None where none can be written."""
    return cache_folder(_FOLDER)
