"""How functions are compiled, and where the compiled code is kept.

Numba notices a change of the file a function stands in, not of the files it calls.  So
the cache folder is named by a hash of all its sources: stale code cannot be
loaded.  Without a writable folder the functions are compiled afresh in every process.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Compiled functions allocate nothing, so references need not be counted (_nrt): counting takes most of the time of
# compiling, and in short functions of running.  None of their divisions can be by zero (error_model).
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


class Decorator(Protocol):
    """Compiles a function; to the type checker it stays what it is."""

    def __call__(self, function: _Function, /) -> _Function:
        """The compiled function."""


def decorators(package: Path, *others: Path, inline: bool = False) -> tuple[Decorator, Decorator]:
    """``entry``, for functions that Python calls, and ``compiled``, for those that only compiled functions call.

    ``package``: the folder they are in.  ``others``: files beyond it whose constants or functions are part of the
    compiled code, which is kept in ``cache_folder(package, *others)``.  ``inline``: what is ``compiled`` becomes part
    of its callers.
    """
    folder = cache_folder(package, *others)
    njit: Any = numba.njit  # its stubs do not know all of its options

    def decorator(**options: Any) -> Decorator:
        def jitted(function: _Function, /) -> _Function:
            if folder is not None:
                # Read when a function is decorated; another package may have set its own since.
                numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # set by Numba from the environment
            compiled: _Function = njit(cache=folder is not None, **options, **_OPTIONS)(function)
            return compiled

        return jitted

    return decorator(), decorator(no_cpython_wrapper=True, **({"forceinline": True} if inline else {}))


def cache_folder(package: Path, *others: Path) -> Path | None:
    """Where the compiled functions of a package, and of the files they depend on, are kept.

    None where no folder can be written.
    """
    return _cache_folder(_sources_hash([Path(__file__), *sorted(package.glob("*.py")), *others]))


def _sources_hash(sources: Iterable[Path]) -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder(name: str) -> Path | None:
    """A folder that can be written, or None.  ``NUMBA_CACHE_DIR`` wins, as for all of Numba."""
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "blis-replay" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def _import_without_scipy() -> None:
    """Load Numba's array functions without SciPy, which takes a fifth of a second of every start.

    Numba asks SciPy whether it could compile matrix products; nothing here has any.
    """
    if "scipy.linalg" in sys.modules:
        return
    sys.modules["scipy.linalg"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        del sys.modules["scipy.linalg"]


_import_without_scipy()
