"""How the functions of the kernel are compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from blis_replay.compiled.cache import cache_folder, cached_njit

Function = TypeVar("Function", bound=Callable[..., Any])

_SOURCES = (Path(__file__).parent,)
_njit = cached_njit(*_SOURCES)

# The kernel allocates nothing, so references need not be counted (_nrt): counting would
# take ten times as long as the work, and most of the time of compiling.  None of its
# divisions can be by zero (error_model).
OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def kept_in() -> Path | None:
    """The folder of the compiled kernel, None where none can be written."""
    return cache_folder(*_SOURCES)


def compiled(function: Function) -> Function:
    """Decorator: a function that only compiled functions call; there is no way in from Python."""
    jitted: Function = _njit(no_cpython_wrapper=True, forceinline=True, **OPTIONS)(function)
    return jitted


def entry(function: Function) -> Function:
    """Decorator: a compiled function that Python calls."""
    jitted: Function = _njit(**OPTIONS)(function)
    return jitted
