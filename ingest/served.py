"""What is known of how a run was served: recorded requests, or aggregates that were published of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools
from blis_replay.ingest.recording import RECORDED, Recording
from blis_replay.ingest.rows import Rows, no_rows


def recorded_requests(recording: Recording) -> Rows:
    """The requests that were recorded; none where they were reconstructed from aggregates."""
    return recording.requests if recording.ground_truth == RECORDED else no_rows(recording.requests.schema)


def completed_requests(recording: Recording, *columns: str) -> pl.DataFrame:
    """Recorded requests with status ok, with these columns."""
    requests = recorded_requests(recording)
    if requests.held is not None:  # what most checks ask for takes SQL twenty times as long as a frame
        return requests.held.select(pl.col(columns).filter(pl.col("status") == "ok"))
    return requests.where("status = 'ok'").frame(columns)


def failed_requests(requests: Rows) -> Rows:
    """Requests that the server did not serve; those that the client gave up itself are not among them."""
    return requests.where("coalesce(status NOT IN ('ok', 'aborted'), true)")


_FEWEST_REFUSED = 5  # in a row; fewer may meet a proxy's limit or a pause between two answers


@dataclass(frozen=True)
class Away:
    """A stretch in which no server answered: it had not started yet, or had ended.

    ``from_us``, ``until_us``: the arrivals of the first and the last of the ``requests`` that were refused.
    """

    from_us: int
    until_us: int
    requests: int


def away(recording: Recording) -> tuple[Away, ...]:
    """Stretches of five or more requests that all fail at once, in which no other request gets an answer.

    At once: known to fail, without a time-out, in less time than any request that was served took to its first token,
    or to its end.  An overloaded server refuses some as quickly, but has others in flight meanwhile.  Where a client
    does not write how long a failure took, only those count that are behind every answer, if they are most of these.
    """
    requests = recorded_requests(recording)
    if failed_requests(requests).height < _FEWEST_REFUSED:
        return ()
    of_all = by_arrival(requests.frame(["arrival_us", "ttft_us", "e2e_us", "status"]))
    served = of_all.filter(pl.col("status") == "ok").drop_nulls("e2e_us")
    quickest_us = served.select(pl.coalesce("ttft_us", "e2e_us").min()).item()
    if quickest_us is None:
        return ()  # nothing says how soon this server answers
    sent_us, arrival_us = served["arrival_us"].to_numpy(), of_all["arrival_us"].to_numpy()
    end_us = sent_us + served["e2e_us"].to_numpy()
    unknown = (of_all["status"].eq_missing("error") & of_all["e2e_us"].is_null()).to_numpy()
    behind = unknown & (arrival_us >= end_us.max())
    # A server that ends takes few with it, one that collapses under its load many.
    behind &= 2 * int((unknown & ~behind).sum()) <= int(behind.sum())
    quick = of_all.select(pl.col("status").eq_missing("error") & (pl.col("e2e_us") < quickest_us).fill_null(False))
    found = []
    for first, last in stretches(quick.to_series().to_numpy() | behind):
        from_us, until_us = int(arrival_us[first]), int(arrival_us[last])
        in_flight = (sent_us <= until_us) & (end_us > from_us)
        if last - first + 1 >= _FEWEST_REFUSED and not in_flight.any():
            found.append(Away(from_us, until_us, last - first + 1))
    return tuple(found)


def refused(recording: Recording) -> Bools:
    """bool[requests]: sent while no server was there."""
    arrival_us = recording.requests["arrival_us"].to_numpy()
    failed = recording.requests["status"].eq_missing("error").to_numpy()
    sent_to_none = np.zeros(len(arrival_us), np.bool_)
    for stretch in away(recording):
        sent_to_none |= failed & (arrival_us >= stretch.from_us) & (arrival_us <= stretch.until_us)
    return sent_to_none


def stretches(true: Bools) -> list[tuple[int, int]]:
    """First and last place of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], true, [False]]).astype(np.int8)))
    return [(int(first), int(last) - 1) for first, last in edges.reshape(-1, 2)]


def by_arrival(requests: pl.DataFrame) -> pl.DataFrame:
    """Requests in the order of their sends, which they mostly have: sorting would copy them."""
    return requests if requests["arrival_us"].is_sorted() else requests.sort("arrival_us")


NO_STEP_US = 200.0  # per token: no engine takes a step in less, so what came like that was held back


# -- Published aggregates ------------------------------------------------------------------------------------------

# Reported statistic -> the true one it stands for.
PAIRED_QUANTILES = {"p75": "p50", "p90": "p80", "p95": "p90", "p99": "p98", "p99.9": "p99.8", "max": "max"}


def published(aggregates: pl.DataFrame, stage: int, metric: str, statistic: str) -> float | None:
    """One published number (AGGREGATE_SCHEMA; stage -1 is the whole run), None if absent."""
    values = aggregates.filter(
        (pl.col("stage") == stage) & (pl.col("metric") == metric) & (pl.col("statistic") == statistic)
    )["value"]
    value = values[0] if len(values) else None
    return None if value is None or not math.isfinite(value) else float(value)


def is_paired(aggregates: pl.DataFrame, stage: int = -1, output_tokens: float | None = None) -> bool:
    """Whether the reported ITL of a stage pools two stamps per token.

    By shape: its median below 5 % of its p75, and its mean equal to the reported TPOT
    within 1 %.  Failing that, by ``(E2E - TTFT) / (output_tokens - 1)`` above 1.5 times it.
    """
    median, p75 = (published(aggregates, stage, "itl_reported", s) for s in ("p50", "p75"))
    mean, tpot = (published(aggregates, stage, metric, "mean") for metric in ("itl_reported", "tpot_reported"))
    if median is not None and p75:
        same_mean = mean is None or tpot is None or abs(tpot - mean) <= 0.01 * mean
        return median < 0.05 * p75 and same_mean
    true = true_mean_gap_us(aggregates, stage, output_tokens)
    return mean is not None and true is not None and true > 1.5 * mean


def true_mean_gap_us(aggregates: pl.DataFrame, stage: int, output_tokens: float | None) -> float | None:
    """Mean gap between output tokens from published means: ``(E2E - TTFT) / (output_tokens - 1)``, us."""
    e2e_us, ttft_us = (published(aggregates, stage, metric, "mean") for metric in ("e2e", "ttft"))
    if e2e_us is None or ttft_us is None or output_tokens is None or output_tokens <= 1:
        return None
    return (e2e_us - ttft_us) / (output_tokens - 1)


def published_itl(aggregates: pl.DataFrame, stage: int = -1, output_tokens: float | None = None) -> dict[str, float]:
    """True ITL quantiles of a stage in us, by name (``p50``, ``p80``, ``p90``, ``p98``, ``p99.8``, ``max``).

    ``output_tokens``: the true decode length, needed only to tell pairing where quantiles are missing.  Not paired: the
    published quantiles as they are.  The mean is not among them, see ``true_mean_gap_us``.
    """
    rows = aggregates.filter((pl.col("stage") == stage) & (pl.col("metric") == "itl_reported"))
    reported = {s: float(v) for s, v in rows.select("statistic", "value").iter_rows() if v is not None and s != "mean"}
    if not is_paired(aggregates, stage, output_tokens):
        return reported
    return {true: reported[name] for name, true in PAIRED_QUANTILES.items() if name in reported}
