"""A recording and its replay under more load than can be served: what explains their difference, and since when.

A request waits from its arrival in the queue to its first place in a batch.  While requests come
faster than they are served the wait grows without end, so it measures how long that has lasted and
no longer the server.  The comparison is meaningless from the last request on that found a place
at once; what can still be compared is how much is served meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor
from typing import Literal

import numpy as np
import polars as pl

from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US
from blis_replay.compiled.arrays import Bools, Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import Rows
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.latency import THRESHOLDS, relative_error
from blis_replay.validate.metrics.observed import observed_requests

# In flight at its largest number for so much of the time: a client that sends when another is done.
_LIMITED_SHARE = 0.5


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


# A place at once: the step that runs and, if scheduling is asynchronous, one more.
_AT_ONCE_US = 250_000
# What is said of a queue at all; as the instrument check of overload has it.
_QUEUE_US = 1_000_000
# Single requests that are late for other reasons make no queue.
_NEIGHBOURS = 5
FEWEST = 20
# Of fewer ends a rate is that of the moment.
_FEWEST_ENDS = 100
# Largest error of the throughput of a simulator that is not to blame: as of the E2E of one that does not queue.
THROUGHPUT_TOLERANCE = THRESHOLDS["e2e"]
_OUTSIDE = ("e2e", "ttft")
# More than so many failures say that the server was overloaded, also without a queue that is seen.
_FAILED_SHARE = 0.10


@dataclass(frozen=True)
class Queue:
    """How requests waited on one side.

    ``from_us``: arrival of the last request that found a place at once before requests came to
    wait longer than they are served; ``until_us``: of the first that did so again, None if there
    was none.  Both None if it never came so far.  ``longest_us``: the longest wait, that of the
    request that arrived at ``longest_at_us``; both 0 where nobody waits for a second.
    ``touched_us``: time in shorter queues, of over a second, that went away.
    """

    from_us: int | None
    until_us: int | None
    longest_us: int
    longest_at_us: int
    touched_us: int


@dataclass(frozen=True)
class Served:
    """What both sides, observed and simulated, served while the recorded queue grew and nobody had given up.

    ``requests_per_s``: None of fewer than 100 ends.  ``offered``: tokens asked for each one served, as recorded.
    """

    tokens_per_s: tuple[float, float]
    requests_per_s: tuple[float, float] | None
    offered: float


@dataclass(frozen=True)
class Saturation:
    """What there is to say of a saturated recording or replay.

    ``from_us``, ``until_us``: between them the comparison is meaningless, None: nowhere, or until the
    end.  ``in_flight``: requests in flight at ``from_us`` as recorded.  ``outside_us``: mean ``e2e`` and
    ``ttft``, observed and simulated, over the ``requests_outside`` that stretch, absent of fewer than 20.
    ``served``: None where the recorded queue never grew for a second.  ``explains``: what explains the
    difference: the ``simulator``, whose errors outside the queue or of the throughput are too large; the
    ``recording``, if they are not; ``neither`` if nothing is meaningless; ``not told`` if there is nothing
    to tell it by.  ``share_before``: the share of the run, by arrivals, that lies before ``from_us``, rounded down to
    hundredths; 0 of fewer than 20 requests.
    """

    observed: Queue
    simulated: Queue
    client_limits: tuple[ClientLimit, ...]
    failed: int
    first_failure_us: int | None
    from_us: int | None
    until_us: int | None
    in_flight: int
    requests_outside: int
    outside_us: dict[str, tuple[float, float]]
    served: Served | None
    explains: Literal["simulator", "recording", "neither", "not told"]
    share_before: float = 0.0

    @property
    def outside(self) -> dict[str, float | None]:
        """Signed error of the mean by metric outside the queue, None where there is none."""
        return {metric: relative_error(*self.outside_us.get(metric, (None, None))) for metric in _OUTSIDE}

    @property
    def throughput_error(self) -> float | None:
        """Simulated over observed output tokens per second less one, while the recorded queue grows."""
        return None if self.served is None else relative_error(*self.served.tokens_per_s)


def saturation(run: ReplayRun) -> Saturation | None:
    """What can be said of queues in a recording and its replay; None where there is none, or none can be seen.

    Needs requests recorded one by one and a simulator that reports steps.
    """
    recording, result = run.recording, run.simulated.engine
    known = observed_requests(recording)
    if result is None or not known.any():
        return None
    arrival_us = recording.requests["arrival_us"].to_numpy().astype(np.int64)
    served_us = _served_us(result)
    observed = queue(arrival_us[known], observed_wait_us(run, known), served_us)
    simulated = simulated_queue(run)
    limits = client_limits(recording)
    failures_us = arrival_us[(recording.requests["status"] != "ok").to_numpy()]
    from_us, until_us = _meaningless(observed, simulated, failures_us, len(arrival_us))
    if from_us is None and not limits and not (observed.touched_us or simulated.touched_us):
        return None
    outside = known & run.simulated.completed & ((arrival_us < (from_us or 0)) | _after(arrival_us, from_us, until_us))
    found = Saturation(
        observed=observed,
        simulated=simulated,
        client_limits=limits,
        failed=len(failures_us),
        first_failure_us=int(failures_us[0]) if len(failures_us) else None,
        from_us=from_us,
        until_us=until_us,
        in_flight=in_flight_at(recording, from_us) if from_us is not None else 0,
        requests_outside=int(outside.sum()),
        outside_us=_means_of(run, outside),
        served=_served(run, observed),
        explains="neither",
        share_before=_share_before(arrival_us, from_us),
    )
    return replace(found, explains=_explanation(found))


def _share_before(arrival_us: Int64s, from_us: int | None) -> float:
    share = floor(100 * (from_us or 0) / max(int(arrival_us[-1]), 1)) / 100
    return min(share, 1.0) if int((arrival_us <= share * arrival_us[-1]).sum()) >= FEWEST else 0.0


def queue(arrival_us: Int64s, wait_us: Int64s, served_us: int) -> Queue:
    """The queue that shows in the waits of requests in order of arrival; ``served_us``: how long one is served.

    Waits are smoothed by the median of 5 neighbours.
    """
    if (wait_us > _QUEUE_US).sum() <= _NEIGHBOURS // 2:
        return Queue(None, None, 0, 0, 0)
    padded = np.pad(wait_us, _NEIGHBOURS // 2, mode="edge")
    wait_us = np.median(np.lib.stride_tricks.sliding_window_view(padded, _NEIGHBOURS), axis=1).astype(np.int64)
    from_us, until_us, touched_us = None, None, 0
    for first, last in _stretches(wait_us > _AT_ONCE_US):
        longest_us = int(wait_us[first : last + 1].max())
        start_us = int(arrival_us[max(first - 1, 0)])
        end_us = int(arrival_us[last + 1]) if last + 1 < len(arrival_us) else None
        if longest_us > max(served_us, _QUEUE_US):
            from_us = start_us if from_us is None else from_us
            until_us = end_us
        elif longest_us > _QUEUE_US:
            touched_us += (int(arrival_us[-1]) if end_us is None else end_us) - start_us
    return Queue(from_us, until_us, int(wait_us.max()), int(arrival_us[np.argmax(wait_us)]), touched_us)


def observed_wait_us(run: ReplayRun, chosen: Bools) -> Int64s:
    """int64[chosen]: how long requests waited for their first place, as recorded.

    Where the server did not say, it is the TTFT less what the replay takes for anything else
    (its mean where the replay did not serve the request).
    """
    result, requests = run.result, run.recording.requests
    served = run.simulated.completed
    other_us = result.first_token_us - result.scheduled_us
    other_us += result.queued_us
    other_us -= result.arrival_us
    other_us[~served] = int(other_us[served].mean())
    inferred = pl.Series(requests["ttft_us"] - pl.Series(other_us))
    waits = requests["queue_us"].fill_null(inferred).fill_null(0).clip(0)
    return waits.to_numpy().astype(np.int64)[chosen]


def simulated_wait_us(abort_us: Int64s, result: SimResult) -> Int64s:
    """int64[n]: how long requests waited for their first place in the replay, or until they were given up."""
    until_us = np.where(result.scheduled_us >= 0, result.scheduled_us, abort_us)
    return np.maximum(until_us - result.queued_us, 0)


def simulated_queue(run: ReplayRun) -> Queue:
    """The queue of a replay by a simulator that reports steps."""
    trace, result = run.plan.trace, run.result
    return queue(trace.arrival_us, simulated_wait_us(trace.abort_us, result), _served_us(result))


def _served_us(result: SimResult) -> int:
    """Mean time from first place to last token in the replay."""
    done = result.completed
    return int((result.finished_us - result.scheduled_us)[done].mean()) if done.any() else 0


def _stretches(long: Bools) -> list[tuple[int, int]]:
    """First and last place of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], long, [False]]).astype(np.int8)))
    return [(int(first), int(last) - 1) for first, last in edges.reshape(-1, 2)]


def _meaningless(
    observed: Queue, simulated: Queue, failures_us: Int64s, requests: int
) -> tuple[int | None, int | None]:
    sides = [side for side in (observed, simulated) if side.from_us is not None]
    if sides:
        ends = [side.until_us for side in sides]
        last = None if None in ends else max(end for end in ends if end is not None)
        return min(side.from_us for side in sides if side.from_us is not None), last
    if len(failures_us) > _FAILED_SHARE * requests:
        return int(failures_us[0]), None
    return None, None


def _after(arrival_us: Int64s, from_us: int | None, until_us: int | None) -> Bools:
    """bool[n]: what came when the queue was gone again."""
    gone_us = NEVER_US if from_us is None or until_us is None else until_us
    return np.asarray(arrival_us > gone_us, np.bool_)


def _means_of(run: ReplayRun, chosen: Bools) -> dict[str, tuple[float, float]]:
    if chosen.sum() < FEWEST:
        return {}
    requests, sides = run.recording.requests, {"e2e": run.e2e_us, "ttft": run.ttft_us}
    return {
        metric: (float(requests[f"{metric}_us"].to_numpy()[chosen].mean()), float(values_us[chosen].mean()))
        for metric, values_us in sides.items()
    }


def _served(run: ReplayRun, observed: Queue) -> Served | None:
    """What was served while the queue grew and nobody gave up; None where that took less than a second."""
    if observed.from_us is None:
        return None
    requests = run.recording.requests
    arrival_us = requests["arrival_us"].to_numpy()
    end_us = observed.longest_at_us  # later it shrinks, and a faster simulator may have nothing left to serve
    given_up = requests.where("status <> 'ok'").frame(["arrival_us", "e2e_us"])
    if given_up.height:  # from then on places are taken by requests that nobody waits for
        end_us = min(end_us, int((given_up["arrival_us"] + given_up["e2e_us"].fill_null(0)).min()))  # type: ignore[arg-type]
    window = observed.from_us, end_us
    known, done = observed_requests(run.recording), run.simulated.completed
    columns = ("arrival_us", "ttft_us", "e2e_us", "output_tokens")
    timed = requests.frame(columns).filter(known)
    if timed["output_tokens"].null_count():
        return None  # what was served is not known in whole
    answered = run.plan.trace.arrival_us, run.ttft_us, run.e2e_us, run.simulated.output_tokens
    sides = tuple(timed[name].to_numpy() for name in columns), tuple(values[done] for values in answered)
    tokens, span_s = tuple(_tokens_within(window, *side) for side in sides), (end_us - observed.from_us) / 1e6
    if span_s < _QUEUE_US / 1e6 or tokens[0] < FEWEST:
        return None
    ends = tuple(_ends_within(window, *side) for side in sides)
    came = (arrival_us > window[0]) & (arrival_us <= window[1])
    return Served(
        tokens_per_s=(tokens[0] / span_s, tokens[1] / span_s),
        requests_per_s=None if ends[0] < _FEWEST_ENDS else (ends[0] / span_s, ends[1] / span_s),
        offered=float(run.plan.trace.output_tokens[came].sum()) / tokens[0],
    )


def _ends_within(
    window: tuple[int, int], arrival_us: Int64s, _ttft_us: Int64s, e2e_us: Int64s, _output_tokens: Int64s
) -> int:
    """Requests that ended within a window."""
    end_us = arrival_us + e2e_us
    return int(((end_us > window[0]) & (end_us <= window[1])).sum())


def _tokens_within(
    window: tuple[int, int], arrival_us: Int64s, ttft_us: Int64s, e2e_us: Int64s, output_tokens: Int64s
) -> float:
    """Output tokens that came within a window, those of a request evenly from its first to its last."""
    first_us, last_us = arrival_us + ttft_us, np.maximum(arrival_us + e2e_us, arrival_us + ttft_us + 1)
    within_us = np.minimum(last_us, window[1]) - np.maximum(first_us, window[0])
    return float((output_tokens * np.maximum(within_us, 0) / (last_us - first_us)).sum())


def _explanation(found: Saturation) -> Literal["simulator", "recording", "neither", "not told"]:
    if found.from_us is None:
        return "neither"
    throughput, outside = found.throughput_error, found.outside
    too_large = any(abs(outside[metric] or 0.0) > THRESHOLDS[metric] for metric in _OUTSIDE)
    if too_large or abs(throughput or 0.0) > THROUGHPUT_TOLERANCE:
        return "simulator"
    if found.observed.from_us is None:
        return "simulator"  # it queues and the server did not
    return "not told" if throughput is None and outside["e2e"] is None else "recording"
