"""Small YAML and JSON documents, read safely: bounded size, no aliases, one-line errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import yaml

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile

# Real ones have a few KB; a MB of one number in base 60 takes a minute.
MAX_YAML_BYTES = 256 << 10
MAX_JSON_BYTES = 16 << 20

# What msgspec can raise over bytes that are no JSON of the form wanted.
DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

# PyYAML's constructors raise all of these on tagged or overlong scalars.
_YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError, OverflowError)


class _NoAliasLoader(yaml.SafeLoader):
    """The safe loader without aliases: merge keys over aliases can expand without bound."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read")
        return super().compose_node(parent, index)


def yaml_mapping(file: RecordedFile) -> dict[str, Any]:
    """The mapping that a YAML file holds (JSON is YAML too); :class:`RecordingError` if it holds none."""
    try:
        document = yaml.load(file.content(MAX_YAML_BYTES), Loader=_NoAliasLoader)  # noqa: S506 - a SafeLoader
    except _YAML_ERRORS as error:
        raise RecordingError(
            file.path, _yaml_place(error), f"no valid YAML ({_first_line(error)})", "mend it"
        ) from error
    return _mapping(file, document)


def json_mapping(file: RecordedFile) -> dict[str, Any]:
    """The object that a JSON file holds; :class:`RecordingError` if it holds none."""
    try:
        document = json.loads(file.content(MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise RecordingError(
            file.path, place, f"no valid JSON ({_first_line(error)})", "copy the file again"
        ) from error
    return _mapping(file, document)


def section(document: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The mapping under a path of keys, empty where there is none."""
    found: object = document
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def text(value: object) -> str | None:
    """``value`` if it is a non-empty string of reasonable length on one line, else ``None``."""
    if not isinstance(value, str):
        return None
    line = "".join(c if c.isprintable() else " " for c in value[:500]).strip()
    return line or None


def quoted(value: object) -> str:
    """The beginning of a value that could not be used, in quotes, for an error or a remark."""
    try:
        return repr(str(value)[:40])
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"


def _mapping(file: RecordedFile, document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise RecordingError(file.path, "", f"holds {_named(document)} where a mapping is expected", "check the file")
    file.tally.records = 1
    return {key if isinstance(key, str) else quoted(key): value for key, value in document.items()}


def _named(document: object) -> str:
    return "nothing" if document is None else f"a {type(document).__name__}"


def _yaml_place(error: BaseException) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}" if mark is not None else ""


def _first_line(error: BaseException) -> str:
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    return " ".join(str(problem).split())[:120]
