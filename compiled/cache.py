"""How functions are compiled, and where the compiled code is kept.

Numba notices a change of the file a function stands in, not of the files it calls.  So
the cache folder is named by a hash of all its sources: stale code cannot be
loaded.  Without a writable folder the functions are compiled afresh in every process.

What is loaded is run: a folder that another user could write is not used, and every file has a checksum, without
which, or with a wrong one, it counts as absent.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from blis_replay.compiled.numba_parts import EntryCompiler, PartCompiler, numba

_caching: Any = importlib.import_module("numba.core.caching")

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

    def entry(function: _Function, /) -> _Function:
        if folder is not None:
            # Read when a function is decorated; another package may have set its own since.
            numba.config.CACHE_DIR = str(folder)
        compiled: Any = numba.njit(cache=folder is not None, pipeline_class=EntryCompiler, **_OPTIONS)(function)
        if folder is not None and not numba.config.DISABLE_JIT:  # without it the function stays as it is
            compiled._cache._cache_file = _CheckedFiles.of(compiled._cache)
        return cast("_Function", compiled)

    def part(function: _Function, /) -> _Function:
        options = {"no_cpython_wrapper": True, "forceinline": True} if inline else {"no_cpython_wrapper": True}
        return cast("_Function", numba.njit(pipeline_class=PartCompiler, **options, **_OPTIONS)(function))

    return entry, part


def cache_folder(package: Path, *others: Path) -> Path | None:
    """Where the compiled functions of a package, and of the files they depend on, are kept.

    None where no folder can be written.
    """
    ours = sorted(Path(__file__).parent.glob("*.py"))
    return _cache_folder(_sources_hash([*ours, *sorted(package.glob("*.py")), *others]))


def _sources_hash(sources: Iterable[Path]) -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder(name: str) -> Path | None:
    """A folder that can be written, or None.  ``NUMBA_CACHE_DIR`` wins, as for all of Numba."""
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    ours = Path(base) / "blis-replay"
    try:
        ours.mkdir(parents=True, exist_ok=True)
        if _is_own(ours, others_may_write=True):
            ours.chmod(stat.S_IMODE(ours.stat().st_mode) & ~_OTHERS_WRITE)
        folder = ours / name
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (_is_own(ours) and _is_own(folder)):
            return None
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # of which the second: there is no home
        return None


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _is_own(folder: Path, *, others_may_write: bool = False) -> bool:
    """Whether a folder, no link to one, is this user's and nobody else can write it."""
    if not hasattr(os, "getuid"):
        return True
    told = folder.lstat()
    open_to_others = bool(told.st_mode & _OTHERS_WRITE)
    return stat.S_ISDIR(told.st_mode) and told.st_uid == os.getuid() and (others_may_write or not open_to_others)


_CHECKSUM_BYTES = hashlib.sha256().digest_size


class _CheckedFiles(_caching.IndexDataCacheFile):  # type: ignore[misc]  # Numba has no types
    """Numba's files of one function, each behind the checksum of what follows."""

    @classmethod
    def of(cls, cache: Any) -> _CheckedFiles:
        """In place of the ones that a function's cache has."""
        files = cache._cache_file
        return cls(cache._cache_path, cache._impl.filename_base, files._source_stamp)

    def _dump(self, value: object) -> bytes:
        content: bytes = super()._dump(value)
        return hashlib.sha256(content).digest() + content

    def _load_index(self) -> dict[Any, str]:
        content = intact(Path(self._index_path))
        version, stamp, overloads = (None, None, {}) if content is None else pickle.loads(content)  # noqa: S301  # ours
        return overloads if (version, stamp) == (self._version, self._source_stamp) else {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        with self._open_for_write(self._index_path) as file:
            file.write(self._dump((self._version, self._source_stamp, overloads)))

    def _load_data(self, name: str) -> Any:
        content = intact(Path(self._data_path(name)))
        if content is None:
            raise FileNotFoundError(name)  # so it is made again
        return pickle.loads(content)  # noqa: S301  # ours


def intact(path: Path) -> bytes | None:
    """What a file of the cache holds, None if it is absent, cut off or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, content = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    return content if hashlib.sha256(content).digest() == checksum else None


def damaged(folder: Path) -> list[Path]:
    """The files of a cache folder that are not what was written; they count as absent."""
    return [path for path in sorted(folder.rglob("*.nb[ic]")) if intact(path) is None]
