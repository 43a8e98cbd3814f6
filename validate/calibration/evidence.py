"""What coefficients are judged by: step cycles, and client latencies through the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency import Lifecycle
from blis_replay.blis.trace import Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, plan_replay
from blis_replay.validate.calibration.cycle_rows import Floats, rows_from_steps
from blis_replay.validate.calibration.step_form import StepForm

# What a residual is measured in: E2E and cycles of a window agree to about 1 %, TTFT to about 3 %
# (the bars of the project), so 1 is a window at the edge of what is wanted.
SCALE = {"cycle": 0.01, "e2e": 0.01, "ttft": 0.03}

# The first requests find a cold prefix cache and so are the only ones that tell what prefill costs:
# their windows are short, or the rest would outvote them.
_COLD_REQUESTS, _COLD_WINDOW, _WINDOW = 200, 10, 50


@dataclass(frozen=True)
class CycleEvidence:
    """Step cycles: ``batch`` float64[rows, 4], ``cycle_us`` float64[rows] as ``CycleRows``."""

    batch: Floats
    cycle_us: Floats

    @property
    def decodes(self) -> Floats:
        """float64[rows]: mean number of decodes."""
        return self.batch[:, 2]

    def residuals(self, form: StepForm, vector: Floats, measured: Lifecycle) -> Floats:
        """float64[rows]: fitted over observed less one, in units of ``SCALE``."""
        return (form.design(self.batch) @ vector / self.cycle_us - 1) / SCALE["cycle"]


@dataclass(frozen=True)
class LatencyEvidence:
    """Client latencies of a recording, window by window of its requests.

    ``plan``: the requests up to the last that can matter.  ``window``: int64[requests], the window of
    each request, -1 for one that is not judged.  ``observed_us``: float64[2, windows], mean E2E
    and TTFT.  ``decodes``: float64[windows], mean number of requests in flight.
    """

    plan: ReplayPlan
    window: Int64s
    observed_us: Floats
    decodes: Floats

    def residuals(self, form: StepForm, vector: Floats, measured: Lifecycle) -> Floats:
        """float64[2 * windows]: simulated over observed mean less one, E2E then TTFT, in units of ``SCALE``."""
        result = simulate(self.plan.trace, self.plan.engine, form.latency(vector), form.lifecycle(vector, measured))
        means = window_means(self.window, result.e2e_us, result.ttft_us)
        scale = np.array([[SCALE["e2e"]], [SCALE["ttft"]]])
        # A run that overflows its server gives latencies without bound; any such one is equally wrong.
        return np.asarray(np.clip((means / self.observed_us - 1) / scale, -1e4, 1e4), np.float64).reshape(-1)

    def with_scheduling(self, asynchronous: bool) -> LatencyEvidence:
        """The same evidence for an engine of this scheduling mode."""
        return replace(self, plan=replace(self.plan, engine=replace(self.plan.engine, async_scheduling=asynchronous)))


Evidence = CycleEvidence | LatencyEvidence


def window_means(window: Int64s, e2e_us: Int64s, ttft_us: Int64s) -> Floats:
    """float64[2, windows]: mean E2E and TTFT of the requests of each window."""
    judged = window >= 0
    count = np.bincount(window[judged])
    return np.stack([np.bincount(window[judged], values[judged]) / count for values in (e2e_us, ttft_us)])


def cycle_evidence(recording: Recording, window: tuple[float, float]) -> CycleEvidence | None:
    """Step cycles of a share of the run; None if there are none."""
    if recording.steps.height < 2:
        return None
    rows = rows_from_steps(recording, window)
    return CycleEvidence(rows.batch, rows.cycle_us) if len(rows.cycle_us) else None


def latency_evidence(recording: Recording, window: tuple[float, float]) -> LatencyEvidence | None:
    """Latencies of the requests that arrived in a share of the run; None if there are none.

    Raises ``ReplayError`` as ``plan_replay`` does.
    """
    requests = recording.requests
    judged = _judged(requests, window)
    if not judged.any():
        return None
    e2e_us, ttft_us = (requests[name].fill_null(0).to_numpy() for name in ("e2e_us", "ttft_us"))
    arrival_us = requests["arrival_us"].to_numpy()
    last = int(np.flatnonzero(judged)[-1])
    # Requests that arrive while the last ones are served slow them down.
    end_us = int((arrival_us + e2e_us)[: last + 1][judged[: last + 1]].max())
    count = max(int(np.searchsorted(arrival_us, end_us)), last + 1)
    numbers = np.full(count, -1, np.int64)
    numbers[judged[:count]] = _windows(np.flatnonzero(judged[:count]))
    plan = plan_replay(with_lengths(recording), ReplayMode())
    observed_us = window_means(numbers, e2e_us[:count], ttft_us[:count])
    in_flight = np.arange(count) - np.searchsorted(np.sort((arrival_us + e2e_us)[:count]), arrival_us[:count])
    decodes = window_means(numbers, in_flight, in_flight)[0]
    return LatencyEvidence(replace(plan, trace=plan.trace.part(slice(count))), numbers, observed_us, decodes)


def _judged(requests: pl.DataFrame, window: tuple[float, float]) -> NDArray[np.bool_]:
    arrival_us = requests["arrival_us"]
    low, high = (share * float(arrival_us[-1]) for share in window)
    timed = pl.all_horizontal(
        pl.col("status") == "ok",
        pl.col("ttft_us") > 0,
        pl.col("e2e_us") > 0,
        pl.col("output_tokens") > 0,
        pl.col("arrival_us").is_between(low, high),
    )
    return requests.select(timed.fill_null(False)).to_series().to_numpy()


def with_lengths(recording: Recording) -> Recording:
    """The recording with succeeded requests of unknown output length, of which there are few, at the median.

    They load the server, but are not judged.
    """
    requests = recording.requests
    unknown = (pl.col("status") == "ok") & pl.col("output_tokens").is_null()
    if not requests.select(unknown.any()).item():
        return recording
    median = pl.col("output_tokens").median().round().cast(pl.Int64)
    filled = pl.when(unknown).then(median).otherwise(pl.col("output_tokens")).alias("output_tokens")
    return replace(recording, requests=requests.with_columns(filled))


def _windows(places: Int64s) -> Int64s:
    """The window of each judged request, by its place in the run; consecutive from 0."""
    cold = places // _COLD_WINDOW
    later = _COLD_REQUESTS // _COLD_WINDOW + (places - _COLD_REQUESTS) // _WINDOW
    raw = np.where(places < _COLD_REQUESTS, cold, later)
    return np.unique(raw, return_inverse=True)[1].astype(np.int64)
