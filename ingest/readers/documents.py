"""Small YAML and JSON documents, read safely: bounded size, no aliases, one-line errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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


def yaml_mapping(file: RecordedFile, limit_bytes: int = MAX_YAML_BYTES) -> dict[str, Any]:
    """The mapping that a YAML file holds (JSON is YAML too); :class:`RecordingError` if it holds none."""
    try:
        document = load_yaml(file.content(limit_bytes))
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


def texts(document: object, *paths: str) -> str | None:
    """The texts at these paths in one, with colons between them; ``None`` without any."""
    return text(": ".join(part for path in paths if (part := text(at(document, path)))))


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
        digits = value.strip()
        value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 19 else None
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_INTEGER
    return value if usable else None  # type: ignore[return-value]


def switch(value: object) -> bool | None:
    """``value`` if it is true or false, else ``None``."""
    return value if isinstance(value, bool) else None


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
# us in one of each unit of time
US_OF = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "sec": 1e6}

# metric, statistic, value
Reported = tuple[str, str, float]


class Metric(NamedTuple):
    """One entry of a tool's report: our name of it, the ``paths`` at which it may stand, and its ``unit`` in ours.

    ``statistic``: of a single number; empty for a distribution.  ``unit`` None: the report states the unit of time.
    """

    name: str
    paths: tuple[str, ...]
    unit: float | None = 1.0
    statistic: str = ""


def reported(file: RecordedFile, document: object, metrics: Iterable[Metric]) -> Iterator[Reported]:
    """What a report says of these metrics; what cannot be used is rejected and counted."""
    for metric in metrics:
        value, unit = at(document, *metric.paths), metric.unit
        if unit is None and isinstance(value, Mapping):
            unit = US_OF.get(str(value.get("unit"))[:20])
            if unit is None:
                file.tally.reject(metric.paths[0], "a unit that is not a unit of time")
                continue
        if metric.statistic:
            yield from reported_number(file, metric.name, metric.statistic, value, unit or 1.0)
        else:
            yield from distribution(file, metric.name, value, unit or 1.0)


def reported_number(
    file: RecordedFile, metric: str, statistic: str, value: object, unit: float = 1.0
) -> Iterator[Reported]:
    """``value`` times ``unit`` as one row, none if it is null; an unusable number is rejected."""
    if value is None:
        return
    number = finite(value)
    if number is None or isinstance(value, str):
        file.tally.reject(f"{metric}.{statistic}", "no finite number")
    elif abs(number * unit) >= MAX_INTEGER:
        file.tally.reject(f"{metric}.{statistic}", "larger than any time or count can be")
    else:
        yield metric, statistic, number * unit


# A tool's name of a statistic -> ours.
_STATISTICS = {"avg": "mean", "median": "p50", "p001": "p0.1", "p01": "p1", "p05": "p5", "p999": "p99.9"}
_STATISTIC = re.compile(r"mean|min|max|p\d{1,2}(?:\.\d{1,4})?", re.ASCII)


def distribution(file: RecordedFile, metric: str, statistics: object, unit: float = 1.0) -> Iterator[Reported]:
    """Mean, extremes and percentiles of a metric, times ``unit``; where both stand there, ``median`` is the p50."""
    if not isinstance(statistics, Mapping):
        if statistics is not None:
            file.tally.reject(metric, "not an object of statistics")
        return
    statistics = {**statistics, **section(statistics, "percentiles")}
    named = {_STATISTICS.get(name, name): name for name in sorted(map(str, statistics), key="median".__eq__)}
    for statistic, name in named.items():
        if _STATISTIC.fullmatch(statistic):
            yield from reported_number(file, metric, statistic, statistics[name], unit)


# Requests of equal lengths take alike: the p99 of their E2E is at most this many medians (chosen).
_ALIKE = 1.5


def may_be_equal(slow: float, usual: float) -> bool:
    """Whether requests may be equally long, by the reported p99 and median of their E2E; 0: not reported."""
    return not slow > _ALIKE * usual > 0


def aggregate_frame(rows: Iterable[tuple[int, str, str, float]]) -> pl.DataFrame:
    """``(stage, metric, statistic, value)`` as a frame of ``AGGREGATE_SCHEMA``."""
    return pl.DataFrame(list(rows), schema=AGGREGATE_SCHEMA, orient="row")
