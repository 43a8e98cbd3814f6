"""A recording under more load than can be served, and its replay: since when, and what can be compared.

A request waits from its arrival in the queue to its first place in a batch.  While requests come
faster than they are served the wait grows without end, so it measures how long that has lasted and
no longer the server.  The comparison is meaningless from the last request on that found a place
at once; what can still be compared is how much is served meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from math import floor

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.blis.trace import NEVER_US
from blis_replay.ingest.overload import (
    FAILED_SHARE,
    FEWEST,
    QUEUE_US,
    ClientLimit,
    Queue,
    client_limits,
    failed_waiting,
    growths,
    in_flight_at,
    overload_ends_us,
    overloaded,
    queue,
)
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.comparison.spread import load_is_known
from blis_replay.validate.judgement import Remark, remark
from blis_replay.validate.metrics.observed import observed_requests, on_both_sides, samples_of, simulated_samples
from blis_replay.validate.metrics.uncertainty import Estimate, error_estimates, estimate, in_order, request_order

# Of fewer ends a rate is that of the moment.
_FEWEST_ENDS = 100
# Parts of a run by which the error of a rate or a span is known: as many as give Student's t of 19 degrees of freedom.
_PARTS = 20


@dataclass(frozen=True)
class Saturation:
    """What there is to say of the queues of a recording and its replay.

    ``from_us``, ``until_us``: between them the recording is overloaded and latencies measure its queue, None: nowhere,
    or until the end.  ``in_flight``: requests in flight at ``from_us`` as recorded.  ``outside``: bool[requests], those
    outside that stretch that both sides finished.  ``share_before``: the share of the run, by arrivals, that lies
    before ``from_us``, rounded down to hundredths; 0 of fewer than 20 requests.  ``answered``: whether requests that
    waited for an answer wait for the simulated one.
    """

    observed: Queue
    simulated: Queue
    client_limits: tuple[ClientLimit, ...]
    failed: int
    first_failure_us: int | None
    from_us: int | None
    until_us: int | None
    in_flight: int
    outside: Bools
    share_before: float = 0.0
    answered: bool = False

    @property
    def remarks(self) -> list[Remark]:
        """Whose queue grows, and then what that rests on."""
        limits = [(limit.stage, limit.from_us / 1e6, limit.in_flight) for limit in self.client_limits]
        held = [remark("client_limits", limits=limits, answered=self.answered)] if limits else []
        alone_s = _s(self.simulated.from_us)
        verdict = remark("short_queues_only") if alone_s is None else remark("saturates_alone", from_s=alone_s)
        if self.from_us is not None:
            verdict = remark("saturates", from_s=_s(self.from_us), until_s=_s(self.until_us))
        return [verdict, *_queues(self), *held]

    @property
    def document(self) -> dict[str, object]:
        """Times in s of the recording, errors as fractions."""
        return {
            "meaningless_from_s": _s(self.from_us),
            "meaningless_until_s": _s(self.until_us),
            "in_flight": self.in_flight,
            "observed": _queue_json(self.observed),
            "simulated": _queue_json(self.simulated),
            "client_limits": [
                {"stage": limit.stage, "in_flight": limit.in_flight, "from_s": _s(limit.from_us)}
                for limit in self.client_limits
            ],
            "failed": self.failed,
            "first_failure_s": _s(self.first_failure_us),
            "requests_outside": int(self.outside.sum()),
        }


def saturation(run: ReplayRun) -> Saturation | None:
    """The queues of a recording and its replay; None without a visible queue.

    Needs requests recorded one by one and a simulator that reports steps.
    """
    recording, result = run.recording, run.simulated.engine
    known = observed_requests(recording)
    if result is None or not known.any():
        return None
    arrival_us = recording.requests["arrival_us"].to_numpy().astype(np.int64)
    observed = queue(arrival_us[known], observed_wait_us(run, known), overload_ends_us(recording))
    simulated = simulated_queue(run)
    limits = client_limits(recording)
    failures_us = arrival_us[failed_waiting(recording)]
    from_us, until_us = _meaningless(observed, simulated, failures_us, len(arrival_us))
    seen = (from_us, simulated.from_us, observed.touched_us or None, simulated.touched_us or None)
    if not limits and seen == (None, None, None, None):
        return None
    gone_us = NEVER_US if from_us is None or until_us is None else until_us
    outside = known & run.simulated.completed & ((arrival_us < (from_us or 0)) | (arrival_us > gone_us))
    share = min(floor(100 * (from_us or 0) / max(int(arrival_us[-1]), 1)) / 100, 1.0)
    return Saturation(
        observed=observed,
        simulated=simulated,
        client_limits=limits,
        failed=len(failures_us),
        first_failure_us=int(failures_us[0]) if len(failures_us) else None,
        from_us=from_us,
        until_us=until_us,
        in_flight=in_flight_at(recording, from_us) if from_us is not None else 0,
        outside=outside,
        share_before=share if int((arrival_us <= share * arrival_us[-1]).sum()) >= FEWEST else 0.0,
        answered=run.plan.answered is not None,
    )


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


def simulated_queue(run: ReplayRun) -> Queue:
    """The queue of a replay by a simulator that reports steps."""
    result, sent_us = run.result, run.arrival_us
    # Until their first place in a batch, or until they were given up.
    until_us = np.where(result.scheduled_us >= 0, result.scheduled_us, run.plan.trace.abort_us)
    waits_us = np.maximum(until_us - result.queued_us, 0)
    first_us = np.where(result.completed, result.first_token_us, sent_us + waits_us)
    times = run.recording.requests.frame(["stage"]).with_columns(
        arrival_us=sent_us, ttft_us=first_us - sent_us, e2e_us=result.finished_us - sent_us
    )
    order = np.argsort(sent_us, kind="stable")
    return queue(sent_us[order], waits_us[order], [growth.end_us for growth in growths(times)])


def _meaningless(
    observed: Queue, simulated: Queue, failures_us: Int64s, requests: int
) -> tuple[int | None, int | None]:
    """From when to when the recording is overloaded; until both queues are gone, as the replay's is then its answer."""
    if observed.from_us is not None:
        ends = [side.until_us for side in (observed, simulated) if side.from_us is not None]
        return observed.from_us, None if None in ends else max(end for end in ends if end is not None)
    if len(failures_us) > FAILED_SHARE * requests:
        return int(failures_us[0]), None
    return None, None


# -- What of a run beyond its capacity can be judged ------------------------------------------------------------
#
# While requests come faster than they are served, E2E and TTFT measure how long that has lasted: a step 5 % longer can
# double them.  How much was served meanwhile does not grow like that, nor does the gap between two tokens, nor do the
# latencies of the time without a queue.


@dataclass(frozen=True)
class Measure:
    """One number of both sides; ``metric`` is the one whose threshold it shares (a rate is one over a time).

    ``slug``: ``tokens_per_s``, ``requests_per_s``, ``makespan``, ``itl``, ``e2e_outside`` or ``ttft_outside``.
    ``estimate``: of its error, None where it is not of single requests.
    """

    slug: str
    name: str
    metric: str
    observed: float
    simulated: float
    unit: str
    estimate: Estimate | None = None


def capacity(
    run: ReplayRun,
    found: Saturation | None,
    requests: int,
    itl_us: tuple[float | None, float | None],
    unusable: Collection[str],
) -> tuple[Measure, ...]:
    """What of a run beyond its capacity can be judged; empty if nothing can.

    ``itl_us``: its mean over ``requests`` requests, observed and simulated.  ``unusable``: metrics that instrument
    checks forbid.
    """
    if requests < FEWEST:
        return ()
    measures = []
    if "e2e" not in unusable:
        if found is not None and "ttft" not in unusable:
            measures += [*_rates(run, found.observed), *_outside(run, found)]
        measures += _makespan(run)
    observed_us, simulated_us = itl_us
    known = load_is_known(run.recording.slug, run.recording.ground_truth) and "itl" not in unusable
    if known and observed_us is not None and simulated_us is not None:
        measures.append(Measure("itl", "ITL", "itl", observed_us / 1000, simulated_us / 1000, "ms"))
    return tuple(measure for measure in measures if measure.observed > 0)


def _rates(run: ReplayRun, observed: Queue) -> list[Measure]:
    """What was served a second while the queue grew and nobody gave up; nothing where that took less than a second."""
    if observed.from_us is None:
        return []
    requests = run.recording.requests
    end_us = observed.longest_at_us  # later it shrinks, and a faster simulator may have nothing left to serve
    given_up = requests.where("status <> 'ok'").frame(["arrival_us", "e2e_us"])
    if given_up.height:  # from then on places are taken by requests that nobody waits for
        end_us = min(end_us, int((given_up["arrival_us"] + given_up["e2e_us"].fill_null(0)).min()))  # type: ignore[arg-type]
    columns = ("arrival_us", "ttft_us", "e2e_us", "output_tokens")
    timed = requests.frame(columns).filter(observed_requests(run.recording))
    span_s = (end_us - observed.from_us) / 1e6
    if timed["output_tokens"].null_count() or span_s < QUEUE_US / 1e6:
        return []  # what was served is not known in whole, or it is that of the moment
    done = run.simulated.completed
    answered = run.arrival_us, run.ttft_us, run.e2e_us, run.simulated.output_tokens
    sides = tuple(timed[name].to_numpy() for name in columns), tuple(values[done] for values in answered)
    edges_us = np.linspace(observed.from_us, end_us, _PARTS + 1)
    rates = []
    for unit, served, fewest in (("tokens", _tokens_within, FEWEST), ("requests", _ends_within, _FEWEST_ENDS)):
        parts = [np.array([served(window, *side) for window in pairwise(edges_us)]) for side in sides]
        if parts[0].sum() >= fewest:
            name = f"{'output ' if unit == 'tokens' else ''}{unit}/s while the queue grows"
            recorded, simulated = (float(part.sum()) / span_s for part in parts)
            sure = _estimate_of_parts(*parts)
            rates.append(Measure(f"{unit}_per_s", name, "e2e", recorded, simulated, f"{unit}/s", sure))
    return rates


def _estimate_of_parts(observed: Floats, simulated: Floats) -> Estimate:
    """The error of a sum of ``_PARTS`` parts, by how their errors differ."""
    error = float(simulated.sum() / observed.sum()) - 1
    additions = (simulated - (1 + error) * observed) / observed.sum()
    return estimate(error, additions, in_order(len(observed)))


def _ends_within(
    window: tuple[float, float], arrival_us: Int64s, _ttft_us: Int64s, e2e_us: Int64s, _output_tokens: Int64s
) -> int:
    """Requests that ended within a window."""
    end_us = arrival_us + e2e_us
    return int(((end_us > window[0]) & (end_us <= window[1])).sum())


def _tokens_within(
    window: tuple[float, float], arrival_us: Int64s, ttft_us: Int64s, e2e_us: Int64s, output_tokens: Int64s
) -> float:
    """Output tokens that came within a window, those of a request evenly from its first to its last."""
    first_us, last_us = arrival_us + ttft_us, np.maximum(arrival_us + e2e_us, arrival_us + ttft_us + 1)
    within_us = np.minimum(last_us, window[1]) - np.maximum(first_us, window[0])
    return float((output_tokens * np.maximum(within_us, 0) / (last_us - first_us)).sum())


def _outside(run: ReplayRun, found: Saturation) -> list[Measure]:
    """The latencies of requests that came before the queue, or after it; nothing of fewer than 20."""
    if found.outside.sum() < FEWEST:
        return []
    sides = samples_of(run.recording, found.outside), simulated_samples(run, found.outside)
    means_us = {"e2e": [float(s.e2e_us.mean()) for s in sides], "ttft": [float(s.ttft_us.mean()) for s in sides]}
    errors = {(metric, "mean"): simulated / observed - 1 for metric, (observed, simulated) in means_us.items()}
    order = request_order(run.recording, found.outside, sides[0].e2e_us)
    estimates = error_estimates(order, *sides, errors)
    return [
        Measure(
            f"{metric}_outside",
            f"{metric.upper()} of {int(found.outside.sum()):,} outside the queue",
            metric,
            recorded_us / 1000,
            simulated_us / 1000,
            "ms",
            estimates[metric, "mean"],
        )
        for metric, (recorded_us, simulated_us) in means_us.items()
    ]


def _makespan(run: ReplayRun) -> list[Measure]:
    """From the first arrival to the last end of a request that both finished."""
    requests = run.recording.requests
    both = on_both_sides(run)
    if both.sum() < FEWEST:
        return []
    arrival_us, e2e_us = (requests[name].to_numpy() for name in ("arrival_us", "e2e_us"))
    recorded = _times_of_parts_s(arrival_us, e2e_us, both)
    simulated = _times_of_parts_s(run.arrival_us, run.e2e_us, both)
    sure = _estimate_of_parts(recorded, simulated)
    return [Measure("makespan", "makespan", "e2e", float(recorded.sum()), float(simulated.sum()), "s", sure)]


def _times_of_parts_s(arrival_us: Int64s, e2e_us: Int64s, both: Bools) -> Floats:
    """float64[parts]: from the end of one twentieth of the requests to that of the next; the first from the start."""
    ends_us = np.sort((arrival_us + e2e_us)[both])
    last = np.linspace(0, len(ends_us), _PARTS + 1).astype(np.int64)[1:] - 1
    return np.asarray(np.diff(ends_us[last], prepend=arrival_us[0]) / 1e6, np.float64)


# -- As remarks and JSON ---------------------------------------------------------------------------------------


def _queues(found: Saturation) -> list[Remark]:
    remarks = []
    for name, side in (("observed", found.observed), ("simulated", found.simulated)):
        longest_s = side.longest_us / 1e6
        if side.from_us is not None:
            in_flight = found.in_flight if name == "observed" else None
            remarks.append(
                remark("queues", side=name, from_s=_s(side.from_us), in_flight=in_flight, longest_s=longest_s)
            )
        elif side.touched_us:
            remarks.append(remark("shorter_queues", side=name, total_s=side.touched_us / 1e6, longest_s=longest_s))
        elif found.from_us is not None:
            remarks.append(remark("no_queue", side=name))
    if found.failed and found.first_failure_us is not None:
        remarks.append(remark("failures", count=found.failed, from_s=_s(found.first_failure_us)))
    return remarks


def _queue_json(side: Queue) -> dict[str, float | None]:
    return {
        "from_s": _s(side.from_us),
        "until_s": _s(side.until_us),
        "longest_wait_s": side.longest_us / 1e6,
        "shorter_queues_s": side.touched_us / 1e6,
    }


def _s(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1e6


def overload_sentence(recording: Recording) -> str:
    """What is said beside the latencies of an overloaded recording; empty for any other."""
    is_overloaded, reason = overloaded(recording)
    queue = "its latencies measure how long the queue has grown"
    return f"{recording.alias} is overloaded: {reason}; {queue}" if is_overloaded else ""
