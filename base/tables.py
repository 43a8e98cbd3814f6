"""Tables: NumPy arrays that compiled code reads and writes in place, many of them behind one pointer.

To Numba an array is a structure of ten fields whose references are counted, and a tuple of twenty arrays as many
arguments of each function that is given it.  ``Tables`` is a set of arrays with declared types, whose ``words`` are the
address and the shape of each.  In compiled code ``reader`` makes of the words a pointer whose fields are tables:
``state.requests[i].status``.  Nothing is counted, and no index is checked or counted from the end.

A table is an array of numbers or of records of one to three axes, C-contiguous.  An index for each axis gives a number
(any integer as int64) or a record in place, an index for the first one alone a table.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Annotated, Any, Self, TypeVar, cast, get_args, get_origin, get_type_hints

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import (
    intrinsic,
    lower_builtin,
    make_attribute_wrapper,
    models,
    overload_attribute,
    register_model,
    type_callable,
)
from numpy.typing import NDArray

# ``NUMBA_DISABLE_JIT=1``, for debugging: the same source runs as plain Python.
AS_PYTHON = bool(numba.config.DISABLE_JIT)

_MAX_AXES = 3
_WORDS_PER_TABLE = 1 + _MAX_AXES  # address, lengths


class Tables:
    """Arrays by name.  A subclass annotates them, e.g. ``at: Annotated[Any, PROGRESS, 0]``: dtype and number of axes.

    ``Int64s`` and its like have one axis.  No axis: an array of one record, in compiled code that record.  Raises
    ``TypeError`` for an array of another type.
    """

    words: NDArray[np.int64]

    def __init__(self, **arrays: NDArray[Any]) -> None:
        layout = self.layout()
        words = self.words = np.zeros(_WORDS_PER_TABLE * len(layout), np.int64)
        for place, (name, (dtype, axes)) in enumerate(layout.items()):
            array = arrays.pop(name)
            if array.dtype != dtype or array.ndim != max(axes, 1) or not array.flags.c_contiguous:
                raise TypeError(f"{type(self).__name__}.{name}: {array.dtype} of {array.ndim} axes")
            first = place * _WORDS_PER_TABLE
            words[first] = array.ctypes.data
            words[first + 1 : first + 1 + array.ndim] = array.shape
            setattr(self, name, array)
        if arrays:
            raise TypeError(f"{type(self).__name__} has no {', '.join(arrays)}")

    @classmethod
    def layout(cls) -> dict[str, tuple[np.dtype[Any], int]]:
        """Dtype and number of axes of each array; 0: one record."""
        return _layout_of(cast(Hashable, cls))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in self.layout()}

    def replaced(self, **arrays: NDArray[Any]) -> Self:
        """The same with other arrays."""
        return type(self)(**{**self.arrays(), **arrays})

    def copy(self) -> Self:
        """Copies of all arrays."""
        return type(self)(**{name: array.copy() for name, array in self.arrays().items()})

    def __reduce__(self) -> tuple[Any, ...]:  # the words are addresses in this process
        return _remade, (type(self), self.arrays())


_Set = TypeVar("_Set", bound=Tables)


def _remade(kind: type[_Set], arrays: dict[str, NDArray[Any]]) -> _Set:
    return kind(**arrays)


@functools.cache
def _layout_of(kind: Any) -> dict[str, tuple[np.dtype[Any], int]]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: _layout(hint) for name, hint in hints.items() if name != "words"}


def _layout(hint: Any) -> tuple[np.dtype[Any], int]:
    axes = 1
    if get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        axes = more.pop()
        if more:
            return more[0], axes
    return np.dtype(get_args(get_args(hint)[1])[0]), axes


def reader(kind: type[_Set]) -> Callable[[_Set | int], _Set]:
    """The function by which compiled code reads a set of tables: from its words, in any form, or from its address."""
    if AS_PYTHON:
        return _as_python
    layout = kind.layout()
    pointer = type(f"{kind.__name__}Pointer", (types.Type,), {})
    register_model(pointer)(models.OpaqueModel)
    of_pointer = pointer(name=pointer.__name__)
    for place, (name, (dtype, axes)) in enumerate(layout.items()):
        item = numba.from_dtype(dtype)
        _add_field(pointer, name, place, item if axes == 0 else _Table.of(item, axes))

    @intrinsic
    def read(typing: Any, words: Any) -> Any:
        if not isinstance(words, types.Array | _Table | types.Integer):
            return None

        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            if isinstance(words, types.Integer):
                return builder.inttoptr(given[0], _BYTES)
            return builder.bitcast(_member(context, builder, words, given[0], "data"), _BYTES)

        return of_pointer(words), code

    return read


def _as_python(tables: Any) -> Any:
    if isinstance(tables, SimpleNamespace):
        return tables
    layout = tables.layout()
    fields = {name: array[0] if layout[name][1] == 0 else array for name, array in tables.arrays().items()}
    return SimpleNamespace(**fields, tables=tables)


# -- The types and their code -------------------------------------------------------------------

_WORD, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()


class _Table(types.Type):  # type: ignore[misc]  # Numba has no types
    """Rows of ``stride`` bytes; ``element`` is what compiled code has of an item."""

    def __init__(self, item: Any, axes: int, stride: int) -> None:
        self.item, self.axes, self.stride = item, axes, stride
        self.is_record = isinstance(item, types.Record)
        is_signed = isinstance(item, types.Integer) and item.signed
        self.element = types.int64 if is_signed else item  # else functions are compiled anew for each width
        digest = hashlib.sha256(str(item).encode()).hexdigest()[:12]  # of a record the text has thousands of letters
        super().__init__(name=f"Table{axes}x{stride}of{digest}")

    @classmethod
    def of(cls, item: Any, axes: int) -> _Table:
        """A table of items one behind the other."""
        return cls(item, axes, item.size if isinstance(item, types.Record) else item.bitwidth // 8)


@register_model(_Table)
class _TableModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, table: Any) -> None:
        super().__init__(manager, table, [("data", types.voidptr), ("shape", types.UniTuple(types.intp, table.axes))])


make_attribute_wrapper(_Table, "shape", "shape")


def _member(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    """The ``data`` or ``shape`` of a table, or of an array of Numba."""
    return builder.extract_value(value, context.data_model_manager[kind].get_field_position(name))


def _table(context: Any, builder: Any, kind: Any, data: Any, lengths: list[Any]) -> Any:
    """A table at an address."""
    value = builder.insert_value(ir.Constant(context.get_value_type(kind), ir.Undefined), data, 0)
    for axis, length in enumerate(lengths):
        value = builder.insert_value(value, length, [1, axis])
    return value


def _add_field(pointer: Any, name: str, place: int, kind: Any) -> None:
    """Let compiled code read a field behind a pointer to the words of a set."""

    @intrinsic
    def field(typing: Any, words: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            first = builder.bitcast(given[0], _WORD.as_pointer())

            def word(number: int) -> Any:
                read = builder.load(builder.gep(first, [ir.Constant(_WORD, place * _WORDS_PER_TABLE + number)]))
                read.set_metadata("invariant.load", builder.module.add_metadata([]))  # no table is ever moved
                return read

            data = builder.inttoptr(word(0), _BYTES)
            if isinstance(kind, types.Record):
                return builder.bitcast(data, context.get_value_type(kind))
            return _table(context, builder, kind, data, [word(1 + axis) for axis in range(kind.axes)])

        return kind(words), code

    @overload_attribute(pointer, name)
    def get(words):  # type: ignore[no-untyped-def]  # Numba compares the signatures of these two
        return lambda words: field(words)


def _is_index(table: Any, index: Any) -> bool:
    if not isinstance(table, _Table):
        return False
    if isinstance(index, types.BaseTuple):
        return len(index) == table.axes and all(isinstance(one, types.Integer) for one in index)
    return isinstance(index, types.Integer)


def _at(context: Any, builder: Any, table: Any, value: Any, index: Any, given: Any) -> Any:
    """The address of what an index stands for."""
    several = isinstance(index, types.BaseTuple)
    shape, row = _member(context, builder, table, value, "shape"), ir.Constant(_WORD, 0)
    for axis in range(table.axes):
        row = builder.mul(row, builder.extract_value(shape, axis)) if axis else row
        if several or axis == 0:
            kind, number = (index[axis], builder.extract_value(given, axis)) if several else (index, given)
            row = builder.add(row, context.cast(builder, number, kind, types.int64))
    place = builder.mul(row, ir.Constant(_WORD, table.stride))
    return builder.gep(_member(context, builder, table, value, "data"), [place])


@type_callable(operator.getitem)
def _type_of_getitem(context: Any) -> Any:
    def typer(table: Any, index: Any) -> Any:
        if not _is_index(table, index):
            return None
        if table.axes > 1 and isinstance(index, types.Integer):
            return _Table(table.item, table.axes - 1, table.stride)
        return table.element

    return typer


@lower_builtin(operator.getitem, _Table, types.Integer)
@lower_builtin(operator.getitem, _Table, types.BaseTuple)
def _getitem(context: Any, builder: Any, signature: Any, given: Any) -> Any:
    table, index = signature.args
    at = _at(context, builder, table, given[0], index, given[1])
    if isinstance(signature.return_type, _Table):
        shape = _member(context, builder, table, given[0], "shape")
        lengths = [builder.extract_value(shape, axis) for axis in range(1, table.axes)]
        return _table(context, builder, signature.return_type, at, lengths)
    if table.is_record:
        return builder.bitcast(at, context.get_value_type(table.item))
    number = builder.load(builder.bitcast(at, context.get_value_type(table.item).as_pointer()))
    return context.cast(builder, number, table.item, table.element)


@type_callable(operator.setitem)
def _type_of_setitem(context: Any) -> Any:
    def typer(table: Any, index: Any, value: Any) -> Any:
        return types.none if _is_index(table, index) else None

    return typer


@lower_builtin(operator.setitem, _Table, types.Integer, types.Any)
@lower_builtin(operator.setitem, _Table, types.BaseTuple, types.Any)
def _setitem(context: Any, builder: Any, signature: Any, given: Any) -> Any:
    table, index, kind = signature.args
    at = _at(context, builder, table, given[0], index, given[1])
    if table.is_record:
        whole = ir.IntType(8 * table.item.size).as_pointer()
        builder.store(builder.load(builder.bitcast(given[2], whole), align=1), builder.bitcast(at, whole), align=1)
    else:
        number = context.cast(builder, given[2], kind, table.item)
        builder.store(number, builder.bitcast(at, number.type.as_pointer()))
    return context.get_dummy_value()


@type_callable(len)
def _type_of_len(context: Any) -> Any:
    def typer(table: Any) -> Any:
        return types.intp if isinstance(table, _Table) else None

    return typer


@lower_builtin(len, _Table)
def _len(context: Any, builder: Any, signature: Any, given: Any) -> Any:
    return builder.extract_value(_member(context, builder, signature.args[0], given[0], "shape"), 0)


# -- For compiled functions ----------------------------------------------------------------------


def _table_of(typing: Any, array: Any) -> Any:
    if array.layout != "C":
        return None
    table = _Table.of(array.dtype, array.ndim)

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = builder.bitcast(_member(context, builder, array, given[0], "data"), _BYTES)
        shape = _member(context, builder, array, given[0], "shape")
        lengths = [builder.extract_value(shape, axis) for axis in range(table.axes)]
        return _table(context, builder, table, data, lengths)

    return table(array), code


def _stretch(typing: Any, table: Any, first: Any, last: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        begin, end = (context.cast(builder, given[i], signature.args[i], types.int64) for i in (1, 2))
        at = _at(context, builder, table, given[0], types.int64, begin)
        return _table(context, builder, table, at, [builder.sub(end, begin)])

    return table(table, first, last), code


def _column(typing: Any, table: Any, name: Any) -> Any:
    column = _Table(table.item.typeof(name.literal_value), table.axes, table.stride)
    offset = ir.Constant(_WORD, table.item.offset(name.literal_value))

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = builder.gep(_member(context, builder, table, given[0], "data"), [offset])
        return builder.insert_value(given[0], data, 0)

    return column(table, name), code


def _word_at(typing: Any, array: Any, at: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = builder.bitcast(_member(context, builder, array, given[0], "data"), _BYTES)
        place = builder.gep(data, [context.cast(builder, given[1], at, types.int64)])
        return builder.load(builder.bitcast(place, _WORD.as_pointer()), align=1)

    return types.uint64(array, at), code


def table_at(dtype: Any) -> Callable[[Any, int], NDArray[Any]]:
    """Of an address and a length, in compiled code, a table with one axis."""
    if AS_PYTHON:
        return _first
    table = _Table.of(numba.from_dtype(np.dtype(dtype)), 1)

    @intrinsic
    def made(typing: Any, address: Any, length: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return _table(context, builder, table, builder.inttoptr(given[0], _BYTES), [given[1]])

        return table(types.int64, types.int64), code

    return made


def record_at(dtype: Any) -> Callable[[Any], Any]:
    """Of an address, in compiled code, the record there."""
    if AS_PYTHON:
        return _first
    record = numba.from_dtype(dtype)

    @intrinsic
    def made(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], context.get_value_type(record))

        return record(types.int64), code

    return made


def _call_step_time(typing: Any, address: Any, ints: Any, floats: Any, batch: Any, start_us: Any) -> Any:
    return _called(ints, floats, batch, types.int64)


def _call_operation(typing: Any, address: Any, number: Any, tables: Any, first: Any, second: Any, third: Any) -> Any:
    return _called(types.int64, tables, *[types.int64] * 3)


def _called(*kinds: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        words = []
        for kind, value in zip(kinds, given[1:], strict=True):
            if isinstance(kind, _Table):
                shape = _member(context, builder, kind, value, "shape")
                data = builder.ptrtoint(_member(context, builder, kind, value, "data"), _WORD)
                words += [data, builder.extract_value(shape, 0)]
            else:
                words.append(value if isinstance(kind, types.Integer) else builder.ptrtoint(value, _WORD))
        function = builder.inttoptr(given[0], ir.FunctionType(_WORD, [_WORD] * len(words)).as_pointer())
        return builder.call(function, words)

    return types.int64(types.int64, *kinds), code


# Of ``functions.by_address``, where nothing is compiled: their places, from 1, stand for their addresses.
PYTHON_FUNCTIONS: list[Callable[..., int]] = []


def _first(array: Any, _length: int = 0) -> Any:
    return array


def _call_operation_as_python(address: int, *given: Any) -> int:
    return PYTHON_FUNCTIONS[address - 1](*given)


def _call_as_python(address: int, ints: Any, floats: Any, batch: Any, start_us: int) -> int:
    return PYTHON_FUNCTIONS[address - 1](ints, len(ints), floats, len(floats), batch, start_us)


_T = TypeVar("_T")


def _itself(array: _T) -> _T:
    return array


def _slice(table: Any, first: int, last: int) -> Any:
    return table[first:last]


def _word_as_python(array: NDArray[Any], at: int) -> Any:
    return array.view(np.uint8)[at : at + 8].view(np.uint64)[0]


# An array that an entry was given, as a table.
table_of: Callable[[_T], _T] = _itself if AS_PYTHON else intrinsic(_table_of)
# ``table[first:last]`` of a table with one axis.
stretch: Callable[[_T, int, int], _T] = _slice if AS_PYTHON else intrinsic(_stretch)
# ``table[name]``: a field of all rows of a table.
column: Callable[[Any, str], Any] = operator.getitem if AS_PYTHON else intrinsic(prefer_literal=True)(_column)
# The eight bytes from any position of an array, little-endian; Numba itself loads only what is aligned.
word_at: Callable[[NDArray[Any], int], Any] = _word_as_python if AS_PYTHON else intrinsic(_word_at)
# Call the function at an address with two tables (of each, where it is and its length), a record and a number.
call_step_time: Callable[[int, Any, Any, Any, int], int] = _call_as_python if AS_PYTHON else intrinsic(_call_step_time)
# The same with an operation's number, a set of tables, a request and two numbers.
call_operation: Callable[[int, int, Any, int, int, int], int] = (
    _call_operation_as_python if AS_PYTHON else intrinsic(_call_operation)
)
