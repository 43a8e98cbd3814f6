"""Whether more was asked of a server than it could serve; all that the program calls overload, queue or saturation.

A load stage is overloaded if its queue grows until it ends, because requests come faster than they are served
(``growths``), or if too many requests fail while they wait.  A queue that stands still is load, and so is one that a
cold start or a stall left behind and that goes away again.  A client that sends when another request is done shows in
the number of requests in flight (``client_limits``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.ingest import served, stream
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.served import published, recorded_requests

FAILED_SHARE = 0.10  # of requests; more of them failed while they waited: the server could not serve them
QUEUE_US = 1_000_000  # shorter waits or median TTFT do not show a queue: unqueued requests wait for a step or two
FEWEST = 20  # requests; of fewer, nothing is said
_PARTS = 20  # equal lengths of time of a stage, between which the queue is counted
_FEWEST_IN_A_PART = 2  # requests on average: 20 requests make 10 parts, enough for a standard error
# Standard errors by which the queue must have grown.  A queue at exactly the server's capacity is a random walk without
# drift, which goes beyond as many once in 90 stages (Student's t of 19 degrees of freedom, one side).  Simulated, four
# places: of 300 stages of 220 and 1,000 requests at 0.95 of the capacity none is called overloaded, at 1.3 times it
# 66 and 99 % are (with 3 standard errors 58 and 100 %); a live server with a queue of 42 at its end had 2.52.
_CERTAIN = 2.5
# Share of the growth in the last half of a stage.  A queue that grows steadily has half of it there, one that stood
# from the middle on none; a quarter is between them.
_IN_THE_LAST_HALF = 0.25
_AT_ONCE_US = 250_000  # a wait for the step that runs, and with asynchronous scheduling for one more
_NEIGHBOURS = 5  # waits are medians of as many: single requests that are late for other reasons make no queue
_PATIENT = 0.9  # quantile of the waits of answered requests: where it is long, others may have failed by waiting
_LIMITED_SHARE = 0.5  # of a stage's time that a client stands at its largest number in flight
_TIMES = ("stage", "arrival_us", "ttft_us", "e2e_us")


def overloaded(recording: Recording) -> tuple[bool, str]:
    """Whether an experiment counts as overloaded, and why (or an empty reason).

    More than 10 % of requests fail while they wait, or the queue of a load stage grows until it ends.  Published
    aggregates have no order of requests: there 10 % of failures say it, or a median TTFT above 1 s, as requests that do
    not queue wait for some tens of milliseconds.
    """
    if _too_many_fail(recording):
        recorded = not recorded_requests(recording).is_empty()
        share = float(failed_waiting(recording).mean()) if recorded else failed_share(recording) or 0.0
        return True, f"{100 * share:.0f} % of requests failed{' while they waited' if recorded else ''}"
    if recorded_requests(recording).is_empty():
        return _slow_median(recording)
    for growth in recorded_growths(recording):
        where = "the run" if growth.stage is None else f"stage {growth.stage}"
        return True, (
            f"the queue grows through {where}: {growth.came:,} requests came and {growth.started:,} were started, so "
            f"that {growth.waiting:,} wait at its end"
        )
    return False, ""


def failed_share(recording: Recording) -> float | None:
    """Failed requests over all, 0..1; published counts if no requests were recorded.

    Those that were sent while no server was there (``served.away``) count on neither side.
    """
    requests = recorded_requests(recording)
    if not requests.is_empty():
        refused = sum(stretch.requests for stretch in served.away(recording))
        there = requests.height - refused
        return (served.failed_requests(requests).height - refused) / there if there else None
    failures, count = published(recording.aggregates, -1, "requests", "failed"), request_count(recording)
    if failures is not None and count:
        return failures / count
    if recording.requests.is_empty():
        return None
    return served.failed_requests(recording.requests).height / recording.requests.height


def failed_waiting(recording: Recording) -> Bools:
    """bool[requests]: failed in a queue: with no first token, by a time-out, after a second, or nobody knows when.

    But for time-outs none if nine of ten answered requests waited for less than a second, as then there was no queue.
    What is refused at once, or breaks off in its answer, was not in one.
    """
    rows = recording.requests.frame(["status", "ttft_us", "e2e_us"])
    late_us = rows.filter(pl.col("status") == "ok")["ttft_us"].quantile(_PATIENT)
    queued = pl.lit(late_us is None or late_us > QUEUE_US)
    waited = (pl.col("status") == "timeout").fill_null(False) | (queued & (pl.col("e2e_us") > QUEUE_US).fill_null(True))
    failed = ~pl.col("status").is_in(["ok", "aborted"]).fill_null(False)
    chosen = rows.select(failed & pl.col("ttft_us").is_null() & waited).to_series().to_numpy()
    return chosen & ~served.refused(recording)


def _too_many_fail(recording: Recording) -> bool:
    requests = recorded_requests(recording)
    if requests.is_empty():
        return (failed_share(recording) or 0.0) > FAILED_SHARE
    there = requests.height - sum(stretch.requests for stretch in served.away(recording))
    return int(failed_waiting(recording).sum()) > FAILED_SHARE * there


def _slow_median(recording: Recording) -> tuple[bool, str]:
    stages = sorted({-1, *recording.aggregates["stage"].drop_nulls().to_list()})
    for stage in stages:
        median_us = published(recording.aggregates, stage, "ttft", "p50")
        if median_us is not None and median_us > QUEUE_US:
            return True, f"the published median TTFT is {median_us / 1e6:.1f} s"
    return False, ""


# -- Queues that grow ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """A load stage whose queue grew until its last arrival, at ``end_us``.

    ``stage``: None where stages are not known.  ``came``, ``started``: requests that arrived in it, and that got their
    first token in it; ``waiting``: without one at its end.
    """

    stage: int | None
    end_us: int
    came: int
    started: int
    waiting: int


def growths(requests: pl.DataFrame) -> tuple[Growth, ...]:
    """The load stages that are overloaded, of requests with ``stage``, ``arrival_us``, ``ttft_us`` and ``e2e_us``.

    The queue is counted at the ends of twenty equal lengths of time.  At the limit of its capacity it is a random walk:
    it moves by the standard deviation of one length times the square root of twenty.  More than 2.5 times that is
    growth, if the last half of the stage holds a quarter of it.  A burst is shorter than a length: then most of the
    requests still wait when the last one comes, for longer than the stage took.
    """
    found = []
    for stage, counts in _counted(requests):
        added = np.diff(counts.waiting)
        grown, error = int(added.sum()), float(added.std(ddof=1)) * np.sqrt(len(added))
        until_the_end = int(added[len(added) // 2 :].sum()) > _IN_THE_LAST_HALF * grown
        came, started, waiting = int(counts.came.sum()), int(counts.started.sum()), int(counts.waiting[-1])
        burst = grown > came / 2 and counts.longer_us > int(counts.at_us[-1] - counts.at_us[0])
        grows = burst or (grown > _CERTAIN * error and until_the_end)
        if grows and counts.longer_us > max(QUEUE_US, counts.served_us):
            found.append(Growth(stage, int(counts.at_us[-1]), came, started, waiting))
    return tuple(found)


def recorded_growths(recording: Recording) -> tuple[Growth, ...]:
    """``growths`` of what was recorded, of requests that were answered; first tokens that came late show no queue."""
    if stream.late_first_tokens(recording) is not None:
        return ()
    return growths(served.completed_requests(recording, *_TIMES))


def queue_counts(recording: Recording) -> Iterator[tuple[int | None, Counts]]:
    """Each load stage with the counts of its queue, as recorded."""
    return _counted(served.completed_requests(recording, *_TIMES))


def overload_ends_us(recording: Recording) -> tuple[int, ...]:
    """The last arrival of each overloaded load stage; of the run, where too many requests of it fail as they wait."""
    if _too_many_fail(recording):
        return (int(recording.requests["arrival_us"].max()),)  # type: ignore[arg-type]
    return tuple(growth.end_us for growth in recorded_growths(recording))


@dataclass(frozen=True)
class Counts:
    """The queue of a load stage, counted at ``at_us`` (int64[n + 1]).

    ``waiting``: int64[n + 1], requests that came and have no first token yet, those of earlier stages among them.
    ``came``, ``started``: int64[n], arrivals and first tokens between two counts.  ``longer_us``: how much longer half
    of those wait that have no first token at the last arrival.  ``served_us``: mean time from first to last token.
    """

    at_us: Int64s
    waiting: Int64s
    came: Int64s
    started: Int64s
    longer_us: float
    served_us: float


def _counted(requests: pl.DataFrame) -> Iterator[tuple[int | None, Counts]]:
    """The counts of each load stage of 20 requests or more."""
    timed = served.by_arrival(requests.drop_nulls(["ttft_us", "arrival_us"]))
    all_arrival_us = timed["arrival_us"].to_numpy().astype(np.int64)
    all_first_us = np.sort(all_arrival_us + timed["ttft_us"].to_numpy().astype(np.int64))
    for (stage,), of_stage in timed.group_by("stage", maintain_order=True):
        arrival_us = of_stage["arrival_us"].to_numpy().astype(np.int64)
        if len(arrival_us) < FEWEST or arrival_us[-1] == arrival_us[0]:
            continue
        parts = min(_PARTS, len(arrival_us) // _FEWEST_IN_A_PART)
        at_us = np.linspace(arrival_us[0], arrival_us[-1], parts + 1).astype(np.int64)
        came = np.searchsorted(all_arrival_us, at_us, side="right")
        started = np.searchsorted(all_first_us, at_us, side="right")
        served_us = (of_stage["e2e_us"] - of_stage["ttft_us"]).mean()
        late_us = all_first_us[started[-1] : came[-1]]
        yield (
            stage,
            Counts(
                at_us,
                came - started,
                np.diff(came),
                np.diff(started),
                longer_us=float(np.median(late_us) - at_us[-1]) if len(late_us) else 0.0,
                served_us=0.0 if served_us is None else max(float(served_us), 0.0),  # type: ignore[arg-type]
            ),
        )


# -- Queues in the waits of single requests ----------------------------------------------------------------------


@dataclass(frozen=True)
class Queue:
    """How requests waited on one side.

    ``from_us``: arrival of the last request that found a place at once before the queue grew to the end of a load
    stage; ``until_us``: of the first that did so again, or None.  ``longest_us``: the longest
    wait, that of the request that arrived at ``longest_at_us``; both 0 where nobody waits for a second.
    ``touched_us``: time in other queues, of over a second, that stood still or went away.
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


def queue(arrival_us: Int64s, wait_us: Int64s, ends_us: Sequence[int]) -> Queue:
    """The queue in the waits of requests in order of arrival; ``ends_us``: of load stages through which it grew."""
    if (wait_us > QUEUE_US).sum() <= _NEIGHBOURS // 2:
        return Queue(None, None, 0, 0, 0)
    padded = np.pad(wait_us, _NEIGHBOURS // 2, mode="edge")
    wait_us = np.median(np.lib.stride_tricks.sliding_window_view(padded, _NEIGHBOURS), axis=1).astype(np.int64)
    from_us, until_us, touched_us = None, None, 0
    for first, last in served.stretches(wait_us > _AT_ONCE_US):
        start_us = int(arrival_us[max(first - 1, 0)])
        end_us = int(arrival_us[last + 1]) if last + 1 < len(arrival_us) else None
        if any(start_us <= stage_us and (end_us is None or stage_us <= end_us) for stage_us in ends_us):
            from_us = start_us if from_us is None else from_us
            until_us = end_us
        elif int(wait_us[first : last + 1].max()) > QUEUE_US:
            touched_us += (int(arrival_us[-1]) if end_us is None else end_us) - start_us
    return Queue(from_us, until_us, int(wait_us.max()), int(arrival_us[np.argmax(wait_us)]), touched_us)


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
    until_us = np.minimum(np.append(sent_us, sent_us[-1])[at + 1], np.append(done_us, sent_us[-1])[done[at]])
    stood_us = int((np.minimum(until_us, sent_us[-1]) - sent_us[at]).sum())
    first_us = int(sent_us[at[0]])
    if largest < 1 or stood_us <= _LIMITED_SHARE * (int(sent_us[-1]) - first_us):
        return None
    return ClientLimit(stage, largest, first_us)


def _sent_and_done(requests: Rows | pl.DataFrame) -> tuple[Int64s, Int64s]:
    timed = requests.select("arrival_us", "e2e_us").drop_nulls()
    sent_us = timed["arrival_us"].to_numpy().astype(np.int64)
    return sent_us, sent_us + timed["e2e_us"].to_numpy().astype(np.int64)


def request_count(recording: Recording) -> int | None:
    """Requests sent: recorded ones, else the published count, else those reconstructed."""
    requests = recorded_requests(recording)
    if requests.is_empty():
        count = published(recording.aggregates, -1, "requests", "sent")
        return int(count) if count is not None else (recording.requests.height or None)
    return requests.height
