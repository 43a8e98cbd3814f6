"""The layers of the house: imports point down only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Design, section 3: what each room may import from; validate is the top floor.
MAY_IMPORT = {
    "compiled": {"compiled"},
    "blis": {"blis", "compiled"},
    "ingest": {"ingest", "compiled"},
    "fixtures": {"fixtures", "blis", "ingest"},
    "replay": {"replay", "blis", "ingest"},
    "validate": {"validate", "replay", "fixtures", "blis", "ingest"},
}
MODULES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """All modules that a file names in its import statements, wherever they stand."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}"} | {f"{node.module}.{a.name}" for a in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    names = imported(path)
    assert not [name for name in names if name.startswith(".")], "relative imports hide the layer"
    rooms = {name.split(".")[1] for name in names if name.startswith("blis_replay.")}
    assert rooms <= MAY_IMPORT[room]


def test_every_folder_with_modules_is_installed() -> None:
    """pyproject lists the packages by name (the import name differs from the folders')."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    folders = {".".join(["blis_replay", *path.parent.relative_to(ROOT).parts]) for path in MODULES}
    assert set(listed) == folders
