"""The server's monotonic clock: its offset to the epoch, and to the clock of the requests.

It places steps and journeys beside requests.  Step cycles and the segments of a journey are differences on one clock
and do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from blis_replay.ingest.recording import BRIDGED, ESTIMATED, NOT_KNOWN, ONE_CLOCK, STEP_SCHEMA, Clock
from blis_replay.ingest.rows import Rows, query, rows_of
from blis_replay.ingest.steps.clock_offset import estimate_offset

# A first step event this near the first send was constructed: sending, receiving and scheduling take longer.
_CONSTRUCTED_WITHIN_US = 1000
# Monotonic stamps that begin up to this before the first send, or during the run, are of the same host.
_SAME_HOST_WITHIN_US = 60_000_000
# By how much stamps may miss the interval of the estimate and still be believed: about a step.
STAMPS_MAY_MISS_BY_US = 10_000


def bridge_of(of_journeys: pl.Series, steps: Rows) -> int | None:
    """Epoch less monotonic clock, ns: the median over journey events, else over steps; ``None`` without two stamps.

    ``of_journeys``: the difference at each event, in ns, whose two stamps are read one after the other; ``steps``:
    ``READ_STEP_SCHEMA``, whose epoch stamp is taken some time after the end of ``schedule()`` (trace-formats 0.1).
    """
    known = of_journeys.drop_nulls()
    if known.is_empty():
        after_ns = pl.col("epoch_ns") - pl.coalesce("ts_end_ns", "ts_start_ns")
        known = steps.select(after_ns).to_series().drop_nulls()
    # By position, not by interpolation: a double has no room for epoch ns.
    return int(known.sort()[(len(known) - 1) // 2]) if len(known) else None


def nearest_us(ns: int) -> int:
    """Whole us."""
    return (ns + 500) // 1000


@dataclass(frozen=True)
class ServerTimes:
    """Where the server's monotonic clock stands.

    ``zero_us``: what it showed at the experiment's zero; ``clocks``: the clocks it makes known; ``remark``:
    in words, if its offset to the requests' clock is not known (``""``).
    """

    zero_us: int
    clocks: tuple[Clock, ...]
    remark: str


def server_times(
    steps: Rows,
    arrivals_ns: pl.Series,
    bridge_ns: int | None,
    client: Clock | None,
    requests: Rows,
    of_pairs: Clock | None = None,
) -> ServerTimes | None:
    """The server's clock beside the requests', ``None`` if nothing was stamped by it.

    ``steps``: ``READ_STEP_SCHEMA``; ``arrivals_ns``: of journeys, on the server's clock; ``client``: the clock of
    ``requests``.  ``of_pairs``: the server's clock by requests that both sides recorded, which goes first.  Then stamps
    bridge the clocks, unless they were constructed or running depth contradicts them; then depth places the steps.
    Where nothing tells, the first journey's arrival, else the first sampled step, is put at the experiment's zero.
    """
    journeys_us = arrivals_ns.drop_nulls() // 1000
    begun = steps.aggregate(first="min(ts_start_ns // 1000)", last="max(ts_start_ns // 1000)")
    ends_us = [*_ends(journeys_us), *(us for us in begun.values() if us is not None)]
    if not ends_us:
        return None
    constructed = not len(arrivals_ns) and _set_on_first_send(steps, client)
    stamped_us = _stamped_zero(ends_us, bridge_ns, client, requests)
    paired_us = _paired_zero(of_pairs, bridge_ns)
    if of_pairs is not None and paired_us is not None:
        clock = replace(of_pairs, name="step", kind="monotonic", zero_us=paired_us, stamped_zero_us=stamped_us)
    elif stamped_us is None or constructed or client is None:
        first_us = min(_ends(journeys_us)) if len(journeys_us) else (_first(steps, "ts_start_ns") or 0) // 1000
        clock = Clock("step", "monotonic", first_us, constructed, NOT_KNOWN, stamped_zero_us=stamped_us)
    else:
        placed = BRIDGED if client.kind == "epoch" else ONE_CLOCK
        clock = Clock("step", "monotonic", stamped_us, constructed, placed, stamped_zero_us=stamped_us)
    why = "not a pair of stamps"
    if client is not None and journeys_us.is_empty() and paired_us is None:
        clock, why = _checked_by_depth(clock, steps, requests)
    what = "sampled step" if journeys_us.is_empty() else "journey"
    remark = ""
    if client is not None and clock.placed == NOT_KNOWN:
        shown = f"the first {what} is shown at the first send"
        remark = f"clock offset between {what.split()[-1]}s and requests: not known ({why}), {shown}"
    clocks = [clock]
    if bridge_ns is not None and not constructed:
        clocks.append(Clock("server", "epoch", clock.zero_us + nearest_us(bridge_ns), placed=BRIDGED))
    return ServerTimes(clock.zero_us, tuple(clocks), remark)


def _first(steps: Rows, column: str) -> int | None:
    """The value of a column in the first step."""
    value: int | None = next(steps.batches([column], rows=1)).item(0, 0)
    return value


def _ends(times: pl.Series) -> list[int]:
    """The earliest and the latest of some times; empty without any."""
    return [end for end in (times.min(), times.max()) if isinstance(end, int)]


def steps_on_zero(steps: Rows, zero_us: int) -> Rows:
    """``READ_STEP_SCHEMA`` as ``STEP_SCHEMA``, from the zero at which the monotonic clock shows ``zero_us``."""
    if steps.held is not None:
        # Every check looks at them, and SQL would see to it each time that they are in order.
        started_us = pl.col("ts_start_ns") // 1000 - zero_us
        return rows_of(steps.held.with_columns(start_us=started_us).select(STEP_SCHEMA.keys()))
    start = {"start_us": "ts_start_ns // 1000 - $zero_us AS start_us"}
    columns = ", ".join(start.get(name, name) for name in STEP_SCHEMA)
    return query(f"SELECT {columns} FROM steps", STEP_SCHEMA, {"zero_us": zero_us}, steps=steps)  # noqa: S608 (constants)


def _paired_zero(of_pairs: Clock | None, bridge_ns: int | None) -> int | None:
    """What the monotonic clock showed at the experiment's zero by requests that both sides recorded."""
    if of_pairs is None or of_pairs.kind == "monotonic":
        return None if of_pairs is None else of_pairs.zero_us
    return None if bridge_ns is None else of_pairs.zero_us - nearest_us(bridge_ns)


def _set_on_first_send(steps: Rows, client: Clock | None) -> bool:
    if client is None or client.kind != "epoch" or steps.is_empty():
        return False
    first_ns = _first(steps, "epoch_ns")
    return first_ns is not None and abs(first_ns // 1000 - client.zero_us) <= _CONSTRUCTED_WITHIN_US


def _checked_by_depth(clock: Clock, steps: Rows, requests: Rows) -> tuple[Clock, str]:
    by_depth, why = estimate_offset(steps_on_zero(steps, clock.zero_us), requests)
    if by_depth is None:
        return clock, why
    agrees = by_depth.low_us - STAMPS_MAY_MISS_BY_US <= 0 <= by_depth.high_us + STAMPS_MAY_MISS_BY_US
    if agrees and clock.placed != NOT_KNOWN:
        return clock, ""
    zero_us = clock.zero_us - by_depth.offset_us
    return replace(clock, zero_us=zero_us, placed=ESTIMATED, uncertainty_us=by_depth.uncertainty_us), ""


def _stamped_zero(ends_us: Sequence[int], bridge_ns: int | None, client: Clock | None, requests: Rows) -> int | None:
    """What the server's clock showed at the experiment's zero by the stamps, or ``None`` if they do not say.

    ``ends_us``: the first and the last stamps are among them.
    """
    if client is None or client.kind == "relative":
        return None
    if client.kind == "monotonic":
        first_us, final_us = min(ends_us), max(ends_us)
        last_us = int(requests.aggregate(last="coalesce(max(arrival_us), 0)")["last"])
        overlap = final_us >= client.zero_us - _SAME_HOST_WITHIN_US and first_us <= client.zero_us + last_us
        return client.zero_us if overlap else None
    return None if bridge_ns is None else client.zero_us - nearest_us(bridge_ns)
