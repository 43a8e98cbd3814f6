"""The layers of the house: imports point down, between rooms, inside them, and from file to file.

What a room may import stands in the docstring of its ``__init__`` (``May import: ...``), and only there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest
from docs_generated import statements

ROOT = Path(__file__).parents[1]
PACKAGE = "blis_replay."
ROOMS = ("base", "recorder", "blis", "ingest", "fixtures", "replay", "validate")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})
_MAY_IMPORT = re.compile(r"^May import: (.+?)\.$", re.MULTILINE | re.DOTALL)


def dotted(path: Path) -> str:
    """``ingest.store.file`` of its path; a package is named by its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


@cache
def imports(name: str) -> frozenset[str]:
    """The modules of this project that a module names in an import statement, wherever it stands."""
    found: set[str] = set()
    for node in statements(ast.parse(MODULES[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix(PACKAGE) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide the layer"
            module = (node.module or "").removeprefix(PACKAGE)
            found |= {
                f"{module}.{alias.name}" if f"{module}.{alias.name}" in MODULES else module for alias in node.names
            }
    return frozenset((found & MODULES.keys()) - {name})


def unit(name: str) -> str:
    """The sub-room of a module, or the module itself where its folder has sub-rooms (what holds them together)."""
    folder = MODULES[name].parent
    return dotted(folder) if MODULES[name].name != "__init__.py" and not has_rooms(folder) else name


def has_rooms(folder: Path) -> bool:
    """Whether there are rooms inside this one."""
    return any(other.parent == folder for other in FOLDERS)


def circles(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Nodes that can be reached from themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        open_ends = list(graph.get(start, ()))
        while open_ends:
            node = open_ends.pop()
            if node not in seen:
                seen.add(node)
                open_ends += graph.get(node, ())
        return seen

    return sorted(node for node in graph if node in reached(node))


def allowed(folder: Path) -> set[str]:
    """What a room says that it may import."""
    said = _MAY_IMPORT.search(ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or "")
    assert said, f"{dotted(folder)}/__init__.py does not say what it may import"
    names = said[1].replace("\n", " ")
    return set() if names == "nothing" else {name.strip() for name in names.split(",")}


@pytest.mark.slow
def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and for type checkers count as well."""
    assert circles({name: imports(name) for name in MODULES}) == []


@pytest.mark.slow
def test_no_room_imports_itself_by_way_of_others() -> None:
    """A circle can close between rooms although none closes between files."""
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        graph.setdefault(unit(name), set()).update(unit(other) for other in imports(name))
    assert circles({room: others - {room} for room, others in graph.items()}) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: dotted(folder))
def test_a_room_imports_what_it_says(folder: Path) -> None:
    """Each name stands for a module, or for a room with all that is in it; none is said in vain."""
    may, room = allowed(folder), dotted(folder)
    for path in folder.glob("*.py"):
        for other in imports(dotted(path)):
            above = {other, *(".".join(other.split(".")[:depth]) for depth in range(1, other.count(".") + 1))}
            assert room in above or above & may, f"{dotted(path)} imports {other}"
    needed = {other for path in folder.glob("*.py") for other in imports(dotted(path))}
    assert all(any(f"{other}.".startswith(f"{name}.") for other in needed) for name in may), "said in vain"


def test_every_folder_with_modules_is_installed() -> None:
    """pyproject lists the packages by name (the import name differs from the folders')."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    assert set(listed) == {f"{PACKAGE}{dotted(folder)}" for folder in FOLDERS}


def test_everything_beside_the_modules_is_installed() -> None:
    """Each file that is read from a package has a pattern in pyproject; `make dist` installs what comes of it."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]["*"]
    packed = {path for folder in FOLDERS for pattern in patterns for path in folder.glob(pattern)}
    beside = {path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()}
    ours = {path for path in beside if path.suffix not in (".py", ".pyc")}
    assert sorted(ours - packed) == []


def test_each_dependency_has_a_row_that_says_what_it_is_for() -> None:
    """Those of development have none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = {name.split(">=")[0] for name in (*project["dependencies"], *extras["report"], *extras["record"])}
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert set(re.findall(r"^\| ([\w-]+) \| \d+ \|", page, re.MULTILINE)) == needed
    install = (ROOT / "docs" / "your-server.md").read_text("utf-8").split("## Install")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", install, re.MULTILINE)) == set(extras) - {"dev"}


def test_what_builds_the_package_is_locked_with_a_hash() -> None:
    """The build runs code of its requirements as well."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    locked = (ROOT / "requirements-build.lock").read_text("utf-8")
    assert re.findall(r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", locked, re.MULTILINE) == required


@pytest.mark.slow
def test_every_file_that_is_installed_is_one_that_a_module_names() -> None:
    """By its name, or by its ending in a module of its folder, or in one that names the folder.

    Files of recordings are recognised by what is in them: tests/fixtures/test_fixture_bundled.py.
    """
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]["*"]
    installed = {path for folder in FOLDERS for pattern in globs for path in folder.glob(pattern)}
    said = {
        path: {node.value for node in ast.walk(ast.parse(path.read_text("utf-8"))) if _is_text(node)} for path in FILES
    }
    of_nobody = [
        path.relative_to(ROOT).as_posix()
        for path in installed
        if path.parts[-3] != "recorded"
        and not any(
            {path.name, path.stem} & texts
            or (
                any(text in (path.suffix, f"*{path.suffix}") for text in texts)
                and (module.parent == path.parent or path.parent.name in texts)
            )
            for module, texts in said.items()
        )
    ]
    assert [name for name in sorted(of_nobody) if not name.endswith("py.typed")] == []  # that is for type checkers


def test_every_module_that_is_installed_is_needed_by_the_command_line_or_the_plugin() -> None:
    """What only tests and scripts need lies beside them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    started = [*project["scripts"].values(), *(v for group in project["entry-points"].values() for v in group.values())]
    open_ends = {place.removeprefix(PACKAGE).partition(":")[0] for place in started}
    open_ends |= {name for name in MODULES if name.startswith("validate.cli.")}  # a verb's is imported by its name
    needed: set[str] = set()
    while open_ends:
        needed.add(name := open_ends.pop())
        rooms = {dotted(folder) for folder in MODULES[name].parents if folder in FOLDERS}
        open_ends |= (imports(name) | rooms) - needed
    assert sorted(MODULES.keys() - needed) == []


LABS = sorted(path for path in (ROOT / "labs").glob("*/**/*.py") if "tests" not in path.relative_to(ROOT).parts)
# What the house may have at the most.  A number may only fall; one that has to rise says why in its commit.
# `loaded`: modules of ours that `validate 34b-general` imports.
BUDGET = {
    "files of the instrument": 282,
    "lines of the instrument": 58_415,
    "lines of labs": 14_144,
    "lines of scripts": 5_235,
    "lines of tests": 42_227,
}
LOADED_BUDGET = {"modules": 76, "lines": 15_012}


def lines(paths: Iterable[Path]) -> int:
    """Lines of files, blank ones and comments too."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def test_the_instrument_imports_no_lab() -> None:
    """Not in an import statement wherever it stands, nor by a name in a text."""
    assert [path.relative_to(ROOT).as_posix() for path in FILES if "blis_replay_labs" in path.read_text("utf-8")] == []


def test_the_house_keeps_its_budget() -> None:
    """Lines of code, docstrings and comments, by what they are for."""
    tests = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "labs" / "tests").rglob("*.py"), ROOT / "conftest.py"]
    size = {
        "files of the instrument": len(FILES),
        "lines of the instrument": lines(FILES),
        "lines of labs": lines(LABS),
        "lines of scripts": lines((ROOT / "scripts").glob("*.py")),
        "lines of tests": lines(tests),
    }
    assert {name: count for name, count in size.items() if count > BUDGET[name]} == {}


_LOADED = """
import sys
from blis_replay.validate.cli.main import main
sys.argv = ["blis-replay", "validate", "34b-general", "--store", sys.argv[1]]
try:
    main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
for module in list(sys.modules.values()):
    if module.__name__.startswith("blis_replay") and getattr(module, "__file__", None):
        print("module", module.__file__)
"""


@pytest.mark.slow
def test_the_main_job_loads_few_modules(tmp_path: Path) -> None:
    """Once the experiment is in the store."""
    command = [sys.executable, "-c", _LOADED, tmp_path / "store.duckdb"]
    subprocess.run(command, capture_output=True, check=True)
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loaded = [Path(line.removeprefix("module ")) for line in printed.splitlines() if line.startswith("module ")]
    assert len(loaded) > 20
    size = {"modules": len(loaded), "lines": lines(loaded)}
    assert {name: count for name, count in size.items() if count > LOADED_BUDGET[name]} == {}


# Files that may use the inside of a library, and what they use; each stands alone and has a fallback.
PRIVATE_USE = {
    "labs/board/adapters/vidur.py": "vidur._native",
    "scripts/fuzz.py": "os._exit, which is public: a child ends without what its parent has to clean up",
    "scripts/oracle_vllm.py": "vllm._version",
}
_INSIDE_NUMBA = re.compile(r"numba\.(?:core|np|cpython|typed)\b[\w.]*")


def private_use(tree: ast.AST) -> set[str]:
    """Modules and names of other people that begin with an underscore, or lie inside Numba."""
    used: set[str] = set()
    libraries: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
            libraries |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("blis_replay"):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _INSIDE_NUMBA.fullmatch(node.value):
            used.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in libraries:
            used.add(f"{node.value.id}.{node.attr}")
    names = {name for name in used if not name.startswith(("__future__", "blis_replay"))}
    return {name for name in names if re.search(r"(?:^|\.)_(?!_)", name) or _INSIDE_NUMBA.match(name)}


def test_private_parts_of_libraries_are_used_where_it_is_said() -> None:
    """A release of a library may change them without a word."""
    paths = [*FILES, *LABS, *(ROOT / "scripts").glob("*.py")]
    using = {path.relative_to(ROOT).as_posix(): private_use(ast.parse(path.read_text("utf-8"))) for path in paths}
    assert {path: sorted(names) for path, names in using.items() if names and path not in PRIVATE_USE} == {}
    assert [path for path in PRIVATE_USE if not using.get(path)] == [], "said in vain"
    found = private_use(ast.parse("import csv\nfrom numba.core import types\ncsv._reader\nimport os\nos.path"))
    assert found == {"csv._reader", "numba.core.types"}


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100


def test_the_spine_is_a_short_walk() -> None:
    """The main job as ARCHITECTURE.md lists it: at most ten files, each imported by one above it."""
    section = (ROOT / "ARCHITECTURE.md").read_text("utf-8").split("## The spine")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", section, re.MULTILINE)
    walk = [dotted(ROOT / file) for file, _sentence in rows]
    assert 1 < len(walk) <= 10
    assert sum(len(MODULES[name].read_text("utf-8").splitlines()) for name in walk) <= 2500
    assert [name for i, name in enumerate(walk) if i and not any(name in imports(above) for above in walk[:i])] == []
    assert all(sentence.endswith(".") for _file, sentence in rows)
