"""docs/schema.json against answers: the fields that it describes for a command, and those of a document."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from schemas import SCHEMA

# Mappings whose keys are free: coefficients, reasons, engine arguments.
FREE = ("measured", "excluded", "not_judged", "engine", "basis", "delays")


def documented(command: str, *, first_column: bool = False) -> set[str]:
    """The names in the description of a command's JSON; ``first_column``: fields, without those that texts name."""
    entry = SCHEMA["x-fields"][command]
    fields, texts = zip(*_leaves(entry["fields"]), strict=True)
    said = [] if first_column else re.findall(r"`([^`]+)`", " ".join([entry.get("description", ""), *texts]))
    named = set(re.findall(r"[a-z_0-9]+", " ".join([*fields, *said])))
    return named if first_column else named | {"schema", "version"}  # of every document


def _leaves(fields: Mapping[str, str | Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Each field with its text; a mapping among them groups the fields of a part of the document."""
    for name, text in fields.items():
        if isinstance(text, str):
            yield name, text
        else:
            yield from _leaves(text)


def fields_of(value: object, free: Collection[str] = ()) -> set[str]:
    """The names of all fields at any depth, except inside ``free`` ones."""
    if isinstance(value, list):
        return {name for item in value for name in fields_of(item, free)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {n for name, item in value.items() if name not in free for n in fields_of(item, free)}
