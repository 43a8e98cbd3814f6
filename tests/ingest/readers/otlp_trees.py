"""Random OTLP documents for property tests: of the right shape, with any numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from blis_replay.ingest.scan.otlp_columns import (
    EVENT_FLOATS,
    EVENT_INTEGERS,
    EVENT_STRINGS,
    EVENTS,
    SCOPES,
    SPAN_FLOATS,
    SPAN_INTEGERS,
    SPAN_STRINGS,
)

MAX_INT64 = 2**63 - 1

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(-(2**63), MAX_INT64) | st.integers(0, 10**13)
doubles = st.floats(width=64, allow_nan=False, allow_infinity=False)
values = (
    st.builds(lambda n: {"intValue": str(n)}, numbers)
    | st.builds(lambda x: {"doubleValue": x}, doubles)
    | st.builds(lambda t: {"stringValue": t}, text)
    | st.builds(lambda b: {"boolValue": b}, st.booleans())
    | st.sampled_from([{"doubleValue": name} for name in ("NaN", "Infinity", "-Infinity")])
    | st.just({"arrayValue": {"values": [{"intValue": "1"}]}})
)
times = (st.integers(0, 2**64 - 1) | st.integers(0, 10**13)).map(str)


def attributes_of(integers: dict[str, str], floats: dict[str, str], strings: dict[str, str]) -> Any:
    """Mostly of the right kind, so that whole spans survive."""
    fitting = (
        st.tuples(st.sampled_from(sorted(integers)), st.builds(lambda n: {"intValue": str(n)}, numbers))
        | st.tuples(st.sampled_from(sorted(floats)), st.builds(lambda x: {"doubleValue": x}, doubles))
        | st.tuples(st.sampled_from(sorted(strings)), st.builds(lambda t: {"stringValue": t}, text))
    )
    any_key = st.sampled_from([*sorted({**integers, **floats, **strings}), "mine"])
    pairs = st.lists(fitting | fitting | fitting | st.tuples(any_key, values), max_size=4)
    return pairs.map(lambda found: [{"key": key, "value": value} for key, value in found])


events = st.fixed_dictionaries(
    {"name": st.sampled_from([*EVENTS, "mine"])},
    optional={
        "timeUnixNano": times,
        "attributes": attributes_of(EVENT_INTEGERS, EVENT_FLOATS, EVENT_STRINGS),
    },
)
spans = st.fixed_dictionaries(
    {"name": st.sampled_from(["llm_core", "llm_request", "scheduler_steps_1"]) | text},
    optional={
        "traceId": st.sampled_from(["0a" * 16, "0b" * 16]),
        "spanId": st.sampled_from(["01" * 8, "02" * 8, "03" * 8]),
        "parentSpanId": st.sampled_from(["01" * 8, "02" * 8, "03" * 8]),
        "startTimeUnixNano": times,
        "endTimeUnixNano": times,
        "attributes": attributes_of(SPAN_INTEGERS, SPAN_FLOATS, SPAN_STRINGS),
        "events": st.lists(events, max_size=3),
        "droppedEventsCount": st.integers(0, 2**32 - 1),
        "status": st.fixed_dictionaries({}, optional={"code": st.integers(0, 2), "message": text}),
        "flags": st.integers(0, 1023),
    },
)
documents = st.builds(
    lambda scoped: {"resourceSpans": [{"scopeSpans": [{"scope": {"name": n}, "spans": found}]} for n, found in scoped]},
    st.lists(st.tuples(st.sampled_from([*SCOPES, "mine"]), st.lists(spans, max_size=3)), max_size=3),
)
