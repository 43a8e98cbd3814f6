"""The requests of a recording: which were recorded, which of them completed and failed, and how many were sent."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.published import published
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


def failed_count(requests: Rows) -> int:
    """How many requests the server did not serve."""
    return failed_requests(requests).height


def failed_requests(requests: Rows) -> Rows:
    """Requests that the server did not serve; those that the client gave up itself are not among them."""
    return requests.where("coalesce(status NOT IN ('ok', 'aborted'), true)")


def request_count(recording: Recording, stage: int = -1) -> int | None:
    """Requests sent: recorded ones, else the published count, else those reconstructed."""
    requests = recorded_requests(recording)
    if requests.is_empty():
        count = published(recording.aggregates, stage, "requests", "sent")
        return int(count) if count is not None else (recording.requests.height or None)
    return requests.height if stage < 0 else requests.where("stage = $stage", stage=stage).height


def by_arrival(requests: pl.DataFrame) -> pl.DataFrame:
    """Requests in the order of their sends, which they mostly have: sorting would copy them."""
    return requests if requests["arrival_us"].is_sorted() else requests.sort("arrival_us")
