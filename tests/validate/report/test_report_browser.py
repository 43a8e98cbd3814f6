"""The page in a real browser: silent, alone, and legible in light, dark and print."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib import resources
from itertools import combinations
from pathlib import Path

import docs_browser
import numpy as np
import pytest

from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.latency_charts import errors_chart
from blis_replay.validate.report.page import card
from blis_replay.validate.report.report import Report
from blis_replay.validate.report.series import ErrorsOverTime
from blis_replay.validate.report.svg import inline

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


@pytest.mark.heavy
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
@pytest.mark.parametrize("which", ["planted", "hostile", "bare"])
def test_a_browser_has_nothing_to_say_and_asks_nobody(
    browser,
    which: str,
    scheme: str,
    width: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    """No console message (a refused script would be one), no dialog, no request but the file itself."""
    html = request.getfixturevalue("planted_report" if which == "planted" else f"{which}_html")
    path = tmp_path / "report.html"
    path.write_text(html.html if isinstance(html, Report) else html, "utf-8")
    said, asked = [], []
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    for event in ("console", "pageerror", "dialog"):
        page.on(event, lambda what: said.append(str(what)))
    page.on("request", lambda made: asked.append(made.url))
    page.goto(path.as_uri())
    assert (said, asked) == ([], [path.as_uri()])
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    assert page.locator("h3", has_text="Provenance").count() == page.locator("section.experiment").count(), "complete"
    scales = page.locator("figure svg").evaluate_all(
        "drawn => drawn.map(svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"
    )
    assert min(scales) > 0.98, "texts of 8 pt or more in a picture stay 8 px or more on a narrow screen"
    if which != "hostile":  # which is the planted one with other texts
        page.evaluate("document.querySelectorAll('details.fold').forEach(fold => { fold.open = true; })")
        assert docs_browser.violations(page) == [], "labels, contrasts, landmarks, and what a keyboard reaches"
    page.close()


def test_axe_finds_a_picture_without_a_description(browser) -> None:  # type: ignore[no-untyped-def]
    """`make docs` asks it about every page of the site, so it has to be able to complain."""
    page = browser.new_page()
    page.set_content("<!doctype html><html lang=en><title>A page</title><main><h1>A page</h1><img src=x></main>")
    (found,) = docs_browser.violations(page)
    page.close()
    assert found == 'image-alt (critical), 1 times, the first: <img src="x">'


def test_the_script_opens_and_reads_values(browser, planted_report: Report, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Worst first; a link opens what is folded; a value under the pointer."""
    file = tmp_path / "report.html"
    file.write_text(planted_report.html, "utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    assert page.locator("table.overview tbody tr th a").all_inner_texts() == ["1b-general", "34b-roleplay"]
    folds = "[...document.querySelectorAll('details.fold')].map(fold => fold.open)"
    assert page.evaluate(folds) == [True, False]
    page.locator("table.overview a").nth(1).click()
    page.wait_for_function(f"{folds}[1]")
    cut_off = "[...document.querySelectorAll('figure > .scroll')].filter(s => s.scrollHeight > s.clientHeight + 1)"
    assert page.evaluate(f"{cut_off}.length") == 0
    picture = page.locator("#experiment-1 figure", has_text="Distribution of TTFT")
    picture.locator("svg").hover()
    row = next(line for line in picture.locator("tbody tr").all() if line.text_content().startswith("p90"))
    for cell in row.locator("td").all():
        assert cell.text_content() in picture.locator(".value").inner_text()


def test_pictures_over_time_zoom_together(browser, planted_report: Report, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A range dragged in one picture, the window of a request by its link, and all of the run again."""
    file = tmp_path / "report.html"
    file.write_text(planted_report.html, "utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    plots = page.locator("#experiment-1 .plot")
    boxes = "plots => plots.map(plot => plot.getAttribute('viewBox').split(' ').map(Number))"
    whole = plots.evaluate_all(boxes)
    assert len(whole) >= 3, "error, TTFT and depth"
    drawing = page.locator("#experiment-1 svg[data-span]").first
    left, right, low, high = map(float, drawing.get_attribute("data-span").split())
    drawing.scroll_into_view_if_needed()
    box, points = drawing.bounding_box(), drawing.evaluate("svg => svg.viewBox.baseVal.width")

    def pixel(share: float) -> float:
        return box["x"] + box["width"] * (left + share * (right - left)) / points

    page.mouse.move(pixel(0.25), box["y"] + 100)
    page.mouse.down()
    page.mouse.move(pixel(0.5), box["y"] + 100)
    page.mouse.up()
    for before, after in zip(whole, plots.evaluate_all(boxes), strict=True):
        assert after[2] == pytest.approx(before[2] / 4, rel=0.02), "a quarter of the run, in each of them"
        assert after[0] - before[0] == pytest.approx(before[2] / 4, rel=0.02)
    link = page.locator("#experiment-1 a[data-window]").first
    link.click()
    begin, end = (float(us) / 1e6 for us in link.get_attribute("data-window").split())
    shown = max(begin, low), min(end, high)
    (first, *_, last) = map(float, drawing.locator(".tick").all_text_contents())
    assert shown[0] - 0.01 <= first < last <= shown[1] + 0.01, "ticks say the seconds that are shown"
    page.get_by_text("show the whole run").first.click()
    assert plots.evaluate_all(boxes) == [pytest.approx(box) for box in whole]
    page.close()


def test_a_telephone_shows_the_cause_and_the_latencies_whole(browser, planted_report: Report, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """390 px: nothing beside each other has to be pushed sideways; a pointer on the last panel reads its first row."""
    path = tmp_path / "report.html"
    path.write_text(planted_report.html, "utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto(path.as_uri())
    beside = page.locator(".beside").first
    wider = "parts => parts.filter(part => part.scrollWidth > part.clientWidth + 1).length"
    assert beside.locator(":scope > div, :scope > div .scroll, :scope > figure").evaluate_all(wider) == 0
    drawing = beside.locator("svg")
    places = [float(place) for place in (drawing.get_attribute("data-at") or "").split()]
    rows = beside.locator("figure tbody tr").count()
    assert len(places) == 3 * rows, "E2E, TTFT and ITL, with a row for each part"
    points = drawing.evaluate("svg => svg.viewBox.baseVal.height")
    box = drawing.bounding_box()
    drawing.hover(position={"x": 100, "y": places[2 * rows] / points * box["height"]})
    assert beside.locator(".value").inner_text().startswith("part error · ")
    page.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    for name in ("Provenance", "depth by time"):
        tables = page.locator(f'.scroll[aria-label="{name}"]')
        assert tables.count() > 0
        assert tables.evaluate_all(wider) == 0, name
    page.close()


def test_what_is_folded_on_the_screen_is_printed(browser, planted_report: Report, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "report.html"
    path.write_text(planted_report.html, "utf-8")
    page = browser.new_page(viewport={"width": 794, "height": 1123})  # A4 at 96 px an inch
    page.goto(path.as_uri())
    folded = "[...document.querySelectorAll('details:not([open]) table')].filter(t => !t.closest('.numbers, .check'))"
    seen = f"{folded}.filter(t => t.checkVisibility({{%s}})).length"
    of_all = page.evaluate(f"{folded}.length")
    assert page.evaluate(seen % "contentVisibilityAuto: true") == 0
    page.emulate_media(media="print")
    assert page.locator(".numbers").first.is_hidden(), "a sheet has pictures and findings, and no tables of them"
    # What is shown is known once it was laid out.
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate(seen % "contentVisibilityAuto: true") == of_all > 5
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "a sheet has no scroll bar"
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every(s => s.scrollHeight <= s.clientHeight + 1)")
    sheets = len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4", prefer_css_page_size=True)))
    assert sheets <= 1 + 3 * 2, "three sheets per experiment, and one with the overview"
    page.close()


def test_names_of_many_stages_do_not_run_into_each_other(browser, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """40 stages in 1,000 s: some names are left out of the picture, all of them stand with the numbers."""
    stages = [(25.0 * stage, f"stage {stage}, {stage}/s") for stage in range(40)]
    of_each = {metric: np.zeros(80) for metric in ("e2e", "ttft", "itl")}
    errors = ErrorsOverTime(np.linspace(0, 1_000, 80), np.full(80, 20), of_each, (np.ones(80), np.ones(80)))
    chart = errors_chart(errors, stages, ("e2e", "ttft", "itl"))
    path = tmp_path / "chart.html"
    path.write_text(f"<style>{_STYLE}</style><figure>{inline(chart, 'c')}</figure>")
    page = browser.new_page()
    page.goto(path.as_uri())
    boxes = page.locator("svg text").evaluate_all(
        "texts => texts.map(text => [text.textContent.trim(), text.getBoundingClientRect()])"
        ".map(([said, box]) => [said, box.left, box.right, box.top, box.bottom])"
    )
    names = [box for box in boxes if box[0].startswith("stage")]
    assert 5 <= len(names) < 40
    for one, other in combinations([box for box in boxes if re.match("stage|E2E|TTFT|ITL", box[0])], 2):
        apart = one[2] <= other[1] or other[2] <= one[1] or one[4] <= other[3] or other[4] <= one[3]
        assert apart, (one, other)
    assert all(name in chart.numbers.note for _, name in stages)


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


def test_a_card_in_a_notebook_has_the_style_of_the_page_and_changes_nothing_else(
    browser,  # type: ignore[no-untyped-def]
    wrong_evidence: Evidence,
    tmp_path: Path,
) -> None:
    """TTFT is beyond its limit: its dot is red, as on the page; a table beside the card keeps the notebook's style."""
    shown = card(wrong_evidence.comparison)
    path = tmp_path / "notebook.html"
    beside = "<table id=beside><tr><td>1</td></tr></table>"
    path.write_text(f"<!doctype html><html lang=en><title>n</title><main><h1>n</h1>{shown}{beside}</main>", "utf-8")
    page = browser.new_page(color_scheme="light", viewport={"width": 1000, "height": 600})
    page.goto(path.as_uri())
    assert page.locator(".card .chip").inner_text() == "FAIL"
    colour = "shown => getComputedStyle(shown).%s"
    red = page.locator('.card path[style*="stroke: var(--fail)"]').first.evaluate(colour % "stroke")
    assert red == page.locator(".card .chip").evaluate(colour % "color") == "rgb(161, 29, 43)"
    assert page.locator("#beside td").evaluate(colour % "borderBottomWidth") == "0px"
    assert page.evaluate("getComputedStyle(document.body).maxWidth") == "none"
    assert docs_browser.violations(page) == []
    page.close()


def _schemes() -> dict[str, dict[str, tuple[int, ...]]]:
    """Colours by scheme: name to red, green and blue."""
    found = {}
    for name, block in zip(("light", "dark", "print"), re.findall(r":scope \{(.*?)\}", _STYLE, re.DOTALL), strict=True):
        colours = {n: tuple(bytes.fromhex(h)) for n, h in re.findall(r"--(\w+): #(\w{6})", block)}
        found[name] = colours
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
    """WCAG AA: 4.5 for text, 3 for what is drawn."""
    colours = _schemes()[scheme]
    for ground in ("page", "panel"):
        for text in ("ink", "muted", "pass", "fail", "undecided", "observed"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for line in ("observed", "simulated", "e2e", "ttft", "itl", "part", "sending", "wait", "prefill", "decode"):
            assert _contrast(colours[line], colours[ground]) >= 3, (line, ground)
