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
from typing import Any

import numba

Decorator = Callable[[Callable[..., Any]], Any]


def cached_njit(package: Path, *others: Path) -> Callable[..., Decorator]:
    """``numba.njit`` for the functions of one package, a folder, with a cache of its own.

    ``others``: files beyond it whose constants or functions are part of the compiled code.
    The decorator that it returns takes the options of ``numba.njit`` but for ``cache``.
    """
    folder = cache_folder(package, *others)
    njit: Any = numba.njit  # its stubs do not know all of its options

    def decorator(**options: Any) -> Decorator:
        def jitted(function: Callable[..., Any]) -> Any:
            if folder is not None:
                # Read when a function is decorated; another package may have set its own since.
                numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # set by Numba from the environment
            return njit(cache=folder is not None, **options)(function)

        return jitted

    return decorator


def cache_folder(package: Path, *others: Path) -> Path | None:
    """Where the compiled functions of a package are kept; None where no folder can be written."""
    return _cache_folder(_sources_hash([*sorted(package.glob("*.py")), *others]))


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
