"""Rows of ``SPAN_SCHEMA`` and ``EVENT_SCHEMA`` in the making: filled by the library decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from blis_replay.ingest.scan.otlp_columns import (
    EVENT_FLOATS,
    EVENT_INTEGERS,
    EVENT_SCHEMA,
    EVENT_STRINGS,
    MAX_SPAN_BYTES,
    SPAN_FLOATS,
    SPAN_INTEGERS,
    SPAN_SCHEMA,
    SPAN_STRINGS,
    TraceBatch,
    batch_of,
)

BATCH_ROWS = 50_000
_MAX_EXACT = 1 << 53
# What a value is called that has to be of a type.
_WANTED = {int: "a whole number", float: "a number", str: "a text"}

Value = int | float | str | None
Row = tuple[Value, ...]


class Malformed(ValueError):
    """A span or an event cannot be used; the text says why."""


class OtherValue:
    """Stands for an attribute's value that is no number and no string."""


OTHER_VALUE = OtherValue()


@dataclass(frozen=True)
class Layout:
    """Where attributes go: name -> (place among the attributes' columns, type), and how many columns there are."""

    places: Mapping[str, tuple[int, type[int] | type[float] | type[str]]]
    width: int


def _layout(integers: dict[str, str], floats: dict[str, str], strings: dict[str, str]) -> Layout:
    columns = list(dict.fromkeys([*integers.values(), *floats.values(), *strings.values()]))
    places: dict[str, tuple[int, type[int] | type[float] | type[str]]] = {}
    for table, kind in ((integers, int), (floats, float), (strings, str)):
        places |= {name: (columns.index(column), kind) for name, column in table.items()}
    return Layout(places, len(columns))


SPAN_LAYOUT = _layout(SPAN_INTEGERS, SPAN_FLOATS, SPAN_STRINGS)
EVENT_LAYOUT = _layout(EVENT_INTEGERS, EVENT_FLOATS, EVENT_STRINGS)


def attribute_values(layout: Layout, attributes: Iterable[tuple[str, Value | OtherValue]]) -> list[Value]:
    """The values of the attributes' columns; raises :class:`Malformed` for one of another type than its column."""
    values: list[Value] = [None] * layout.width
    for key, value in attributes:
        if (place := layout.places.get(key)) is not None:
            values[place[0]] = _converted(key, value, place[1])
    return values


def _converted(key: str, value: Value | OtherValue, kind: type[int] | type[float] | type[str]) -> Value:
    if value is None or type(value) is kind:
        return value
    if kind is float and isinstance(value, int):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT:
        return int(value)
    # Not a text itself: it may be of a prompt.
    said = "a text" if isinstance(value, str) else f"{value!r:.30}"
    said = "neither a number nor a text" if isinstance(value, OtherValue) else said
    raise Malformed(f"{key} is {said}, expected {_WANTED[kind]}")


def check_size(span: bytes | memoryview) -> None:
    """Raises :class:`Malformed` if a span is larger than any that is decoded."""
    if len(span) > MAX_SPAN_BYTES:
        raise Malformed(f"a span of {len(span)} bytes")


@dataclass
class BatchRows:
    """The rows of a batch so far."""

    spans: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether it is time for the next batch."""
        return len(self.spans) >= BATCH_ROWS or len(self.events) >= BATCH_ROWS

    def add(self, span: Sequence[Value], attributes: Sequence[Value], events: Iterable[Sequence[Value]]) -> None:
        """Add a span (the columns before its attributes', these) and its events (the columns after ``span_row``)."""
        row = len(self.spans)
        self.spans.append((*span, *attributes))
        self.events.extend((row, *event) for event in events)

    def add_other(self, record: int, span: int, scope: str, name: str) -> None:
        """Add a span of a scope that is not read."""
        self.spans.append((record, span, scope, name, *(None,) * (len(SPAN_SCHEMA) - 4)))

    def batch(self, unit: str) -> TraceBatch:
        """The rows as frames."""
        return batch_of(unit, _frame(SPAN_SCHEMA, self.spans), _frame(EVENT_SCHEMA, self.events))


def _frame(schema: Mapping[str, pl.DataType | type[pl.DataType]], rows: list[Row]) -> pl.DataFrame:
    if not rows:
        return pl.DataFrame(schema=schema)
    # Column by column: twice as fast as by row.
    columns = zip(schema.items(), zip(*rows, strict=True), strict=True)
    return pl.DataFrame([pl.Series(name, values, kind) for (name, kind), values in columns])
