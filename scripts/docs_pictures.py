"""The pictures of the documentation: screenshots of the report, ``python scripts/docs_pictures.py``.

They need Chromium (Debian's package; ``CHROMIUM`` names another), and are looked at before they are committed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from docs_pages import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
_WIDTH, _HEIGHT, _BELOW = 1100, 900, 12  # px


def main() -> None:
    """The report of one experiment without asynchronous scheduling, in light and in dark."""
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        command = "blis-replay report 34b-general --replay scheduling=synchronous --out report.html"
        subprocess.run(command.split(), cwd=folder, check=True)
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            _shoot(browser, Path(folder) / "report.html", scheme, ROOT / "docs" / f"report-{scheme}.png")
        browser.close()


def _shoot(browser: Browser, page: Path, scheme: Literal["light", "dark"], picture: Path) -> None:
    """The header of the first experiment, its cause and where the error comes from."""
    shown = browser.new_page(color_scheme=scheme, viewport={"width": _WIDTH, "height": _HEIGHT})
    shown.goto(page.as_uri())
    top = shown.locator("section.experiment").bounding_box()["y"]
    beside = shown.locator(".beside").first.bounding_box()
    area = {"x": 0, "y": top, "width": _WIDTH, "height": beside["y"] + beside["height"] + _BELOW - top}
    shown.screenshot(path=picture, clip=area, full_page=True)
    shown.close()


if __name__ == "__main__":
    main()
