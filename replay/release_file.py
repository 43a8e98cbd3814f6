"""Coefficient releases by name or by file, and from the artifacts of others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from blis_replay.base.errors import ReleaseError, UnknownNameError
from blis_replay.blis.releases.release import (
    CoefficientRelease,
    bundled_releases,
    parse_release,
)

# A release, or a policy, is a page of text; a larger file is something else.
_LARGEST_BYTES = 1_000_000


def load_release(name_or_path: str) -> CoefficientRelease:
    """A release that ships with the package, by name, or another, by path.

    Raises ``UnknownNameError`` if neither exists, ``ReleaseError`` if the file cannot be read as a release.
    """
    if not name_or_path:
        raise UnknownNameError("the name of the coefficients is empty; name a release that ships, or a file")
    bundled = bundled_releases()
    if name_or_path in bundled:
        return _parsed(bundled[name_or_path], name_or_path)
    path = Path(name_or_path)
    if not path.exists():
        raise UnknownNameError(f"no release or file is called {name_or_path}; releases that ship: {', '.join(bundled)}")
    return parse_release(page_of_text(path, "coefficients"), str(path))


# Those that ship are asked for once an experiment; to read one takes as long as a replay.
_parsed = cache(parse_release)


def page_of_text(path: Path, what: str, error: type[Exception] = ReleaseError) -> str:
    """The text of a file that holds ``what``; raises ``error`` if it cannot be read, is not text, or is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)  # devices and pipes have no size
        if len(content) > _LARGEST_BYTES:
            raise error(f"{path}: too large for {what}; name another file")
        return content.decode("utf-8")
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror}); name a readable file") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text; name a file of {what}") from None
