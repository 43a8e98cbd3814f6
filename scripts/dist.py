"""Build the wheel, the sdist and the wheel of the labs into dist/, and try each as a user would.

    python scripts/dist.py            # build and try; some minutes, and 1 GB of temporary files
    python scripts/dist.py --build    # build only

The wheel is built from the unpacked sdist, so both have the same files.  Each is installed into an empty environment
with the locked versions; then commands run from an empty folder outside the repository.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

_ROOT = Path(__file__).parents[1]
_DIST = _ROOT / "dist"
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def main() -> int:
    """0: built, and each of them works; the first command that fails ends it with 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", action="store_true", help="build only")
    given = parser.parse_args()
    try:
        wheel, sdist, labs = _built()
        for file in (wheel, sdist, labs):
            print(f"{file.relative_to(_ROOT)}: {file.stat().st_size / 1e6:.1f} MB")
        if not given.build:
            _try_without_extras(sdist)
            _try_with_all(wheel, labs)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))}\nended with {error.returncode}\n{error.stdout}", file=sys.stderr)
        return 1
    return 0


def _built() -> tuple[Path, Path, Path]:
    """The wheel, the sdist, and the wheel of the labs."""
    with TemporaryDirectory() as folder:
        python = _environment(Path(folder) / "build")
        _run(python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", _ROOT / "requirements-build.lock")
        sdist = _DIST / _run(python, "-c", _BUILD, "build_sdist", _DIST, cwd=_ROOT).split()[-1]
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = Path(folder) / sdist.name.removesuffix(".tar.gz")
        wheel = _DIST / _run(python, "-c", _BUILD, "build_wheel", _DIST, cwd=source).split()[-1]
        # Of a copy: what is built beside the sources would be read as sources by tests.
        copy = shutil.copytree(
            _ROOT / "labs", Path(folder) / "labs", ignore=shutil.ignore_patterns("build", "*.egg-info")
        )
        labs = _DIST / _run(python, "-c", _BUILD, "build_wheel", _DIST, cwd=copy).split()[-1]
    return wheel, sdist, labs


def _try_without_extras(sdist: Path) -> None:
    """The sdist alone: a verdict, and one line for verbs that need an extra or the labs."""
    with TemporaryDirectory() as folder:
        blis_replay = _installed(Path(folder), str(sdist))
        _expect("FITS  34b-general", _run(blis_replay, "validate", "34b-general", cwd=Path(folder)))
        for arguments, install in (
            (("report", "34b-general", "--out", "report.html"), "pip install 'blis-replay[report]'"),
            (("study", "generalize"), "pip install ./labs"),
        ):
            ended = subprocess.run([blis_replay, *arguments], cwd=folder, capture_output=True, text=True)
            _expect(install, ended.stderr)


def _try_with_all(wheel: Path, labs: Path) -> None:
    with TemporaryDirectory() as folder:
        blis_replay = _installed(Path(folder), f"{wheel}[all]", str(labs))
        _expect("1 FITS", _run(blis_replay, "report", "34b-general", "--out", "report.html", cwd=Path(folder)))
        _expect("--lomo", _run(blis_replay, "study", "generalize", "--help", cwd=Path(folder)))


def _installed(folder: Path, *what: str) -> Path:
    """The command line of an empty environment with ``what`` installed, versions as locked."""
    locked = folder / "versions.txt"
    lines = (_ROOT / "requirements.lock").read_text("utf-8").splitlines()
    locked.write_text("\n".join(found[0] for line in lines if (found := re.match(r"[\w.-]+==[\w.]+", line))), "utf-8")
    python = _environment(folder / "environment")
    _run(python, "-m", "pip", "install", "--quiet", "--constraint", locked, *what)
    packages = sum(file.stat().st_size for file in (folder / "environment").rglob("*") if file.is_file())
    print(f"{', '.join(Path(one).name for one in what)} installed into an empty environment: {packages / 1e6:,.0f} MB")
    return python.with_name("blis-replay")


def _environment(folder: Path) -> Path:
    """The interpreter of a new environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def _run(*command: Path | str, cwd: Path | None = None) -> str:
    ended = subprocess.run(
        [*map(str, command)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return ended.stdout


def _expect(text: str, printed: str) -> None:
    if text not in printed:
        sys.exit(f"expected {text!r} in:\n{printed}")
    print(f"  printed {text!r}")


if __name__ == "__main__":
    sys.exit(main())
