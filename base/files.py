"""Files that appear whole: written beside their place, then renamed, so that whatever fails leaves the old one."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path | str, text: str) -> int:
    """Write a file of UTF-8 text, or nothing at all; its bytes.  Raises as ``whole_file`` does."""
    content = text.encode("utf-8")
    with whole_file(path) as file:
        file.write(content)
    return len(content)


@contextmanager
def whole_file(path: Path | str) -> Iterator[BinaryIO]:
    """A file to write to; on leaving it has the name ``path``, and on an error ``path`` is what it was before.

    A link stays one: what it points to is replaced.  A pipe or a device is written to as it is.  Raises ``OSError``
    that names ``path`` and says what became of it.
    """
    place = Path(os.path.realpath(path))
    with naming(path):
        before = _mode(place)
        if before is not None and not stat.S_ISREG(before):
            with place.open("wb") as file:
                yield file
            return
        handle, name = tempfile.mkstemp(prefix=f".{place.name[:100]}-", suffix=".part", dir=place.parent)
        scratch = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                scratch.chmod(stat.S_IMODE(before) if before is not None else 0o666 & ~_umask())
                yield file
                file.flush()
                os.fsync(handle)
            scratch.replace(place)
        except BaseException:
            with suppress(OSError):
                scratch.unlink()
            raise


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """What the system says while ``path`` is made, as ``OSError`` of that name: a full disk names no file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        stays = "; the file that was there is as it was" if Path(path).is_file() else ""
        # Of a library in another language: the system's text, and its number behind that.
        said = re.sub(r" \(os error \d+\)", "", str(error.strerror or error))
        raise OSError(error.errno, f"{said}{stays}", str(path)) from error


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A scratch folder; on leaving it what was written there is in ``folder``, and on an error nothing of it.

    A ``folder`` that was not there before is gone again then.  Raises ``OSError`` that names ``folder``.
    """
    is_new = not folder.exists()
    try:
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # On the same file system, so that the last step is a renaming.
            with tempfile.TemporaryDirectory(dir=folder, prefix=".blis-replay-") as scratch:
                yield Path(scratch)
                for written in sorted(Path(scratch).iterdir()):
                    written.replace(folder / written.name)
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def _mode(place: Path) -> int | None:
    try:
        return place.stat().st_mode
    except FileNotFoundError:
        return None


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now
