"""The tracks of a timeline, in the order in which a viewer shows them: what every file format writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from blis_replay.ingest.printable import printable
from blis_replay.validate.timeline.lanes import SIDES

if TYPE_CHECKING:
    from blis_replay.validate.timeline.window import Timeline

ENGINE, REQUESTS = 1, 2
GROUPS = {ENGINE: "engine", REQUESTS: "requests"}
_LONGEST_TEXT = 200
_TIMES = ("side", "start_us", "end_us", "step")


@dataclass(frozen=True)
class Slice:
    """Something that lasts, us from the experiment's zero; ``arguments`` are shown when it is picked."""

    name: str
    start_us: int
    end_us: int
    arguments: Mapping[str, int | str]


@dataclass(frozen=True)
class Track:
    """One line of the viewer: slices one after the other, or ``(at_us, value)`` of a counter.

    ``group``: ENGINE or REQUESTS; ``number``: its place, unique over both.
    """

    group: int
    number: int
    name: str
    slices: tuple[Slice, ...] = ()
    samples: tuple[tuple[int, float], ...] = ()


def title(shown: Timeline) -> str:
    """The experiment, made printable."""
    return _text(shown.alias)


def tracks(shown: Timeline) -> Iterator[Track]:
    """Steps and counters, then the lanes by request, observed above simulated; all cut off at the window.

    A slice that is cut off has its whole time among its arguments.
    """
    number = 0
    for side in SIDES:
        steps = shown.steps.filter(pl.col("side") == side)
        if steps.height:
            number += 1
            yield Track(
                ENGINE, number, f"steps {side}", tuple(_step(row, shown) for row in steps.iter_rows(named=True))
            )
    # Ordered by counter, so that the two sides of one are neighbours.
    for (counter, side), rows in _parts(shown.counters.sort("counter", "side", "at_us"), "counter", "side"):
        number += 1
        samples = tuple(
            (max(at_us, shown.from_us), value) for at_us, value in rows.select("at_us", "value").iter_rows()
        )
        yield Track(ENGINE, number, f"{counter} {side}", samples=samples)
    for (request, side), rows in _parts(shown.lanes.sort("request_index", "side", "start_us"), "request_index", "side"):
        number += 1
        slices = tuple(_segment(row, shown) for row in rows.iter_rows(named=True))
        yield Track(REQUESTS, number, f"request {request} {side}", slices)


def _parts(frame: pl.DataFrame, *by: str) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    return iter(frame.partition_by(*by, maintain_order=True, as_dict=True).items())


def _step(row: dict[str, Any], shown: Timeline) -> Slice:
    prefill, decode = row["prefill_tokens"], row["decode_tokens"]
    if prefill is None or decode is None:
        kind = "step"
    elif prefill and decode:
        kind = "mixed step"
    else:
        kind = "prefill step" if prefill else "decode step" if decode else "empty step"
    return _slice(f"{kind} {row['step']}", row, {}, shown)


def _segment(row: dict[str, Any], shown: Timeline) -> Slice:
    name = shown.request_ids.get(row["request_index"])
    return _slice(row["segment"], row, {} if name is None else {"request_id": _text(name)}, shown)


def _slice(name: str, row: dict[str, Any], more: dict[str, int | str], shown: Timeline) -> Slice:
    arguments = {
        key: value for key, value in row.items() if value is not None and key not in (*_TIMES, "segment")
    } | more
    start_us, end_us = max(row["start_us"], shown.from_us), min(row["end_us"], shown.until_us)
    if (start_us, end_us) != (row["start_us"], row["end_us"]):
        arguments |= {"whole_start_us": row["start_us"], "whole_duration_us": row["end_us"] - row["start_us"]}
    return Slice(_text(name), start_us, end_us, arguments)


def _text(text: str) -> str:
    """Made printable, and of a length that a viewer can show."""
    return printable(text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…")
