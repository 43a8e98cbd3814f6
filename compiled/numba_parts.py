"""Numba as this program uses it: compiled functions are parts of entries, and tables are handed over by reference.

Only what has to be compiled imports this module: code that was kept runs without Numba (``functions``).

Numba makes machine code of each function, with all that it calls copied into it, and so makes and optimises the same
code once a caller.  Here every function stays a part, a few lines of LLVM's language.  ``machine_code`` links what an
entry calls, each part once, behind a function with a plain C signature, and optimises it as one.

A NamedTuple of twenty arrays is 150 arguments in each call.  ``by_reference`` hands over its address instead.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np


def _numba() -> Any:
    """Numba as its environment variables say; it would obey a file of the working directory too."""
    fresh = "numba" not in sys.modules
    hidden = {"yaml": sys.modules.get("yaml")} if fresh else {}
    if fresh:
        sys.modules["yaml"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot read the file
            module = importlib.import_module("numba")
    finally:
        for name, before in hidden.items():
            sys.modules.pop(name)
            if before is not None:
                sys.modules[name] = before
    # It looks again whenever it compiles.
    importlib.import_module("numba.core.config")._config_fname = f"{os.devnull}/none"  # type: ignore[attr-defined]
    return module


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


numba = _numba()
_import_without_scipy()
_ir: Any = importlib.import_module("llvmlite.ir")
_types: Any = importlib.import_module("numba.core.types")
_registry: Any = importlib.import_module("numba.core.registry")
_compiler_lock: Any = importlib.import_module("numba.core.compiler_lock").global_compiler_lock
_codegen: Any = importlib.import_module("numba.core.codegen")
_compiler: Any = importlib.import_module("numba.core.compiler")
_extending: Any = importlib.import_module("numba.core.extending")
_models: Any = importlib.import_module("numba.core.datamodel.models")
_imputils: Any = importlib.import_module("numba.core.imputils")
_templates: Any = importlib.import_module("numba.core.typing.templates")
_arrays: Any = importlib.import_module("numba.np.arrayobj")
_cgutils: Any = importlib.import_module("numba.core.cgutils")
_LOCAL = _codegen.ll.Linkage.internal, _codegen.ll.Linkage.private

# -- Parts and entries ------------------------------------------------------------------------


class _PartLibrary(_codegen.JITCodeLibrary):  # type: ignore[misc]  # Numba has no types
    """The code of a function that only compiled ones call; it has no machine code of its own."""

    def add_llvm_module(self, module: Any) -> None:
        """Take a module of this function as it is."""
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)

    def finalize(self) -> None:
        """Let entries link it, and leave out what they do not need."""
        self._raise_if_finalized()
        for value in (*self._final_module.functions, *self._final_module.global_variables):
            if not value.is_declaration and value.linkage not in _LOCAL:
                value.linkage = "linkonce_odr"
        self._shared_module = self._final_module
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """0: there is none."""
        del name
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """What Numba tells the environment of the function to, which holds objects for printing; no part has any."""
        return _NoEnvironment

    def linked(self) -> Iterator[Any]:
        """This library and what it calls."""
        yield self
        yield from _linked(self._linking_libraries)


def _linked(libraries: Iterable[Any]) -> Iterator[Any]:
    for library in libraries:
        if isinstance(library, _PartLibrary):
            yield from library.linked()
        else:
            yield library


class _NoEnvironment:
    @staticmethod
    def set_env(name: str, environment: object) -> None:
        """Nothing to be set."""


class _EntryLibrary(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that Python calls, with all of its parts."""

    def add_llvm_module(self, module: Any) -> None:
        """Take the module with the call from Python."""
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)

    def machine_code(self, symbol: str) -> bytes:
        """Link each part once, optimise, and make an object file."""
        for library in dict.fromkeys(_linked(self._linking_libraries)):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        for function in self._final_module.functions:
            if not function.is_declaration and function.name != symbol:
                function.linkage = "internal"  # nobody else calls it, so that its arguments may change
        # Numba first runs passes that inline, to find references that cancel out: nothing here counts references.
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)
        self._final_module.verify()
        code: bytes = self._codegen._tm.emit_object(self._final_module)
        return code


class _PartCompiler(_compiler.CompilerBase):  # type: ignore[misc]  # Numba has no types
    """Numba's passes, for a function that becomes part of others."""

    def define_pipelines(self) -> list[Any]:
        """The passes, into a library of ours."""
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        manager = _compiler.DefaultPassBuilder.define_nopython_pipeline(state)
        manager.passes = [one for one in manager.passes if one[0].__name__ not in _PASSES_FOR_NOTHING]
        manager.finalize()
        return [manager]


# What is compiled here has no closures, context managers, array expressions or branches that constants decide.
_PASSES_FOR_NOTHING = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteSemanticConstants",
    "DeadBranchPrune",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "NopythonRewrites",
    "DumpParforDiagnostics",
}


def _remember_signatures() -> None:
    """Let Numba find but once what an operator or function of its own makes of given types: it tries all its rules."""
    context = _registry.cpu_target.typing_context
    found = context._resolve_user_function_type
    known: dict[tuple[Any, tuple[Any, ...]], Any] = {}

    def remembered(function: Any, given: Any, named: Any, literals: Any = None) -> Any:
        if named or isinstance(function, str | _types.Dispatcher):  # of a str the arguments are values
            return found(function, given, named, literals)
        key = function, tuple(given)
        if key not in known:
            signature = found(function, given, named, literals)
            if signature is None:
                return None
            known[key] = signature
        return known[key]

    context._resolve_user_function_type = remembered


_remember_signatures()


# Compiled functions allocate nothing, so references need not be counted (_nrt): counting takes most of the time of
# compiling, and in short functions of running.  None of their divisions can be by zero (error_model).
_OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "_nrt": False,
    "no_cfunc_wrapper": True,
    "no_cpython_wrapper": True,
    "pipeline_class": _PartCompiler,
}


def part(function: Callable[..., Any], inline: bool) -> Any:
    """A function, compiled once for each kind of arguments that another calls it with."""
    made = numba.njit(**_OPTIONS, forceinline=inline)(function)  # False too: else it would be as for its first caller
    called = made.get_call_template
    made.get_call_template = lambda given, named: called(
        tuple(map(_widest, given)), {name: _widest(kind) for name, kind in named.items()}
    )
    return made


def _widest(kind: Any) -> Any:
    """int64 for every signed integer, constants too: else a function is compiled anew for each."""
    if isinstance(kind, _types.Literal):
        kind = kind.literal_type
    return _types.int64 if isinstance(kind, _types.Integer) and kind.signed else kind


# -- The call from Python ---------------------------------------------------------------------

_WORD, _REAL, _CODE = _ir.IntType(64), _ir.DoubleType(), _ir.IntType(32)


def machine_code(entry: Any, arguments: tuple[Any, ...], symbol: str, from_start: bool) -> tuple[str, bytes]:
    """What a function answers, and its object file, in which it has the name ``symbol``.

    What it answers: a letter for each value (i: int, f: float, b: bool), with a t before those of a tuple.  The call is
    ``int32 symbol(int64 *arguments, int64 *answers)`` with words as of ``functions.words_of``; not 0: it failed.
    ``from_start``: as of ``functions.decorators``.
    """
    kinds = tuple(map(_kind, arguments))
    with _indices_from_start() if from_start else nullcontext():
        entry.compile(kinds)
    made = entry.overloads[kinds]
    context, answer = made.target_context, made.signature.return_type
    library = _EntryLibrary(context.codegen(), symbol)
    module = context.create_module(symbol)
    function = _ir.Function(module, _ir.FunctionType(_CODE, [_WORD.as_pointer()] * 2), symbol)
    builder = _ir.IRBuilder(function.append_basic_block("entry"))
    words = iter(range(1 << 31))
    values = [_loaded(builder, function.args[0], words, context.get_value_type(kind)) for kind in kinds]
    called = context.call_conv.get_function_type(answer, kinds)
    called = _ir.Function(module, called, made.fndesc.llvm_func_name)
    status, value = context.call_conv.call_function(builder, called, answer, kinds, values)
    several = isinstance(answer, _types.BaseTuple)
    members = tuple(answer) if several else () if answer == _types.none else (answer,)
    for place in range(len(members)):
        one = builder.extract_value(value, place) if several else value
        _store(builder, one, builder.gep(function.args[1], [_ir.Constant(_WORD, place)]))
    builder.ret(status.code)
    with _compiler_lock:
        library.add_ir_module(module)
        library.add_linking_library(made.library)
        return "t" * several + "".join(map(_letter, members)), library.machine_code(symbol)


@contextmanager
def _indices_from_start() -> Iterator[None]:
    """Index arrays without the test for counting from the end, longer than the access; but for constants."""
    tested = _arrays.fix_integer_index

    def plain(context: Any, builder: Any, kind: Any, value: Any, size: Any) -> Any:
        number = context.cast(builder, value, kind, _types.intp)
        return tested(context, builder, kind, value, size) if isinstance(number, _ir.Constant) else number

    _arrays.fix_integer_index = plain
    try:
        yield
    finally:
        _arrays.fix_integer_index = tested


def _kind(argument: Any) -> Any:
    if isinstance(argument, bool | np.bool_):
        return _types.boolean
    if isinstance(argument, int | np.integer):
        return _types.int64
    if isinstance(argument, float | np.floating):
        return _types.float64
    if isinstance(argument, tuple):
        return _types.BaseTuple.from_types(tuple(map(_kind, argument)), type(argument))
    return numba.typeof(argument)


def _letter(kind: Any) -> str:
    return "b" if isinstance(kind, _types.Boolean) else "f" if isinstance(kind, _types.Float) else "i"


def _loaded(builder: Any, words: Any, places: Iterator[int], kind: Any) -> Any:
    """A value of a type of LLVM, its members one word each."""
    if isinstance(kind, _ir.Aggregate):
        value = _ir.Constant(kind, _ir.Undefined)
        for place, member in enumerate(kind.elements):
            value = builder.insert_value(value, _loaded(builder, words, places, member), place)
        return value
    word = builder.load(builder.gep(words, [_ir.Constant(_WORD, next(places))]))
    if isinstance(kind, _ir.PointerType):
        return builder.inttoptr(word, kind)
    return builder.bitcast(word, _REAL) if kind == _REAL else word if kind == _WORD else builder.trunc(word, kind)


def _store(builder: Any, value: Any, place: Any) -> None:
    """A number or truth value as a word."""
    if value.type == _REAL:
        value = builder.bitcast(value, _WORD)
    elif value.type != _WORD:
        value = builder.zext(value, _WORD)
    builder.store(value, place)


# -- By reference -----------------------------------------------------------------------------


class _Reference(_types.Type):  # type: ignore[misc]
    """The address of a NamedTuple; compiled code reads its fields, and cannot change which arrays they are."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        # It is part of the name of each function that is given one; that of the tuple has thousands of letters.
        digest = hashlib.sha256(str(whole).encode()).hexdigest()[:12]
        super().__init__(name=f"{whole.instance_class.__name__}At{digest}")


@_extending.register_model(_Reference)
class _ReferenceModel(_models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, reference: Any) -> None:
        whole = manager.lookup(reference.whole).get_value_type()
        super().__init__(manager, reference, whole.as_pointer())


@_templates.infer_getattr
class _ReferenceFields(_templates.AttributeTemplate):  # type: ignore[misc]
    key = _Reference

    def generic_resolve(self, reference: Any, name: str) -> Any:
        """The type of a field."""
        whole = reference.whole
        return whole[whole.fields.index(name)] if name in whole.fields else None


def _field(context: Any, builder: Any, reference: Any, address: Any, name: str) -> Any:
    place = reference.whole.fields.index(name)
    value = builder.load(_cgutils.gep_inbounds(builder, address, 0, place))
    return _imputils.impl_ret_borrowed(context, builder, reference.whole[place], value)


_extending.lower_getattr_generic(_Reference)(_field)


def by_reference(typing: Any, whole: Any) -> Any:
    """Makes the code of ``functions.by_reference``."""
    del typing

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _cgutils.alloca_once(builder, context.get_value_type(signature.args[0]))
        builder.store(arguments[0], place)
        return place

    return _Reference(whole)(whole), code


def type_of_intrinsic(make: Callable[..., Any]) -> Any:
    """The type of a function that ``make`` makes code of."""
    made, known = _extending.intrinsic(make), _registry.cpu_target.typing_context
    known.refresh()
    return known.resolve_value_type(made)
