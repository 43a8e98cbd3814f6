"""Find sentences that are hard to read, in the pages, in what the program prints, and in docstrings and comments.

    python scripts/plain_english.py              # exit code 1 if a page or a message has one
    python scripts/plain_english.py --docstrings # list those of docstrings and comments instead
    python scripts/plain_english.py --messages   # list all messages of the program, with their places, to be read

Messages are string literals that read like prose.  A sentence has at most ``LONGEST`` words, and the median over a page
is at most ``MEDIAN``.  Code spans and numbers with their units count as one word.  ``plain_english.yaml`` lists words
with better ones.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from pathlib import Path
from statistics import median
from tokenize import COMMENT, generate_tokens

import yaml
from docs_pages import ROOT, all_pages, budgets, parts_of

LONGEST, MEDIAN = 35, 16
# By where they are checked: pattern -> what to write instead.
WORDS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_ROOMS = ("base", "blis", "fixtures", "ingest", "recorder", "replay", "validate")
_CODE, _LINK, _MARKS = (
    re.compile(r"`[^`]*`"),
    re.compile(r"!?\[([^\]]*)\]\([^)]*\)"),
    re.compile(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}"),
)
_END = re.compile(r"(?<=[.!?])[\")]?\s+(?=[A-Z0-9`\"(])| · ")
_END_OR_SEMICOLON = re.compile(rf"{_END.pattern}|;\s+")
_WORD = re.compile(r"[^\W_][\w'’.,%/-]*")


@dataclass(frozen=True)
class Sentence:
    """A sentence and where it stands; ``prose``: of a paragraph, not of a table or a message."""

    place: str
    text: str
    prose: bool = False

    @property
    def words(self) -> int:
        """How many it has."""
        return len(_WORD.findall(self.text))


def of_markdown(place: str, text: str) -> Iterator[Sentence]:
    """The sentences of a page: its prose, list items and cells of tables, without blocks of code."""
    for part in parts_of(text):
        if part.kind == "prose":
            yield from _of_lines(place, part.line, part.body)
        elif part.kind == "region":
            inner = parts_of("\n".join(part.body))
            for one in inner:
                if one.kind == "prose":  # of messages, as the code has them
                    for sentence in _of_lines(place, part.line + one.line, one.body):
                        yield from _split(sentence.place, sentence.text)


def _of_lines(place: str, first: int, lines: tuple[str, ...]) -> Iterator[Sentence]:
    paragraph: list[str] = []
    start = first
    for at, line in enumerate([*lines, ""], first):
        row = line.lstrip().startswith("|")
        if not line.strip() or row or re.match(r"\s*(?:[-*]|\d+\.) |#", line):
            yield from _split(f"{place}:{start}", " ".join(paragraph), prose=True)
            paragraph, start = [], at
        if row:
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                yield from _split(f"{place}:{at}", cell.strip())
        elif line.strip() and not line.startswith(("#", "<!--")):
            if not paragraph:
                start = at
            paragraph.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", line).strip())


def _split(place: str, text: str, *, prose: bool = False) -> Iterator[Sentence]:
    """In tables and messages a semicolon ends a sentence as well: problem; remedy."""
    plain = _MARKS.sub("", _LINK.sub(r"\1", _CODE.sub("Code", text)))
    for sentence in (_END if prose else _END_OR_SEMICOLON).split(plain):
        if _WORD.search(sentence):
            yield Sentence(place, sentence.strip(), prose)


def of_module(place: str, text: str) -> Iterator[Sentence]:
    """The sentences of string literals that are printed: some words, no docstring, no SQL."""
    nodes = list(ast.walk(ast.parse(text)))  # once: of all that is linted it takes most of the time
    inside = {
        id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))  # a docstring
    for node in nodes:
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            said = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            said = node.value
        else:
            continue
        if _is_prose(said):
            yield from _split(f"{place}:{node.lineno}", " ".join(said.split()))


def _is_prose(text: str) -> bool:
    """Some words, and no SQL, markup or regular expression."""
    code = re.search(r"\bSELECT\b|\bFROM\b|<\w|\\[bsdw(]", text)
    return (
        code is None
        and len(re.findall(r"\b(?:a|an|and|as|at|for|in|is|it|no|not|of|or|per|that|the|to|with)\b", text)) > 1
    )


def sentences() -> Iterator[Sentence]:
    """All that is checked."""
    for page in all_pages():
        yield from of_markdown(str(page.source.relative_to(ROOT)), page.text)
    yield from messages()


def messages() -> Iterator[Sentence]:
    """The catalogue of messages: errors, findings, causes, remedies and help, by file and line; X is a value."""
    for room in _ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            found = of_module(str(path.relative_to(ROOT)), path.read_text("utf-8"))
            yield from sorted(found, key=lambda one: int(one.place.rpartition(":")[2]))


def docstrings() -> Iterator[Sentence]:
    """The sentences of docstrings and of comments, by file and line."""
    for room in (*_ROOMS, "labs"):
        for path in sorted(one for one in (ROOT / room).rglob("*.py") if "tests" not in one.relative_to(ROOT).parts):
            place, text = str(path.relative_to(ROOT)), path.read_text("utf-8")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    yield from _of_paragraphs(f"{place}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node) or "")
            for token in generate_tokens(StringIO(text).readline):
                if token.type == COMMENT:
                    yield from _of_paragraphs(f"{place}:{token.start[0]}", token.string.lstrip("# "))


def _of_paragraphs(place: str, text: str) -> Iterator[Sentence]:
    """Of prose, and of each item of a list; tables, and what is indented or laid out line by line, are left out."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*] )", text):
        if not paragraph.startswith((" ", "Example", "\b", "==")):
            yield from _split(place, " ".join(paragraph.replace("``", "`").split()), prose=True)


def hard_docstrings() -> list[str]:
    """A line for each sentence of a docstring or comment that is too long or has a listed word."""
    checked = [Sentence(one.place, one.text) for one in docstrings()]  # only pages have a median
    return [*findings(checked), *(line for one in checked for line in _listed(one, "docstrings and comments"))]


def findings(checked: Iterable[Sentence]) -> list[str]:
    """A line for each sentence that is too long or has a listed word, and for each page whose median is too high."""
    found, pages = [], dict[str, list[int]]()
    for one in checked:
        if one.words > LONGEST:
            found.append(f"{one.place}: {one.words} words, at most {LONGEST}: {one.text}")
        found += _listed(one, "everywhere")
        if one.prose:
            pages.setdefault(one.place.split(":")[0], []).append(one.words)
    for page, words in pages.items():
        if median(words) > MEDIAN:
            found.append(f"{page}:1: the median sentence has {median(words):g} words, at most {MEDIAN}")
    return found


def too_long() -> list[str]:
    """A line for each page with more words than ``docs_pages.NAVIGATION`` gives it."""
    words = {name: len((ROOT / name).read_text("utf-8").split()) for name in budgets()}
    return [f"{name}:1: {words[name]} words, at most {most}" for name, most in budgets().items() if words[name] > most]


def _listed(one: Sentence, where: str) -> Iterator[str]:
    for pattern, better in WORDS[where].items():
        if word := re.search(pattern, one.text):
            yield f"{one.place}: {word[0]!r}; write {better}: {one.text}"


def main() -> int:
    """0: nothing was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--docstrings", action="store_true", help="list those of docstrings and comments instead")
    parser.add_argument("--messages", action="store_true", help="list all messages instead, with their places")
    given = parser.parse_args()
    if given.messages:
        for place, said in groupby(messages(), key=lambda one: one.place):
            print(f"{place}: {' '.join(one.text for one in said)}")
        return 0
    if given.docstrings:
        print("\n".join(hard := hard_docstrings()))
        print(f"{len(hard)} to rewrite")
        return 0
    checked = list(sentences())
    found = [*findings(checked), *too_long()]
    for line in found:
        print(line)
    prose = median(one.words for one in checked if one.prose)
    print(f"{len(checked):,} sentences, median of prose {prose:g} words; {len(found)} to rewrite")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
