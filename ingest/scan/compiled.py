"""How the scans are compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from blis_replay.compiled.cache import cache_folder, cached_njit
from blis_replay.ingest.readers.otlp import columns as otlp_columns

Function = TypeVar("Function", bound=Callable[..., Any])

# The columns of traces are constants of the compiled code.
_SOURCES = (Path(__file__).parent, Path(otlp_columns.__file__))
_njit = cached_njit(*_SOURCES)

# No scan allocates, so references need not be counted (_nrt), which would take most of the time of compiling.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def kept_in() -> Path | None:
    """The folder of the compiled scans, None where none can be written."""
    return cache_folder(*_SOURCES)


def compiled(function: Function) -> Function:
    """Decorator: a function that only compiled functions call; there is no way in from Python."""
    jitted: Function = _njit(no_cpython_wrapper=True, **_OPTIONS)(function)
    return jitted


def inlined(function: Function) -> Function:
    """Decorator: a small one that is made part of the compiled functions that call it."""
    jitted: Function = _njit(no_cpython_wrapper=True, forceinline=True, **_OPTIONS)(function)
    return jitted


def entry(function: Function) -> Function:
    """Decorator: a compiled function that Python calls."""
    jitted: Function = _njit(**_OPTIONS)(function)
    return jitted
