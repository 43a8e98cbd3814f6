"""Whether more was asked of a server than it could serve; all that the program calls overload, queue or saturation.

A recording is overloaded if too many requests fail, or TTFT grows through a load stage (``overloaded``).  A queue is
seen in the waits of single requests, recorded or simulated (``queue``), and a client that sends when another request
is done in the number of requests in flight (``client_limits``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.ingest.checks.evidence import (
    Context,
    by_arrival,
    completed_requests,
    failed_count,
    recorded_requests,
    request_count,
)
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.stream import published
from blis_replay.ingest.tables import Table, columns_named

CHECK = "overloaded"
MEASURES = "whether the server was offered more than it could serve"
FAILED_SHARE = 0.10  # of requests; more of them failed: the server could not serve them
QUEUE_US = 1_000_000  # shorter waits, and medians of TTFT, are no queue: unqueued requests wait for a step or two
_GROWTH = 5.0  # median TTFT of a stage's last fifth over that of its first
_FEWEST_FOR_FIFTHS = 25  # requests in a stage
FEWEST = 20  # requests; of fewer, nothing is said
_AT_ONCE_US = 250_000  # a wait for the step that runs, and with asynchronous scheduling for one more
_NEIGHBOURS = 5  # waits are medians of as many: single requests that are late for other reasons make no queue
_LIMITED_SHARE = 0.5  # of a stage's time that a client stands at its largest number in flight
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
        for fifth in range(5 if of_stage.height >= _FEWEST_FOR_FIFTHS else 0):
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
        if median_us is not None and median_us > QUEUE_US:
            return True, f"the published median TTFT is {median_us / 1e6:.1f} s"
    return False, ""


def _growing_ttft(requests: pl.DataFrame) -> tuple[bool, str]:
    timed = by_arrival(requests.drop_nulls(["ttft_us", "arrival_us"]))
    for (stage,), of_stage in timed.group_by("stage", maintain_order=True):
        fifth = of_stage.height // 5
        if of_stage.height < _FEWEST_FOR_FIFTHS:
            continue
        first_us, last_us = (float(part["ttft_us"].median()) for part in (of_stage.head(fifth), of_stage.tail(fifth)))  # type: ignore[arg-type]
        if last_us > QUEUE_US and last_us > _GROWTH * first_us:
            where = "the run" if stage is None else f"stage {stage}"
            return True, f"median TTFT grows through {where} from {first_us / 1e6:.2f} s to {last_us / 1e6:.1f} s"
    return False, ""


# -- Queues in the waits of single requests ----------------------------------------------------------------------


@dataclass(frozen=True)
class Queue:
    """How requests waited on one side.

    ``from_us``: arrival of the last request that found a place at once before requests came to wait longer than they
    are served; ``until_us``: of the first that did so again.  None if there is none.  ``longest_us``: the longest
    wait, that of the request that arrived at ``longest_at_us``; both 0 where nobody waits for a second.
    ``touched_us``: time in shorter queues, of over a second, that went away.
    """

    from_us: int | None
    until_us: int | None
    longest_us: int
    longest_at_us: int
    touched_us: int

    @property
    def stands_at_the_end(self) -> bool:
        """Whether a queue lasts until the last arrival."""
        return self.from_us is not None and self.until_us is None

    @property
    def growth(self) -> float | None:
        """Seconds by which the wait grows per second, up to the longest one; None without a queue."""
        if self.from_us is None or self.longest_at_us <= self.from_us:
            return None
        return self.longest_us / (self.longest_at_us - self.from_us)


def queue(arrival_us: Int64s, wait_us: Int64s, served_us: int) -> Queue:
    """The queue that shows in the waits of requests in order of arrival; ``served_us``: how long one is served."""
    if (wait_us > QUEUE_US).sum() <= _NEIGHBOURS // 2:
        return Queue(None, None, 0, 0, 0)
    padded = np.pad(wait_us, _NEIGHBOURS // 2, mode="edge")
    wait_us = np.median(np.lib.stride_tricks.sliding_window_view(padded, _NEIGHBOURS), axis=1).astype(np.int64)
    from_us, until_us, touched_us = None, None, 0
    for first, last in _stretches(wait_us > _AT_ONCE_US):
        longest_us = int(wait_us[first : last + 1].max())
        start_us = int(arrival_us[max(first - 1, 0)])
        end_us = int(arrival_us[last + 1]) if last + 1 < len(arrival_us) else None
        if longest_us > max(served_us, QUEUE_US):
            from_us = start_us if from_us is None else from_us
            until_us = end_us
        elif longest_us > QUEUE_US:
            touched_us += (int(arrival_us[-1]) if end_us is None else end_us) - start_us
    return Queue(from_us, until_us, int(wait_us.max()), int(arrival_us[np.argmax(wait_us)]), touched_us)


def _stretches(long: Bools) -> list[tuple[int, int]]:
    """First and last place of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], long, [False]]).astype(np.int8)))
    return [(int(first), int(last) - 1) for first, last in edges.reshape(-1, 2)]


# -- Clients that send when another request is done ------------------------------------------------------------------


@dataclass(frozen=True)
class ClientLimit:
    """A load generator that sent only when another request was done: its limit, reached first at ``from_us``.

    ``stage``: the load stage in which it did, None where stages are not known.
    """

    stage: int | None
    in_flight: int
    from_us: int


def in_flight_at(recording: Recording, time_us: int) -> int:
    """Requests that were sent by then, and neither done nor given up, as recorded."""
    sent_us, done_us = _sent_and_done(recording.requests)
    return int(((sent_us <= time_us) & (done_us > time_us)).sum())


def client_limits(recording: Recording) -> tuple[ClientLimit, ...]:
    """The number of requests in flight at which the client stood for most of a load stage, where there is one.

    Between the first time at its largest number and the last arrival of the stage.
    """
    stages = recording.requests.frame(["stage", "arrival_us", "e2e_us"]).group_by("stage", maintain_order=True)
    limits = (_client_limit(stage, requests) for (stage,), requests in stages)
    return tuple(limit for limit in limits if limit is not None)


def _client_limit(stage: int | None, requests: Rows | pl.DataFrame) -> ClientLimit | None:
    sent_us, done_us = _sent_and_done(requests)
    if len(sent_us) < FEWEST:
        return None
    # Requests are in order of arrival.  Of what is sent when another is done, the end comes first.
    done_us.sort()
    done = np.searchsorted(done_us, sent_us, side="right")
    in_flight = np.arange(1, len(sent_us) + 1) - done
    largest = int(in_flight.max())
    at = np.flatnonzero(in_flight == largest)
    # So many are there from the arrival of one until the next comes or one is done.
    until_us = np.minimum(np.append(sent_us, sent_us[-1])[at + 1], done_us[done[at]])
    stood_us = int((np.minimum(until_us, sent_us[-1]) - sent_us[at]).sum())
    first_us = int(sent_us[at[0]])
    if stood_us <= _LIMITED_SHARE * (int(sent_us[-1]) - first_us):
        return None
    return ClientLimit(stage, largest, first_us)


def _sent_and_done(requests: Rows | pl.DataFrame) -> tuple[Int64s, Int64s]:
    timed = requests.select("arrival_us", "e2e_us").drop_nulls()
    sent_us = timed["arrival_us"].to_numpy().astype(np.int64)
    return sent_us, sent_us + timed["e2e_us"].to_numpy().astype(np.int64)
