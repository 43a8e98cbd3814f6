"""Compiled functions: ``entry``, which Python calls, and ``compiled``, which only compiled functions call.

An entry is one C function of an object file, which is kept (``cache``) for each kind of arguments that it was called
with.  Kept code is loaded and called without Numba, whose import alone takes longer than most replays.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import importlib
import os
import struct
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import call, is_
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from blis_replay.compiled.files import SUFFIX, cache_folder, intact, keep

_Function = TypeVar("_Function", bound=Callable[..., Any])
_T = TypeVar("_T")


class Decorator(Protocol):
    """Compiles a function; to the type checker it stays what it is."""

    def __call__(self, function: _Function, /) -> _Function:
        """The compiled function."""


def decorators(
    package: Path, *others: Path, inline: bool = False, from_start: bool = False
) -> tuple[Decorator, Decorator]:
    """``entry``, for functions that Python calls, and ``compiled``, for those that only compiled functions call.

    ``package``: the folder they are in.  ``others``: files beyond it whose constants or functions are part of the
    compiled code, which is kept in ``cache_folder(package, *others)``.  ``inline``: what is ``compiled`` becomes part
    of its callers.  ``from_start``: only constant indices count from the end if they are negative,
    so that the others need no test.  With ``NUMBA_DISABLE_JIT=1``, for debugging, functions stay as they are.
    """
    folder = functools.cache(lambda: cache_folder(package, *others))

    def entry(function: _Function, /) -> _Function:
        return function if _AS_PYTHON else cast("_Function", _Entry(function, folder, from_start))

    def part(function: _Function, /) -> _Function:
        return function if _AS_PYTHON else cast("_Function", _Part(function, inline))

    return entry, part


_AS_PYTHON = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


class _Part:
    """A function that compiled functions call."""

    def __init__(self, function: Callable[..., Any], inline: bool = False) -> None:
        functools.update_wrapper(cast("Any", self), function)
        self._function, self._inline = function, inline

    @functools.cached_property
    def by_numba(self) -> Any:
        """The function as Numba knows it."""
        return _numba_parts().part(self._function, self._inline)

    @property
    def _numba_type_(self) -> Any:
        """For Numba, where it finds this in another function."""
        return self.by_numba._numba_type_


class _Entry(_Part):
    """A function that Python calls; positional arguments are arrays, numbers and NamedTuples of them."""

    def __init__(self, function: Callable[..., Any], folder: Callable[[], Path | None], from_start: bool) -> None:
        super().__init__(function)
        self._folder, self._from_start = folder, from_start
        self._loaded: dict[tuple[object, ...], _Loaded] = {}

    def __reduce__(self) -> str:
        return self._function.__qualname__  # as of any function of a module

    def __call__(self, *arguments: Any) -> Any:
        """What the function answers: a number, a tuple of numbers, or None."""
        kinds: list[object] = []
        given = array("q")
        for argument in arguments:
            _add_words(argument, kinds, given)
        loaded = self._loaded.get(tuple(kinds))
        if loaded is None:
            loaded = self._loaded[tuple(kinds)] = self._load(arguments, kinds)
        answers = array("q", loaded.room)
        if failed := loaded.call(given.buffer_info()[0], answers.buffer_info()[0]):
            raise SystemError(f"{self._function.__qualname__} failed with {failed}")
        if loaded.letters == "i":
            return answers[0]
        values = tuple(map(_value, loaded.letters, answers))
        return values if loaded.is_tuple else values[0] if values else None

    def _load(self, arguments: tuple[Any, ...], kinds: list[object]) -> _Loaded:
        """The function for these kinds of arguments, kept or compiled."""
        folder = self._folder()
        name = f"{self._function.__module__}.{self._function.__qualname__}"
        told = repr((kinds, *_machine())).encode()
        path = folder / f"{name}-{hashlib.sha256(told).hexdigest()[:16]}{SUFFIX}" if folder else None
        content = intact(path) if path else None
        if content is None:
            with _no_garbage_sought():
                letters, code = _numba_parts().machine_code(self.by_numba, arguments, _SYMBOL, self._from_start)
            content = letters.encode() + b"\n" + code
            if path:
                keep(path, content)
        letters, _, code = content.partition(b"\n")
        return _loaded(letters.decode(), code)


@contextmanager
def _no_garbage_sought() -> Iterator[None]:
    """Numba makes millions of objects and keeps most of them: going through them takes a seventh of all its time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _numba_parts() -> Any:
    from blis_replay.compiled import numba_parts

    return numba_parts


# -- Arguments and answers as words of 64 bits ---------------------------------------------------

# Of numpy.ndarray.flags.num: what Numba makes a difference of.
_C_ORDER, _F_ORDER, _ALIGNED_WRITEABLE = 1, 2, 0x500
# An array begins with its address (``PyArrayObject_fields`` of NumPy); ``ctypes.data`` takes five times as long.
_word_at, _ADDRESS_AT = ctypes.c_int64.from_address, object.__basicsize__


def _add_words(argument: Any, kinds: list[object], words: array[int]) -> None:
    """What kind an argument is of, and its words."""
    if type(argument) is int:
        kinds.append("i")
        words.append(argument)
    elif isinstance(argument, np.ndarray):
        given = _ARRAYS.get(id(argument))
        if given is None or given.itself() is not argument:
            given = _Array.remembered(argument)
        kinds.append(given.kind)
        words.extend(given.words)
    elif isinstance(argument, tuple):
        known = _TABLES.get(type(argument))
        if known is None or not all(map(is_, map(call, known.arrays), argument)):
            known = _TABLES[type(argument)] = _Tables.of(argument)
        kinds.append(known.kinds)
        words.extend(known.words)
    elif isinstance(argument, bool | np.bool_):
        kinds.append("b")
        words.append(int(argument))
    elif isinstance(argument, float | np.floating):
        kinds.append("f")
        words.frombytes(struct.pack("d", argument))
    else:
        kinds.append("i")
        words.append(int(argument))


class _Kinds:
    """Kind of an array, or of the members of a NamedTuple; equal ones are one object, and so compared at once."""

    known: ClassVar[dict[tuple[object, ...], _Kinds]] = {}

    def __init__(self, kinds: tuple[object, ...]) -> None:
        self._kinds = kinds

    def __repr__(self) -> str:
        return repr(self._kinds)

    @classmethod
    def of(cls, *kinds: object) -> _Kinds:
        """The one object for these."""
        return cls.known.setdefault(kinds, cls(kinds))


class _Array(NamedTuple):
    """What an array was when it was last given: a model's parameters are given over and over."""

    itself: weakref.ref[Any]
    kind: _Kinds
    words: array[int]

    @classmethod
    def remembered(cls, given: Any) -> _Array:
        """Of an array that nobody resizes later, as of the last few."""
        kind, words = _of_array(given)
        if len(_ARRAYS) >= _REMEMBERED:
            _ARRAYS.clear()
        made = _ARRAYS[id(given)] = cls(weakref.ref(given), _Kinds.of(*kind), array("q", words))
        return made


def _of_array(given: Any) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Its kind, and its words: those of Numba's structure."""
    flags = given.flags.num
    kind = given.dtype, given.ndim, (flags & _C_ORDER or flags & _F_ORDER) | flags & _ALIGNED_WRITEABLE
    # Nobody counts references to it (the first two).
    address = _word_at(id(given) + _ADDRESS_AT).value
    return kind, (0, 0, given.size, given.itemsize, address, *given.shape, *given.strides)


_ARRAYS: dict[int, _Array] = {}
_REMEMBERED = 100


class _Tables(NamedTuple):
    """What a NamedTuple of arrays was when it was last given; a server driven step by step is given over and over."""

    arrays: tuple[Any, ...]  # weak references
    kinds: _Kinds
    words: array[int]

    @classmethod
    def of(cls, argument: tuple[Any, ...]) -> _Tables:
        kinds: list[object] = [type(argument).__qualname__]
        words = array("q")
        for member in argument:
            kind, of_member = _of_array(member)
            kinds.append(kind)
            words.extend(of_member)
        return cls(tuple(map(weakref.ref, argument)), _Kinds.of(*kinds), words)


_TABLES: dict[type, _Tables] = {}


def _value(letter: str, word: int) -> int | float | bool:
    if letter == "f":
        value: float = struct.unpack("d", struct.pack("q", word))[0]
        return value
    return bool(word) if letter == "b" else word


# -- Machine code --------------------------------------------------------------------------------

_SYMBOL = "blis_replay_entry"
# Unlike others of ctypes it keeps the interpreter's lock: what a state is read for meanwhile would be half a step.
_CALL = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


class _Loaded(NamedTuple):
    call: Callable[[int, int], int]
    letters: str
    is_tuple: bool
    room: bytes  # for the answers
    engine: Any  # which holds the machine code


def _loaded(letters: str, code: bytes) -> _Loaded:
    llvm = _llvm()
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    values = letters.removeprefix("t")
    return _Loaded(
        _CALL(engine.get_function_address(_SYMBOL)), values, letters != values, bytes(8 * len(values)), engine
    )


@functools.cache
def _llvm() -> Any:
    llvm = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@functools.cache
def _machine() -> tuple[object, ...]:
    """What machine code depends on besides its source."""
    llvm = _llvm()
    processor = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return (*processor, os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES"))


# -- For compiled functions ----------------------------------------------------------------------


class Intrinsic:
    """A function whose code is made by ``make``, as for Numba's ``intrinsic``; known to compiled functions alone."""

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make

    @functools.cached_property
    def _numba_type_(self) -> Any:
        return _numba_parts().type_of_intrinsic(self._make())


def _itself(whole: _T) -> _T:
    return whole


# The NamedTuple, to be called in an entry, whose end the address does not outlive.
by_reference = _itself if _AS_PYTHON else cast("Callable[[_T], _T]", Intrinsic(lambda: _numba_parts().by_reference))
