"""docs/json.md against answers: the fields that a section names, and those of a document."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "json.md"
# Mappings whose keys are free: coefficients, reasons, engine arguments.
FREE = ("measured", "excluded", "not_judged", "engine", "basis", "delays")


def documented(verb: str, *, first_column: bool = False) -> set[str]:
    """The names in back quotes of the section about a verb's JSON; ``first_column``: fields, without values."""
    section = _PAGE.read_text("utf-8").split(f"# JSON of `blis-replay {verb} --json`")[1].split("\n## ")[0]
    if first_column:
        section = " ".join(line.split("|")[1] for line in section.splitlines() if "|" in line)
    named = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", section))))
    return named if first_column else named | {"schema", "version"}  # of every document


def fields_of(value: object, free: Collection[str] = ()) -> set[str]:
    """The names of all fields at any depth, except inside ``free`` ones."""
    if isinstance(value, list):
        return {name for item in value for name in fields_of(item, free)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {n for name, item in value.items() if name not in free for n in fields_of(item, free)}
