"""Run what stands on a page, and say what should stand there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory

from docs_fences import Command, Part, commands_of, parts_of, text_of
from docs_generated import GENERATED
from docs_options import refuse_unknown_options
from docs_outputs import refreshed
from docs_pages import ROOT, Page

DATA = Path(os.environ.get("BLIS_REPLAY_DATA", ROOT.parent / "shared" / "data"))
HAS_RECORDINGS = (DATA / "NOTES.md").is_file()
# Languages of blocks that are shown and not run.
_SHOWN = {"text", "yaml", "json", "toml", "sh", "diff", "html"}
_LIMIT_S = 600


class PageError(Exception):
    """A page that cannot be run: where, and what is wrong."""


def current_text(page: Page) -> str:
    """The page as it should be: every command run in order in a folder of the page's own.

    Blocks that need the published recordings stay as they are where those are not.  Raises
    ``PageError`` for a block of a kind that is not known, and for a program that fails.
    """
    try:
        parts = parts_of(page.text)
        with TemporaryDirectory() as folder:
            (Path(folder) / "scripts").symlink_to(ROOT / "scripts")
            return text_of(_Runner(page, Path(folder)).run(parts))
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise PageError(f"{page.source.name}: {error}") from None


def refresh(page: Page, *, update: bool) -> str:
    """Run a page; what is wrong with it, as text, and "" if nothing is.  ``update``: write what should stand there."""
    before = page.text
    try:
        now = current_text(page)
    except PageError as error:
        return str(error)
    if update and now != before:
        page.source.write_text(now, "utf-8")
    changes = (
        [] if update else unified_diff(before.splitlines(), now.splitlines(), page.source.name, "printed", lineterm="")
    )
    return "\n".join(changes)


@dataclass(frozen=True)
class _Runner:
    page: Page
    folder: Path

    def run(self, parts: list[Part]) -> list[Part]:
        done: list[Part] = []
        for i, part in enumerate(parts):
            if _is_program(part):
                printed = self._program(part)
                made = [] if _is_output(parts, i + 2) or not printed else [_BLANK, _output_block(printed)]
                done += [part, *made]
            elif _is_output(parts, i):
                done.append(part.with_body(refreshed(part.body, printed)))
            else:
                done.append(self._current(part))
        return done

    def _current(self, part: Part) -> Part:
        if part.kind == "region":
            if part.language not in GENERATED:
                raise ValueError(f"line {part.line}: nothing generates {part.language!r}")
            return part.with_body(GENERATED[part.language]())
        if part.kind == "prose" or part.language == "sh":
            refuse_unknown_options(part)
            return part
        if part.language == "console":
            return part if self._skipped(part) else part.with_body(self._console(part))
        if part.language not in {*_SHOWN, "python"}:
            raise ValueError(f"line {part.line}: ```{part.language} is no kind of block; see docs/documentation.md")
        if part.words:
            (self.folder / part.words[0]).write_text("\n".join([*part.body, ""]), "utf-8")
        return part

    def _skipped(self, part: Part) -> bool:
        return "recordings" in part.words and not HAS_RECORDINGS

    def _console(self, part: Part) -> list[str]:
        lines = [line for command in commands_of(part) for line in [*command.written, *self._output(command)]]
        never = (str(self.folder), str(Path.home() / ".cache"), "Traceback (most recent call last)")
        unfit = [line for line in lines if any(text in line for text in never)]
        if unfit:
            raise ValueError(f"line {part.line}: a traceback, or a path of this machine; put ... there: {unfit[0]}")
        return lines

    def _output(self, command: Command) -> list[str]:
        """What should stand below a command; errors come where they come, an exit code other than 0 last."""
        ended = self._shell(["bash", "-c", command.shell])
        code = [f"# exit code {ended.returncode}"] if ended.returncode else []
        return refreshed(command.output, [*_lines(ended.stdout), *code])

    def _program(self, part: Part) -> list[str]:
        ended = self._shell([sys.executable, "-c", "\n".join(part.body)])
        if ended.returncode:
            raise ValueError(f"line {part.line}: the program fails:\n{ended.stdout}")
        return _lines(ended.stdout)

    def _shell(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )


_BLANK = Part("prose", 0, ("",))


def _is_program(part: Part) -> bool:
    return part.kind == "fence" and part.language == "python" and not part.words


def _output_block(printed: list[str]) -> Part:
    return Part("fence", 0, tuple(printed), "text")


def _is_output(parts: list[Part], at: int) -> bool:
    """Whether this is the text block right after a program."""
    if not 2 <= at < len(parts):
        return False
    program, between, part = parts[at - 2 : at + 1]
    return _is_program(program) and between.body == ("",) and (part.kind, part.language) == ("fence", "text")


def _lines(printed: str) -> list[str]:
    return [line.rstrip() for line in printed.rstrip("\n").split("\n")] if printed.strip() else []


def _environment() -> dict[str, str]:
    """A terminal of 80 columns, and nothing of the user's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLIS_REPLAY_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "COLUMNS": "80", "LC_ALL": "C.UTF-8", "BLIS_REPLAY_DATA": str(DATA)}
