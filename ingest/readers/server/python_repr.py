"""Python's printed values (``repr``) read as data: nothing is evaluated, nothing raises.

Besides literals, servers print configuration objects (``KVEventsConfig(publisher='zmq', ...)``), members of
enumerations (``<CUDAGraphMode.NONE: 0>``), bare words (``torch.bfloat16``, ``auto``) and JSON (``null``, ``true``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Each level reads the text inside its brackets once more.
_DEEPEST = 40
_LONGEST_NUMBER = 40  # digits

_QUOTED = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
# A text in quotes, one that does not end, a bracket or separator, or a run of anything else.
_PIECE = re.compile(rf"""{_QUOTED}|['"].*+|[{{}}\[\]()<>,:=]|[^{{}}\[\]()<>,:='"]++""", re.DOTALL)
_TEXT = re.compile(_QUOTED, re.DOTALL)
_BRACKETED = re.compile(r"([\w.]*+)([{\[(])(.*)[}\])]", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_OPENING, _CLOSING = frozenset("{[(<"), frozenset("}])>")
_CONSTANTS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}

# Name (may be empty) and value, as printed.
_Part = tuple[str, str]


class Text(str):
    """A printed value that is not a literal, as it was printed."""

    __slots__ = ()


@dataclass(frozen=True)
class Entries:
    """Named values in the order in which they were printed; ``whole``: the text did not end within them."""

    values: Mapping[str, object]
    whole: bool


def read_mapping(text: str) -> Entries | None:
    """The mapping with which a text begins (``{'max_num_seqs': 32, ...}``); ``None`` if it begins with none.

    Lists, tuples and sets become lists, objects mappings of their fields; anything else a :class:`Text`.
    Where the text ends within a value (a line that was cut), that value is left out: it may have been longer.
    """
    if not text.startswith("{"):
        return None
    parts, whole = _split(text, 1, "}")
    return Entries(_values(parts, 1)[0], whole)


def read_fields(text: str) -> Entries:
    """The fields of an object printed without its brackets, up to the end of the text (``dtype=auto, seed=0``)."""
    return Entries(_values(_split(text, 0, "")[0], 0)[0], True)


def _split(text: str, at: int, closing: str) -> tuple[list[_Part], bool]:
    """The parts between commas up to a closing bracket, and whether it is there."""
    parts: list[_Part] = []
    name, begin, depth = "", at, 0
    for match in _PIECE.finditer(text, at):
        piece = match[0]
        if piece in _OPENING or (piece[0] in "'\"" and not _TEXT.fullmatch(piece)):
            depth += 1
        elif depth:
            depth -= piece in _CLOSING
        elif piece in (",", closing):
            parts.append((name, text[begin : match.start()]))
            name, begin = "", match.end()
            if piece == closing:
                return parts, True
        elif piece in (":", "=") and not name:
            name, begin = text[begin : match.start()], match.end()
    if not closing and not depth:
        parts.append((name, text[begin:]))
    return parts, False


def _values(parts: Sequence[_Part], depth: int) -> tuple[dict[str, object], list[object]]:
    """The values that have a name, and the others."""
    named: dict[str, object] = {}
    others: list[object] = []
    for name, printed in parts:
        if name:
            key = _value(name, depth)
            named[key if isinstance(key, str) else repr(key)[:80]] = _value(printed, depth)
        elif printed.strip():
            others.append(_value(printed, depth))
    return named, others


def _value(printed: str, depth: int) -> object:
    printed = printed.strip()
    if printed in _CONSTANTS:
        return _CONSTANTS[printed]
    if len(printed) <= _LONGEST_NUMBER and _NUMBER.fullmatch(printed):
        return int(printed) if printed.lstrip("+-").isdigit() else float(printed)
    if _TEXT.fullmatch(printed):
        return _unquoted(printed)
    match = _BRACKETED.fullmatch(printed) if depth < _DEEPEST else None
    if match is None:
        return Text(printed)
    named, others = _values(_split(match[3], 0, "")[0], depth + 1)
    if match[1]:
        return named if named and not others else Text(printed)
    return named if named or (match[2] == "{" and not others) else others


def _unquoted(printed: str) -> str:
    """The text in quotes, with its escapes where they are Python's."""
    if "\\" not in printed:
        return printed[1:-1]
    try:
        return str(ast.literal_eval(printed))
    except (ValueError, SyntaxError, MemoryError):
        return printed[1:-1]
