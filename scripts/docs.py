"""Build the documentation, with every output on it produced by the command above it.

    python scripts/docs.py              # run all pages, fail where one is not current, build the site
    python scripts/docs.py --update     # write what the commands print into the pages first
    python scripts/docs.py --update docs/fit.md
    python scripts/docs.py --build-only

CONTRIBUTING.md describes the form of the pages.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import docs_browser
from docs_generated import GENERATED, refuse_unknown_options
from docs_pages import NAVIGATION, ROOT, Command, Page, Part, all_pages, commands_of, parts_of, refreshed, text_of
from docs_site import build_site

DATA = Path(os.environ.get("BLIS_REPLAY_DATA", ROOT.parent / "shared" / "data"))
HAS_RECORDINGS = (DATA / "NOTES.md").is_file()
# Languages of blocks that are shown and not run.
_SHOWN = {"text", "yaml", "json", "toml", "sh", "diff", "html"}
_LIMIT_S = 600
_SITE = ROOT / "build" / "site"


def main() -> int:
    """0: all current and built; 1: a page is not current, a program fails, a link is broken, or axe complains."""
    given = _arguments()
    problems: list[str] = []
    if not given.build_only:
        chosen = [page for page in all_pages() if not given.pages or page.source in given.pages]
        problems += _run(chosen, given.update)
        if not HAS_RECORDINGS:
            print("not run: blocks that need the published recordings; BLIS_REPLAY_DATA names their folder")
    problems += build_site(_SITE)
    print(f"{sum(map(len, NAVIGATION.values()))} pages in {_SITE.relative_to(ROOT)}")
    if not (given.build_only or given.pages):
        problems += _axe(sorted(_SITE.glob("*.html")))
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems and not given.update:
        print("if what is printed is right: python scripts/docs.py --update", file=sys.stderr)
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=lambda name: Path(name).resolve(), help="run these pages only")
    parser.add_argument("--update", action="store_true", help="write what the commands print into the pages")
    parser.add_argument("--build-only", action="store_true", help="run nothing")
    given = parser.parse_args()
    for page in given.pages:
        if page not in {known.source for known in all_pages()}:
            parser.error(f"{page} is no page of the documentation; docs/NAME.md is one")
    return given


def _run(pages: list[Page], update: bool) -> list[str]:
    """Run pages side by side, the longest first; the problems, as text."""
    longest = sorted(pages, key=_length, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [problem for problem in pool.map(lambda page: _one(page, update), longest) if problem]


def _length(page: Page) -> int:
    """How long a page takes, roughly: a block on the published recordings counts for ten others."""
    return sum(10 if "recordings" in part.words else 1 for part in parts_of(page.text) if part.language == "console")


def _one(page: Page, update: bool) -> str:
    start = perf_counter()
    problem = refresh(page, update=update)
    print(f"{page.source.name}: {perf_counter() - start:.1f} s{', not current' if problem else ''}", flush=True)
    return problem


def _axe(files: list[Path]) -> list[str]:
    """What axe finds on the site, as text; nothing where there is no browser, which is said."""
    if docs_browser.CHROMIUM is None:
        print("not looked at by axe: there is no chromium on the path")
        return []
    start = perf_counter()
    found = docs_browser.violations_of_files(files)
    print(f"axe: {len(files)} files, {len(found)} violations, {perf_counter() - start:.1f} s")
    return found


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
    if update:
        return ""
    return "\n".join(unified_diff(before.splitlines(), now.splitlines(), page.source.name, "printed", lineterm=""))


@dataclass(frozen=True)
class _Runner:
    page: Page
    folder: Path

    def run(self, parts: list[Part]) -> list[Part]:
        done: list[Part] = []
        for i, part in enumerate(parts):
            if _is_program(part):
                printed = self._program(part)
                done.append(part)
                if printed and not _is_output(parts, i + 2):
                    done += [Part("prose", 0, ("",)), Part("fence", 0, tuple(printed), "text")]
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
            skipped = "recordings" in part.words and not HAS_RECORDINGS
            return part if skipped else part.with_body(self._console(part))
        if part.language not in {*_SHOWN, "python"}:
            raise ValueError(f"line {part.line}: ```{part.language} is no kind of block; see CONTRIBUTING.md")
        if part.words:
            (self.folder / part.words[0]).write_text("\n".join([*part.body, ""]), "utf-8")
        return part

    def _console(self, part: Part) -> list[str]:
        commands = commands_of(part)
        lines = [line for command in commands for line in [*command.written, *self._output(command, part.line)]]
        never = (str(self.folder), str(Path.home() / ".cache"), "Traceback (most recent call last)")
        unfit = [line for line in lines if any(text in line for text in never)]
        if unfit:
            raise ValueError(f"line {part.line}: a traceback, or a path of this machine; put ... there: {unfit[0]}")
        return lines

    def _output(self, command: Command, line: int) -> list[str]:
        """What should stand below a command; errors come where they come, an exit code other than 0 last.

        Raises ``ValueError`` for a failure that the page does not announce: a ``...`` would hide it.
        """
        ended = self._shell(["bash", "-c", command.shell])
        if ended.returncode and f"# exit code {ended.returncode}" not in command.output:
            said = "\n".join(_lines(ended.stdout)[-3:])
            raise ValueError(
                f"line {line}: `{command.shell}` ends with exit code {ended.returncode}; if that is right, write "
                f"`# exit code {ended.returncode}` below its output, which ends so:\n{said}"
            )
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


def _is_program(part: Part) -> bool:
    return part.kind == "fence" and part.language == "python" and not part.words


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
    # What `doctor` prints is that of a machine on which nothing is set.
    ours = ("BLIS_REPLAY_", "XDG_CACHE_HOME", "NUMBA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "COLUMNS": "80", "LC_ALL": "C.UTF-8", "BLIS_REPLAY_DATA": str(DATA)}


if __name__ == "__main__":
    sys.exit(main())
