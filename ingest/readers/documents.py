"""Small YAML and JSON documents, read safely: bounded size, no aliases, one-line errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import polars as pl

from blis_replay.base.document import YAML_ERRORS, load_yaml, yaml_problem
from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.recording import AGGREGATE_SCHEMA

# Real ones have a few KB; a MB of one number in base 60 takes a minute.
MAX_YAML_BYTES = 256 << 10
MAX_JSON_BYTES = 16 << 20

# What msgspec raises for bytes that are not JSON of the form wanted.
DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def yaml_mapping(file: RecordedFile) -> dict[str, Any]:
    """The mapping that a YAML file holds (JSON is YAML too); :class:`RecordingError` if it holds none."""
    try:
        document = load_yaml(file.content(MAX_YAML_BYTES))
    except YAML_ERRORS as error:
        line, problem = yaml_problem(error)
        raise RecordingError(file.path, line, f"not valid YAML ({problem})", "correct the file") from error
    return _mapping(file, document)


def json_mapping(file: RecordedFile) -> dict[str, Any]:
    """The object that a JSON file holds; :class:`RecordingError` if it holds none."""
    try:
        document = json.loads(file.content(MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        problem = " ".join(str(error).split())[:120]
        raise RecordingError(file.path, place, f"no valid JSON ({problem})", "copy the file again") from error
    return _mapping(file, document)


def at(document: object, *paths: str) -> Any:
    """The first value other than null under one of these paths: keys, and places in lists, with dots between."""
    for path in paths:
        value = document
        for step in path.split("."):
            if isinstance(value, Mapping):
                value = value.get(step)
            elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                value = None
        if value is not None:
            return value
    return None


def section(document: object, *paths: str) -> Mapping[str, Any]:
    """The mapping under the first of these paths that leads to one with keys, empty where none does."""
    return next((found for path in paths if isinstance(found := at(document, path), Mapping) and found), {})


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


# A word or a date in the place of a number: any other text may be part of a prompt.
_SHORT_WORD = re.compile(r"\S{0,24}|[-+.:,/\dTZ ]{0,40}")


def quoted_value(value: object) -> str:
    """As ``quoted``, for a value out of a record: of a longer text only how long it is, as texts are never kept."""
    said = value if isinstance(value, str) else "" if isinstance(value, int | float | None) else str(value)
    return quoted(value) if _SHORT_WORD.fullmatch(said) else f"(a text of {len(said):,} characters)"


def _mapping(file: RecordedFile, document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        holds = "nothing" if document is None else f"a {type(document).__name__}"
        raise RecordingError(file.path, "", f"holds {holds} where a mapping is expected", "check the file")
    file.tally.records = 1
    return {key if isinstance(key, str) else quoted(key): value for key, value in document.items()}


MAX_TOKENS = 1 << 31
# Beyond this a time in us or a count is damage, and sums of two still fit int64.
MAX_INTEGER = 1 << 61


def whole(value: object) -> int | None:
    """``value`` as a non-negative integer below 2^61, or ``None``; decimal strings and 3.0 are accepted."""
    if isinstance(value, str):
        text = value.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 19):
            return None
        value = int(text)
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        if not math.isfinite(value) or not value.is_integer():
            return None
        value = int(value)
    if not isinstance(value, int):
        return None
    return value if 0 <= value < MAX_INTEGER else None


def tokens(value: object) -> int | None:
    """``value`` as a number of tokens of at least 1, or ``None`` (0 is how these tools write "unknown")."""
    count = whole(value)
    return count if count is not None and 0 < count < MAX_TOKENS else None


def finite(value: object) -> float | None:
    """``value`` as a finite float, or ``None``; numeric strings are accepted."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        return None
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def microseconds(seconds: object) -> int | None:
    """``seconds`` as whole microseconds (rounded), or ``None`` if it is not a number or beyond 2^61 us."""
    value = finite(seconds)
    if value is None or abs(value) * 1e6 >= MAX_INTEGER:
        return None
    return round(value * 1e6)


WHOLE_RUN = -1
US_PER_S = 1e6
US_PER_MS = 1e3

# metric, statistic, value
Reported = tuple[str, str, float]


def reported_number(
    file: RecordedFile, metric: str, statistic: str, value: object, unit: float = 1.0
) -> Iterator[Reported]:
    """``value`` times ``unit`` as one row, none if it is null; an unusable number is rejected."""
    if value is None:
        return
    number = finite(value)
    if number is None or isinstance(value, str):
        file.tally.reject(f"{metric}.{statistic}", "no finite number")
        return
    if abs(number * unit) >= MAX_INTEGER:
        file.tally.reject(f"{metric}.{statistic}", "larger than any time or count can be")
        return
    yield metric, statistic, number * unit


# A tool's name of a statistic -> ours.
_STATISTICS = {"avg": "mean", "median": "p50", "p001": "p0.1", "p01": "p1", "p05": "p5", "p999": "p99.9"}
_STATISTIC = re.compile(r"mean|min|max|p\d{1,2}(?:\.\d{1,4})?", re.ASCII)


def distribution(file: RecordedFile, metric: str, statistics: object, unit: float = 1.0) -> Iterator[Reported]:
    """Mean, extremes and percentiles of a metric, ``unit`` times as large; of ``p50`` and ``median`` the latter."""
    if not isinstance(statistics, Mapping):
        if statistics is not None:
            file.tally.reject(metric, "not an object of statistics")
        return
    named = {_STATISTICS.get(name, name): name for name in sorted(map(str, statistics), key="median".__eq__)}
    for statistic, name in named.items():
        if _STATISTIC.fullmatch(statistic):
            yield from reported_number(file, metric, statistic, statistics[name], unit)


def aggregate_frame(rows: Iterable[tuple[int, str, str, float]]) -> pl.DataFrame:
    """``(stage, metric, statistic, value)`` as a frame of ``AGGREGATE_SCHEMA``."""
    return pl.DataFrame(list(rows), schema=AGGREGATE_SCHEMA, orient="row")
