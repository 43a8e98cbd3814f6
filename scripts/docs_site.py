"""Build a static site of the pages with Zensical, which checks the links between them.

Zensical is maintained by the authors of Material for MkDocs.  It reads the same Markdown, and brings search, contents,
highlighting and copy buttons.  It gets a copy of the pages, without the marks of blocks that only ``docs.py`` reads.
The page of commands becomes a page per verb.  Pages load nothing from other servers.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from click import unstyle
from docs_pages import NAVIGATION, ROOT, Page, page_of, parts_of

from blis_replay.validate.report.html import UNIT

_VERBS = "docs/commands.md"
# The configuration of Zensical, our style and our script.
_THEME = Path(__file__).with_name("site")
# A picture that there is in light and in dark colours: the theme shows the one that fits.
# The second of two in one page is for readers of the Markdown, who have one theme.
_IN_TWO_SCHEMES = re.compile(r"!\[([^\]]*)\]\(([\w/]+)-light\.png\)")
_IN_DARK = re.compile(r"!\[[^\]]*\]\([\w/]+-dark\.png\)\n*")
# A number with its unit, or a count of others: no line ends in it.
_NUMBER_CELL = re.compile(r"<td>(?=[+-]?\d[^<]{,11}</td>)")
# What is no prose: there a number and its unit may be parted.
_NO_PROSE = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<script.*?</script>|<[^>]*>)", flags=re.S)
# Files beside the pages that the site leaves out: their names stay as text.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_LOADED = re.compile(r'<(?:script|img|iframe|link rel="?stylesheet)\b[^>]*?\b(?:src|href)="?([^"\s>]+)')
HELP = re.compile(r"^```text\n(Usage: .*?)^```$", flags=re.M | re.S)


def build_site(out: Path) -> list[str]:
    """Replace ``out`` by the site; returns what is wrong with it, such as broken links, a line each."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        nav = [{section: list(_staged(section, folder / "pages"))} for section in NAVIGATION]
        for picture in (path for kind in ("*.png", "*.json") for path in (ROOT / "docs").glob(kind)):
            shutil.copy(picture, folder / "pages")
        for file in ("site.css", "site.js"):
            shutil.copy(_THEME / file, folder / "pages")
        settings = (_THEME / "zensical.toml").read_text("utf-8")
        (folder / "zensical.toml").write_text(
            settings.replace("[project]", f"[project]\nnav = {_toml(nav)}", 1), "utf-8"
        )
        command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ended.returncode:
            return [unstyle(f"zensical: {ended.stdout}{ended.stderr}")]
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "site", out)
    (out / "404.html").unlink()  # whoever serves the site has a page of its own for that
    for page in out.rglob("*.html"):
        text = _NUMBER_CELL.sub('<td class="number">', page.read_text("utf-8"))
        parts = _NO_PROSE.split(text)
        text = "".join(part if at % 2 else UNIT.sub("\u00a0", part) for at, part in enumerate(parts))
        page.write_text(text.replace("<th></th>", "<td></td>"), "utf-8")  # an empty corner heads nothing
    return [*badly_loaded(out), *_lost_items(out)]


def _lost_items(out: Path) -> list[str]:
    """Items of lists that became part of the paragraph before them, for want of an empty line."""
    pages = {page.name: page.read_text("utf-8") for page in out.glob("*.html")}
    texts = {name: re.sub(r"<pre.*?</pre>", "", text, flags=re.S) for name, text in pages.items()}
    return [
        f"{name}: no item of a list, put an empty line before it: {line}"
        for name, text in texts.items()
        for line in re.findall(r"^- .{,60}", text, flags=re.M)
    ]


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
    """The page without the marks that only ``docs.py`` reads, and without links to files that are no pages."""
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
    return _OUTSIDE.sub(r"\1", text)


def _toml(value: Any) -> str:
    """Lists, inline tables and strings as TOML: JSON but for the equals sign."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_toml(of_key)}' for key, of_key in value.items())} }}"
    return json.dumps(value)


def badly_loaded(site: Path) -> list[str]:
    """Pictures, scripts and styles of pages that are missing, or loaded from another server."""
    problems: list[str] = []
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        for link in dict.fromkeys(_LOADED.findall(path.read_text("utf-8"))):
            if "//" in link:
                problems.append(f"{name}: {link} is loaded from elsewhere")
            elif not (path.parent / link.partition("?")[0].partition("#")[0]).exists():
                problems.append(f"{name}: {link} leads to nothing")
    return problems
