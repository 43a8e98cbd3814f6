"""The page as a document: what is drawn is what was computed, nothing recorded is obeyed, nothing is loaded."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from planted_pages import HOSTILE_PLACES, PlantedPage

from blis_replay.ingest.overload import Queue
from blis_replay.ingest.recording import OVERLOAD_CHECK, Finding
from blis_replay.ingest.store import open_store
from blis_replay.replay.executors import pool_map
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.pages import metric_table
from blis_replay.validate.comparison.saturation import Measure, Saturation
from blis_replay.validate.comparison.validated import compare_experiment
from blis_replay.validate.judgement import held
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, THRESHOLDS
from blis_replay.validate.metrics.observed import samples_of
from blis_replay.validate.metrics.uncertainty import Estimate
from blis_replay.validate.report.charts import charts_of
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.latency_charts import distribution_chart
from blis_replay.validate.report.page import before_of, by_worst, headline, page, section_of, strip
from blis_replay.validate.report.report import Report, report
from blis_replay.validate.report.series import QuantileCurve, quantile_curve
from blis_replay.validate.report.worst import worst_html
from blis_replay.validate.text.cells import cell_text, percent, time_text

pytestmark = pytest.mark.slow

Work = Callable[[str], object]
_VOID = {"meta", "link", "img", "br", "path", "use", "rect"}


@dataclass
class Element:
    """A start tag: its name, attributes, the names of what it stands in, and the text directly inside."""

    name: str
    attributes: dict[str, str]
    inside: tuple[str, ...]
    text: str = ""


@dataclass
class Document(HTMLParser):
    """The elements of a page, as a parser that is not ours reads them."""

    elements: list[Element] = field(default_factory=list)
    stack: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        inside = tuple(element.name for element in self.stack)
        element = Element(tag, {name: value or "" for name, value in attrs}, inside)
        self.elements.append(element)
        if tag not in _VOID:
            self.stack.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {n: v or "" for n, v in attrs}, tuple(e.name for e in self.stack)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.stack.pop().name == tag, "every element is closed where it was opened"

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.stack[-1].text += data

    def named(self, name: str) -> list[Element]:
        """All elements of a name."""
        return [element for element in self.elements if element.name == name]


def read(html: str) -> Document:
    document = Document()
    document.feed(html)
    document.close()
    assert document.stack == []
    return document


def _path(svg: str, colour: str) -> np.ndarray:
    """float[k, 2]: the points of the longest line of a colour."""
    found = re.findall(rf'<path d="([^"]*)"[^>]*style="fill: none; stroke[^"]*var\(--{colour}\)', svg)
    longest = max(found, key=len)
    return np.array(re.findall(r"[ML] ([\d.]+) ([\d.]+)", longest), np.float64)


def test_the_line_that_is_drawn_is_the_curve_that_was_computed() -> None:
    """x is linear in ms and y in the logarithm of the share that is slower: every point of the path, to 0.02 pt."""
    rng = np.random.default_rng(7)
    curve = quantile_curve(rng.gamma(4, 10_000, 5_000).astype(np.int64))
    assert curve is not None
    points = _path(distribution_chart("ttft", curve, None).svg, "observed")
    assert len(points) == len(curve.level)
    for drawn, value in ((points[:, 0], curve.value_us), (points[:, 1], np.log(1 - curve.level))):
        scale = (drawn[-1] - drawn[0]) / (value[-1] - value[0])
        np.testing.assert_allclose(drawn, drawn[0] + scale * (value - value[0]), atol=0.02)


def test_the_numbers_of_a_distribution_are_its_quantiles(wrong_evidence: Evidence) -> None:
    """600 requests: p50, p90 and p99 are those of the table; p99.9 is beyond what 600 can tell."""
    observed = samples_of(wrong_evidence.run.recording, wrong_evidence.compared).ttft_us
    chart = next(c for c in charts_of(wrong_evidence).shown if c.title == "Distribution of TTFT")
    rows = {row[0]: row for row in chart.numbers.rows}
    for name, level in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert rows[name][1] == pytest.approx(np.quantile(observed, level), rel=0.005)
    assert rows["p99.9"][1:] == (None, None, None)


def test_published_quantiles_are_points_and_nothing_between_them_is_claimed() -> None:
    published = QuantileCurve(np.array([0.5, 0.98]), np.array([16_360.0, 20_130.0]), published=True)
    chart = distribution_chart("itl", published, None)
    assert [row[1] for row in chart.numbers.rows] == [16_360.0, None, None, None]
    assert "observed (published)" in chart.svg


def test_the_metric_table_is_that_of_the_comparison(wrong_evidence: Evidence) -> None:
    table = metric_table(wrong_evidence.comparison)
    kinds = [column.kind for column in table.columns]
    rows = {row[0]: [cell_text(*one) for one in zip(row, kinds, strict=True)] for row in table.rows}
    for metric in METRICS:
        for statistic in STATISTICS:
            cell = wrong_evidence.comparison.metrics[metric][statistic]
            numbers = (time_text(cell.a_us), time_text(cell.b_us), percent(cell.error))
            assert rows[f"{metric.upper()} {statistic}"][1:4] == [*numbers]


def test_the_verdict_is_followed_by_the_planted_cause(planted_report: Report) -> None:
    """30 ms before the queue against a TTFT of 31 ms: TTFT is off by 95 %, and the sentence says by what."""
    text = " ".join(element.text for element in read(planted_report.html).named("p")[:20])
    assert "over-predicted by 95.5\u00a0%" in text, "no line ends between a number and its unit"
    text = text.replace("\u00a0", " ")
    assert "TTFT over-predicted by 95.5 % (limit ±15 %)" in planted_report.html.replace("\u00a0", " ")
    assert re.search(r"TTFT mean is over-predicted by 95\.5 %; 95\.\d points come from delay before the queue", text)


def overloaded(comparison: Comparison) -> Comparison:
    """The same, had the instrument check called its recording so."""
    findings = (*comparison.recording.findings, Finding(OVERLOAD_CHECK, "note", "", "planted"))
    return replace(comparison, recording=replace(comparison.recording, findings=findings))


def test_a_saturated_run_is_told_as_such_first_and_gets_no_advice(wrong_evidence: Evidence) -> None:
    """Coefficients fitted to latencies that measure a queue would be wrong, so no command is offered."""
    assert section_of(wrong_evidence, "").remedy.startswith("blis-replay calibrate ")
    queue = Queue(from_us=8_000_000, until_us=None, longest_us=4_000_000, longest_at_us=40_000_000, touched_us=0)
    found = Saturation(queue, queue, (), 0, None, 8_000_000, None, 30, np.zeros(1, np.bool_))
    saturated = replace(wrong_evidence, comparison=replace(overloaded(wrong_evidence.comparison), saturation=found))
    section = section_of(saturated, "")
    assert section.cause == "saturation" and "calibrate" not in section.remedy
    assert section.why[0].startswith("the server saturates at 8.0 s; latencies after that are not comparable")
    assert not any("calibrate" in sentence for sentence in section.why)


def test_an_overloaded_run_shows_what_it_is_judged_by(wrong_evidence: Evidence) -> None:
    """Served 12 % less than recorded, with a limit of 10 %; its latencies have no card, no colour and no advice."""
    measures = (
        Measure("itl", "ITL", "itl", 20.0, 21.0, "ms"),
        Measure("tokens_per_s", "output tokens/s while the queue grows", "e2e", 1000.0, 880.0, "tokens/s"),
    )
    known = {("itl", "mean"): (0.05, 0.02), ("tokens_per_s", "mean"): (-0.12, 0.01)}
    estimates = {cell: Estimate(error, error - half, error + half, 8) for cell, (error, half) in known.items()}
    queued = replace(overloaded(wrong_evidence.comparison), capacity=measures, estimates=estimates)
    judged = replace(wrong_evidence, comparison=queued)
    section = section_of(judged, "")
    shown = [(q.name, q.error, q.state) for q in section.judgement.worst_first]
    assert shown == [
        ("output tokens/s while the queue grows", pytest.approx(-0.12), "beyond"),
        ("ITL", pytest.approx(0.05), "within"),
    ]
    assert strip(section.judgement.judged, (), "x", "x").count("var(--fail)") == 3, "one dot and its interval"
    assert section.cause == "saturation" and "calibrate" not in section.remedy
    assert (section.metrics, section.stages) == (None, None), "no number that is not judged"
    drawn = {chart.title for chart in section.charts.shown}
    assert not drawn & {"Distribution of E2E", "Distribution of TTFT"}


def test_a_picture_over_time_marks_where_the_server_is_overloaded(wrong_evidence: Evidence) -> None:
    queue = Queue(from_us=30_000_000, until_us=None, longest_us=4_000_000, longest_at_us=40_000_000, touched_us=0)
    found = Saturation(queue, queue, (), 0, None, 30_000_000, None, 30, np.zeros(1, np.bool_))
    marked = replace(wrong_evidence, comparison=replace(wrong_evidence.comparison, saturation=found))
    over_time = [chart for chart in charts_of(marked).shown if chart.wide and chart.numbers.names[0] == "middle, s"]
    assert len(over_time) == 2
    assert all(">overloaded<" in chart.svg and "overloaded from 30 s" in chart.numbers.note for chart in over_time)


def test_no_fit_is_advised_where_latencies_are_unusable(wrong_evidence: Evidence) -> None:
    """`calibrate` would refuse them."""
    findings = (*wrong_evidence.comparison.recording.findings, Finding("streaming", "unusable", "ttft", "planted"))
    recording = replace(wrong_evidence.comparison.recording, findings=findings)
    cells = {
        statistic: replace(cell, unusable="streaming", reason="planted")
        for statistic, cell in wrong_evidence.comparison.metrics["ttft"].items()
    }
    metrics = {**wrong_evidence.comparison.metrics, "ttft": cells}
    broken = replace(wrong_evidence.comparison, recording=recording, metrics=metrics)
    section = section_of(replace(wrong_evidence, comparison=broken), "")
    assert "calibrate" not in section.remedy and not any("calibrate" in sentence for sentence in section.why)


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        (["FAIL"] * 2 + ["UNDECIDED"] * 2 + ["PASS"] * 8, "2 of 12 recordings fail, 2 are undecided, 8 pass"),
        (["PASS", "FITS", "NOT JUDGED"], "1 of 3 recordings is not judged, 1 passes, 1 fits (not held out)"),
        (["PASS"], "The simulator passes"),
    ],
)
def test_the_page_begins_with_the_answer(verdicts: list[str], sentence: str) -> None:
    assert headline(verdicts) == sentence


def test_the_worst_requests_are_those_with_the_largest_errors(wrong_evidence: Evidence) -> None:
    """Their segments sum to E2E on both sides, and a link has the half-way before and after of the later side."""
    worst, run = charts_of(wrong_evidence).worst, wrong_evidence.run
    assert worst is not None
    observed_us = run.recording.requests["e2e_us"].to_numpy()
    off_us = np.abs(run.e2e_us - observed_us)[wrong_evidence.compared]
    np.testing.assert_allclose(np.abs(np.diff(worst.e2e_us, axis=0)[0]), np.sort(off_us)[::-1][:5])
    np.testing.assert_allclose(worst.e2e_us, [observed_us[worst.index], run.e2e_us[worst.index]])
    assert tuple(worst.segments) == ("send to queue", "queue wait", "prefill", "decode", "delivery")
    shown = worst_html(worst, "#pictures")
    assert [int(n) for n in re.findall(r'<th scope="row">([\d,]+)</th>', shown)] == worst.index.tolist()
    sent_us, long_us = worst.sent_us[0], worst.e2e_us[:, 0].max()
    window = re.findall(r'href="#pictures" data-window="(-?\d+) (\d+)"', shown)[0]
    assert [int(end) for end in window] == pytest.approx([sent_us - long_us / 2, sent_us + 1.5 * long_us], abs=1)
    command = section_of(wrong_evidence, "", options=" --store x.duckdb").trace
    alias, request = wrong_evidence.comparison.alias, worst.index[0]
    assert command.endswith(f" --store x.duckdb --request {request} -o {alias}-{request}.json")


def test_waterfalls_have_the_axis_of_all_recordings(wrong_evidence: Evidence) -> None:
    """-3 to +3 limits in each, so a bar of 0.1 % is never as long as one of 32 %; what is beyond ends there."""
    chart = next(chart for chart in charts_of(wrong_evidence).shown if chart.beside)
    grids = re.findall(r'<path d="((?:M [\d.]+ [\d.]+ V [\d.]+ ?)+)" style="[^"]*--grid', chart.svg)
    lines = [re.findall(r"M ([\d.]+)", grid) for grid in grids]
    assert len(lines) == 3 and lines[0] == lines[1] == lines[2]
    ticks = [float(text) for text in re.findall(r'class="tick">([^<]+)<', chart.svg)]
    assert ticks == [-2, 0, 2]
    per_limit = (float(lines[0][2]) - float(lines[0][1])) / 2
    bars = re.findall(r'd="M ([\d.]+) [\d.]+ L ([\d.]+) [^"]*" style="fill: var\(--simulated\)', chart.svg)
    long = [(float(end) - float(begin)) / per_limit for begin, end in bars]
    e2e = wrong_evidence.comparison.metrics["e2e"]["mean"].error
    assert e2e is not None
    assert long[:2] == pytest.approx([e2e / THRESHOLDS["e2e"], 3.0], abs=0.01), "TTFT is 95 % off, 6.4 limits"


def test_seconds_begin_at_ten_and_labels_stay_apart() -> None:
    """Half an hour of E2E: an axis in seconds, plain numbers, at most seven of them on a narrow picture."""
    curve = quantile_curve(np.linspace(1e6, 1.54e9, 5_000).astype(np.int64))
    chart = distribution_chart("e2e", curve, None)
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", chart.svg)
    numbers = [float(text) for text in labels if re.fullmatch(r"-?[\d.]+", text)]
    assert "E2E, s" in labels and not any("e+" in text or "1e" in text for text in labels)
    assert 2 <= len(numbers) <= 7 and max(numbers) < 1_600
    assert cell_text(chart.numbers.rows[2][1], "time") == "1,525 s"


def test_the_judged_errors_stand_beside_their_limits(planted_report: Report) -> None:
    """30 ms before the queue: mean TTFT is 95.5 % over, limit ±15 %, so its dot is at the end of its strip."""
    section = planted_report.html.split('aria-labelledby="experiment-1-name"')[1].replace("\u00a0", " ")
    rows = re.findall(r"<tr>(.*?)</tr>", section.split("<caption>What is judged")[1].split("</table>")[0])[1:]
    cells = [re.findall(r"<t[hd][^>]*>([^<]+)</t[hd]>", row) for row in rows[:3]]
    assert [(row[0], row[1], row[4]) for row in cells[:2]] == [
        ("E2E", "within", "+1.7 %"),
        ("TTFT", "beyond", "+95.5 %"),
    ]
    assert "M 431.0 12.0 a 4 4" in rows[1], "which ends 4 pt before the edge of 440"
    assert re.search(r">FAIL</strong> TTFT over-predicted", section)


def test_a_baseline_is_a_line_below_with_the_change_since(planted_page: PlantedPage, wrong_evidence: Evidence) -> None:
    """30 ms too long before the queue now, nothing before: |TTFT error| grew by 95.5 points, by hardly less or more."""
    with open_store(planted_page.store, read_only=True) as store:
        true = compare_experiment(store, planted_page.recording.slug, planted_page.true, ReplayMode())
    before = before_of(wrong_evidence.comparison, true)
    assert before.judgement.verdict == "PASS"
    (change, low, high) = map(
        float, re.findall(r"TTFT ([+-][\d.]+) \(([+-][\d.]+) \.\. ([+-][\d.]+)\)", before.change)[0]
    )
    assert (change, low <= change <= high) == (pytest.approx(95.5, abs=0.2), True)


def test_the_worst_comes_first(planted_report: Report, wrong_evidence: Evidence) -> None:
    document = read(planted_report.html)
    links = [element.text for element in document.named("a")]
    back = "Back to all experiments"
    assert [link for link in links if not link.startswith("timeline at ")] == ["1b-general", "34b-roleplay", back, back]
    assert [e.attributes.get("open") for e in document.named("details") if e.attributes.get("class") == "fold"] == [
        *("", None)
    ], "the worst is open, the others are folded"
    judgement = wrong_evidence.comparison.judgement
    error = wrong_evidence.comparison.metrics["ttft"]["mean"].error
    assert error is not None
    assert by_worst(judgement)[:2] == (0, pytest.approx(-error / THRESHOLDS["ttft"]))


def test_red_is_a_failure_and_nothing_else(wrong_evidence: Evidence) -> None:
    judgement = wrong_evidence.comparison.judgement
    assert "var(--fail)" in strip(judgement.judged, (), "x", "x")
    estimates = {cell: replace(e, low=-1.0, high=2.0) for cell, e in wrong_evidence.comparison.estimates.items()}
    open_ = replace(wrong_evidence.comparison, estimates=estimates)
    assert open_.verdict == "UNDECIDED"
    drawn = strip(open_.judgement.judged, (), "x", "x")
    assert "var(--fail)" not in drawn and "var(--undecided)" in drawn


@pytest.mark.parametrize(("low", "high", "arrows"), [(-0.29, 0.29, 0), (-0.53, 0.0, 1), (-0.53, 0.5, 2)])
def test_an_interval_that_goes_on_beyond_its_strip_has_an_arrow(low: float, high: float, arrows: int) -> None:
    """A strip ends at three limits of 10 %."""
    quantity = held(("e2e", "mean"), 0.10, (1.0, 0.9), Estimate(-0.1, low, high, 8), name="E2E")
    assert strip([quantity], (), "x", "x").count(" L ") == 2 * arrows


def test_published_aggregates_make_a_page_that_says_what_it_cannot_draw(planted_report: Report) -> None:
    html = planted_report.html.split('aria-labelledby="experiment-2-name"')[1]
    document = read("<section>" + html.split(">", 1)[1].split("</main>")[0])
    titles = [element.text for element in document.named("title") if not element.text.startswith("Error of ")]
    assert titles[:4] == ["Where the error comes from", *(f"Distribution of {name}" for name in ("E2E", "TTFT", "ITL"))]
    absent = [e.text for e in document.named("li") if "no latencies of single requests were recorded" in e.text]
    assert len(absent) == 3  # worst requests, errors over time, depths
    assert any("fewer than 20 pairs of consecutive steps" in e.text for e in document.named("li"))
    assert any(e.text.startswith("output tokens: ") for e in document.named("li")), "what the numbers rest on"
    assert "blis-replay record" in [element.text for element in document.named("code")], "a command in its sentence"


def test_nothing_recorded_becomes_a_tag_an_attribute_or_a_control_character(hostile_html: str) -> None:
    document = read(hostile_html)
    names = Counter(element.name for element in document.elements)
    assert (names["script"], names["img"], names["iframe"], names["style"]) == (1, 0, 0, 1)
    assert not [a for e in document.elements for a in e.attributes if a.startswith("on")]
    assert set(re.findall(r"[^\x20-\x7e]", hostile_html)) <= set("\n\u00a0×±…·’–→"), "no control or direction character"
    assert "{{ 7 * 7 }}" in hostile_html, "text is no template"
    for place in HOSTILE_PLACES:
        assert any(f"{place}-<script>alert(1)</script>" in e.text for e in document.elements), place


def test_a_text_of_a_million_characters_is_cut_and_says_so(hostile_html: str) -> None:
    assert "(998,000 characters more)" in hostile_html
    assert len(hostile_html) < 600_000


def test_a_recording_with_hardly_a_column_makes_a_page_that_says_so(bare_html: str) -> None:
    """Latencies are compared and drawn; what takes steps is named with the reason, and depths are those of clients."""
    document = read(bare_html)
    titles = [element.text for element in document.named("title")[1:] if not element.text.startswith("Error of ")]
    assert titles == [
        "Where the error comes from",
        *("Distribution of E2E", "Distribution of TTFT", "Distribution of ITL"),
        *("Error and TTFT over the time of the run", "Requests in flight"),
    ]
    assert "to first token" in bare_html and "queue wait</span>" not in bare_html, "lanes of what clients saw"
    absent = [element.text for element in document.named("li") if element.text.startswith("step cycle against")]
    assert absent == ["step cycle against batch size: fewer than 20 pairs of consecutive steps were recorded"]


@pytest.mark.heavy
def test_a_page_is_the_same_from_several_processes(
    planted_page: PlantedPage, planted_report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experiments are computed side by side, each process reading the store; order and bytes stay."""

    def in_two_processes(work: Work, slugs: Sequence[str]) -> list[object]:
        return pool_map(work, slugs, 2, None)

    monkeypatch.setattr("blis_replay.validate.report.report.map_jobs", in_two_processes)
    again = report(planted_page.store, planted_page.slugs, planted_page.both, command="blis-replay report")
    assert again == planted_report


@pytest.fixture(params=["planted", "hostile", "bare"])
def html(request: pytest.FixtureRequest) -> str:
    if request.param == "planted":
        return str(request.getfixturevalue("planted_report").html)
    return str(request.getfixturevalue(f"{request.param}_html"))


def test_the_page_loads_nothing_and_runs_its_own_script_only(html: str) -> None:
    """The policy names the script by its hash; whatever else came to be on the page would not run."""
    document = read(html)
    policy = next(e for e in document.named("meta") if e.attributes.get("http-equiv") == "Content-Security-Policy")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.attributes["content"] == (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    )
    assert "innerHTML" not in script and "eval" not in script, "it sets text, never markup"
    targets = [v for e in document.elements for a, v in e.attributes.items() if a in ("href", "src", "xlink:href")]
    assert [target for target in targets if not target.startswith(("#", "data:,"))] == []
    assert not re.search(r"url\((?!#)|@import", html)


def test_every_picture_and_table_can_be_read_without_seeing_it(html: str) -> None:
    document = read(html)
    by_id = {e.attributes["id"]: e for e in document.elements if "id" in e.attributes}
    assert len(by_id) == len([e for e in document.elements if "id" in e.attributes]), "no id stands twice"
    pictures = [e for e in document.named("svg") if "svg" not in e.inside]
    assert pictures
    for picture in pictures:
        assert picture.attributes["role"] == "img"
        if "aria-label" in picture.attributes:
            assert re.search(r"observed: .*\d.*; simulated: .*\d", picture.attributes["aria-label"])
            continue
        assert by_id[picture.attributes["aria-labelledby"]].text.strip()
        assert re.search(r"\d", by_id[picture.attributes["aria-describedby"]].text), "told with numbers"
    references = re.findall(r'(?:url\(|href=")#([^)"]+)', html)
    assert set(references) <= set(by_id)
    assert len(document.named("caption")) == len(document.named("table"))
    assert all(e.attributes.get("scope") in ("col", "row") for e in document.named("th"))
    levels = [int(e.name[1]) for e in document.elements if re.fullmatch("h[1-6]", e.name)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), "no level of headings is left out"


def test_what_scrolls_can_be_reached_and_is_named(html: str) -> None:
    for element in read(html).elements:
        if "scroll" in element.attributes.get("class", "").split():
            assert element.attributes["tabindex"] == "0"
            assert element.attributes["role"] == "group"
            assert element.attributes.get("aria-label", "").strip() or element.attributes["aria-labelledby"]


def test_every_colour_of_a_picture_is_one_of_the_page(html: str) -> None:
    """So that light, dark and paper each have their own."""
    style = read(html).named("style")[0].text
    schemes = [set(re.findall(r"--(\w+): #", part)) for part in style.split("@media") if "--page: #" in part]
    assert len(schemes) == 3 and schemes[0] == schemes[1] == schemes[2]
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        used = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg))
        assert used <= {"none", *(f"var(--{name})" for name in schemes[0])}


def test_equal_input_gives_equal_bytes(wrong_evidence: Evidence) -> None:
    first, second = section_of(wrong_evidence, ""), section_of(wrong_evidence, "")
    assert page([first], {}, "a", "exact") == page([second], {}, "a", "exact")


def test_the_size_of_a_picture_does_not_grow_with_the_recording() -> None:
    few, many = (
        quantile_curve(np.random.default_rng(1).gamma(4, 10_000, n).astype(np.int64)) for n in (1_000, 100_000)
    )
    sizes = [len(distribution_chart("e2e", curve, curve).svg) for curve in (few, many)]
    assert max(sizes) < 20_000
    assert abs(sizes[1] - sizes[0]) < 500


@pytest.mark.heavy
def test_twelve_real_experiments_are_below_five_megabytes(real_store, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Two recorded ones with all their pictures, one of them with step records, times six."""
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.experiment import DEFAULT_RELEASE, find_experiment

    slugs = [find_experiment(real_store, name) for name in ("34b-general", "mixtral-codegen")]
    real_store.connection.execute("CHECKPOINT")
    copied = shutil.copy(real_store.path, tmp_path / "store.duckdb")  # that one is open for all tests
    made = report(copied, slugs, load_release(DEFAULT_RELEASE), ReplayMode())
    assert len(made.html.encode()) * 6 < 5_000_000
    # No step cycles of the second; strips of three errors of each, together and alone; lanes of five requests of each.
    assert made.html.count('<svg role="img"') == 7 + 6 + 2 + 6 + 10
