"""Compiled functions: ``entry``, which Python calls, and ``compiled``, which only compiled functions call.

Numba compiles an entry, with all that it calls in it, for each kind of arguments, and keeps the code in a folder of
ours (``cache_folder``).  A set of tables (``tables.Tables``) is handed over as its words.

That folder is named by a hash of all sources that the code is made of: stale code cannot be loaded.  Without a writable
folder the functions are compiled afresh in every process.  What is loaded is run, so a folder that another user could
write is not used.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numba
import numpy as np

from blis_replay.base.tables import AS_PYTHON, PYTHON_FUNCTIONS, Tables

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Decorator(Protocol):
    """Compiles a function; to the type checker it stays what it is."""

    def __call__(self, function: _Function, /) -> _Function:
        """The compiled function."""


def decorators(package: Path, *others: Path, inline: bool = False) -> tuple[Decorator, Decorator]:
    """``entry``, for functions that Python calls, and ``compiled``, for those that only compiled functions call.

    ``package``: the folder they are in.  ``others``: files beyond it whose constants or functions are part of the
    compiled code, which is kept in ``cache_folder(package, *others)``.  ``inline``: LLVM copies what is ``compiled``
    into its callers.  With ``NUMBA_DISABLE_JIT=1``, for debugging, functions stay as they are.
    """
    folder = cache_folder(package, *others)

    def entry(function: _Function, /) -> _Function:
        return function if AS_PYTHON else cast("_Function", _Entry(function, folder))

    def part(function: _Function, /) -> _Function:
        return function if AS_PYTHON else cast("_Function", numba.njit(**_OF_PARTS, forceinline=inline)(function))

    return entry, part


def by_address(package: Path, *others: Path) -> Callable[[Callable[..., int]], ByAddress]:
    """For functions of whole numbers that compiled code calls by address; see ``decorators`` for the arguments."""
    folder = cache_folder(package, *others)
    return lambda function: ByAddress(function, folder)


# No division can be by zero, so that none is tested (error_model).  Python calls no part.
_OPTIONS: dict[str, Any] = {"error_model": "numpy"}
_OF_PARTS = {**_OPTIONS, "no_cfunc_wrapper": True, "no_cpython_wrapper": True}


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """Let Numba keep code in a folder of ours, named by all sources: itself it notices a change of one file only."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


class _Entry:
    """A function that Python calls with numbers, arrays and sets of tables; its code is kept in ``folder``, if any."""

    def __init__(self, function: Callable[..., Any], folder: Path | None) -> None:
        functools.update_wrapper(cast("Any", self), function)
        self._function, self._folder = function, folder
        with _kept_in(folder):
            self._compiled = numba.njit(**_OPTIONS, cache=folder is not None)(function)

    def __reduce__(self) -> str:
        return self._function.__qualname__  # like any function of a module

    def __call__(self, *given: Any) -> Any:
        """What the function answers: a number, a tuple of numbers, or None."""
        arguments = [*map(_argument, given)]
        try:
            return self._compiled(*arguments)
        except (EOFError, pickle.UnpicklingError):  # kept code that was cut off
            for path in self._folder.rglob("*.nb[ic]") if self._folder else ():
                with suppress(OSError):
                    path.unlink()
            return self._compiled(*arguments)
        except OSError:  # the disk is full: it is compiled, and not kept
            return self._compiled(*arguments)


def _argument(given: Any) -> Any:
    if isinstance(given, Tables):
        return given.words
    return int(given) if isinstance(given, np.integer) else given


class ByAddress:
    """A function that compiled code calls by its address (``tables.call_step_time``), compiled at first use."""

    def __init__(self, function: Callable[..., int], folder: Path | None) -> None:
        self._function, self._folder = function, folder

    @functools.cached_property
    def address(self) -> int:
        """Where its machine code is in this process."""
        if AS_PYTHON:
            PYTHON_FUNCTIONS.append(self._function)
            return len(PYTHON_FUNCTIONS)
        try:
            self._compiled = self._made(self._folder)
        except (EOFError, pickle.UnpicklingError, OSError):  # kept code that was cut off, or the disk is full
            self._compiled = self._made(None)
        return int(self._compiled.address)

    def _made(self, folder: Path | None) -> Any:
        arguments = [numba.types.int64] * len(inspect.signature(self._function).parameters)
        with _kept_in(folder):
            return numba.cfunc(numba.types.int64(*arguments), cache=folder is not None, **_OPTIONS)(self._function)


# -- The cache of compiled code --------------------------------------------------------------


def cache_folder(package: Path, *others: Path) -> Path | None:
    """Where the compiled functions of a package, and of the files they depend on, are kept.

    None where no folder can be written.  ``NUMBA_CACHE_DIR`` wins, as for all of Numba.
    """
    digest = hashlib.sha256()
    ours = [Path(__file__).with_name(name) for name in ("functions.py", "tables.py")]
    for source in (*ours, *sorted(package.glob("*.py")), *others):
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(base) / "blis-replay"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        if _is_own(kept, others_may_write=True):
            kept.chmod(stat.S_IMODE(kept.stat().st_mode) & ~_OTHERS_WRITE)
        folder = kept / digest.hexdigest()[:16]
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (_is_own(kept) and _is_own(folder)):
            return None
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _is_own(folder: Path, *, others_may_write: bool = False) -> bool:
    """Whether a folder, no link to one, is this user's and nobody else can write it."""
    if not hasattr(os, "getuid"):
        return True
    status = folder.lstat()
    open_to_others = bool(status.st_mode & _OTHERS_WRITE)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and (others_may_write or not open_to_others)
