"""The step records' monotonic clock, laid beside the clock of the requests.

The result is for looking at steps and requests side by side.  Step cycles are differences
on one clock and do not depend on it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from blis_replay.ingest.clock_offset import estimate_offset
from blis_replay.ingest.recording import BRIDGED, ESTIMATED, NOT_KNOWN, ONE_CLOCK, STEP_SCHEMA, Clock

# How near the first step event has to be to the first send to be no coincidence: a
# request takes longer than this to be sent, received and scheduled.
_CONSTRUCTED_WITHIN_US = 1000
# Steps that begin within this before the first send, or during the run, are of the same host.
_SAME_HOST_WITHIN_US = 60_000_000
# Stamps that miss the interval of the estimate by less than a step are left alone.
STAMPS_MAY_MISS_BY_US = 10_000


def align_steps(
    steps: pl.DataFrame, client: Clock | None, requests: pl.DataFrame, sequential_span_ids: bool
) -> tuple[pl.DataFrame, Clock | None, str]:
    """Steps as ``STEP_SCHEMA``, their clock, and a remark if its offset is not known.

    ``steps``: ``READ_STEP_SCHEMA`` by step id; ``client``: the clock of ``requests``
    (``REQUEST_SCHEMA``).  Stamps bridge the clocks unless they were constructed or running
    depth contradicts them; then depth says the offset, and where it cannot, the first
    sampled step is put at the experiment's zero.
    """
    if steps.is_empty():
        return pl.DataFrame(schema=STEP_SCHEMA), None, ""
    clock = _stamped_clock(steps, client, requests, sequential_span_ids)
    remark = ""
    if client is not None:
        clock, why = _checked_by_depth(clock, steps, requests)
        if clock.placed == NOT_KNOWN:
            remark = (
                f"clock offset between steps and requests: not known ({why}), the first sampled step is shown at the "
                "first send"
            )
    return _since(steps, clock.zero_us), clock, remark


def _since(steps: pl.DataFrame, zero_us: int) -> pl.DataFrame:
    aligned = steps.with_columns((pl.col("ts_start_ns") // 1000 - zero_us).alias("start_us"))
    return aligned.select(pl.col(name).cast(kind) for name, kind in STEP_SCHEMA.items())


def _stamped_clock(
    steps: pl.DataFrame, client: Clock | None, requests: pl.DataFrame, sequential_span_ids: bool
) -> Clock:
    """The step clock as the stamps have it; ``placed`` is not known where they are constructed or silent."""
    first_us = int(steps["ts_start_ns"][0]) // 1000
    constructed = sequential_span_ids or _set_on_first_send(steps, client)
    stamped_us = _stamped_zero(steps, client, requests)
    if stamped_us is None or constructed or client is None:
        return Clock("step", "monotonic", first_us, constructed, NOT_KNOWN, stamped_zero_us=stamped_us)
    placed = BRIDGED if client.kind == "epoch" else ONE_CLOCK
    return Clock("step", "monotonic", stamped_us, constructed, placed, stamped_zero_us=stamped_us)


def _checked_by_depth(clock: Clock, steps: pl.DataFrame, requests: pl.DataFrame) -> tuple[Clock, str]:
    found, why = estimate_offset(_since(steps, clock.zero_us), requests)
    if found is None:
        return clock, why
    agrees = found.low_us - STAMPS_MAY_MISS_BY_US <= 0 <= found.high_us + STAMPS_MAY_MISS_BY_US
    if agrees and clock.placed != NOT_KNOWN:
        return clock, ""
    zero_us = clock.zero_us - found.offset_us
    return replace(clock, zero_us=zero_us, placed=ESTIMATED, uncertainty_us=found.uncertainty_us), ""


def _set_on_first_send(steps: pl.DataFrame, client: Clock | None) -> bool:
    if client is None or client.kind != "epoch":
        return False
    return abs(int(steps["epoch_ns"][0]) // 1000 - client.zero_us) <= _CONSTRUCTED_WITHIN_US


def _stamped_zero(steps: pl.DataFrame, client: Clock | None, requests: pl.DataFrame) -> int | None:
    """What the step clock showed at the experiment's zero by the stamps, or ``None`` if they do not say."""
    if client is None or client.kind == "relative":
        return None
    if client.kind == "monotonic":
        first_us, final_us = int(steps["ts_start_ns"][0]) // 1000, int(steps["ts_start_ns"][-1]) // 1000
        last_us = int(requests["arrival_us"].max() or 0) if len(requests) else 0  # type: ignore[arg-type]
        overlap = final_us >= client.zero_us - _SAME_HOST_WITHIN_US and first_us <= client.zero_us + last_us
        return client.zero_us if overlap else None
    stamped = steps.filter(pl.col("epoch_ns") > 0)
    if stamped.is_empty():
        return None
    # The event is stamped after the end of schedule(), so the end is the nearer partner.
    monotonic_ns = stamped.select(pl.coalesce("ts_end_ns", "ts_start_ns")).to_series()
    offset_us = int(np.median((stamped["epoch_ns"] // 1000 - monotonic_ns // 1000).to_numpy()))
    return client.zero_us - offset_us
