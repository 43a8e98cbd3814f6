"""How kernel functions are compiled, and where the compiled code is kept.

Numba notices a change of the file a function stands in, not of the files it calls.  So
the cache folder is named by a hash of all kernel sources: stale code cannot be loaded.
Without a writable folder the functions are compiled afresh in every process.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def _sources_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path | None:
    """A folder that can be written, or None.  ``NUMBA_CACHE_DIR`` wins, as for all of Numba."""
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "blis-replay" / _sources_hash()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def _import_without_scipy() -> None:
    """Load Numba's array functions without SciPy, which takes a fifth of a second of every start.

    Numba asks SciPy whether it could compile matrix products; the kernel has none.
    """
    if "scipy.linalg" in sys.modules:
        return
    sys.modules["scipy.linalg"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        del sys.modules["scipy.linalg"]


_import_without_scipy()
_FOLDER = _cache_folder()
_njit: Any = numba.njit  # its stubs do not know all of its options
if _FOLDER is not None:
    numba.config.CACHE_DIR = str(_FOLDER)  # type: ignore[attr-defined]  # set from the environment by Numba


# The kernel allocates nothing, so references need not be counted (_nrt): counting would
# take ten times as long as the work, and most of the time of compiling.  None of its
# divisions can be by zero (error_model).
_OPTIONS: dict[str, Any] = {
    "cache": _FOLDER is not None,
    "error_model": "numpy",
    "_nrt": False,
    "no_cfunc_wrapper": True,
}


def compiled(function: Function) -> Function:
    """Decorator: a function that only compiled functions call; there is no way in from Python."""
    jitted: Function = _njit(no_cpython_wrapper=True, forceinline=True, **_OPTIONS)(function)
    return jitted


def entry(function: Function) -> Function:
    """Decorator: a compiled function that Python calls."""
    jitted: Function = _njit(**_OPTIONS)(function)
    return jitted
