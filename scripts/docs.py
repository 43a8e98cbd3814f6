"""Build the documentation, with every output on it produced by the command above it.

    python scripts/docs.py              # run all pages, fail where one is not current, build the site
    python scripts/docs.py --update     # write what the commands print into the pages first
    python scripts/docs.py --update docs/gating.md
    python scripts/docs.py --build-only

The form of the pages is described in docs/documentation.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter

from docs_fences import parts_of
from docs_html import build_site
from docs_pages import ROOT, Page, all_pages
from docs_rooms import rooms_svg
from docs_run import HAS_RECORDINGS, refresh
from docs_shots import shot

_SITE = ROOT / "build" / "site"
# Pictures that are drawn from the code.
_DRAWN: dict[str, Callable[[], str]] = {
    "docs/architecture.svg": rooms_svg,
    "docs/terminal-80.svg": partial(shot, 80),
    "docs/terminal-160.svg": partial(shot, 160),
}


def main() -> int:
    """0: all current and built; 1: a page is not current, a program fails, or a link leads to nothing."""
    given = _arguments()
    problems: list[str] = []
    if not given.build_only:
        chosen = [page for page in all_pages() if not given.pages or page.source in given.pages]
        problems += [*([] if given.pages else _drawn(given.update)), *_run(chosen, given.update)]
        if not HAS_RECORDINGS:
            print("not run: blocks that need the published recordings; BLIS_REPLAY_DATA names their folder")
    problems += build_site(_SITE)
    print(f"{len(all_pages())} pages in {_SITE.relative_to(ROOT)}")
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
    longest = sorted(pages, key=lambda page: -sum(part.language == "console" for part in parts_of(page.text)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [problem for problem in pool.map(lambda page: _one(page, update), longest) if problem]


def _one(page: Page, update: bool) -> str:
    start = perf_counter()
    problem = refresh(page, update=update)
    print(f"{page.source.name}: {perf_counter() - start:.1f} s{', not current' if problem else ''}", flush=True)
    return problem


def _drawn(update: bool) -> list[str]:
    drawn = {name: draw() for name, draw in _DRAWN.items()}
    stale = [name for name, picture in drawn.items() if not _is(ROOT / name, picture)]
    if update:
        for name in stale:
            (ROOT / name).write_text(drawn[name], "utf-8")
        return []
    return [f"{name} is not what the code draws now" for name in stale]


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
