"""Which attributes the scans of OTLP traces know, and which field of a row takes which kind of value."""

from __future__ import annotations

import numpy as np

from blis_replay.ingest.readers.otlp.columns import (
    EVENT_FLOATS,
    EVENT_INTEGERS,
    EVENT_STRINGS,
    SPAN_FLOATS,
    SPAN_INTEGERS,
    SPAN_STRINGS,
)
from blis_replay.ingest.scan.names import names_of
from blis_replay.ingest.scan.otlp_rows import ATTRIBUTES, EVENT_COUNTS, SPAN_COUNTS, event_field, span_field

OF_SPAN, OF_EVENT = 0, 1
ALL_KINDS = INTEGER, DOUBLE, STRING = 0, 1, 2
LARGEST_DROPPED = (1 << 32) - 1  # the count of dropped events has 32 bits
ATTRIBUTE_NAMES, ATTRIBUTE_LENGTHS, ATTRIBUTE_TABLE = names_of(ATTRIBUTES)
# By whose attribute it is and its name (the last one: any other): where its value goes, and the kinds it can have.
FIELD_OF = np.full((2, len(ATTRIBUTES) + 1), -1)
KINDS_OF = np.zeros_like(FIELD_OF)
for _whose, _place, _tables in (
    (OF_SPAN, span_field, (SPAN_INTEGERS, SPAN_FLOATS, SPAN_STRINGS)),
    (OF_EVENT, event_field, (EVENT_INTEGERS, EVENT_FLOATS, EVENT_STRINGS)),
):
    for _table, _kinds in zip(_tables, (1 << INTEGER, 1 << INTEGER | 1 << DOUBLE, 1 << STRING), strict=True):
        for _name, _column in _table.items():
            FIELD_OF[_whose, ATTRIBUTES.index(_name)] = _place(_column)
            KINDS_OF[_whose, ATTRIBUTES.index(_name)] = _kinds
FIRST_TEXT = np.array([len(SPAN_COUNTS), len(EVENT_COUNTS)])
