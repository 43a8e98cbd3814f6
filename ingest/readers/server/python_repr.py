"""Python's printed values (``repr``) read as data: nothing is evaluated, nothing raises, each character is seen once.

Besides literals, servers print configuration objects (``KVEventsConfig(publisher='zmq', ...)``), members of
enumerations (``<CUDAGraphMode.NONE: 0>``), bare words (``torch.bfloat16``, ``auto``) and JSON (``null``, ``true``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_DEEPEST = 40
_MOST_PARTS = 3
_LONGEST_NUMBER = 40

# A text in quotes, a bracket or separator, or a run of anything else.
_PIECE = re.compile(
    r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|[{}\[\]()<>,:=]|[^{}\[\]()<>,:='"]++|['"]""",
    re.DOTALL,
)
_CLOSING = {"{": "}", "[": "]", "(": ")", "<": ">"}
_CONSTANTS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")


class Text(str):
    """A printed value that is no literal, as it was printed."""

    __slots__ = ()


@dataclass(frozen=True)
class Entries:
    """Named values in the order in which they were printed; ``whole``: the text did not end within them."""

    values: Mapping[str, object]
    whole: bool


def read_mapping(text: str) -> Entries | None:
    """The mapping with which a text begins (``{'max_num_seqs': 32, ...}``); ``None`` if it begins with none.

    Lists, tuples and sets become lists, objects mappings of their fields; what is none of these a :class:`Text`.
    Where the text ends within a value (a line that was cut), that value is left out: it may have been longer.
    """
    reader = _Reader(text)
    return reader.mapping() if text.startswith("{") else None


def read_fields(text: str) -> Entries:
    """The fields of an object printed without its brackets, up to the end of the text (``dtype=auto, seed=0``)."""
    reader = _Reader(text)
    return Entries(reader.entries("", 0)[0], True)


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Where each piece begins and ends, up to the first text in quotes that does not end."""
    for match in _PIECE.finditer(text):
        yield match.span()
        # To look for the end of each later one again would take the square of the line.
        if match[0] in "'\"":
            return


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._pieces = text, list(_pieces(text))
        self._next, self._ended = 0, False

    def mapping(self) -> Entries:
        """The mapping that begins here."""
        self._next = 1
        named, _others = self.entries("}", 1)
        return Entries(named, not self._ended)

    def _peek(self) -> str:
        if self._next >= len(self._pieces):
            return ""
        start, end = self._pieces[self._next]
        return self._text[start:end]

    def entries(self, closing: str, depth: int) -> tuple[dict[str, object], list[object]]:
        """What stands before a closing bracket: named values (``key: value``, ``key=value``), and the others."""
        named: dict[str, object] = {}
        others: list[object] = []
        while (piece := self._peek()) != closing or not piece:
            if not piece:
                if closing:
                    self._ended = True
                break
            if piece == "," or piece.isspace():
                self._next += 1
                continue
            value = self.value({",", closing, ":", "="}, depth)
            if self._peek() in (":", "="):
                self._next += 1
                name, value = value, self.value({",", closing}, depth)
                if not self._cut(closing):
                    named[name if isinstance(name, str) else repr(name)[:80]] = value
            elif not self._cut(closing):
                others.append(value)
        self._next += 1
        return named, others

    def _cut(self, closing: str) -> bool:
        """Whether the text ended within a value that something should have closed."""
        if closing and self._next >= len(self._pieces):
            self._ended = True
        return self._ended

    def value(self, until: set[str], depth: int) -> object:
        """The value up to (not with) one of the pieces ``until``."""
        first = self._next
        parts: list[object] = []
        while (piece := self._peek()) and piece not in until:
            part = self._part(piece, depth)
            # Two parts make a value at most; of more than that the text is kept.
            if len(parts) < _MOST_PARTS and not (isinstance(part, _Word) and not part.strip()):
                parts.append(part)
        match parts:
            case [_Word() as word]:
                return _constant(word.strip())
            case [_Word(), _Bracket(opening="(", named=named, others=[])] if named:
                return named
            case [_Bracket() as bracket] if bracket.opening != "<":
                return bracket.value
            case [str() as literal] if not isinstance(literal, _Word):
                return literal
        return Text(self._printed(first))

    def _part(self, piece: str, depth: int) -> object:
        self._next += 1
        if len(piece) > 1 and piece[0] in "'\"":
            return _unquoted(piece)
        if piece in "'\"":
            self._ended = True
        elif piece in _CLOSING:
            if depth < _DEEPEST and piece != "<":
                return _Bracket(piece, *self.entries(_CLOSING[piece], depth + 1))
            self._pass_over(piece)
            return _Bracket(piece, {}, [])
        return _Word(piece)

    def _pass_over(self, opening: str) -> None:
        """To behind the bracket that closes an opened one, or to the end."""
        open_brackets = 1
        while open_brackets:
            piece = self._peek()
            if not piece:
                self._ended = True
                return
            open_brackets += (piece == opening) - (piece == _CLOSING[opening])
            self._next += 1

    def _printed(self, first: int) -> str:
        if first >= self._next:
            return ""
        return self._text[self._pieces[first][0] : self._pieces[min(self._next, len(self._pieces)) - 1][1]].strip()


class _Word(str):
    """A run of characters that is no text in quotes."""

    __slots__ = ()


@dataclass(frozen=True)
class _Bracket:
    opening: str
    named: dict[str, object]
    others: list[object]

    @property
    def value(self) -> object:
        return self.named if self.named or (self.opening == "{" and not self.others) else self.others


def _constant(word: str) -> object:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if len(word) <= _LONGEST_NUMBER and _NUMBER.fullmatch(word):
        return int(word) if word.lstrip("+-").isdigit() else float(word)
    return Text(word)


def _unquoted(piece: str) -> str:
    """The text in quotes, with its escapes where they are Python's."""
    if "\\" not in piece:
        return piece[1:-1]
    try:
        return str(ast.literal_eval(piece))
    except (ValueError, SyntaxError, MemoryError):
        return piece[1:-1]
