"""From the pages to a static site: no script, nothing from elsewhere, every internal link checked."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from docs_pages import NAVIGATION, ROOT, Page, Part, all_pages, page_of, parts_of
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Heading:
    """A heading of a page: its level (1 to 6), anchor and text."""

    level: int
    anchor: str
    text: str


@dataclass(frozen=True)
class Rendered:
    """A page in HTML, its ``top`` the first heading, with its headings, and the links that lead to nothing."""

    page: Page
    top: str
    body: str
    headings: tuple[Heading, ...]
    broken: tuple[str, ...]


def build_site(out: Path) -> list[str]:
    """Write the site into ``out``, in place of what was there; returns the broken links, a line each."""
    anchors = {page.source: {h.anchor for h in _headings(_tokens(page))} for page in all_pages()}
    rendered = [_rendered(page, anchors) for page in all_pages()]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined)
    template = environment.get_template("docs_page.html")
    navigation = {section: [page_of(name) for name in names] for section, names in NAVIGATION.items()}
    order = all_pages()
    for i, one in enumerate(rendered):
        around = {"before": order[i - 1] if i else None, "after": order[i + 1] if i + 1 < len(order) else None}
        (out / one.page.html).write_text(template.render(shown=one, navigation=navigation, **around), "utf-8")
    shutil.copy(_HERE / "docs_page.css", out / "style.css")
    for picture in sorted([*(ROOT / "docs").glob("*.png"), *(ROOT / "docs").glob("*.svg")]):
        shutil.copy(picture, out)
    return [problem for one in rendered for problem in one.broken]


def anchor_of(text: str, taken: Sequence[str] = ()) -> str:
    """The anchor of a heading, as forges make it: lower case, no punctuation, hyphens for blanks."""
    plain = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    same = sum(anchor == plain or re.fullmatch(re.escape(plain) + r"-\d+", anchor) is not None for anchor in taken)
    return f"{plain}-{same}" if same else plain


def _parser() -> MarkdownIt:
    # Raw HTML is shown as text, not obeyed.
    return MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")


class _Renderer(RendererHTML):
    """The library's renderer with this site's blocks, tables and headings."""

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Console blocks with the commands set off; blocks that need recordings say so."""
        part = Part("fence", 0, tuple(tokens[idx].content.splitlines()), *_language(tokens[idx].info))
        note = '<p class="note">needs the published recordings</p>' if "recordings" in part.words else ""
        name = part.words[0] if part.words and part.language != "console" else ""
        caption = f'<p class="note">{escape(name)}</p>' if name else note
        lines = _console(part.body) if part.language == "console" else [escape(line) for line in part.body]
        joined = "\n".join(lines)
        return f'{caption}<pre tabindex="0" class="{escape(part.language)}"><code>{joined}</code></pre>\n'

    def table_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Wide tables scroll by themselves."""
        return '<div class="scrolls" tabindex="0"><table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """See ``table_open``."""
        return "</table></div>\n"


def _tokens(page: Page) -> list[Token]:
    """The page without the marks of its generated regions."""
    parts = parts_of(page.text)
    lines = [line for part in parts for line in (part.body if part.kind == "region" else part.lines)]
    return _parser().parse("\n".join(lines))


def _language(info: str) -> tuple[str, tuple[str, ...]]:
    language, *words = info.split() or [""]
    return language, tuple(words)


def _console(body: Sequence[str]) -> list[str]:
    lines: list[str] = []
    in_command = False
    for line in body:
        in_command = line.startswith("$ ") or (in_command and lines[-1].endswith("\\</b>"))
        lines.append(f"<b>{escape(line)}</b>" if in_command else escape(line))
    return lines


def _rendered(page: Page, anchors: dict[Path, set[str]]) -> Rendered:
    tokens = _tokens(page)
    headings = _headings(tokens)
    of_heading = iter(headings)
    broken: list[str] = []
    for token in tokens:
        if token.type == "heading_open":
            token.attrSet("id", next(of_heading).anchor)
        for child in token.children or ():
            name = {"link_open": "href", "image": "src"}.get(child.type)
            if name is not None:
                target = _target(str(child.attrs[name]), page, anchors)
                if target is None:
                    broken.append(f"{page.source.relative_to(ROOT)}: {child.attrs[name]} leads to nothing")
                child.attrSet(name, target or "")
    parser = _parser()
    top, end, body = parser.renderer.render(tokens, parser.options, {}).partition("</h1>")
    return Rendered(page, top + end, body, tuple(headings), tuple(broken))


def _headings(tokens: Sequence[Token]) -> list[Heading]:
    found: list[Heading] = []
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            found.append(Heading(int(opening.tag[1]), anchor_of(text, [h.anchor for h in found]), text))
    return found


def _target(link: str, page: Page, anchors: dict[Path, set[str]]) -> str | None:
    """The link as the site has it; None if there is no such page, heading or picture."""
    if link.startswith("https://"):
        return link
    path, _, anchor = link.partition("#")
    source = (page.source.parent / path).resolve() if path else page.source
    if source in anchors:
        known = not anchor or anchor in anchors[source]
        html = page_of(source.relative_to(ROOT).as_posix()).html
        return (f"{html}#{anchor}" if anchor else html) if known else None
    return source.name if source.suffix in (".png", ".svg") and source.is_file() else None
