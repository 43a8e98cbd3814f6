"""Read YAML documents strictly into frozen types, and write them.

A type defines a document: its fields, kinds (``Kinds``), ranges (``msgspec.Meta``) and units (``Unit``).  An error is
one line: which document, which field, what was expected.

Dataclasses are documents, too.  A field with a unit is written without the unit of its name (``intercept_ns`` is
``intercept: 13546 us``), and ``Annotated`` with one of the marks below changes how a field is written.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Protocol, TypeVar, cast

import msgspec
import yaml
from msgspec import Meta, inspect
from yaml.constructor import ConstructorError

T = TypeVar("T")

# What PyYAML raises for invalid YAML: its constructors pass on any error of tagged or overlong scalars.
YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError, OverflowError)


class FieldError(ValueError):
    """A ``__post_init__`` refuses ``field`` of its type; with the problem and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"field {field}: {problem}; {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy


class Kinds(Protocol):
    """A family of types, each with the name that a document gives as its ``kind``."""

    def type_of(self, kind: object, place: str) -> type:
        """The type of a kind; raises ``FieldError``."""

    def kind_of(self, value: Any) -> str:
        """The kind of a value."""


# Marks of fields, for ``Annotated``.  IF_SET: written if it is not the default.  REQUIRED: a document must have it,
# also if it has a default.  UNWRITTEN: no document has it.
# Two marks are made with ``Meta(extra=...)``.  ``kinds``: the ``Kinds`` of a field of several types.  ``codec``: an
# object such as a ``Unit``, with ``read(written, place)``, ``write(value)`` and ``expected(type)`` for errors.
IF_SET, REQUIRED = Meta(extra={"if_set": True}), Meta(extra={"required": True})
UNWRITTEN = Meta(extra={"unwritten": True})


def written_as(name: str) -> Meta:
    """The mark of a field that a document has under another name."""
    return Meta(extra={"name": name})


@dataclass(frozen=True)
class Unit:
    """A number with a unit.

    ``factors``: size of each unit.  ``base``: size of the unit of the number that is read.  ``written``: the unit that
    is written.  ``step``: numbers are rounded to multiples of this size, to integers if it equals ``base``.
    """

    factors: Mapping[str, int]
    base: int
    written: str
    step: int | None = None

    def read(self, value: object, place: str) -> float:
        """The number that ``12.5 us`` stands for; raises ``FieldError``."""
        match = isinstance(value, str) and _QUANTITY.fullmatch(value)
        if not match or not (match[2] or match[3] == "%"):
            raise FieldError(place, f"is {shown(value)}, and not a number with a unit", f"write e.g. {self.example}")
        if match[3] not in self.factors:
            raise FieldError(place, f"has the unknown unit {match[3]!r}", f"use one of {', '.join(self.factors)}")
        scaled = float(match[1]) * self.factors[match[3]]
        if self.step is None:
            return scaled / self.base
        steps = round(scaled / self.step)
        return steps if self.step == self.base else steps * self.step / self.base

    def write(self, value: float) -> str:
        """The quantity as it is written."""
        return f"{value * self.base / self.factors[self.written]:.10g} {self.written}"

    def expected(self, info: inspect.Type) -> str:
        """What may be written: the range, and an example."""
        return f"a number with a unit{_range(info, self.write)}, such as {self.example}"

    @property
    def example(self) -> str:
        """A quantity in this unit."""
        return f"'12.5 {self.written}'"


_QUANTITY = re.compile(r"\s*([-+]?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][-+]?[0-9]{1,2})?)(\s*)([^\s0-9.]\S*)\s*")
_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_NS_PER_TOKEN = {f"{unit}/token": ns for unit, ns in _NS.items()}
_TIME = {"codec": Unit(_NS, 1_000, "us", step=1)}
_TIME_PER_TOKEN = {"codec": Unit(_NS_PER_TOKEN, 1_000, "us/token", step=1)}
PERCENT = {"codec": Unit({"%": 1}, 100, "%")}
_ELEVEN_DAYS_US, _ELEVEN_DAYS_NS = 1e12, 10**15
_BEYOND_SENSE = 1e15

# Numbers and texts of documents; a time is in us, a percentage a fraction.
Number = Annotated[float, Meta(ge=-_BEYOND_SENSE, le=_BEYOND_SENSE)]
Text = Annotated[str, Meta(pattern=r"\S")]
Time = Annotated[float, Meta(ge=-_ELEVEN_DAYS_US, le=_ELEVEN_DAYS_US, extra=_TIME)]
NonNegativeTime = Annotated[float, Meta(ge=0, le=_ELEVEN_DAYS_US, extra=_TIME)]
TimePerToken = Annotated[float, Meta(ge=-_ELEVEN_DAYS_US, le=_ELEVEN_DAYS_US, extra=_TIME_PER_TOKEN)]
# Times in whole ns, and in whole us, that are written in us like all.
_WHOLE_NS = Meta(ge=-_ELEVEN_DAYS_NS, le=_ELEVEN_DAYS_NS)
TimeNs = Annotated[int, _WHOLE_NS, Meta(extra={"codec": Unit(_NS, 1, "us", step=1)})]
TimeNsPerToken = Annotated[int, _WHOLE_NS, Meta(extra={"codec": Unit(_NS_PER_TOKEN, 1, "us/token", step=1)})]
NonNegativeWholeTime = Annotated[int, Meta(ge=0, le=10**12, extra={"codec": Unit(_NS, 1_000, "us", step=1_000)})]
BytesPerS = Annotated[float, Meta(gt=0, extra={"codec": Unit({"GB/s": 10**9, "TB/s": 10**12}, 1, "GB/s")})]
FlopsPerS = Annotated[float, Meta(gt=0, extra={"codec": Unit({"TFLOP/s": 10**12, "PFLOP/s": 10**15}, 1, "TFLOP/s")})]
Bytes = Annotated[float, Meta(gt=0, extra={"codec": Unit({"GB": 10**9, "GiB": 2**30}, 1, "GB")})]
Percentage = Annotated[float, Meta(ge=0, lt=1e4, extra=PERCENT)]


_MOST_NESTED = 100
# Numbers in base 60 and 16 take the square of their length to read.
_MOST_DIGITS = 400
_STANDARD = "tag:yaml.org,2002:"


def load_yaml(text: str | bytes) -> object:
    """The values of a YAML text, by the safe loader; raises one of ``YAML_ERRORS``.

    Refuses aliases and merge keys, which can expand endlessly, and equal keys, because one would be lost.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        # The parser in C recurses without a limit of its own.
        if depth > _MOST_NESTED or isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not read" if depth <= _MOST_NESTED else "it is nested too deeply"
            raise ConstructorError(None, None, problem, event.start_mark)  # type: ignore[arg-type]  # a mark of the other parser
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # mypy does not know what it finds
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        tag = str(node.tag).removeprefix(_STANDARD)
        if not isinstance(node, yaml.ScalarNode):
            if tag not in ("map", "seq"):  # a set has no places that a complaint could name
                raise ConstructorError(None, None, f"{shown(tag)} is neither a list nor a mapping", node.start_mark)
            return super().construct_object(node, deep)
        if tag in ("int", "float") and len(node.value) > _MOST_DIGITS:
            problem = f"a number of more than {_MOST_DIGITS} digits"
            raise ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except YAML_ERRORS as error:  # its own constructors take for granted that a text fits its tag
            problem = f"{shown(node.value)} cannot be read as {tag}"
            raise ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise ConstructorError(None, None, "expected a mapping", node.start_mark)
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise ConstructorError(None, None, "merge keys (<<) are not read", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ConstructorError(None, None, "a key that is a list or a mapping", key_node.start_mark)
            if key in mapping:
                raise ConstructorError(None, None, f"the key {shown(key)} stands there twice", key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep)
        return mapping


def yaml_problem(error: BaseException) -> tuple[str, str]:
    """The place of one of ``YAML_ERRORS`` (``line 12``, or empty if unknown), and the problem on one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    return "" if mark is None else f"line {mark.line + 1}", " ".join(str(problem).split())[:120]


def read_yaml(text: str, kind: type[T], origin: str, what: str, error: type[Exception]) -> T:
    """The ``kind`` that a YAML text describes.

    Errors of type ``error`` name the text by ``origin``, and what it is by ``what`` (``a release``).  If ``what`` is
    empty, unknown fields are ignored.
    """
    return read_values(yaml_values(text, origin, error), kind, origin, what, error)


def yaml_values(text: str, origin: str, error: type[Exception]) -> object:
    """The values of a YAML text; raises ``error`` naming the text and the line."""
    try:
        return load_yaml(text)
    except YAML_ERRORS as problem:
        line, says = yaml_problem(problem)
        raise error(f"{origin}{line and ', '}{line}: not YAML ({says}); correct or replace the file") from None


def read_values(values: object, kind: type[T], origin: str, what: str, error: type[Exception]) -> T:
    """The ``kind`` that parsed values describe."""
    try:
        return cast(T, _read(_info(cast(Hashable, kind)), values, "", what))
    except FieldError as problem:
        place = f", field {problem.field}" if problem.field else ""
        raise error(f"{origin}{place}: {problem.problem}; {problem.remedy}") from None
    except UnicodeEncodeError:
        raise error(f"{origin}: has half a character (a lone surrogate); correct its texts") from None


def document_of(value: Any, kind: Any = None) -> Any:
    """The plain values from which ``read_values`` reads ``value``, in the order of its fields, without None."""
    info = _info(cast(Hashable, type(value))) if kind is None else kind
    if isinstance(info, inspect.UnionType):
        info = next((one for one in info.types if getattr(one, "cls", None) is type(value)), info.types[0])
    marks, info = _marks(info), _bare(info)
    if "kinds" in marks:
        return {"kind": marks["kinds"].kind_of(value)} | document_of(value)
    if "codec" in marks:
        return marks["codec"].write(value)
    if isinstance(info, inspect.StructType | inspect.DataclassType):
        document: dict[Any, Any] = {}
        for name, field in _fields(info).items():
            item, marks = getattr(value, field.name), _marks(field.type)
            if not ((item is None and "codec" not in marks) or ("if_set" in marks and item == _default(field))):
                document[name] = document_of(item, field.type)
        return document
    if isinstance(info, inspect.DictType):
        return {key: document_of(item, info.value_type) for key, item in value.items()}
    if isinstance(info, inspect.VarTupleType):
        return [document_of(item, info.item_type) for item in value]
    return list(value) if isinstance(value, tuple) else value


def shown(value: object) -> str:
    """The beginning of a bad value, for an error."""
    if isinstance(value, dict | list):
        return "key: value pairs" if isinstance(value, dict) else f"a list of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"
    if value is None or isinstance(value, bool):
        return "empty" if value is None else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}..."


@cache
def _info(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


_MAPPINGS = (inspect.StructType, inspect.DataclassType, inspect.DictType)
_LISTS = (inspect.VarTupleType, inspect.TupleType)


def _marks(info: inspect.Type) -> Mapping[str, Any]:
    return (info.extra or {}) if isinstance(info, inspect.Metadata) else {}


def _bare(info: inspect.Type) -> inspect.Type:
    return info.type if isinstance(info, inspect.Metadata) else info


def _fields(info: Any) -> dict[str, inspect.Field]:
    """The fields of a type by their names in a document, in order; empty for a mapping."""
    return _fields_of(info.cls) if isinstance(info, inspect.StructType | inspect.DataclassType) else {}


@cache
def _fields_of(kind: type) -> dict[str, inspect.Field]:
    info: Any = inspect.type_info(kind)
    if isinstance(info, inspect.StructType):
        return {field.encode_name: field for field in info.fields}
    fields = {field.name: field for field in info.fields}
    written = (fields[field.name] for field in dataclasses.fields(info.cls))
    return {_written_name(field): field for field in written if "unwritten" not in _marks(field.type)}


def _written_name(field: inspect.Field) -> str:
    marks = _marks(field.type.types[0] if isinstance(field.type, inspect.UnionType) else field.type)
    name = field.encode_name
    return str(marks.get("name", re.sub("_[un]s$", "", name) if isinstance(marks.get("codec"), Unit) else name))


def _default(field: inspect.Field) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _read(info: inspect.Type, value: Any, place: str, what: str) -> Any:
    """The value of a type that plain values stand for; raises ``FieldError``."""
    info = _meant(info, value)
    marks, bare = _marks(info), _bare(info)
    if "kinds" in marks:
        return _of_kind(marks["kinds"], value, place, what)
    codec = marks.get("codec")
    read = value if codec is None else codec.read(value, place)
    bare = _bare(_meant(bare, read))
    if isinstance(bare, _MAPPINGS) and isinstance(read, dict):
        return _read_mapping(bare, read, place, what)
    if isinstance(bare, _LISTS) and isinstance(read, list | tuple) and _has_length(bare, len(read)):
        types = bare.item_types if isinstance(bare, inspect.TupleType) else [bare.item_type] * len(read)
        pairs = enumerate(zip(types, read, strict=True))
        return tuple(_read(one, item, f"{place}[{i}]", what) for i, (one, item) in pairs)
    if not _fits(bare, read):
        given = shown(value) if codec is None or not isinstance(read, int | float) else codec.write(read)
        raise FieldError(place, f"is {given}", f"write {_expected(info, value)}")
    return float(read) if isinstance(bare, inspect.FloatType) else read


def _has_length(info: Any, length: int) -> bool:
    if isinstance(info, inspect.TupleType):
        return length == len(info.item_types)
    return length >= (info.min_length or 0) and (info.max_length is None or length <= info.max_length)


def _fits(info: Any, value: Any) -> bool:
    """Whether a scalar has a type; True does not count as a number, nor 1.0 as an integer."""
    if isinstance(info, inspect.UnionType):
        return any(_fits(_bare(one), value) for one in info.types)
    if isinstance(info, inspect.LiteralType):
        return any(value == one and type(value) is type(one) for one in info.values)
    if isinstance(info, inspect.StrType) and isinstance(value, str):
        value.encode()  # raises for half a character
        return re.search(info.pattern or "", value) is not None
    if isinstance(info, inspect.IntType | inspect.FloatType):
        numbers = (int,) if isinstance(info, inspect.IntType) else (int, float)
        return type(value) in numbers and _within(info, value)
    kinds: dict[type, type | tuple[type, ...]] = {inspect.BoolType: bool, inspect.NoneType: type(None)}
    return isinstance(info, inspect.AnyType) or isinstance(value, kinds.get(type(info), ()))


def _within(info: Any, value: float) -> bool:
    """Whether a number lies between the bounds of its type; nan lies nowhere."""
    bounds = ((info.ge, operator.ge), (info.gt, operator.gt), (info.le, operator.le), (info.lt, operator.lt))
    return all(bound is None or holds(value, bound) for bound, holds in bounds)


def _read_mapping(info: Any, value: dict[Any, Any], place: str, what: str) -> Any:
    if not all(isinstance(key, str) for key in value):
        raise FieldError(place, "has a key that is not text", "put it in quotes")
    fields = _fields(info)
    names = [*fields]
    if isinstance(info, inspect.DictType):
        names = [*map(str, info.key_type.values)] if isinstance(info.key_type, inspect.LiteralType) else [*value]
    for key in value:
        if what and key not in names:
            raise FieldError(_joined(place, key), f"is not a field of {what}", nearest(key, names))
    if isinstance(info, inspect.DictType):
        return {
            _read(info.key_type, key, place, what): _read(info.value_type, item, _joined(place, key), what)
            for key, item in value.items()
        }
    read: dict[str, Any] = {}
    for name, field in fields.items():
        if value.get(name) is not None or (name in value and field.required):
            read[field.name] = _read(field.type, value[name], _joined(place, name), what)
        elif field.required or "required" in _marks(field.type):
            raise FieldError(_joined(place, name), "is missing", f"add {_expected(field.type)}")
    try:
        return info.cls(**read)
    except FieldError as error:
        raise FieldError(_joined(place, error.field), error.problem, error.remedy) from None
    except (ValueError, TypeError) as error:
        problem, _, remedy = str(error).partition("; ")
        raise FieldError(place, problem, remedy or "correct it") from None


def _of_kind(kinds: Kinds, value: Any, place: str, what: str) -> Any:
    """The value of the type that its ``kind`` names; the type may add fields (``completed``)."""
    if not isinstance(value, dict):
        raise FieldError(place, f"is {shown(value)}", "write key: value pairs")
    kind = kinds.type_of(value.get("kind"), _joined(place, "kind"))
    if "kind" not in _fields(_info(cast(Hashable, kind))):
        value = {key: item for key, item in value.items() if key != "kind"}
    return _read(_info(cast(Hashable, kind)), getattr(kind, "completed", dict)(value), place, what)


def _meant(info: inspect.Type, value: object) -> inspect.Type:
    """The member of a union that a value is for; the union itself if there are several."""
    if not isinstance(info, inspect.UnionType):
        return info
    members: list[Any] = [one for one in info.types if not isinstance(one, (*_MAPPINGS, *_LISTS, inspect.NoneType))]
    if isinstance(value, dict | list | tuple):
        kinds = _MAPPINGS if isinstance(value, dict) else _LISTS
        members = [one for one in info.types if isinstance(_bare(one), kinds)]
    return members[0] if len(members) == 1 else info


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def nearest(name: str, names: list[str]) -> str:
    """The remedy for an unknown name: the nearest name, or all of them."""
    from difflib import get_close_matches  # only a mistake needs it

    near = get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"remove it, or use one of {', '.join(names)}"


def _expected(info: Any, value: object = None) -> str:
    """What may be written for a type; absurdly wide bounds are named only for a number that exceeds them."""
    if isinstance(info, inspect.Metadata):
        return (
            str(_marks(info)["codec"].expected(info.type)) if "codec" in _marks(info) else _expected(info.type, value)
        )
    if isinstance(info, inspect.UnionType):
        one_of = (_expected(one, value) for one in info.types if not isinstance(one, inspect.NoneType))
        return " or ".join(dict.fromkeys(one_of))
    if isinstance(info, inspect.LiteralType):
        return f"{'one of ' if len(info.values) > 1 else ''}{', '.join(map(str, info.values))}"
    if isinstance(info, inspect.IntType | inspect.FloatType):
        number, show = ("a whole number", "{:,}") if isinstance(info, inspect.IntType) else ("a number", "{:,g}")
        bounded = type(value) in (int, float) or (info.le or 0) < _BEYOND_SENSE
        return number + (_range(info, show.format) if bounded else "")
    if isinstance(info, inspect.VarTupleType):
        return f"a list{' of at least one' if info.min_length else ''}, each {_expected(info.item_type)}"
    if isinstance(info, inspect.TupleType):
        return f"a list of {len(info.item_types)}, each {_expected(info.item_types[0])}"
    if isinstance(info, inspect.StrType):
        return "text"
    return "true or false" if isinstance(info, inspect.BoolType) else "key: value pairs"


def _range(info: Any, show: Callable[[float], str]) -> str:
    low, high = info.ge if info.gt is None else info.gt, info.le if info.lt is None else info.lt
    if high is None:
        return "" if low is None else f" above {show(low)}" if info.gt is not None else f" from {show(low)} on"
    if info.gt is not None:
        return f" above {show(low)} and {'at most' if info.lt is None else 'below'} {show(high)}"
    return f"{'' if low is None else f' from {show(low)}'} to {'' if info.lt is None else 'below '}{show(high)}"
