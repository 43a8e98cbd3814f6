"""Compiled code: kept in a folder per package, and made afresh where there is none to be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MODULE = """
from pathlib import Path
from blis_replay.compiled.cache import decorators

entry, compiled = decorators(Path(__file__).parent)

@entry
def twice(x):
    return 2 * x
"""


def run(folder: Path, code: str, cache: Path) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    arguments = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"]
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def package(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "code.py").write_text(MODULE)


def kept(cache: Path) -> set[str]:
    return {path.parent.relative_to(cache).parts[1] for path in cache.rglob("*.nbc")}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    package(tmp_path, "one")
    (tmp_path / "file").write_text("")
    assert run(tmp_path, "from one.code import twice; print(twice(21))", tmp_path / "file") == "42\n"


def test_each_package_has_its_own_folder_whatever_was_imported_between(tmp_path: Path) -> None:
    package(tmp_path / "both", "one")
    package(tmp_path / "both", "two")
    (tmp_path / "both" / "two" / "more.py").write_text("MORE = 1\n")  # another content, so another hash
    code = "from one.code import twice; import two.code; twice(1); two.code.twice(1)"
    run(tmp_path / "both", code, tmp_path / "cache")
    assert len(kept(tmp_path / "cache")) == 2


def test_a_change_of_any_source_of_a_package_makes_another_folder(tmp_path: Path) -> None:
    """A function is cached with what it calls in it, and those can stand in other files."""
    package(tmp_path, "one")
    code = "from one.code import twice; twice(1)"
    run(tmp_path, code, tmp_path / "cache")
    run(tmp_path, code, tmp_path / "cache")
    assert len(kept(tmp_path / "cache")) == 1
    (tmp_path / "one" / "called.py").write_text("FACTOR = 2\n")
    run(tmp_path, code, tmp_path / "cache")
    assert len(kept(tmp_path / "cache")) == 2
