"""Compiled code: kept in a folder per package, and made afresh where there is none to be had."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blis_replay.compiled.cache import damaged

pytestmark = pytest.mark.slow

MODULE = """
from pathlib import Path
from blis_replay.compiled.functions import decorators

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


@pytest.mark.parametrize("damage", ["emptied", "cut", "flipped"])
def test_a_damaged_file_is_compiled_afresh_and_told(tmp_path: Path, damage: str) -> None:
    """Unchecked, a flipped bit of machine code ends in a segmentation fault."""
    package(tmp_path, "one")
    code = "from one.code import twice; print(twice(21))"
    run(tmp_path, code, tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("*.nbc")
    whole = bytearray(path.read_bytes())
    if damage == "flipped":
        whole[len(whole) // 2] ^= 1
    path.write_bytes({"emptied": b"", "cut": whole[:-100], "flipped": whole}[damage])
    assert damaged(tmp_path / "cache") == [path]
    assert run(tmp_path, code, tmp_path / "cache") == "42\n"
    assert damaged(tmp_path / "cache") == []


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    """What lies there would be run: here bytes that are no machine code, with the checksum of such."""
    package(tmp_path, "one")
    code = "from one.code import twice; print(twice(21))"
    run(tmp_path, code, tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("*.nbc")
    content = b"i\nno machine code"
    path.write_bytes(hashlib.sha256(content).digest() + content)
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        check=False,
    )
    assert ended.returncode != 0
    path.parent.chmod(0o777)
    assert run(tmp_path, code, tmp_path / "cache") == "42\n"


def test_a_file_of_the_working_directory_does_not_configure_numba(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "one")
    monkeypatch.chdir(tmp_path)
    Path(".numba_config.yaml").write_text("disable_jit: 1\n")
    code = "from one.code import twice; print(twice(21)); import numba, yaml; print(numba.config.DISABLE_JIT)"
    assert run(tmp_path, code, tmp_path / "cache") == "42\n0\n"


def test_the_same_source_runs_as_plain_python(tmp_path: Path) -> None:
    """``NUMBA_DISABLE_JIT=1``, for debugging: nothing is compiled, so no function has a cache."""
    code = (
        "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'\nfrom blis_replay.blis.kernel import loop\nprint(loop.BATCH)"
    )
    assert run(tmp_path, code, tmp_path / "cache") == "0\n"


PARTS = """
from pathlib import Path
from typing import NamedTuple
import numpy as np
from blis_replay.compiled.functions import decorators
from blis_replay.compiled.functions import by_reference

entry, compiled = decorators(Path(__file__).parent)

class Both(NamedTuple):
    values: np.ndarray
    factors: np.ndarray

@compiled
def product(both, i):
    return both.values[i] * both.factors[i]

@compiled
def add(both, i, to):
    both.values[i] += to

@entry
def work(both):
    whole = by_reference(both)
    for i in range(len(whole.values)):
        add(whole, i, 1)
    return product(whole, 0) + product(whole, 1)

numbers = np.array([1, 2]), np.array([10, 100])
"""


@pytest.mark.parametrize("setting", ["0", "1"])
def test_parts_are_compiled_as_one_with_what_python_calls(tmp_path: Path, setting: str) -> None:
    """2 x 10 + 3 x 100; of three functions one is kept: the others are within it.  As plain Python nothing is."""
    package(tmp_path, "one")
    (tmp_path / "one" / "code.py").write_text(PARTS)
    code = (
        f"import os; os.environ['NUMBA_DISABLE_JIT'] = '{setting}'\nfrom one.code import *; print(work(Both(*numbers)))"
    )
    assert [run(tmp_path, code, tmp_path / "cache") for _first_and_kept in range(2)] == ["320\n"] * 2
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 1 - int(setting)


def test_kept_code_runs_without_numba(tmp_path: Path) -> None:
    """Its import takes longer than most replays; answers are a number of each kind, and arguments of other dtypes."""
    package(tmp_path, "one")
    (tmp_path / "one" / "code.py").write_text(KINDS)
    code = "import sys; from one.code import *; print(every_kind(*given), 'numba' in sys.modules)"
    answer = "((7, 2.5, True), None)"
    said = [run(tmp_path, code, tmp_path / "cache") for _first_and_kept in range(2)]
    assert said == [f"{answer} True\n", f"{answer} False\n"]


KINDS = """
from pathlib import Path
import numpy as np
from blis_replay.compiled.functions import decorators

entry, compiled = decorators(Path(__file__).parent)

@entry
def added(values, factor, is_asked):
    return values[1, 0] + values[-1, -1], 2 * factor, not is_asked

@entry
def doubled(values):
    values *= 2

given = np.array([[1, 2], [3, 4]], np.int32), 1.25, False

def every_kind(*given):
    return added(*given), doubled(given[0].T)
"""
