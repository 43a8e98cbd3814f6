"""How far a latency model is from recorded step cycles, step by step."""

from __future__ import annotations

import numpy as np

from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency import Latency
from blis_replay.ingest.recording import Recording
from blis_replay.validate.calibration.physical_rows import mean_lengths

# With fewer requests running, the engine may have been idle between two steps.
_BUSY_DEPTH = 4


def step_mape(recording: Recording, latency: Latency) -> float | None:
    """Mean absolute error of single step cycles, as a fraction; None without consecutive sampled steps.

    The cycle is the time between the starts of two consecutive steps, never the recorded
    duration.  The batch is that of the later step: the interval before a step with prefill is
    the longer one.  Its contexts are the recording's means.
    """
    steps = recording.steps.sort("step_id")
    step_id, start_us = steps["step_id"].to_numpy(), steps["start_us"].to_numpy()
    later = np.flatnonzero(np.diff(step_id) == 1) + 1
    busy = later[(steps["running_depth"].to_numpy()[later - 1] >= _BUSY_DEPTH)]
    cycle_us = start_us[busy] - start_us[busy - 1]
    if not len(busy):
        return None
    lengths = mean_lengths(recording)
    kernel = latency.for_kernel()
    batch = np.zeros(k.BATCH_SIZE, np.int64)
    simulated_us = np.empty(len(busy))
    counts = steps.select("prefill_tokens", "prefill_requests", "decode_tokens").fill_null(0).to_numpy()[busy]
    for i, (prefill, prefill_requests, decode) in enumerate(counts):
        batch[k.BATCH_PREFILL_TOKENS], batch[k.BATCH_DECODE_TOKENS] = prefill, decode
        batch[k.BATCH_PREFILL_REQUESTS] = prefill_requests
        batch[k.BATCH_CONTEXT_TOKENS] = round(decode * lengths.context_tokens)
        batch[k.BATCH_ATTENDED_TOKENS] = round(prefill * lengths.prompt_tokens)
        simulated_us[i] = step_duration_us(*kernel, batch, int(start_us[busy[i]]))
    usable = cycle_us > 0
    return float(np.abs(simulated_us[usable] / cycle_us[usable] - 1).mean()) if usable.any() else None
