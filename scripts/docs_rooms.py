"""The rooms of the house and the imports between them, as a table and as a picture."""

from __future__ import annotations

import ast
from functools import cache
from html import escape
from pathlib import Path

from docs_pages import ROOT

# Room -> left, top, width and height of its box; what imports stands above what it imports.
_BOXES = {
    "validate": (20, 16, 820, 104),
    "replay": (220, 180, 400, 110),
    "fixtures": (670, 180, 170, 110),
    "ingest": (20, 356, 420, 110),
    "blis": (490, 356, 350, 110),
    "compiled": (340, 526, 250, 74),
}
# Where the arrow of an import begins and ends; by default it falls straight from the middle of the upper room.
_ARROWS = {
    ("validate", "replay"): (420, 420),
    ("validate", "fixtures"): (755, 755),
    ("validate", "ingest"): (110, 110),
    ("validate", "blis"): (645, 645),
    ("replay", "ingest"): (300, 300),
    ("replay", "blis"): (550, 550),
    ("fixtures", "ingest"): (690, 425),
    ("fixtures", "blis"): (790, 790),
    ("ingest", "compiled"): (390, 390),
    ("blis", "compiled"): (540, 540),
}
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1c1c1c } .name { font-weight: 700; font-size: 16px }
  .small { font-size: 12px; fill: #555 } rect { fill: #f4f6f8; stroke: #7a8794 } .inner { fill: #fff; stroke: #c3cad1 }
  path { stroke: #35618e; stroke-width: 1.6; fill: none } .head { fill: #35618e; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e6e6 } .small { fill: #a8b0b8 } rect { fill: #1f252b; stroke: #6b7782 }
    .inner { fill: #171b20; stroke: #46505a } path { stroke: #7fb2e5 } .head { fill: #7fb2e5 }
  }"""


@cache
def imports_between() -> frozenset[tuple[str, str]]:
    """Each two rooms of which the first imports from the second."""
    return frozenset(
        (room, other) for room in _BOXES for module in _modules(room) for other in _imported_rooms(module) - {room}
    )


def rooms_table() -> list[str]:
    """A row a room and each of its folders: what it is for."""
    rows = [_row(folder) for room in _BOXES for folder in [ROOT / room, *_folders(room)]]
    return ["| room | what it is for |", "|---|---|", *rows]


def rooms_svg() -> str:
    """The picture: a box a room, an arrow for imports."""
    boxes = "\n".join(_box(room) for room in _BOXES)
    arrows = "\n".join(map(_arrow, sorted(imports_between())))
    label = "Rooms of the repository and the imports between them, which all point down"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 616" role="img" aria-label="{label}">\n'
        f"<title>{label}</title>\n<style>{_STYLE}\n</style>\n{boxes}\n{arrows}\n</svg>\n"
    )


def _box(room: str) -> str:
    left, top, width, height = _BOXES[room]
    lines = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6"/>',
        f'<text class="name" x="{left + 12}" y="{top + 24}">{room}/</text>',
    ]
    lines += [
        f'<text class="small" x="{left + 12}" y="{top + 44 + 16 * i}">{escape(line)}</text>'
        for i, line in enumerate(_wrapped(_purpose(ROOT / room), (width - 24) // 6))
    ]
    at = left + 12
    for folder in _folders(room):
        wide = 7 * len(folder.name) + 16
        lines.append(f'<rect class="inner" x="{at}" y="{top + height - 34}" width="{wide}" height="24" rx="4"/>')
        lines.append(f'<text class="small" x="{at + 8}" y="{top + height - 18}">{folder.name}</text>')
        at += wide + 8
    return "\n".join(lines)


def _arrow(pair: tuple[str, str]) -> str:
    above, below = (_BOXES[room] for room in pair)
    middle = above[0] + above[2] // 2
    start, end = _ARROWS.get(pair, (middle, below[0] + below[2] // 2))
    top, bottom = above[1] + above[3], below[1]
    head = f'<path class="head" d="M{end} {bottom} l-5 -9 h10 z"/>'
    return f'<path d="M{start} {top} L{end} {bottom - 8}"/>{head}'


def _row(folder: Path) -> str:
    return f"| `{folder.relative_to(ROOT).as_posix()}/` | {_purpose(folder)} |"


def _purpose(folder: Path) -> str:
    """The first paragraph of the folder's docstring, in one line."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def _folders(room: str) -> list[Path]:
    """The folders of a room that have modules, those inside of others left out."""
    return sorted(path.parent for path in (ROOT / room).glob("*/__init__.py"))


def _imported_rooms(module: Path) -> set[str]:
    nodes = ast.walk(ast.parse(module.read_text("utf-8")))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[1] for name in names if name.startswith("blis_replay.")}


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return lines
