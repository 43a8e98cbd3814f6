"""What the TTFT of a pair of servers consists of, recorded and simulated, and the gap after it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.blis.result import SimResult
from blis_replay.ingest.store import Store
from blis_replay.ingest.store.recordings import inter_token_gaps
from blis_replay.replay.transfers import Apart
from blis_replay.validate.comparison.comparison import Comparison


def with_parts(comparison: Comparison, apart: Apart, store: Store) -> Comparison:
    """With the mean of each part (``replay.transfers.PARTS``) and of the first gap, us, of the requests of both.

    Parts are of the requests that have all of them on both sides, and so add up to the mean TTFT of these.
    """
    result, recording = comparison.run.result, comparison.recording
    chosen = comparison.selection.of(recording.requests) & result.completed
    seen_us, simulated_us = apart.observed_us, apart.parts_us(result)
    whole = chosen & ~np.isnan(sum(seen_us.values()) + sum(simulated_us.values()))
    parts = {name: (_mean(seen_us[name], whole), _mean(simulated_us[name], whole)) for name in simulated_us}
    gap_us, count = inter_token_gaps(store, recording.slug, chosen, first=True)
    observed = float(np.average(gap_us, weights=count)) if len(gap_us) else None
    of_engine = _first_gap_us(result)
    ours = _mean((of_engine + result.post_token_us).astype(np.float64), chosen & (of_engine >= 0))
    return replace(comparison, parts={**parts, "first_gap": (observed, ours)})


def _mean(values_us: Floats, chosen: Bools) -> float | None:
    known = values_us[chosen & ~np.isnan(values_us)]
    return float(known.mean()) if len(known) else None


def _first_gap_us(result: SimResult) -> Int64s:
    """int64[n]: engine's first token to its second, -1 without a second one."""
    ordered = result.segments[np.argsort(result.segments[:, 0], kind="stable")].astype(np.int64)
    of, first, rows = ordered.T
    request = np.repeat(of, rows)
    step = np.repeat(first - (np.cumsum(rows) - rows), rows) + np.arange(len(request))
    second = np.flatnonzero(request[1:] == request[:-1]) + 1
    second = second[np.unique(request[second], return_index=True)[1]]
    gap_us = np.full(len(result.status), -1, np.int64)
    gap_us[request[second]] = result.step_end_us[step[second]] - result.step_end_us[step[second - 1]]
    return gap_us
