"""The documentation: its pages are what the commands print, and the builder notices where they are not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import docs_browser
import docs_site
import plain_english
import pytest
from docs_generated import GENERATED
from docs_pages import ELISION, NAVIGATION, ROOT, Page, all_pages, is_current, parts_of, refreshed, text_of
from hypothesis import given
from hypothesis import strategies as st

import docs
from blis_replay.validate.cli.main import LABS, VERBS, cli
from docs import PageError, current_text, refresh

Write = Callable[[str], Page]

# Pages that are run in every test run: they take seconds.  `make docs` runs all of them.
QUICK = ("index.md", "json-and-python.md", "commands.md", "how-it-works.md", "ARCHITECTURE.md", "CONTRIBUTING.md")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a page of this text into a folder of its own."""

    def page(text: str) -> Page:
        source = tmp_path / "page.md"
        source.write_text(text, "utf-8")
        return Page(source, "page.html")

    return page


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_page_is_what_its_commands_print(name: str) -> None:
    (page,) = [page for page in all_pages() if page.source.name == name]
    assert current_text(page) == page.text


def test_the_readme_names_its_two_commands() -> None:
    """Which set up what they need in a clone: the demo, and the tests."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("make ")][:2] == ["make demo", "make test"]


def test_every_markdown_file_of_the_documentation_is_in_the_navigation() -> None:
    written = {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")}
    assert {page.source for page in all_pages()} == written - {ROOT / "CHANGELOG.md"}


@pytest.mark.heavy
def test_the_script_builds_a_site_in_which_no_link_leads_to_nothing_and_each_verb_has_a_page(tmp_path: Path) -> None:
    """On a page that takes no time: exit code 0, and the pages are counted.

    Links inside of the site, and whatever a page loads: there is a search, and nothing from elsewhere.
    """
    command = [sys.executable, ROOT / "scripts" / "docs.py", ROOT / "CONTRIBUTING.md"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{sum(map(len, NAVIGATION.values()))} pages in build/site" in ended.stdout
    shutil.copytree(ROOT / "build" / "site", tmp_path / "site")
    assert docs_site.badly_loaded(tmp_path / "site") == []
    verbs = {path.stem.removeprefix("blis-replay-") for path in (tmp_path / "site").glob("blis-replay-*.html")}
    assert {*VERBS, *LABS} <= verbs
    page = (tmp_path / "site" / "blis-replay-validate.html").read_text()
    assert "<dt><code>--coefficients RELEASE</code></dt><dd>Name or YAML file." in page
    assert "E2E 10\u00a0%" in page, "no line ends between a number and its unit"
    assert (tmp_path / "site" / "search.json").stat().st_size > 100_000
    (tmp_path / "site" / "new.html").write_text(
        '<img src="https://elsewhere"><img src="no.png"><link rel="stylesheet" href="site.css">'
    )
    assert docs_site.badly_loaded(tmp_path / "site") == [
        "new.html: https://elsewhere is loaded from elsewhere",
        "new.html: no.png leads to nothing",
    ]


def test_a_help_text_for_80_columns_becomes_text_that_a_phone_can_break() -> None:
    """Prose and descriptions are joined, also within `re-tokenised`; examples stay lines of their own."""
    told = [
        "Usage: tool [OPTIONS]",
        "  Judge, with `more` and two",
        "  lines of it.",
        "  Examples:\n    tool --all\n    tool x < y",
        "Options:\n  --replay MODE    exact, or re-\n                   tokenised; see --all\n  -f, --format [text]\n"
        "                   Print as.",
    ]
    text = "```text\n" + "\n\n".join([told[0], f"{told[1]}\n{told[2]}", *told[3:]]) + "\n```"
    found = docs_site.HELP.search(text)
    assert found
    assert docs_site.help_markdown(found).split("\n\n") == [
        "```text\nUsage: tool [OPTIONS]\n```",
        "<p>Judge, with <code>more</code> and two lines of it.</p>",
        "<p>Examples:</p>",
        "```sh\ntool --all\ntool x < y\n```",
        "<p><strong>Options:</strong></p>\n<dl><dt><code>--replay MODE</code></dt>"
        "<dd>exact, or re-tokenised; see <code>--all</code></dd>"
        "<dt><code>-f, --format [text]</code></dt><dd>Print as.</dd></dl>",
    ]


def test_zensical_gets_pages_without_the_marks_of_the_executed_blocks(write: Write) -> None:
    page = write(
        "# P\n\n```console recordings\n$ ls\n```\n```yaml a.yaml\na: 1\n```\n<!-- begin x -->\nx\n<!-- end x -->\n"
    )
    assert docs_site.staged_text(page) == (
        '# P\n\n```console title="needs the published recordings"\n$ ls\n```\n```yaml title="a.yaml"\na: 1\n```\nx\n'
    )


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.source.name)
def test_generated_parts_are_current_on_every_page(page: Page) -> None:
    for part in parts_of(page.text):
        if part.kind == "region":
            assert list(part.body) == GENERATED[part.language]()


def test_every_verb_has_its_help_on_the_page_of_commands() -> None:
    text = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert [verb for verb in [*VERBS, *LABS] if f"\n## blis-replay {verb}\n" not in text] == []
    coefficients = cli.get_command(click.Context(cli), "coefficients")
    assert isinstance(coefficients, click.Group)
    verbs = coefficients.list_commands(click.Context(coefficients))
    assert [v for v in verbs if f"\n## blis-replay coefficients {v}\n" not in text] == []


def test_output_that_has_changed_is_found_and_written(write: Write) -> None:
    page = write("# Page\n\n```console\n$ echo one; echo two; exit 1\none\n2\n# exit code 1\n```\n")
    assert current_text(page) == "# Page\n\n```console\n$ echo one; echo two; exit 1\none\ntwo\n# exit code 1\n```\n"


@pytest.mark.parametrize("output", ["...", "one", "...\n# exit code 2"])
def test_a_failure_that_a_page_does_not_announce_fails_the_build(write: Write, output: str) -> None:
    """Three dots once swallowed a failing command, and the next one showed an error as its example."""
    page = write(f"# Page\n\n```console\n$ echo one; exit 1\n{output}\n```\n")
    with pytest.raises(PageError, match="ends with exit code 1"):
        current_text(page)
    assert "ends with exit code 1" in refresh(page, update=True)


def test_commands_of_a_page_share_a_folder_and_files_named_in_it(write: Write) -> None:
    text = (
        "# Page\n\n```yaml made.yaml\na: 1\n```\n\n```console\n$ cat made.yaml \\\n    > copy\n$ cat copy\na: 1\n```\n"
        '\n```python\nprint(open("copy").read().strip())\n```\n\n```text\na: 1\n```\n'
    )
    assert current_text(write(text)) == text


def test_what_a_program_prints_gets_a_block_of_its_own(write: Write) -> None:
    page = write("# Page\n\n```python\nprint(1)\n```\n\nMore.\n")
    assert current_text(page) == "# Page\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\nMore.\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\nls\n```\n", "no kind of block"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```console\nno command\n```\n", "begins with a command"),
        ("```text\n", "is not closed"),
        ("```console\n$ pwd\n```\n", "a path of this machine"),
        ("```console\n$ python -c 1/0\n# exit code 1\n```\n", "a traceback"),
        ("<!-- begin nothing -->\n<!-- end nothing -->\n", "nothing generates 'nothing'"),
        ("```sh\nblis-replay validate --experimint x\n```\n", "there is no --experimint"),
        ("Use `blis-replay wrong --json`.\n", "there is no wrong"),
    ],
)
def test_a_page_that_cannot_be_run_is_one_error_with_its_place(write: Write, text: str, problem: str) -> None:
    with pytest.raises(PageError, match=r"page\.md: line \d") as error:
        current_text(write(f"# Page\n\n{text}"))
    assert problem in str(error.value)


def test_blocks_that_need_recordings_stay_as_they_are_without_them(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "HAS_RECORDINGS", False)
    text = "# Page\n\n```console recordings\n$ echo new\nold\n```\n"
    assert current_text(write(text)) == text


def test_three_dots_stand_for_lines_and_names_for_what_varies() -> None:
    printed = ["head", "read in 1.25 s", "a", "b", "tail"]
    assert is_current(["head", "read in <seconds> s", ELISION, "tail"], printed)
    assert not is_current(["head", "read in <seconds> s", "tail"], printed)
    assert not is_current(["head", "read in <seconds> m", ELISION, "tail"], printed)


def test_a_changed_number_is_written_and_what_was_left_out_stays_out() -> None:
    documented = ["mean  1.5", ELISION, "p99  2", "took <seconds> s"]
    printed = ["mean  1.6", "p50  1", "p90  2", "p99  3", "took 4.2 s"]
    assert refreshed(documented, printed) == ["mean  1.6", ELISION, "p99  3", "took <seconds> s"]


@given(st.lists(st.text("ab.1 ", max_size=5)), st.lists(st.text("ab.1 ", max_size=5)))
def test_what_is_written_is_current(documented: list[str], printed: list[str]) -> None:
    """Whatever stood there: after an update the page stands for the output."""
    assert is_current(refreshed(documented, printed), printed)


@pytest.mark.slow
@given(st.lists(st.sampled_from(["word", "", "```text", "```", "<!-- begin x -->", "<!-- end x -->", "$ ls"])))
def test_a_page_is_its_parts(lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    try:
        parts = parts_of(text)
    except ValueError:
        return
    assert text_of(parts) == text


def test_a_page_that_is_not_current_is_told_and_mended(write: Write) -> None:
    page = write("# Page\n\n```console\n$ echo two\n2\n```\n")
    assert "\n-2\n+two\n" in refresh(page, update=False)
    assert "\n2\n" in page.text
    assert refresh(page, update=True) == ""
    assert refresh(page, update=False) == ""


def test_hard_sentences_are_found_in_pages_and_in_what_is_printed() -> None:
    """45 words are 10 too many, and the median of two sentences is above 16; what is in a table is no prose."""
    long = (
        "They are exact all the same, but what one wants to know is" + " the way from that replay to the recording" * 4
    )
    page = f"# Page\n\n{long}. `a b c` is fine.\n\n| A made recording | 5; 6 |\n|---|---|\n"
    found = plain_english.findings(plain_english.of_markdown("page.md", page))
    assert [line.split(": ")[0] for line in found] == ["page.md:3"] * 3 + ["page.md:5", "page.md:1"]
    assert "45 words, at most 35" in found[0] and "synthetic recording" in found[3]
    module = '"""A made recording."""\nx = f"{1} is no time of a day; the day is"\ny = "SELECT a FROM b of a"\n'
    assert [one.text for one in plain_english.of_module("m.py", module)] == ["X is no time of a day", "the day is"]
    assert plain_english.findings([plain_english.Sentence("m.py:1", "Mean E2E is under-predicted by 48 %.")]) == []


@pytest.mark.slow
def test_the_catalogue_has_every_message_with_its_place() -> None:
    """An error, a remedy and a line of help that stand in three rooms; none is hard to read."""
    messages = list(plain_english.messages())
    said = {one.text: one.place.partition(":")[0] for one in messages}
    assert said["name an experiment, or list the checks with --checks"] == "validate/cli/recordings.py"
    assert said["use a wider --split or more recordings"] == "validate/fit/calibrate.py"
    assert len(said) > 1_000
    assert plain_english.findings(messages) == []
    assert plain_english.findings([plain_english.Sentence("m.py:1", "2 window(s) of steps")]) != []


@pytest.mark.slow
def test_docstrings_and_comments_are_not_hard_to_read() -> None:
    """`python scripts/plain_english.py --docstrings` lists those that are."""
    assert plain_english.hard_docstrings() == []
    text = "What is told, of which nothing is used:\n- one\n- two and\n  three\n\n    a told table\n\n\b\na command"
    checked = plain_english._of_paragraphs("m.py:1", text)
    assert [one.text for one in checked] == ["What is told, of which nothing is used:", "- one", "- two and three"]


@pytest.mark.skipif(docs_browser.CHROMIUM is None, reason="no chromium on the path; install the system's package")
def test_of_a_console_the_commands_are_copied() -> None:
    """Without the prompt and what they print; a command goes on behind a backslash."""
    script = (ROOT / "scripts" / "site" / "site.js").read_text("utf-8")
    shown = "$ blis-replay list \\\n    --json\nalias  model\n$ true\n"
    with docs_browser.browser_page("light", 1440) as page:
        page.set_content(f'<div class="language-console"><pre><code>{shown}</code></pre><button>Copy</button></div>')
        page.evaluate(
            "Object.defineProperty(navigator, 'clipboard', { value: { writeText: (t) => (window.said = t) } })"
        )
        page.add_script_tag(content=script)
        page.click("button")
        assert page.evaluate("window.said") == "blis-replay list \\\n    --json\ntrue"
