"""What a CI service shows of judgements: files in a folder, which ``action.yml`` hands to GitHub.

``summary.md``: verdicts with a dot plot; ``annotations.txt``: a workflow command per experiment; ``junit.xml``;
``badge.json`` (endpoint of shields.io) and ``badge.svg``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from blis_replay.base.errors import printable
from blis_replay.base.files import write_whole
from blis_replay.validate.comparison.verdict_text import held_text, reason
from blis_replay.validate.gating.policy import Check
from blis_replay.validate.gating.reports import junit
from blis_replay.validate.judgement import OUTCOMES, Judgement, Quantity, Verdict, worst
from blis_replay.validate.text.answer import markdown_text

_LEVELS: Mapping[Verdict, str] = {"PASS": "notice", "FITS": "notice", "FAIL": "error"}
_COLOURS: Mapping[Verdict, str] = {"PASS": "#2e7d32", "FITS": "#2e7d32", "FAIL": "#b71c1c"}
_UNKNOWN_COLOUR = "#8d6e00"
_COLUMNS = 41  # of a dot plot, from twice the limit below to twice the limit above
_CHARACTER_PX = 6.8  # mean width in Verdana 11, the font of shields.io badges


def write_for_ci(folder: Path, judgements: Sequence[Judgement], not_judged: Mapping[str, str], simulator: str) -> None:
    """Write all files; ``not_judged``: experiment to why it could not be replayed."""
    said = [(one.subject.alias, one.verdict, reason(one)) for one in judgements]
    said += [(name, "NOT JUDGED", why) for name, why in not_judged.items()]
    verdict = worst(one for _, one, _ in said)
    good = sum(one in ("PASS", "FITS") for _, one, _ in said)
    message, colour = f"{verdict} {good}/{len(said)}", _COLOURS.get(verdict, _UNKNOWN_COLOUR)
    suites = [(one.subject.alias, _checks(one), "") for one in judgements]
    suites += [(name, [Check("verdict", name, "", "", "NOT JUDGED", why)], "") for name, why in not_judged.items()]
    badge = {"schemaVersion": 1, "label": "fidelity", "message": message, "color": colour.removeprefix("#")}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "summary.md": _summary(verdict, simulator, said, judgements),
        "annotations.txt": "".join(_annotation(*one) for one in said),
        "junit.xml": junit(f"blis-replay validate: {simulator}", suites),
        "badge.json": json.dumps(badge) + "\n",
        "badge.svg": _badge("fidelity", message, colour),
    }.items():
        write_whole(folder / name, text)


def dots(quantity: Quantity) -> str:
    """An error as a dot in its interval, beside its limit: ``|`` at both limits, ``:`` at 0, both ends cut off."""

    def column(error: float) -> int:
        share = error / (4 * quantity.limit) + 0.5
        return round(min(max(share, 0.0), 1.0) * (_COLUMNS - 1))

    line = [" "] * _COLUMNS
    low, high = quantity.interval or (0.0, 0.0)
    if quantity.interval is not None:
        line[column(low) : column(high) + 1] = "-" * (column(high) - column(low) + 1)
    for at, mark in ((-quantity.limit, "|"), (0.0, ":"), (quantity.limit, "|")):
        line[column(at)] = mark
    if quantity.error is not None:
        line[column(quantity.error)] = "●"
    return "".join(line)


def _summary(
    verdict: Verdict, simulator: str, said: Sequence[tuple[str, Verdict, str]], judgements: Sequence[Judgement]
) -> str:
    lines = [f"- **{one}** {markdown_text(name)}: {markdown_text(why)}" for name, one, why in said]
    plot = [
        f"{printable(j.subject.alias):.24}".ljust(25) + f"{q.name:.18}".ljust(19) + dots(q).rstrip()
        for j in judgements
        for q in j.judged
    ]
    key = "error in its 95 % interval, for another recording of the load; | limits, : no error, to twice the limit"
    fenced = ["```text", *plot, "", key, "```"] if plot else []
    return "\n".join([f"## {verdict}: {markdown_text(simulator)}", "", *lines, "", *fenced]) + "\n"


def _annotation(name: str, verdict: Verdict, why: str) -> str:
    """A workflow command; ``%`` and, in a title, ``:`` and ``,`` mean something there."""
    text = printable(why).replace("%", "%25")
    title = f"{verdict} {printable(name)}".replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{_LEVELS.get(verdict, 'warning')} title={title}::{text}\n"


def _checks(judgement: Judgement) -> list[Check]:
    """The verdict, and each number that it rests on."""
    verdict, alias = judgement.verdict, judgement.subject.alias
    passed: Verdict = "PASS" if verdict == "FITS" else verdict
    whole = Check("verdict", alias, "", "", passed, reason(judgement))
    judged = () if verdict == "NOT JUDGED" else judgement.judged
    return [whole, *(Check("limit", alias, q.key, q.statistic, OUTCOMES[q.state], held_text(q)) for q in judged)]


def _badge(label: str, message: str, colour: str) -> str:
    left, right = (round(len(text) * _CHARACTER_PX) + 12 for text in (label, message))
    parts = ((0, left, "#555", label), (left, right, colour, message))
    boxes = "".join(
        f'<rect x="{x}" width="{width}" height="20" fill="{fill}"/>'
        f'<text x="{x + width / 2}" y="14">{escape(text)}</text>'
        for x, width, fill, text in parts
    )
    said = escape(f"{label}: {message}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{said}">'
        f'<title>{said}</title><g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">'
        f"{boxes}</g></svg>\n"
    )
