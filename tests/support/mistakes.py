"""Typical mistakes on the command line: the table of tests/cli/mistakes.md, which tests hold the messages against.

A row is a command, its exit code and the one line that it prints.  Commands are written by hand;
``python tests/support/mistakes.py`` renews codes and messages.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from blis_replay.ingest.store import open_store
from blis_replay.validate.cli.main import main

_PAGE = Path(__file__).parents[1] / "cli" / "mistakes.md"
# Stands for the folder in which a command runs.
FOLDER = "/FOLDER"
_ROW = re.compile(r"\| `(blis-replay .+?)` \| (\d) \| `` (.*) `` \|")


@dataclass(frozen=True)
class Mistake:
    """A command as it is typed, its exit code, and what it prints on standard error."""

    command: str
    code: int
    message: str

    @property
    def arguments(self) -> list[str]:
        """What follows the name of the program."""
        return shlex.split(self.command)[1:]


def mistakes() -> list[Mistake]:
    """The rows of the page."""
    rows = _ROW.findall(_PAGE.read_text("utf-8").replace("\\|", "\0"))
    return [Mistake(a.replace("\0", "|"), int(code), b.replace("\0", "|")) for a, code, b in rows]


def set_up(folder: Path) -> None:
    """What the commands find in their folder: files that are damaged, and places that are taken."""
    (folder / "folder").mkdir()
    (folder / "there").mkdir()
    (folder / "another.duckdb").write_bytes(bytes(8) + b"DUCK" + bytes(100))
    (folder / "there" / "summary.json").write_text("{}", "utf-8")
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "notes.json").write_text('{"note": 1}', "utf-8")
    (folder / "broken.yaml").write_text("a: [", "utf-8")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "no-store.duckdb").write_text("no database", "utf-8")
    (folder / "empty.duckdb").write_text("", "utf-8")
    (folder / "bench.zip").write_bytes(b"PK\x03\x04")
    (folder / "bench.csv.xz").write_bytes(b"\xfd7zXZ\x00")
    (folder / "bench.json.gz").write_bytes(b"\x1f\x8b\x08")
    (folder / "excel.csv").write_bytes("arrival_s,prompt_tokens\n0,100\n".encode("utf-16"))
    (folder / "zero.json").write_bytes(b"")
    (folder / "newer.duckdb").write_bytes(_newer_store())
    for ending in ("csv", "json"):
        (folder / f"full.{ending}").symlink_to("/dev/full")
    columns = "arrival_s,prompt_tokens,output_tokens,ttft_ms,e2e_ms\n"
    (folder / "thousands.csv").write_text(f'{columns}0,"1,000",20,50,400\n', "utf-8")
    (folder / "decimal.csv").write_text(f'{columns}"0,5",100,20,50,400\n', "utf-8")
    (folder / "engine.yaml").write_text(
        "max_num_seqs: 8\nmax_num_batched_tokens: 64\nmax_model_len: 64\nasync_scheduling: true\n", "utf-8"
    )


@cache
def _newer_store() -> bytes:
    """The file of a store that a later version of this program wrote."""
    with TemporaryDirectory() as name:
        path = Path(name) / "store.duckdb"
        with open_store(path) as store:
            store.connection.execute("UPDATE meta SET value = value::INTEGER + 1 WHERE key = 'schema_version'")
        return path.read_bytes()


def _renew() -> None:
    """Write the rows again, with what each command prints now."""
    text = _PAGE.read_text("utf-8")
    rows = [
        f"| `{_cell(row.command)}` | {row.code} | `` {_cell(row.message)} `` |" for row in map(_printed, mistakes())
    ]
    _PAGE.write_text("\n".join([text.partition("| `")[0].rstrip(), *rows, ""]), "utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _printed(mistake: Mistake) -> Mistake:
    out, error, code = io.StringIO(), io.StringIO(), 0
    with TemporaryDirectory() as name, chdir(name), redirect_stdout(out), redirect_stderr(error):
        set_up(Path())
        with patch.object(sys, "argv", ["blis-replay", *mistake.arguments]):
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
        said = error.getvalue().replace(str(Path.cwd()), FOLDER)
    answered = out.getvalue() and "--json" not in mistake.arguments  # which says an error as JSON too
    if answered or len(said.splitlines()) != 1:
        raise ValueError(f"{mistake.command}: not one line on standard error: {out.getvalue()}{said}")
    return Mistake(mistake.command, code, said.strip().removeprefix("error: "))


if __name__ == "__main__":
    _renew()
