"""The step records' monotonic clock, laid beside the clock of the requests.

The result is for looking at steps and requests side by side.  Step cycles are differences
on one clock and do not depend on it.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from blis_replay.ingest.recording import STEP_SCHEMA, Clock

# How near the first step event has to be to the first send to be no coincidence: a
# request takes longer than this to be sent, received and scheduled.
_CONSTRUCTED_WITHIN_US = 1000
# Steps that begin within this before the first send, or during the run, are of the same host.
_SAME_HOST_WITHIN_US = 60_000_000


def align_steps(
    steps: pl.DataFrame, client: Clock | None, last_us: int, sequential_span_ids: bool
) -> tuple[pl.DataFrame, Clock | None, str]:
    """Steps as ``STEP_SCHEMA``, their clock, and a remark if its offset is not known.

    ``steps``: ``READ_STEP_SCHEMA`` by step id; ``client``: the requests' clock; ``last_us``:
    the last arrival, from the experiment's zero.  Where the stamps cannot bridge the clocks,
    the first sampled step is put at the experiment's zero.
    """
    if steps.is_empty():
        return pl.DataFrame(schema=STEP_SCHEMA), None, ""
    start_us = steps["ts_start_ns"] // 1000
    first_us = int(start_us[0])
    constructed = sequential_span_ids or _set_on_first_send(steps, client)
    zero_us = None if constructed else _bridged_zero(steps, client, last_us)
    remark = ""
    if zero_us is None and client is not None:
        remark = "clock offset between steps and requests: not known, the first sampled step is shown at the first send"
    clock = Clock("step", "monotonic", first_us if zero_us is None else zero_us, constructed)
    aligned = steps.with_columns((start_us - clock.zero_us).alias("start_us"))
    return aligned.select(pl.col(name).cast(kind) for name, kind in STEP_SCHEMA.items()), clock, remark


def _set_on_first_send(steps: pl.DataFrame, client: Clock | None) -> bool:
    if client is None or client.kind != "epoch":
        return False
    return abs(int(steps["epoch_ns"][0]) // 1000 - client.zero_us) <= _CONSTRUCTED_WITHIN_US


def _bridged_zero(steps: pl.DataFrame, client: Clock | None, last_us: int) -> int | None:
    """What the step clock showed at the experiment's zero, or ``None`` if nothing tells."""
    if client is None or client.kind == "relative":
        return None
    first_us, final_us = int(steps["ts_start_ns"][0]) // 1000, int(steps["ts_start_ns"][-1]) // 1000
    if client.kind == "monotonic":
        overlap = final_us >= client.zero_us - _SAME_HOST_WITHIN_US and first_us <= client.zero_us + last_us
        return client.zero_us if overlap else None
    stamped = steps.filter(pl.col("epoch_ns") > 0)
    if stamped.is_empty():
        return None
    # The event is stamped after the end of schedule(), so the end is the nearer partner.
    monotonic_ns = stamped.select(pl.coalesce("ts_end_ns", "ts_start_ns")).to_series()
    offset_us = int(np.median((stamped["epoch_ns"] // 1000 - monotonic_ns // 1000).to_numpy()))
    return client.zero_us - offset_us
