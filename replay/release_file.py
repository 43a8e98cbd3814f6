"""Coefficient releases by name or by file."""

from __future__ import annotations

from pathlib import Path

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.release import CoefficientRelease, bundled_releases, parse_release
from blis_replay.replay.errors import UnknownNameError

# A release is a page of text; a larger file is something else.
_LARGEST_BYTES = 1_000_000


def load_release(name_or_path: str) -> CoefficientRelease:
    """A release that ships with the package, by name, or one's own, by path.

    Raises ``UnknownNameError`` if there is neither, ``ReleaseError`` if the file is no sound
    release.
    """
    bundled = bundled_releases()
    if name_or_path in bundled:
        return parse_release(bundled[name_or_path], name_or_path)
    path = Path(name_or_path)
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ReleaseError(f"{path}: too large for a coefficient release; name another file")
        return parse_release(path.read_text("utf-8"), str(path))
    except FileNotFoundError:
        raise UnknownNameError(
            f"no release or file is called {name_or_path}; releases that ship: {', '.join(bundled)}"
        ) from None
    except OSError as error:
        raise ReleaseError(f"{path}: cannot be read ({error.strerror}); name a readable file") from None
    except UnicodeDecodeError:
        raise ReleaseError(f"{path}: not UTF-8 text; name a coefficient release") from None
