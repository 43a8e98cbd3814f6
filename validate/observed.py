"""The observed side of a comparison: what a recording says, cell by cell, or why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.published_itl import published_itl
from blis_replay.ingest.recording import Recording
from blis_replay.validate.metrics import STATISTICS, LatencySamples, pooled_quantiles, statistics

Gaps = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Selection:
    """Which requests to compare: a load stage, and a window of the run by arrival (0..1)."""

    stage: int | None = None
    window: tuple[float, float] = (0.0, 1.0)

    def of(self, requests: pl.DataFrame) -> NDArray[np.bool_]:
        """bool[n]: the requests that belong to the selection."""
        arrival_us = requests["arrival_us"].to_numpy()
        low, high = (share * float(arrival_us[-1]) for share in self.window)
        within = (arrival_us >= low) & (arrival_us <= high)
        if self.stage is None:
            return np.asarray(within, np.bool_)
        return np.asarray(within & (requests["stage"] == self.stage).fill_null(False).to_numpy(), np.bool_)

    @property
    def everything(self) -> bool:
        """Whether all requests belong to it."""
        return self.stage is None and self.window == (0.0, 1.0)


@dataclass(frozen=True)
class ObservedCell:
    """One observed number in us; None with the ``reason`` where the recording has none.

    ``between_us``: bounds, where the recording gives only those.
    """

    value_us: float | None
    reason: str | None = None
    between_us: tuple[float, float] | None = None


Cells = dict[str, dict[str, ObservedCell]]


def observed_requests(recording: Recording) -> NDArray[np.bool_]:
    """bool[n]: requests whose TTFT and E2E were recorded and that succeeded."""
    requests = recording.requests
    known = requests["ttft_us"].is_not_null() & requests["e2e_us"].is_not_null()
    return ((requests["status"] == "ok") & known).to_numpy()


def samples_of(recording: Recording, chosen: NDArray[np.bool_]) -> LatencySamples:
    """Recorded latencies of the chosen requests, in request order."""
    requests = recording.requests.filter(chosen)
    return LatencySamples(
        requests["ttft_us"].to_numpy().astype(np.int64),
        requests["e2e_us"].to_numpy().astype(np.int64),
        requests["output_tokens"].to_numpy().astype(np.int64),
    )


def has_gaps(token_gaps: Gaps | None) -> bool:
    """Whether token times were recorded, so that the ITL is that of single tokens."""
    return token_gaps is not None and bool(token_gaps[1].sum() > 0)


def cells_from_requests(
    recording: Recording, samples: LatencySamples, selection: Selection, token_gaps: Gaps | None
) -> Cells:
    """Observed cells where single requests are recorded.

    ``token_gaps``: pooled gaps between output tokens, as ``(gap_us, count)``, where token
    times were recorded; without them the ITL quantiles come from published aggregates.
    """
    cells = {
        "e2e": _plain(statistics(samples.e2e_us)),
        "ttft": _plain(statistics(samples.ttft_us)),
        "tpot": _plain(statistics(samples.tpot_us)),
        "itl": _no_token_times(),
    }
    if token_gaps is not None and has_gaps(token_gaps):
        gap_us, count = token_gaps
        mean = float((gap_us * count).sum() / count.sum())
        cells["itl"] = _plain({"mean": mean, **pooled_quantiles(gap_us, count)})
        return cells
    if selection.window == (0.0, 1.0):
        cells["itl"] |= _published_itl(recording, selection.stage)
    cells["itl"]["mean"] = ObservedCell(samples.itl_mean_us)
    return cells


def cells_from_aggregates(recording: Recording, stage: int | None) -> Cells:
    """Observed cells where only published aggregates exist.

    The mean ITL is (mean E2E - mean TTFT) / (output tokens - 1), the configured length
    being the same for all.  TPOT of these load generators is the mean gap between stream
    events; it is corrected by the same factor as the ITL.
    """
    table = {
        (row["metric"], row["statistic"]): row["value"]
        for row in recording.aggregates.filter(pl.col("stage") == (-1 if stage is None else stage)).iter_rows(
            named=True
        )
    }
    unpublished = "not published"
    cells: Cells = {
        metric: {
            name: ObservedCell(table.get((metric, name)), None if (metric, name) in table else unpublished)
            for name in STATISTICS
        }
        for metric in ("e2e", "ttft")
    }
    lengths = recording.requests["output_tokens"].drop_nulls()
    e2e, ttft = table.get(("e2e", "mean")), table.get(("ttft", "mean"))
    cells["itl"] = {name: ObservedCell(None, unpublished) for name in STATISTICS} | _published_itl(recording, stage)
    if e2e is not None and ttft is not None and len(lengths):
        cells["itl"]["mean"] = ObservedCell((e2e - ttft) / (float(lengths.mean()) - 1))  # type: ignore[arg-type]
    cells["tpot"] = _published_tpot(table, cells["itl"]["mean"].value_us)
    return cells


def _plain(values: Mapping[str, float]) -> dict[str, ObservedCell]:
    return {name: ObservedCell(values.get(name), None if name in values else "no such request") for name in STATISTICS}


def _no_token_times() -> dict[str, ObservedCell]:
    return {name: ObservedCell(None, "no token times recorded") for name in STATISTICS}


def _published_itl(recording: Recording, stage: int | None) -> dict[str, ObservedCell]:
    """ITL quantiles from published aggregates, where there are any."""
    quantiles = published_itl(recording.aggregates, -1 if stage is None else stage)
    cells = {name: ObservedCell(quantiles[name]) for name in STATISTICS if name in quantiles}
    if "p99" not in cells and "p98" in quantiles and "p99.8" in quantiles:
        reason = "no token times recorded; published quantiles bracket it"
        cells["p99"] = ObservedCell(None, reason, (quantiles["p98"], quantiles["p99.8"]))
    return cells


def _published_tpot(table: Mapping[tuple[str, str], float], itl_mean_us: float | None) -> dict[str, ObservedCell]:
    reported = table.get(("tpot_reported", "mean"))
    if reported is None or itl_mean_us is None:
        return {name: ObservedCell(None, "not published") for name in STATISTICS}
    factor = itl_mean_us / reported
    values = {name: table[("tpot_reported", name)] * factor for name in STATISTICS if ("tpot_reported", name) in table}
    return {name: ObservedCell(values.get(name), None if name in values else "not published") for name in STATISTICS}
