"""Compiled code: kept in a folder per package, and made afresh where there is none to be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MODULE = """
from pathlib import Path
from blis_replay.base.functions import decorators

entry, compiled = decorators(Path(__file__).parent)

@entry
def twice(x):
    return 2 * x
"""


def run(folder: Path, code: str, cache: Path, **settings: str) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **settings}
    arguments = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"]
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def package(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "code.py").write_text(MODULE)


TWICE = "from one.code import twice; print(twice(21))"
COUNTED = (
    "from numba.core.event import install_recorder\nfrom one.code import twice\n"
    "with install_recorder('numba:compile') as compiling:\n    print(twice(21), len(compiling.buffer) > 0)"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package and of the cache that it filled, made once: work on copies of the cache."""
    folder = tmp_path_factory.mktemp("compiled")
    package(folder, "one")
    assert run(folder, COUNTED, folder / "cache") == "42 True\n"
    return folder


@pytest.fixture
def cache(compiled: Path, tmp_path: Path) -> Path:
    """A cache in which the code of ``compiled`` is kept."""
    return shutil.copytree(compiled / "cache", tmp_path / "cache")


def kept(cache: Path) -> set[str]:
    return {path.relative_to(cache).parts[1] for path in cache.rglob("*.nbc")}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    package(tmp_path, "one")
    (tmp_path / "file").write_text("")
    assert run(tmp_path, TWICE, tmp_path / "file") == "42\n"


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
    run(tmp_path, TWICE, tmp_path / "cache")
    assert len(kept(tmp_path / "cache")) == 1
    (tmp_path / "one" / "called.py").write_text("FACTOR = 2\n")
    run(tmp_path, TWICE, tmp_path / "cache")
    assert len(kept(tmp_path / "cache")) == 2


def test_where_others_keep_compiled_code_is_as_it_was(tmp_path: Path) -> None:
    package(tmp_path, "one")
    code = "import numba; before = numba.config.CACHE_DIR; import one.code; print(numba.config.CACHE_DIR == before)"
    assert run(tmp_path, code, tmp_path / "cache") == "True\n"


def test_kept_code_is_not_compiled_again(compiled: Path, cache: Path) -> None:
    assert run(compiled, COUNTED, cache) == "42 False\n"
    assert len(kept(cache)) == 1


def test_two_programs_may_fill_one_cache(tmp_path: Path) -> None:
    package(tmp_path, "one")
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda _: run(tmp_path, TWICE, tmp_path / "cache"), range(2))] == ["42\n"] * 2


@pytest.mark.parametrize(("pattern", "left"), [("*.nbi", 0), ("*.nbi", 20), ("*.nbc", 0), ("*.nbc", 20)])
def test_files_that_were_cut_off_are_compiled_afresh(compiled: Path, cache: Path, pattern: str, left: int) -> None:
    """As by a machine that lost its power."""
    (path,) = cache.rglob(pattern)
    os.truncate(path, left)
    assert run(compiled, TWICE, cache) == "42\n"
    assert path.stat().st_size > left


def test_a_full_disk_keeps_nothing(tmp_path: Path) -> None:
    package(tmp_path, "one")
    code = (
        "import errno, os\nfrom one.code import twice\n"
        "def full(*_given): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "os.replace = full\nprint(twice(21))"
    )
    assert run(tmp_path, code, tmp_path / "cache") == "42\n"
    assert kept(tmp_path / "cache") == set()


def test_a_folder_that_others_can_write_is_not_used(compiled: Path, cache: Path) -> None:
    """What lies there would be run."""
    (path,) = cache.rglob("*.nbc")
    path.write_bytes(b"planted")
    (folder,) = (cache / "blis-replay").iterdir()
    folder.chmod(0o777)
    assert run(compiled, TWICE, cache) == "42\n"
    assert path.read_bytes() == b"planted"


PARTS = """
from pathlib import Path
from typing import Annotated, Any
import numpy as np
from blis_replay.base.arrays import Int32s, Int64s
from blis_replay.base.functions import decorators
from blis_replay.base.tables import Tables, column, reader, stretch, table_of, word_at

entry, compiled = decorators(Path(__file__).parent)

PAIR = np.dtype((np.record, [("left", np.int64), ("right", np.int16)]))

class Both(Tables):
    total: Annotated[Any, PAIR, 0]
    pairs: Annotated[Any, PAIR, 1]
    factors: Int32s
    grid: Annotated[Int64s, 2]

both_of = reader(Both)

@compiled
def product(both, i):
    return both.pairs[i].left * both.factors[i]

@compiled
def add(lefts, i, to):
    lefts[i] += to

@entry
def work(both, weights):
    both = both_of(both)
    for i in range(len(both.pairs)):
        add(column(both.pairs, "left"), i, 1)
        both.grid[1, i] = both.grid[0, i] + both.grid.shape[1]
    both.pairs[0] = both.pairs[1]
    both.pairs[0].left -= 1
    both.total.right = both.factors[1]
    weights = table_of(weights)
    both.grid[1][0] += len(stretch(weights, 1, 3))
    return product(both, 0) + product(both, 1), weights[2] / 2, word_at(both.factors, 4) >> 32

pairs = np.array([(1, 2), (2, 3)], PAIR)
both = Both(total=pairs[:1].copy(), pairs=pairs, factors=np.array([10, 100, 7], np.int32), grid=np.zeros((2, 2), int))
"""


@pytest.mark.parametrize("setting", ["0", "1"])
def test_parts_are_compiled_as_one_with_what_python_calls(tmp_path: Path, setting: str) -> None:
    """Of three functions one is kept: the others are within it.  As plain Python nothing is, and all is the same."""
    package(tmp_path, "one")
    (tmp_path / "one" / "code.py").write_text(PARTS)
    code = (
        "from one.code import *\nleft, half, word = work(both, np.array([1.0, 2.0, 3.0]))\n"
        'print(left, half, int(word), both.pairs.tolist(), both.grid.tolist(), both.total["right"])'
    )
    for _first_and_kept in range(2 - int(setting)):
        answer = run(tmp_path, code, tmp_path / "cache", NUMBA_DISABLE_JIT=setting)
        assert answer == "320 1.5 7 [(2, 3), (3, 3)] [[0, 0], [4, 2]] [100]\n"
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 1 - int(setting)


def test_tables_are_those_that_were_declared(tmp_path: Path) -> None:
    """Compiled code would read other memory."""
    package(tmp_path, "one")
    (tmp_path / "one" / "code.py").write_text(PARTS)
    code = """
import copy, pickle
from one.code import *
for name, other in (("factors", np.zeros(3)), ("grid", np.zeros((2, 2), int).T), ("grid", np.zeros(2, int))):
    try:
        both.replaced(**{name: other})
    except TypeError as error:
        print(error)
for twin in (copy.deepcopy(both), pickle.loads(pickle.dumps(both)), both.copy()):
    twin.pairs[0] = (5, 5)
    print(work(twin, np.arange(3.0))[0], both.pairs[0].left, sorted(twin.words) == sorted(both.words))
"""
    assert run(tmp_path, code, tmp_path / "cache").splitlines() == [
        "Both.factors: float64 of 1 axes",
        "Both.grid: int64 of 2 axes",
        "Both.grid: int64 of 1 axes",
        *["320 1 False"] * 3,
    ]


def test_numbas_file_of_a_stranger_names_no_code(tmp_path: Path) -> None:
    """Numba reads it from the working directory; before, it could name a class that is loaded, and stop compiling."""
    (tmp_path / ".numba_config.yaml").write_text("cache_locator_classes: evil.Locator\ndisable_jit: 1\n", "utf-8")
    code = f"import os; os.chdir({str(tmp_path)!r}); import blis_replay.base.functions, numba\n"
    code += "print([numba.config.CACHE_LOCATOR_CLASSES, numba.config.DISABLE_JIT])"
    assert run(tmp_path, code, tmp_path / "cache") == "['', 0]\n"
