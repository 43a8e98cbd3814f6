"""How the functions of the cluster layer are compiled: as those of the kernel, which they call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from blis_replay.blis import kernel
from blis_replay.blis.kernel.compiled import OPTIONS
from blis_replay.compiled.cache import cached_njit

Function = TypeVar("Function", bound=Callable[..., Any])

_njit = cached_njit(Path(__file__).parent, *sorted(Path(str(kernel.__file__)).parent.glob("*.py")))


def compiled(function: Function) -> Function:
    """Decorator: a function that only compiled functions call."""
    jitted: Function = _njit(no_cpython_wrapper=True, forceinline=True, **OPTIONS)(function)
    return jitted


def entry(function: Function) -> Function:
    """Decorator: a compiled function that Python calls."""
    jitted: Function = _njit(**OPTIONS)(function)
    return jitted
