"""The pictures of the documentation: the report in a browser, and commands in terminals of any width.

    python scripts/docs_pictures.py                                          # screenshots of the report
    python scripts/docs_pictures.py 160 out.svg blis-replay validate --experiment 34b-general    # a terminal, as SVG

The screenshots need Chromium (Debian's package; ``CHROMIUM`` names another), and are looked at before they are
committed.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from contextlib import chdir
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from docs_pages import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_ROWS = 50
_SIZE, _ADVANCE, _LEADING, _MARGIN = 13, 7.8, 18, 14  # px; a line of text is stretched onto this grid
_COLOURS = {31: "red", 32: "green", 33: "yellow", 34: "blue", 35: "magenta", 36: "cyan"}
_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")

# Both palettes are of WCAG contrast 4.5 and more on their ground.
_STYLE = """
text { font: 13px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }
.ground { fill: #ffffff; stroke: #d1d9e0 } .bold { font-weight: bold } .prompt { fill: #59636e }
.red { fill: #b3261e } .green { fill: #116329 } .yellow { fill: #7d4e00 } .blue { fill: #0550ae }
.magenta { fill: #8250df } .cyan { fill: #0b6b75 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .ground { fill: #0d1117; stroke: #3d444d } .prompt { fill: #9198a1 }
.red { fill: #ff8f87 } .green { fill: #56d364 } .yellow { fill: #e3b341 } .blue { fill: #79c0ff }
.magenta { fill: #d2a8ff } .cyan { fill: #76e3ea }
}
"""


@dataclass(frozen=True)
class Run:
    """Characters beside each other of one style; ``classes``: of the picture's style sheet."""

    column: int
    text: str
    classes: str


def terminal_svg(command: list[str], columns: int) -> str:
    """What ``command`` prints on a terminal of so many columns, below the command itself, as an SVG document."""
    prompt = shlex.join(command)
    lines = [[Run(0, f"$ {prompt}", "prompt")], *screen(on_terminal(command, columns))]
    width, height = columns * _ADVANCE + 2 * _MARGIN, len(lines) * _LEADING + 2 * _MARGIN
    texts = [_text(run, at) for at, line in enumerate(lines) for run in line]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height}" '
            f'width="{width:.0f}" height="{height}">',
            f"<title>{escape(prompt)}: its output on a terminal of {columns} columns</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="6"/>',
            *texts,
            "</svg>\n",
        ]
    )


def on_terminal(command: list[str], columns: int) -> str:
    """What a command writes to a terminal that is its standard output and standard error."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment = {**kept, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        written = b""
        try:
            while read := os.read(ours, 1 << 16):
                written += read
        except OSError:
            pass  # how a terminal says that nobody writes to it any more
    os.close(ours)
    return written.decode(errors="replace")


def screen(written: str) -> list[list[Run]]:
    """The lines that stand there in the end: carriage returns, wiped lines, bold and colours are obeyed."""
    lines: list[list[tuple[str, str]]] = [[]]
    column, classes, at = 0, "", 0
    while at < len(written):
        sequence = _SEQUENCE.match(written, at)
        if sequence is not None:
            at = sequence.end()
            if sequence[2] == "m":
                classes = _styled(classes, sequence[1])
            elif sequence[2] == "K":
                del lines[-1][column:]
            continue
        character, at = written[at], at + 1
        if character == "\n":
            lines.append([])
            column = 0
        elif character == "\r":
            column = 0
        elif character.isprintable():
            lines[-1][column : column + 1] = [(character, classes)]
            column += 1
    while lines and not lines[-1]:
        lines.pop()
    return [_runs(line) for line in lines]


def _styled(classes: str, codes: str) -> str:
    """The style after a sequence of codes."""
    styles = set(classes.split())
    for code in map(int, filter(None, codes.split(";") if codes else ["0"])):
        if code == 0:
            styles.clear()
        elif code == 1:
            styles.add("bold")
        elif code in _COLOURS:
            styles = (styles - set(_COLOURS.values())) | {_COLOURS[code]}
    return " ".join(sorted(styles))


def _runs(line: list[tuple[str, str]]) -> list[Run]:
    runs: list[Run] = []
    for column, (character, classes) in enumerate(line):
        if runs and runs[-1].classes == classes:
            runs[-1] = Run(runs[-1].column, runs[-1].text + character, classes)
        else:
            runs.append(Run(column, character, classes))
    return [run for run in runs if run.text.strip()]


def _text(run: Run, line: int) -> str:
    """Words one by one, each on its columns: no font decides where a column of a table stands."""
    styled = f' class="{run.classes}"' if run.classes else ""
    y = _MARGIN + line * _LEADING + _SIZE
    return "".join(
        f'<text{styled} x="{_MARGIN + (run.column + word.start()) * _ADVANCE:.1f}" y="{y}" '
        f'textLength="{len(word[0]) * _ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs">{escape(word[0])}</text>'
        for word in re.finditer(r"\S+(?: \S+)*", run.text)
    )


def shot(columns: int) -> str:
    """The picture, in SVG; the store is one of its own."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with TemporaryDirectory() as folder, chdir(folder):
        return terminal_svg(["blis-replay", "validate", "--experiment", "34b-general", "-v"], columns)


_CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
_WIDTH, _HEIGHT, _BELOW = 1100, 900, 12


def main(arguments: list[str]) -> None:
    """``COLUMNS FILE COMMAND...`` draws a terminal; without arguments the report is shot."""
    if arguments:
        columns, file, *command = arguments
        Path(file).write_text(terminal_svg(command, int(columns)), "utf-8")
    else:
        report_shots()


def report_shots() -> None:
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
    from PIL import Image

    shown = browser.new_page(color_scheme=scheme, viewport={"width": _WIDTH, "height": _HEIGHT})
    shown.goto(page.as_uri())
    top = shown.locator("section.experiment").bounding_box()["y"]
    beside = shown.locator(".beside").first.bounding_box()
    area = {"x": 0, "y": top, "width": _WIDTH, "height": beside["y"] + beside["height"] + _BELOW - top}
    taken = Image.open(BytesIO(shown.screenshot(clip=area, full_page=True)))
    taken.quantize(64, dither=Image.Dither.NONE).save(picture, optimize=True)  # a quarter of the bytes
    shown.close()


if __name__ == "__main__":
    main(sys.argv[1:])
