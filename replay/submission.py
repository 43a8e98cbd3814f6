"""A submission: the answers of a command to one experiment or several, kept in a zip file.

Each experiment is a folder of the ``cmd:`` contract (``replay/command.py``): ``requests.csv`` as it was given,
``results.csv`` and ``simulator.json``.  Answers are found by their requests, so names of folders do not matter, and
answers to other requests are not taken.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blis_replay.base.errors import printable
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.replay.command import HEADER, REQUESTS, RESULTS, CommandError, CommandSimulator

PREFIX = "zip:"
_MOST_MEMBERS = 10_000
_MOST_BYTES = 1 << 30  # of one member, unpacked


@dataclass(frozen=True)
class Submission(CommandSimulator):
    """A simulator whose answers were kept; ``words`` has the path of the file."""

    def _run(self, place: Path) -> int:
        """Put the answers to the requests in ``place`` beside them; no memory was used."""
        asked = (place / REQUESTS).read_bytes()
        try:
            with zipfile.ZipFile(self.words[0]) as archive:
                folders = [*_folders_of(archive, asked)]
                if len(folders) > 1:
                    raise CommandError(f"{self.name} answers these requests in {len(folders)} folders; keep one")
                for name in (RESULTS, HEADER):
                    with archive.open(folders[0] + name) as member:
                        (place / name).write_bytes(member.read(_MOST_BYTES))
        except IndexError:
            raise CommandError(
                f"{self.name} has no answers to these requests; keep {REQUESTS} as it was given"
            ) from None
        except KeyError:
            raise CommandError(f"{self.name}: no {RESULTS} with {HEADER} beside the requests; keep all three") from None
        except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError, ValueError):
            raise CommandError(f"{self.name}: cannot be read; zip the folders of a command") from None
        return 0


def submission_simulator(text: str, release: CoefficientRelease) -> Submission:
    """The simulator of ``zip:FILE``; raises ``CommandError`` if the file is missing."""
    path = Path(text.removeprefix(PREFIX))
    if not path.is_file():
        raise CommandError(f"{printable(text)}: no such file; give zip:FILE")
    return Submission((str(path.absolute()),), release, label=PREFIX + printable(path.name))


def _folders_of(archive: zipfile.ZipFile, asked: bytes) -> Iterator[str]:
    """The folders of the archive with exactly these requests."""
    for member in archive.infolist()[:_MOST_MEMBERS]:
        if member.filename.rpartition("/")[2] == REQUESTS and member.file_size == len(asked):
            with archive.open(member) as file:
                if file.read(len(asked) + 1) == asked:
                    yield member.filename.removesuffix(REQUESTS)
