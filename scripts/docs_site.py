"""From the pages to a static site, by Zensical; every link inside of it is checked.

Zensical is maintained by the authors of Material for MkDocs, reads the same Markdown, and brings search, contents,
highlighting and copy buttons.  It gets a copy of the pages: marks of blocks that only ``docs.py`` reads are taken
out, and the page of commands is split into a page for each verb.  Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

from docs_pages import NAVIGATION, ROOT, Page, page_of, parts_of

from blis_replay.validate.report.html import UNIT

_VERBS = "docs/commands.md"
_CONFIGURATION = """\
[project]
site_name = "blis-replay"
site_description = "How far a simulator is from a real vLLM server, and why."
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
extra_css = ["site.css"]
extra_javascript = ["site.js"]
nav = {nav}

[project.theme]
language = "en"
font = false
features = [
    "content.code.copy", "navigation.footer", "navigation.sections", "navigation.indexes", "navigation.top",
    "navigation.tracking", "search.highlight", "toc.follow",
]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Dark colours"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Light colours"

[project.markdown_extensions]
attr_list = {{}}
tables = {{}}
md_in_html = {{}}
toc.permalink = true
toc.slugify.object = "pymdownx.slugs.slugify"
toc.slugify.kwds = {{ case = "lower" }}
pymdownx.highlight.pygments_lang_class = true
pymdownx.superfences = {{}}
"""

# What the theme leaves to be done so that a screen reader, a keyboard and weak eyes get everything (axe finds nothing):
# links with a contrast of 4.5, code buttons that are no landmark, wide tables that a keyboard can scroll.  A column is
# as narrow as its numbers, so that prose beside them has room; code is not cut into letters, and commands to be copied
# go on in the next line.  On a phone tables are narrower, and a folded one has its cells below each other.
_STYLE = """\
:root, [data-md-color-scheme="default"] { --md-accent-fg-color: #3d4fc4; --md-typeset-a-color: #3d4fc4; }
.md-typeset table:not([class]) :is(th, td) { padding: 0.5em 0.8em; min-width: 0; }
.md-typeset td.number { white-space: nowrap; }
.md-typeset table:has(th:nth-child(8)) :is(th, td) { padding: 0.4em; }
.md-typeset table:not([class]) td:has(> code, > a > code) { min-width: 8em; }
@media (min-width: 44em) { .md-typeset td:first-child code { word-break: normal; } }
.md-typeset table:has(th:nth-child(10)) { font-size: 0.58rem; }
.md-typeset table:has(th:nth-child(10)) :is(th, td) { padding: 0.4em 0.3em; }
.md-typeset .language-sh code { white-space: pre-wrap; overflow-wrap: anywhere; }
.md-typeset dt { margin-top: 0.8em; }
.md-typeset dd { margin: 0.2em 0 0 1.2em; }
@media print { .md-typeset details { break-inside: auto; } }
@media (max-width: 44em) {
  .md-typeset table:not([class]) :is(th, td) { padding: 0.35em 0.5em; }
  .md-typeset table:not([class], :has(th:nth-child(8))) th { min-width: 4rem; }
  .md-typeset table:not([class]) td:last-child:not(.number) { min-width: 10em; }
  .md-typeset table:not([class]) td:last-child:nth-child(n + 4):not(.number) { min-width: 22em; }
  .three-columns :is(thead, tbody, tr, td, th) { display: block; }
  .three-columns thead { display: none; }
  .md-typeset .three-columns table:not([class]) td { padding: 0.1em 0; border: 0; }
  .three-columns tr { border-bottom: 0.05rem solid var(--md-typeset-table-color); padding: 0.4em 0; }
  .three-columns td:nth-child(2)::before { content: "exit code "; }
}
"""
_SCRIPT = """\
const complete = () => {
  for (const buttons of document.querySelectorAll("nav.md-code__nav")) buttons.setAttribute("role", "none");
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
  for (const code of document.querySelectorAll("pre > code")) if (code.tabIndex < 0) code.tabIndex = 0;
};
// What a link leads to is open, and so is everything on paper.
const unfold = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && (target.closest("details") || target.nextElementSibling);
  if (folded && folded.tagName === "DETAILS") folded.open = true;
};
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
unfold();
complete();
new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
"""
# A picture that there is in light and in dark colours: the theme shows the one that fits.
# The second of two in one page is for readers of the Markdown, who have one theme.
_IN_TWO_SCHEMES = re.compile(r"!\[([^\]]*)\]\(([\w/]+)-light\.png\)")
_IN_DARK = re.compile(r"!\[[^\]]*\]\([\w/]+-dark\.png\)\n*")
# A number with its unit, or a count of others: no line ends in it.
_NUMBER_CELL = re.compile(r"<td>(?=[+-]?\d[^<]{,11}</td>)")
# What is no prose: there a number and its unit may be parted.
_NO_PROSE = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<script.*?</script>|<[^>]*>)", flags=re.S)
# Pages are in several folders, and side by side on the site.
_TO_OTHER_FOLDERS = re.compile(r"\]\((?:\.\./)*(?:labs/)?docs/")
HELP = re.compile(r"^```text\n(Usage: .*?)^```$", flags=re.M | re.S)
_UNNAMED = re.compile(
    r'(<nav [^>]*)aria-labelledby="\w+"([^>]*>\s*<label class="md-nav__title"[^>]*>\s*<span[^>]*></span>)([^<]*)'
)


def build_site(out: Path) -> list[str]:
    """Write the site into ``out``, in place of what was there; returns the broken links, a line each."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        nav = [{section: list(_staged(section, folder / "pages"))} for section in NAVIGATION]
        for picture in (path for kind in ("*.png", "*.svg") for path in (ROOT / "docs").glob(kind)):
            shutil.copy(picture, folder / "pages")
        (folder / "pages" / "site.css").write_text(_STYLE, "utf-8")
        (folder / "pages" / "site.js").write_text(_SCRIPT, "utf-8")
        (folder / "zensical.toml").write_text(_CONFIGURATION.format(nav=_toml(nav)), "utf-8")
        command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ended.returncode:
            return [f"zensical: {line}" for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "site", out)
    (out / "404.html").unlink()  # whoever serves the site has a page of its own for that
    for page in out.rglob("*.html"):
        text = _UNNAMED.sub(_named, page.read_text("utf-8"))
        text = _NUMBER_CELL.sub('<td class="number">', text)
        parts = _NO_PROSE.split(text)
        text = "".join(part if at % 2 else UNIT.sub("\u00a0", part) for at, part in enumerate(parts))
        page.write_text(text.replace("<th></th>", "<td></td>"), "utf-8")  # an empty corner heads nothing
    return [*broken_links(out), *_lost_items(out)]


def _lost_items(out: Path) -> list[str]:
    """Items of lists that became part of the paragraph before them, for want of an empty line."""
    pages = {page.name: page.read_text("utf-8") for page in out.glob("*.html")}
    texts = {name: re.sub(r"<pre.*?</pre>", "", text, flags=re.S) for name, text in pages.items()}
    return [
        f"{name}: no item of a list, put an empty line before it: {line}"
        for name, text in texts.items()
        for line in re.findall(r"^- .{,60}", text, flags=re.M)
    ]


def _named(navigation: re.Match[str]) -> str:
    """A part of the navigation by its own title: the theme names it by a label that may be empty."""
    before, after, title = navigation.groups()
    return f'{before}aria-label="{" ".join(title.split())}"{after}{title}'


def _staged(section: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Write the pages of a section as Zensical reads them; their titles and files, in order."""
    folder.mkdir(exist_ok=True)
    for name in NAVIGATION[section]:
        page = page_of(name)
        file = Path(page.html).with_suffix(".md").name
        text = staged_text(page)
        if name != _VERBS:
            (folder / file).write_text(text, "utf-8")
            yield {page.title: file}
            continue
        index, *verbs = re.split(r"^## (?=blis-replay )", text, flags=re.MULTILINE)
        titles = [verb.partition("\n")[0] for verb in verbs]
        links = "".join(f"- [{title}]({_verb_file(title)})\n" for title in titles)
        (folder / file).write_text(f"{index}\n{links}", "utf-8")
        for title, verb in zip(titles, verbs, strict=True):
            (folder / _verb_file(title)).write_text(f"# {HELP.sub(help_markdown, verb)}", "utf-8")
        yield {
            page.title: [
                {"All verbs": file},
                *({title.removeprefix("blis-replay "): _verb_file(title)} for title in titles),
            ]
        }


def help_markdown(block: re.Match[str]) -> str:
    """A help text that is laid out for 80 columns, as text that a screen of any width breaks: prose, examples, options.

    ``block``: the help text between the fences of its page.
    """
    parts = (_help_part(part) for part in re.split(r"\n\n", block[1].strip("\n")))
    return "\n\n".join(parts)


def _help_part(part: str) -> str:
    """What stands between two empty lines: the usage, a table of options or commands, or prose and examples."""
    head, *rest = part.split("\n")
    if head.startswith("Usage:"):
        return f"```text\n{' '.join(part.split())}\n```"
    if not head.startswith(" "):
        listed = re.findall(r"^  (\S.*?)(?:  +(\S.*)|$)((?:\n {3,}\S.*)*)", "\n".join(rest), flags=re.M)
        items = (
            f"<dt><code>{escape(term)}</code></dt><dd>{_prose(f'{said}{more}')}</dd>" for term, said, more in listed
        )
        return f"<p><strong>{escape(head)}</strong></p>\n<dl>{''.join(items)}</dl>"
    prose = [line for line in part.split("\n") if not line.startswith("   ")]
    shown = [line.removeprefix("    ") for line in part.split("\n") if line.startswith("   ")]
    fence = ["", "```sh" if "Example" in prose[-1] else "```text", *shown, "```"] if shown else []
    return "\n".join([f"<p>{_prose(chr(10).join(prose))}</p>", *fence])


def _prose(text: str) -> str:
    """Words of a help text whose lines are joined, also where one ends within a word."""
    joined = " ".join(re.sub(r"(?<=[\w.])-\s*\n\s*(?=\w)", "-", text).split())
    return re.sub(r"`([^`]+)`|(?<![\w-])(--[a-z][a-z-]+)", r"<code>\1\2</code>", escape(joined, quote=False))


def _verb_file(title: str) -> str:
    return f"{title.replace(' ', '-')}.md"


def staged_text(page: Page) -> str:
    """The page without the marks that only ``docs.py`` reads, and with links to pages side by side."""
    lines: list[str] = []
    for part in parts_of(page.text):
        if part.kind == "fence":
            named = part.words and part.language != "console"
            recordings = part.language == "console" and "recordings" in part.words
            title = part.words[0] if named else "needs the published recordings" if recordings else ""
            lines += [f"```{part.language}" + (f' title="{title}"' if title else ""), *part.body, "```"]
        else:
            lines += part.body
    text = _IN_DARK.sub("", "\n".join(lines) + "\n")
    text = _IN_TWO_SCHEMES.sub(r"![\1](\2-light.png#only-light) ![\1](\2-dark.png#only-dark)", text)
    return _TO_OTHER_FOLDERS.sub("](", text)


def _toml(value: Any) -> str:
    """Lists, inline tables and strings as TOML: JSON but for the equals sign."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_toml(of_key)}' for key, of_key in value.items())} }}"
    return json.dumps(value)


class _Page(HTMLParser):
    """The anchors of a page, and what it links to or loads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember ``id``, ``href`` and ``src``."""
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe") or (tag == "link" and given.get("rel") == "stylesheet"):
            self.loaded += [given[name] for name in ("src", "href") if name in given]


def broken_links(site: Path) -> list[str]:
    """Links to pages, headings and files that there are not, and what would be loaded from elsewhere."""
    pages = {path: _Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    broken: list[str] = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        broken += [f"{name}: {link} is loaded from elsewhere" for link in page.loaded if "//" in link]
        for link in dict.fromkeys([*page.links, *page.loaded]):
            if "//" in link or link.startswith("mailto:"):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            missing = anchor and target in pages and anchor not in pages[target].anchors
            if not target.exists() or missing:
                broken.append(f"{name}: {link} leads to nothing")
    return broken
