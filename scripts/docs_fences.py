"""A page as a list of parts: prose, fenced blocks, and regions that are generated.

::

    ```console            commands, each on a line that begins with `$ `, and what they print
    ```console recordings the same, and needs the published recordings
    ```python             a program; a ```text block right after it is what it prints
    ```python name.py     a file that later commands of the page use; the same with any language
    ```text ```yaml       shown as it stands
    ```sh                 commands that cannot be run here (they need a GPU, or never end)
    <!-- begin NAME -->   what `docs_generated.py` makes, up to <!-- end NAME -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
