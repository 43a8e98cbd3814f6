"""The pages of the documentation: their order, their parts, and whether a command still prints what its page says.

A page is a Markdown file of the repository, read as a list of parts: prose, fenced blocks, and regions that are
generated (`docs_generated.py`).  CONTRIBUTING.md says what happens with each kind of block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Section of the navigation -> its pages in the order of a first visit, and how many words each may have.
NAVIGATION: dict[str, dict[str, int]] = {
    "Start": {
        "docs/index.md": 450,
        "docs/quick-start.md": 900,
        "docs/your-server.md": 1_810,
        "docs/release-in-ci.md": 1_300,
        "docs/case-study.md": 900,
    },
    "Guides": {
        "docs/verdict.md": 1_700,
        "docs/cause.md": 1_900,
        "docs/trust.md": 2_000,
        "docs/fit.md": 2_000,
        "docs/what-if.md": 1_400,
        "docs/compare.md": 1_300,
        "docs/record.md": 1_200,
    },
    "Reference": {
        "docs/commands.md": 3_630,
        "docs/formats.md": 1_900,
        "docs/json-and-python.md": 1_000,
        "docs/how-it-works.md": 1_755,
    },
}
# Pages that are no part of the site: the entrance, and those for contributors.
BESIDE = {"README.md": 1_000, "ARCHITECTURE.md": 1_300, "CONTRIBUTING.md": 1_000, "SECURITY.md": 500}


@dataclass(frozen=True)
class Page:
    """One page: its source, and the name of its HTML file."""

    source: Path
    html: str

    @property
    def text(self) -> str:
        """The Markdown as it stands in the repository."""
        return self.source.read_text("utf-8")

    @property
    def title(self) -> str:
        """The first heading."""
        return next(line[2:].strip() for line in self.text.splitlines() if line.startswith("# ")).replace("`", "")


def page_of(name: str) -> Page:
    """The page of a source such as ``docs/fit.md``."""
    return Page(ROOT / name, f"{Path(name).stem}.html")


def all_pages() -> list[Page]:
    """Every page that is run and linted: those of the site in the order of the navigation, then the others."""
    return [page_of(name) for name in budgets()]


def budgets() -> dict[str, int]:
    """How many words each page may have."""
    return {name: words for pages in (*NAVIGATION.values(), BESIDE) for name, words in pages.items()}


_OPEN = re.compile(r"```(\S*) ?(.*)")
_BEGIN = re.compile(r"<!-- begin ([\w-]+) -->")


@dataclass(frozen=True)
class Part:
    """``kind``: ``prose``, ``fence`` or ``region``; ``line``: its first line in the page, from 1.

    ``language`` and ``words`` of a fence are what stands after the backquotes; ``language`` of a
    region is its name.  ``body``: the lines between the first and the last, of prose all.
    """

    kind: str
    line: int
    body: tuple[str, ...]
    language: str = ""
    words: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The part as it is written."""
        if self.kind == "fence":
            return [" ".join([f"```{self.language}", *self.words]), *self.body, "```"]
        if self.kind == "region":
            return [f"<!-- begin {self.language} -->", *self.body, f"<!-- end {self.language} -->"]
        return list(self.body)

    def with_body(self, body: list[str]) -> Part:
        """The part with other lines between its first and last."""
        return replace(self, body=tuple(body))


def parts_of(text: str) -> list[Part]:
    """The parts of a page; ``text_of`` makes the page again.  Raises ``ValueError`` if one is not closed."""
    lines, parts, at = text.splitlines(), [], 0
    while at < len(lines):
        fence, region = _OPEN.fullmatch(lines[at]), _BEGIN.fullmatch(lines[at])
        if fence is None and region is None:
            end = next((i for i in range(at, len(lines)) if _opens(lines[i])), len(lines))
            parts.append(Part("prose", at + 1, tuple(lines[at:end])))
            at = end
            continue
        closing = "```" if fence else f"<!-- end {region.group(1)} -->"  # type: ignore[union-attr]  # one is there
        if closing not in lines[at + 1 :]:
            raise ValueError(f"line {at + 1}: {lines[at]} is not closed")
        end = lines.index(closing, at + 1)
        body = tuple(lines[at + 1 : end])
        if fence:
            parts.append(Part("fence", at + 1, body, fence.group(1), tuple(fence.group(2).split())))
        elif region:
            parts.append(Part("region", at + 1, body, region.group(1)))
        at = end + 1
    return parts


def _opens(line: str) -> bool:
    return bool(_OPEN.fullmatch(line) or _BEGIN.fullmatch(line))


def text_of(parts: list[Part]) -> str:
    """The page that is made of these parts."""
    return "\n".join(line for part in parts for line in part.lines) + "\n"


def cell(text: str) -> str:
    """The text as a cell of a Markdown table."""
    return text.replace("|", "\\|")


@dataclass(frozen=True)
class Command:
    """A command of a console block: as it is written, as a shell takes it, and the output that stands there."""

    written: tuple[str, ...]
    shell: str
    output: tuple[str, ...]


def commands_of(part: Part) -> list[Command]:
    """The commands of a console block.  Raises ``ValueError`` if it does not begin with one."""
    if not part.body or not part.body[0].startswith("$ "):
        raise ValueError(f"line {part.line}: a console block begins with a command, `$ ...`")
    starts = [i for i, line in enumerate(part.body) if line.startswith("$ ")]
    return [_command(part.body[a:b]) for a, b in zip(starts, [*starts[1:], len(part.body)], strict=True)]


def _command(lines: tuple[str, ...]) -> Command:
    end = next(i for i, line in enumerate(lines, 1) if not line.endswith("\\"))
    return Command(lines[:end], "\n".join(lines[:end])[2:], lines[end:])


ELISION = "..."
VARYING = {
    "<seconds>": r"\d[\d,]*(?:\.\d+)?",
    "<version>": r"\d+(?:\.\w+)+",
    "<size>": r"\d[\d,]*(?:\.\d+)?",
    "<path>": r"[\w./~-]+",
    "<processors>": r"\d+",
}
_VARYING = re.compile("|".join(map(re.escape, VARYING)))
_NUMBERS = re.compile(r"[-+]?\d[\d.,]*| +|-{3,}")


def is_current(documented: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the lines of a page stand for these lines of output."""
    pattern = "".join(r"(?:[^\n]*\n)*?" if line == ELISION else _pattern(line) + r"\n" for line in documented)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


def refreshed(documented: Sequence[str], printed: Sequence[str]) -> list[str]:
    """What should stand in the page: as it is where that is current, else the output, with its elisions kept.

    Lines of the page and of the output are paired by all but their numbers; of a new line it is enough to
    write how it begins.
    """
    if is_current(documented, printed):
        return list(documented)
    return list(_merged([_completed(line, printed) for line in documented], printed))


def _completed(line: str, printed: Sequence[str]) -> str:
    if line == ELISION or not line.strip():
        return line
    return next((output for output in printed if output.startswith(line)), line)


def _merged(documented: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
    pairing = SequenceMatcher(None, [*map(_skeleton, documented)], [*map(_skeleton, printed)], autojunk=False)
    for kind, a, b, c, d in pairing.get_opcodes():
        if kind == "equal":
            pairs = zip(documented[a:b], printed[c:d], strict=True)
            yield from (old if re.fullmatch(_pattern(old), new) else new for old, new in pairs)
        elif ELISION in documented[a:b]:
            yield ELISION
        else:
            yield from printed[c:d]


def _pattern(line: str) -> str:
    parts = _VARYING.split(line)
    varying = [VARYING[name] for name in _VARYING.findall(line)]
    return "".join(re.escape(part) + then for part, then in zip(parts, [*varying, ""], strict=True))


def _skeleton(line: str) -> str:
    return line if line == ELISION else _NUMBERS.sub("#", _VARYING.sub("0", line))
