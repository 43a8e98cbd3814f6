"""``blis-replay report`` as a user meets it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Run

pytestmark = pytest.mark.slow


@pytest.mark.heavy
@pytest.mark.usefixtures("calibrated")
def test_a_page_is_written_and_said_in_one_line(run: Run) -> None:
    asked = ("report", "--experiment", "1b-general", "--coefficients", "mine.yaml", "--out")
    answer = run(*asked, "report.html")
    assert (answer.code, answer.err) == (0, "")
    assert re.match(r"report\.html: 1 (PASS|FITS|UNDECIDED|FAIL); 0\.", answer.out)
    html = Path("report.html").read_text("utf-8")
    command = "blis-replay report 1b-general --coefficients mine.yaml --replay exact --out report.html"
    assert command in html
    assert "two stream events per token" in html
    histogram = html.split("<caption>gaps between stream stamps")[1].split("</table>")[0]
    bars = [
        (int(count.replace(",", "")), "<span" in row)
        for row in histogram.split("<tr>")[2:]
        for count in re.findall(r"<td>([\d,]+)</td>", row)
    ]
    assert sum(count > 1_000 for count, _ in bars) == 2, "two stamps per token make two modes"
    assert all(drawn == (count > 0) for count, drawn in bars)
    run(*asked, "report.html")
    assert Path("report.html").read_text("utf-8") == html


@pytest.mark.heavy
def test_errors_with_another_release_stand_below(run: Run) -> None:
    """70b-general by the release that ships, and by the published direct calibration; both as validate has them."""
    releases = ("h100-vllm-0.15.1", "stepml-direct")
    asked = ("--experiment", "70b-general", "--coefficients")
    answer = run("report", *asked, releases[0], "--baseline", releases[1], "--out", "report.html")
    assert answer.code == 0
    rows = re.findall(r"<tr.*?</tr>", Path("report.html").read_text("utf-8").split("</table>")[0], re.DOTALL)[1:]
    for row, release in zip(rows, releases, strict=True):
        errors = run("validate", *asked, release, "--json").json["experiments"][0]["metrics"]
        expected = [f"{100 * errors[metric]['mean']['error']:+.1f}" for metric in ("e2e", "ttft", "itl")]
        assert re.findall(r"(?:E2E|TTFT|ITL)\s([-+][\d.]+)\s%\s\(", row.split("</desc>")[0]) == expected
    assert "with stepml-direct" in rows[1]


def test_a_page_that_fails_names_the_experiment_once(run: Run) -> None:
    """Its slug is its alias, and no file of it names a model."""
    row = "arrival_s,prompt_tokens,output_tokens,ttft_ms,e2e_ms\n0,100,20,50,400\n1,100,20,50,400\n"
    Path("c1.csv").write_text(row)
    assert run("ingest", "c1.csv", "--name", "c1").code == 0
    answer = run("report", "c1", "--out", "report.html")
    assert (answer.code, answer.err.count("c1")) == (4, 1)


@pytest.mark.usefixtures("stored_demo")
def test_what_cannot_be_judged_is_named_on_the_page(run: Run) -> None:
    """The release that ships has no coefficients for the synthetic model."""
    answer = run("report", "--experiment", "1b-general", "--experiment", "34b-roleplay", "--out", "report.html")
    assert answer.out.startswith("report.html: 1 PASS, 1 NOT JUDGED; ")
    assert "has no coefficients for synthetic/synthetic-1b" in Path("report.html").read_text("utf-8")
    alone = run("report", "--experiment", "1b-general", "--out", "alone.html")
    assert (alone.code, alone.out) == (4, "")
    assert "has no coefficients for synthetic/synthetic-1b" in alone.err
    assert not Path("alone.html").exists()
