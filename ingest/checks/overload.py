"""Whether the server was offered more than it could serve: such runs are judged by what was served."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.checks.evidence import (
    Context,
    by_arrival,
    completed_requests,
    failed_count,
    recorded_requests,
    request_count,
)
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.stream import published
from blis_replay.ingest.tables import Table, columns_named

CHECK = "overloaded"
MEASURES = "whether the server was offered more than it could serve"
FAILED_SHARE = 0.10
GROWTH = 5.0
SLOW_TTFT_US = 1_000_000
_FEWEST = 25
_TTFTS = ("stage", "arrival_us", "ttft_us")
RULE = (
    "more than 10 % of requests fail, or the median TTFT of a load stage's last fifth is above 1 s and more than "
    "5 times that of its first fifth; with published aggregates only: a median TTFT above 1 s"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """One finding for an overloaded experiment, none for others."""
    is_overloaded, reason = overloaded(recording)
    if not is_overloaded:
        return []
    message = f"overloaded: {reason}; judged by what was served"
    return [Finding(CHECK, "note", "", message, {"failed_share": failed_share(recording)}, RULE)]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Median TTFT of each fifth of each load stage, by order of sending."""
    timed = by_arrival(completed_requests(recording, *_TTFTS).drop_nulls(["ttft_us", "arrival_us"]))
    rows = []
    for (stage,), of_stage in timed.group_by("stage", maintain_order=True):
        for fifth in range(5 if of_stage.height >= _FEWEST else 0):
            low, high = (of_stage.height * i // 5 for i in (fifth, fifth + 1))
            median_us = float(of_stage[low:high]["ttft_us"].median())  # type: ignore[arg-type]
            rows.append(("the run" if stage is None else f"stage {stage}", fifth + 1, round(median_us / 1e3, 1)))
    columns = ("part", "fifth", "median TTFT ms")
    return (Table("TTFT through the load stages", columns_named(*columns), tuple(rows), bars="median TTFT ms"),)


def overloaded(recording: Recording) -> tuple[bool, str]:
    """Whether an experiment counts as overloaded, and why (or an empty reason).

    More than 10 % of requests fail; or TTFT grows through a load stage, the median of its
    last fifth being above 1 s and more than 5 times that of its first fifth.  Published
    aggregates have no order of requests: there a median TTFT above 1 s says it, which a
    queue makes (unqueued requests wait for a step or two, some tens of milliseconds).
    """
    share = failed_share(recording)
    if share is not None and share > FAILED_SHARE:
        return True, f"{100 * share:.0f} % of requests failed"
    if recorded_requests(recording).is_empty():
        return _slow_median(recording)
    return _growing_ttft(completed_requests(recording, *_TTFTS))


def failed_share(recording: Recording) -> float | None:
    """Failed requests over all, 0..1; published counts where there are no recorded requests."""
    requests = recorded_requests(recording)
    if not requests.is_empty():
        return failed_count(requests) / requests.height
    failures, count = published(recording.aggregates, -1, "requests", "failed"), request_count(recording)
    if failures is not None and count:
        return failures / count
    if recording.requests.is_empty():
        return None
    return failed_count(recording.requests) / recording.requests.height


def _slow_median(recording: Recording) -> tuple[bool, str]:
    stages = sorted({-1, *recording.aggregates["stage"].drop_nulls().to_list()})
    for stage in stages:
        median_us = published(recording.aggregates, stage, "ttft", "p50")
        if median_us is not None and median_us > SLOW_TTFT_US:
            return True, f"the published median TTFT is {median_us / 1e6:.1f} s"
    return False, ""


def _growing_ttft(requests: pl.DataFrame) -> tuple[bool, str]:
    timed = by_arrival(requests.drop_nulls(["ttft_us", "arrival_us"]))
    for (stage,), of_stage in timed.group_by("stage", maintain_order=True):
        fifth = of_stage.height // 5
        if of_stage.height < _FEWEST:
            continue
        first_us, last_us = (float(part["ttft_us"].median()) for part in (of_stage.head(fifth), of_stage.tail(fifth)))  # type: ignore[arg-type]
        if last_us > SLOW_TTFT_US and last_us > GROWTH * first_us:
            where = "the run" if stage is None else f"stage {stage}"
            return True, f"median TTFT grows through {where} from {first_us / 1e6:.2f} s to {last_us / 1e6:.1f} s"
    return False, ""
