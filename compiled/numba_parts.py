"""Numba as this program uses it: compiled functions are parts of entries, and tables are handed over by reference.

Numba makes machine code of each function, with all that it calls copied into it, and so makes and optimises the same
code once a caller.  Here a function that only compiled ones call stays a part, a few lines of LLVM's language: an
``Entry`` links each of its parts once, and is optimised and made machine code as one.

A NamedTuple of twenty arrays is 150 arguments in each call.  ``by_reference`` hands over its address instead.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar


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
_types: Any = importlib.import_module("numba.core.types")
_codegen: Any = importlib.import_module("numba.core.codegen")
_compiler: Any = importlib.import_module("numba.core.compiler")
_extending: Any = importlib.import_module("numba.core.extending")
_models: Any = importlib.import_module("numba.core.datamodel.models")
_imputils: Any = importlib.import_module("numba.core.imputils")
_templates: Any = importlib.import_module("numba.core.typing.templates")
_cgutils: Any = importlib.import_module("numba.core.cgutils")
_LOCAL = _codegen.ll.Linkage.internal, _codegen.ll.Linkage.private

_T = TypeVar("_T")

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

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self._linking_libraries: list[Any] = []
        self._own: set[str] = set()

    def add_llvm_module(self, module: Any) -> None:
        """Take a module of this function, or of its call from Python."""
        self._own |= {function.name for function in module.functions if not function.is_declaration}
        super().add_llvm_module(module)

    def finalize(self) -> None:
        """Link each part once, and optimise."""
        self._linking_libraries = list(dict.fromkeys(_linked(self._linking_libraries)))
        super().finalize()

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.name not in self._own:
                function.linkage = "internal"  # nobody else calls it, so that its arguments may change
        # Numba first runs passes that inline, to find references that cancel out: nothing here counts references.
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class EntryCompiler(_compiler.CompilerBase):  # type: ignore[misc]
    """Numba's passes, for a function that Python calls."""

    library: Any = _EntryLibrary

    def define_pipelines(self) -> list[Any]:
        """The passes, into a library of ours."""
        state = self.state
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return [_compiler.DefaultPassBuilder.define_nopython_pipeline(state)]


class PartCompiler(EntryCompiler):
    """Numba's passes, for a function that only compiled ones call."""

    library = _PartLibrary


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


def _by_reference(typing: Any, whole: Any) -> Any:
    del typing

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _cgutils.alloca_once(builder, context.get_value_type(signature.args[0]))
        builder.store(arguments[0], place)
        return place

    return _Reference(whole)(whole), code


def _itself(whole: _T) -> _T:
    return whole


# The NamedTuple, to be called in an entry, whose end the address does not outlive.
by_reference = _itself if numba.config.DISABLE_JIT else _extending.intrinsic(_by_reference)
