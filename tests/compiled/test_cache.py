"""Compiled code: kept in a folder per package, and made afresh where there is none to be had."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from blis_replay.compiled.files import damaged, intact, keep

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


def _of_another(path: Path) -> None:
    """Sound, and of another function: as in a cache that was put together anew."""
    other = path.with_name("other.nbc")
    keep(other, b"i\nother code")
    other.replace(path)


def _of_another_version(path: Path) -> None:
    """Of the same function, in the folder that stands for other sources or another Numba."""
    before = path.parent.with_name("before")
    before.mkdir()
    keep(before / path.name, b"i\ncode of before")
    (before / path.name).replace(path)


PLANTED: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "a link to an endless device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "open to others": lambda path: path.chmod(0o666),
    "open to its group": lambda path: path.chmod(0o620),
    "of a terabyte": lambda path: os.truncate(path, 1 << 40),
    "of another function": _of_another,
    "of another version": _of_another_version,
    "its checksum damaged": lambda path: path.write_bytes(b"!" + path.read_bytes()[1:]),
    "nothing but a checksum": lambda path: os.truncate(path, 32),
    "cut within its checksum": lambda path: os.truncate(path, 31),
    "doubled": lambda path: path.write_bytes(2 * path.read_bytes()),
    "one bit of its code": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"d"),
    "absent": Path.unlink,
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_not_what_was_kept_there_counts_as_absent(tmp_path: Path, planted: str) -> None:
    """And is replaced, but for a folder: what it was, or what it points to, is not written to."""
    folder = tmp_path / "sources-and-numba"
    folder.mkdir()
    path = folder / "one.nbc"
    keep(path, b"i\ncode")
    assert intact(path) == b"i\ncode"
    PLANTED[planted](path)
    assert intact(path) is None
    elsewhere = folder / "elsewhere"
    before = elsewhere.read_bytes() if elsewhere.exists() else b""
    keep(path, b"i\nnew code")
    assert intact(path) == (None if planted == "a folder" else b"i\nnew code")
    assert (elsewhere.read_bytes() if elsewhere.exists() else b"") == before


@pytest.mark.skipif(os.getuid() != 0, reason="only the administrator can give a file away")
def test_a_file_of_another_user_counts_as_absent(tmp_path: Path) -> None:
    keep(tmp_path / "one.nbc", b"i\ncode")
    os.chown(tmp_path / "one.nbc", 65_534, 65_534)
    assert intact(tmp_path / "one.nbc") is None
    assert damaged(tmp_path) == [tmp_path / "one.nbc"]


def test_a_full_disk_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    keep(tmp_path / "one.nbc", b"i\ncode")
    assert list(tmp_path.iterdir()) == []


def test_sound_code_of_another_function_is_not_run(tmp_path: Path) -> None:
    """With a checksum of the content alone, 3 x 21 would be the answer of twice."""
    package(tmp_path, "one")
    (tmp_path / "one" / "code.py").write_text(MODULE + "\n@entry\ndef thrice(x):\n    return 3 * x\n")
    code = "from one.code import twice, thrice; print(twice(21), thrice(21))"
    run(tmp_path, code, tmp_path / "cache")
    thrice, twice = sorted((tmp_path / "cache").rglob("*.nbc"))
    twice.write_bytes(thrice.read_bytes())
    assert damaged(tmp_path / "cache") == [twice]
    assert run(tmp_path, code, tmp_path / "cache") == "42 63\n"


def test_two_programs_may_fill_one_cache(tmp_path: Path) -> None:
    package(tmp_path, "one")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom one.code import twice; print(twice(21))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    assert [program.communicate()[0] for program in both] == ["42\n"] * 2
    assert damaged(tmp_path / "cache") == []


def test_damaged_files_are_compiled_afresh_and_told(tmp_path: Path) -> None:
    """One emptied, one cut and one with a flipped bit, which unchecked ends in a segmentation fault."""
    names = ("one", "two", "three")
    for name in names:
        package(tmp_path, name)
    code = "; ".join(f"from {name}.code import twice as {name}; print({name}(21))" for name in names)
    run(tmp_path, code, tmp_path / "cache")
    emptied, cut, flipped = paths = sorted((tmp_path / "cache").rglob("*.nbc"))
    whole = bytearray(flipped.read_bytes())
    whole[len(whole) // 2] ^= 1
    for path, content in ((emptied, b""), (cut, cut.read_bytes()[:-100]), (flipped, whole)):
        path.write_bytes(content)
    assert sorted(damaged(tmp_path / "cache")) == paths
    assert run(tmp_path, code, tmp_path / "cache") == "42\n" * 3
    assert damaged(tmp_path / "cache") == []


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    """What lies there would be run: here bytes that are no machine code, with the checksum of such."""
    package(tmp_path, "one")
    code = "from one.code import twice; print(twice(21))"
    run(tmp_path, code, tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("*.nbc")
    content = b"i\nno machine code"
    place = f"{path.parent.name}/{path.name}\n".encode()
    path.write_bytes(hashlib.sha256(place + content).digest() + content)
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
