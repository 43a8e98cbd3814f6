"""Several files of a folder, all or none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blis_replay.base.files import naming


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
