"""What axe finds on pages in a real browser: labels, contrasts, landmarks, what a keyboard reaches.

axe is the engine that comes with ``axe-playwright-python``; no page loads anything for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium")
# Each colour scheme once, and each width: what depends on both at once is nothing that axe looks at.
_VIEWS = (("light", 1440), ("dark", 390))
_RUN = """async () => (await axe.run({ resultTypes: ["violations"] })).violations.map(
    found => `${found.id} (${found.impact}), ${found.nodes.length} times, the first: ${found.nodes[0].html}`)"""


def violations(page: Page) -> list[str]:
    """What is wrong with the page that is open, a line per rule with its first element."""
    page.evaluate(AXE_SCRIPT)
    found: list[str] = page.evaluate(_RUN)
    return [line[:300] for line in found]


def of_files(files: list[Path]) -> list[str]:
    """What is wrong with these files in any view, a line each; the views side by side."""
    with ThreadPoolExecutor(len(_VIEWS)) as pool:
        return [line for lines in pool.map(lambda view: list(_of_view(files, *view)), _VIEWS) for line in lines]


def _of_view(files: list[Path], scheme: str, width: int) -> Iterator[str]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        for file in files:
            page.goto(file.as_uri())
            yield from (f"{file.name}, {scheme}, {width} px: axe: {line}" for line in violations(page))
        browser.close()
