"""The page in a real browser: silent, alone, and legible in light, dark and print."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from blis_replay.validate.report.report import Report

playwright = pytest.importorskip("playwright.sync_api")
_CHROMIUM = shutil.which("chromium")
_STYLE = (resources.files("blis_replay.validate.report") / "page.css").read_text("utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if _CHROMIUM is None:
        pytest.skip("no chromium on the path; install the system's package")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["planted", "hostile"])
def test_a_browser_has_nothing_to_say_and_asks_nobody(
    browser,
    which: str,
    scheme: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    """No console message (a refused script would be one), no dialog, no request but the file itself."""
    html = request.getfixturevalue("hostile_html" if which == "hostile" else "planted_report")
    path = tmp_path / "report.html"
    path.write_text(html.html if isinstance(html, Report) else html, "utf-8")
    said, asked = [], []
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    for event in ("console", "pageerror", "dialog"):
        page.on(event, lambda what: said.append(str(what)))
    page.on("request", lambda made: asked.append(made.url))
    page.goto(path.as_uri())
    assert (said, asked) == ([], [path.as_uri()])
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    for picture in page.locator("figure > svg").all():
        box = picture.bounding_box()
        assert box is not None
        assert box["width"] > 250
        assert box["height"] > 100
    page.close()


def test_pictures_follow_the_colour_scheme(browser, planted_report: Report, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "report.html"
    path.write_text(planted_report.html, "utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    colours = {}
    for name, media in (
        ("light", {"color_scheme": "light", "media": "screen"}),
        ("dark", {"color_scheme": "dark", "media": "screen"}),
        ("print", {"color_scheme": "dark", "media": "print"}),
    ):
        page.emulate_media(**media)
        colours[name] = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    page.close()
    assert colours == {"light": "rgb(27, 31, 36)", "dark": "rgb(232, 234, 237)", "print": "rgb(0, 0, 0)"}


def _schemes() -> dict[str, dict[str, tuple[int, ...]]]:
    """Colours by scheme: name to red, green and blue."""
    found = {}
    for name, block in zip(("light", "dark", "print"), re.findall(r":root \{(.*?)\}", _STYLE, re.DOTALL), strict=True):
        colours = {n: tuple(bytes.fromhex(h)) for n, h in re.findall(r"--(\w+): #(\w{6})", block)}
        heat = re.search(r"--heat: (\d+), (\d+), (\d+)", block)
        assert heat is not None
        found[name] = colours | {"heat": tuple(map(int, heat.groups()))}
    return found


def _contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """WCAG 2: relative luminances of two sRGB colours, the lighter over the darker, each with 0.05 of glare."""

    def luminance(colour: tuple[int, ...]) -> float:
        linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_and_lines_stand_out(scheme: str) -> None:
    """WCAG AA: 4.5 for text, 3 for what is drawn; also on the hottest cell of the heat table."""
    colours = _schemes()[scheme]
    hottest = max(float(share) for share in re.findall(r"rgba\(var\(--heat\), ([\d.]+)\)", _STYLE))
    hot = tuple(round(hottest * h + (1 - hottest) * p) for h, p in zip(colours["heat"], colours["page"], strict=True))
    for ground in ("page", "panel"):
        for text in ("ink", "muted", "pass", "fail", "observed"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for line in ("simulated", "accent", "over", "under"):
            assert _contrast(colours[line], colours[ground]) >= 3, (line, ground)
    assert _contrast(colours["ink"], hot) >= 4.5
