"""Make the screenshots of the documentation: ``python scripts/docs_pictures.py``.

Needs Chromium (Debian's package; ``CHROMIUM`` names another).  The pictures are looked at before they are committed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from docs_pages import ROOT
from playwright.sync_api import Browser, sync_playwright

_CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
_WIDTH, _HEIGHT = 1100, 1300


def main() -> None:
    """The report of one experiment, in light and in dark."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        command = "blis-replay report --experiment 34b-general --out report.html"
        subprocess.run(command.split(), cwd=folder, check=True)
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            _shoot(browser, Path(folder) / "report.html", scheme, ROOT / "docs" / f"report-{scheme}.png")
        browser.close()


def _shoot(browser: Browser, page: Path, scheme: Literal["light", "dark"], picture: Path) -> None:
    shown = browser.new_page(color_scheme=scheme, viewport={"width": _WIDTH, "height": _HEIGHT})
    shown.goto(page.as_uri())
    shown.screenshot(path=picture)
    shown.close()


if __name__ == "__main__":
    main()
