"""Observed quantities in place of modelled ones, ready for the simulator: step cycles, stamps, delays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import TypeVar
from weakref import ref

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.errors import ReplayError, counted
from blis_replay.blis.latency.models import ObservedCycles
from blis_replay.blis.trace import RequestTrace
from blis_replay.ingest.checks.stationarity import STALL_US, steps_behind, usual_us
from blis_replay.ingest.recording import NOT_KNOWN, Recording
from blis_replay.ingest.rows import Rows, no_rows
from blis_replay.ingest.steps.followed import NONE, followed_log
from blis_replay.ingest.steps.records import is_asynchronous
from blis_replay.ingest.steps.timeline import StepAnchors, step_anchors
from blis_replay.replay.mode import ReplayMode

Answer = TypeVar("Answer")

_STAMPS = ("queued_us", "scheduled_us", "first_token_us", "finished_us")
JOURNEYS, SPANS, CLIENT_ONLY = "journeys", "durations of llm_request spans", "client latencies only"
PLACED = "llm_request spans, placed by iterations of the server's log,"


@dataclass(frozen=True)
class ServerStamps:
    """Stamps of requests that succeeded, float64[n] in request order, us from the experiment's zero; nan: not recorded.

    ``source``: JOURNEYS, PLACED, SPANS or CLIENT_ONLY.  ``queued_us``, ``scheduled_us`` (first), ``first_token_us`` and
    ``finished_us`` are the engine's.  ``steps_waited``: calls of ``schedule()`` from queueing up to the one that
    admitted it, 1 if the first did.
    """

    source: str
    queued_us: Floats
    scheduled_us: Floats
    first_token_us: Floats
    finished_us: Floats
    steps_waited: Floats


def _once_a_recording(function: Callable[[Recording], Answer]) -> Callable[[Recording], Answer]:
    """The last answer again for the same records: an attribution asks for it with every replay.

    Only arguments of the engine may differ, and of them only scheduling changes what was observed.
    """
    last: list[tuple[tuple[ref[Rows], ...], object, Answer]] = []

    @wraps(function)
    def answered(recording: Recording) -> Answer:
        rows = (
            *(recording.requests, recording.steps, recording.iterations),
            *(recording.lifecycles, recording.journey_events),
        )
        told = (recording.clocks, recording.findings, is_asynchronous(recording))
        for seen, of, answer in last:
            if of == told and all(one() is other for one, other in zip(seen, rows, strict=True)):
                return answer
        answer = function(recording)
        last[:] = [(tuple(map(ref, rows)), told, answer)]
        return answer

    return answered


@_once_a_recording
def server_stamps(recording: Recording) -> ServerStamps:
    """The server's stamps: of its journeys, else laid out from the durations that its spans carry."""
    requests = recording.requests
    ok = (requests["status"] == "ok").to_numpy()
    no_stamps = ServerStamps(CLIENT_ONLY, *np.full((5, requests.height), np.nan))
    if _off_its_clock(recording, "segments"):
        return no_stamps
    journeys = recording.lifecycles.frame().drop_nulls("request_index")
    # Upstream spans stamp nothing inside the engine, but have durations of what happened there.
    if journeys.select(pl.any_horizontal(pl.col("queued_us", "scheduled_us").is_not_null()).any()).item():
        own = requests.select("request_index").join(
            journeys.unique("request_index", keep="none"), on="request_index", how="left", maintain_order="left"
        )
        return _stamps(own, ok, JOURNEYS)
    if requests["prefill_us"].null_count() < requests.height:
        scheduled_us = _admitting_iterations(recording)
        placed = scheduled_us is not None
        return _stamps(_of_durations(requests, scheduled_us), ok, PLACED if placed else SPANS)
    return no_stamps


def _off_its_clock(recording: Recording, *metrics: str) -> bool:
    """Whether the clock check says that what the server stamped must not be laid beside the requests."""
    return any(f.check == "clocks" and f.severity == "unusable" and f.metric in metrics for f in recording.findings)


def _stamps(own: pl.DataFrame, ok: Bools, source: str) -> ServerStamps:
    stamps = own.select(*_STAMPS, pl.col("scheduled_step") - pl.col("queued_step"))
    values = stamps.select(pl.all().cast(pl.Float64).fill_null(np.nan)).to_numpy()
    return ServerStamps(source, *np.ascontiguousarray(np.where(ok[:, None], values, np.nan).T))


def _admitting_iterations(recording: Recording) -> pl.Series | None:
    """When the iteration of the server's log began that admitted each request, us; None if it is not known of each."""
    log, _why_not = followed_log(recording)
    if log is None:
        return None
    step = pl.Series(np.where(log.walk.admitted < log.walk.end, log.walk.admitted, NONE))
    known = log.served.select("request_index", step=step)
    starts = log.iterations.select("start_us", step=pl.int_range(pl.len()))
    own = recording.requests.select("request_index").join(
        known.join(starts, on="step"), on="request_index", how="left", maintain_order="left"
    )
    return None if own["start_us"].null_count() else own["start_us"]


def _of_durations(requests: Rows, scheduled_us: pl.Series | None) -> pl.DataFrame:
    """A span has no stamp between arrival and end: its durations are laid back to back from ``scheduled_us``.

    Where that is not known they end with the client's first token, and a token's way to the client counts as time
    before the queue.
    """
    nothing = pl.lit(None, pl.Float64)
    by_client = pl.col("arrival_us") + pl.col("ttft_us") - pl.col("prefill_us")
    scheduled = by_client if scheduled_us is None else pl.lit(scheduled_us)
    first_token = scheduled + pl.col("prefill_us")
    return requests.select(
        queued_us=scheduled - pl.col("queue_us"),
        scheduled_us=scheduled,
        first_token_us=first_token,
        finished_us=first_token + pl.col("decode_us"),
        scheduled_step=nothing,
        queued_step=nothing,
    )


MIN_ANCHORS = 20  # fewer say little about a run
MIN_REQUESTS = 20
# A cycle this many times shorter than the median is two calls of schedule() in a row (some 100 us), and no step.
WAKE_FACTOR = 10
BIN_US = 1_000_000  # 50 to 150 steps at a few requests in flight, and tens of requests cross it
MAX_BINS = 20_000
# Weight of a difference between the speeds of neighbouring bins, in tokens that are not accounted for: it only decides
# where no request does.
SMOOTHING = 0.3


@_once_a_recording
def observed_cycles(recording: Recording) -> tuple[ObservedCycles, str]:
    """Step cycles by time, and in words what they rest on.

    From step records, else from the iterations of a log: the time between two anchors, less what the server stood idle,
    over the steps between them.  Without them, from the latencies of single requests: the steps a second with which
    each request got its tokens between its first and last.
    Raises ``ReplayError`` if the recording has neither.
    """
    by_log = recording.steps.is_empty()
    anchors = _placed_iterations(recording) if by_log else placed_anchors(recording).frame
    if len(anchors) >= MIN_ANCHORS:
        of = "iterations of the server's log, placed by their requests" if by_log else "times of steps, empty ones too"
        return _between(anchors, recording), f"recorded: {len(anchors):,} {of}"
    rows = recording.requests.where("status = 'ok' AND output_tokens > 1 AND e2e_us > ttft_us").frame()
    if len(rows) < MIN_REQUESTS:
        few = f"{len(rows)} requests with latencies are too few for them" if len(rows) else "no request has latencies"
        raise ReplayError(
            f"{recording.alias}: step cycles were not recorded, and {few}; record steps (`blis-replay record`) or "
            "per-request latencies"
        )
    return _from_latencies(rows), f"recorded: solved from the decode times of {len(rows):,} requests, second by second"


def _placed_iterations(recording: Recording) -> pl.DataFrame:
    """Number and start of the iterations of a server's log that could be placed on the clock of the requests."""
    placed = recording.iterations.where("NOT dummy AND start_us IS NOT NULL")
    return placed.select("start_us", step_id=pl.col("iteration"))


def placed_anchors(recording: Recording) -> StepAnchors:
    """The recorded starts of steps; none if their clock is not tied to that of the requests."""
    anchors = step_anchors(recording)
    loose = any(clock.name == "step" and clock.placed == NOT_KNOWN for clock in recording.clocks)
    loose = loose or _off_its_clock(recording, "segments", "step_time")
    return replace(anchors, rows=no_rows(anchors.rows.schema)) if loose else anchors


def _between(anchors: pl.DataFrame, recording: Recording) -> ObservedCycles:
    start_us = anchors["start_us"].to_numpy().astype(np.float64)
    steps = np.diff(anchors["step_id"].to_numpy())
    idle_us = np.diff(_idle_until(*in_engine(recording, server_stamps(recording)), start_us))
    usable = (steps > 0) & (idle_us == 0)
    # When exactly a server fell idle is known less well than when it was busy.
    if usable.sum() < MIN_ANCHORS:
        usable = steps > 0
    cycle_us = np.rint((np.diff(start_us) - idle_us) / np.maximum(steps, 1))
    latest = np.maximum.accumulate(np.where(usable, np.arange(len(steps)), int(np.argmax(usable))))
    cycles = np.maximum(cycle_us[latest], 1).astype(np.int64)
    begins = start_us[:-1].astype(np.int64)
    if is_asynchronous(recording):
        begins, cycles, usable, idle_us = _one_at_a_wake(begins, cycles, usable, idle_us)
    return ObservedCycles(begins, cycles, usable & (idle_us == 0))


def _one_at_a_wake(
    from_us: Int64s, cycle_us: Int64s, usable: Bools, idle_us: Floats
) -> tuple[Int64s, Int64s, Bools, Floats]:
    """The anchors without those from which the next step was scheduled at once.

    A server that schedules asynchronously and was idle has room for two batches.  Nothing ran between
    the two calls, so their distance counts with the cycle that follows.
    """
    wake = np.flatnonzero(usable & (cycle_us * WAKE_FACTOR < np.median(cycle_us[usable])))
    wake = wake[wake + 1 < len(cycle_us)]
    from_us, cycle_us = from_us.copy(), cycle_us.copy()
    cycle_us[wake + 1] += from_us[wake + 1] - from_us[wake]
    from_us[wake + 1] = from_us[wake]
    return np.delete(from_us, wake), np.delete(cycle_us, wake), np.delete(usable, wake), np.delete(idle_us, wake)


def in_engine(recording: Recording, stamps: ServerStamps) -> tuple[Floats, Floats]:
    """From when to when (us) each request was in the engine, by its stamps; else, in flight for the client."""
    sent = recording.requests.select("arrival_us", end=pl.col("arrival_us") + pl.col("e2e_us")).cast(pl.Float64)
    begin_us, end_us = (sent[name].fill_null(np.nan).to_numpy() for name in ("arrival_us", "end"))
    begin_us = np.where(np.isnan(stamps.queued_us), begin_us, stamps.queued_us)
    end_us = np.where(np.isnan(stamps.finished_us), end_us, stamps.finished_us)
    known = ~np.isnan(begin_us + end_us)
    order = np.argsort(begin_us[known], kind="stable")
    return begin_us[known][order], end_us[known][order]


def _idle_until(begin_us: Floats, end_us: Floats, at_us: Floats) -> Floats:
    """float64: how long, up to each time, no request was there."""
    gap_us = np.maximum(begin_us[1:] - np.maximum.accumulate(end_us)[:-1], 0) if len(end_us) else end_us
    gap_end_us, gap_us = begin_us[1:][gap_us > 0], gap_us[gap_us > 0]
    if not len(gap_us):
        return np.zeros(len(at_us))
    gap_start_us = gap_end_us - gap_us
    passed = np.searchsorted(gap_start_us, at_us, side="right")
    before = np.concatenate([[0.0], np.cumsum(gap_us)])
    last = np.maximum(passed - 1, 0)
    within = np.where(passed > 0, np.minimum(at_us - gap_start_us[last], gap_us[last]), 0.0)
    return np.asarray(before[last] + within, np.float64)


def _from_latencies(rows: pl.DataFrame) -> ObservedCycles:
    """Steps per second in each bin such that every request has output tokens - 1 steps between first and last.

    Linear least squares over all requests: a request gets the steps of a bin in proportion to their overlap.
    """
    from scipy.sparse.linalg import spsolve  # heavy, and only this needs it

    first_us = (rows["arrival_us"] + rows["ttft_us"]).to_numpy()
    last_us = (rows["arrival_us"] + rows["e2e_us"]).to_numpy()
    steps = rows["output_tokens"].to_numpy().astype(np.float64) - 1
    origin_us = int(first_us.min())
    width_us = max(BIN_US, -(-(int(last_us.max()) - origin_us) // MAX_BINS))
    bins = int((last_us.max() - origin_us) // width_us) + 1
    overlap = _overlap(first_us - origin_us, last_us - origin_us, width_us, bins)
    normal = overlap.T @ overlap + SMOOTHING**2 * _curvature(bins)
    speed = np.asarray(spsolve(normal.tocsc(), overlap.T @ steps), np.float64)  # steps in a bin
    usual = steps.sum() * width_us / float((last_us - first_us).sum())
    cycle_us = np.rint(width_us / np.maximum(speed, usual / 20))
    return ObservedCycles(origin_us + width_us * np.arange(bins, dtype=np.int64), cycle_us.astype(np.int64))


def _overlap(first_us: Int64s, last_us: Int64s, width_us: int, bins: int):  # type: ignore[no-untyped-def]  # scipy has no types
    """Sparse requests x bins: which share of each bin a request decoded."""
    from scipy.sparse import coo_matrix

    begin, end = first_us // width_us, last_us // width_us
    count = end - begin + 1
    request = np.repeat(np.arange(len(begin)), count)
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(begin, count)
    low = np.maximum(place * width_us, first_us[request])
    high = np.minimum((place + 1) * width_us, last_us[request])
    return coo_matrix(((high - low) / width_us, (request, place)), shape=(len(begin), bins)).tocsr()


def _curvature(bins: int):  # type: ignore[no-untyped-def]  # scipy has no types
    """D^T D of first differences, and a trace of the identity so that one bin alone can be solved."""
    from scipy.sparse import diags, identity

    if bins == 1:
        return 1e-9 * identity(1)
    difference = diags([-np.ones(bins - 1), np.ones(bins - 1)], [0, 1], shape=(bins - 1, bins))
    return difference.T @ difference + 1e-9 * identity(bins)


MIN_STAMPS = 20  # whose median requests without a stamp get
# Largest share of requests without a recorded decision: to hold some requests and not the others changes who is first.
MAX_WITHOUT_DECISION = 0.1
GOLDEN = (5**0.5 - 1) / 2  # fractional parts of its multiples lie evenly between 0 and 1, in any stretch of them


def observed_pre_queue(recording: Recording, stamps: ServerStamps, cycles: ObservedCycles) -> tuple[Int64s, str]:
    """int64[n] us from send to the waiting queue, and its basis; raises ``ReplayError`` if not recorded.

    A busy server takes a request in, and stamps it as queued, between two steps: it was sent to the engine up to a
    cycle earlier, which the simulator's own loop adds again.  When in the cycle is not recorded; the requests
    are spread over it evenly, half a cycle on average.
    """
    still = stalled_us(recording, cycles) > 0
    turn_us = _before_its_turn(in_engine(recording, stamps), cycles, still, stamps.queued_us)
    delay_us = stamps.queued_us - _arrival_us(recording) - turn_us
    merged = ", with the way of the first token to the client" if stamps.source == SPANS else ""
    return _filled(recording, delay_us, "the delay before the queue"), _basis(delay_us, stamps.source) + merged


def observed_hold(recording: Recording, stamps: ServerStamps, cycles: ObservedCycles) -> tuple[Int64s, str]:
    """int64[n] us that the scheduler passed a request over, beyond the first call after it was queued; and its basis.

    ``cycles``: observed ones, for the length of a cycle at the time.  A request that waited k calls was
    passed over for k - 1 cycles; where steps are not recorded, for what its wait exceeds a cycle.
    Raises ``ReplayError`` if queueing and scheduling were not recorded of nearly every request.
    """
    wait_us = stamps.scheduled_us - stamps.queued_us
    ok = (recording.requests["status"] == "ok").to_numpy()
    if np.isnan(wait_us[ok]).mean() > MAX_WITHOUT_DECISION or not ok.any():
        raise ReplayError(
            f"{recording.alias}: too few requests have a record of when they were queued and scheduled; "
            "record journeys of every request"
        )
    place = np.searchsorted(cycles.from_us, np.nan_to_num(stamps.queued_us), side="right") - 1
    cycle_us = cycles.cycle_us[np.maximum(place, 0)].astype(np.float64)
    by_time = np.maximum(wait_us - cycle_us, 0.0)
    by_steps = np.minimum((stamps.steps_waited - 1) * cycle_us, wait_us)
    held_us = np.where(np.isnan(stamps.steps_waited), by_time, np.where(stamps.steps_waited > 1, by_steps, 0.0))
    return np.maximum(np.nan_to_num(held_us), 0.0).astype(np.int64), _basis(wait_us, stamps.source)


def observed_delivery(recording: Recording, stamps: ServerStamps) -> tuple[Int64s, Int64s, str]:
    """int64[n] us from the engine's first token, and from its last, to the client; and their basis.

    Raises ``ReplayError`` if the engine's stamps were not recorded, or only as durations, which tell nothing of it.
    """
    if stamps.source == SPANS:
        raise ReplayError(
            f"{recording.alias}: {SPANS} do not tell when a token left the engine; record journeys for that"
        )
    latencies = recording.requests.select("ttft_us", "e2e_us").cast(pl.Float64).fill_null(np.nan)
    sent_us = _arrival_us(recording)
    first_us = sent_us + latencies["ttft_us"].to_numpy() - stamps.first_token_us
    last_us = sent_us + latencies["e2e_us"].to_numpy() - stamps.finished_us
    what = "the way of a token to the client"
    return _filled(recording, first_us, what), _filled(recording, last_us, what), _basis(last_us, stamps.source)


def recorded_delays(recording: Recording) -> tuple[dict[str, str], dict[str, str]]:
    """Which delays and decisions the recording can replace: by mode key, the basis; and of the others, why not."""
    stamps = server_stamps(recording)
    ask: dict[str, Callable[[], str]] = {
        "pre_queue": lambda: observed_pre_queue(recording, stamps, observed_cycles(recording)[0])[-1],
        "schedule": lambda: observed_hold(recording, stamps, observed_cycles(recording)[0])[-1],
        "output_processing": lambda: observed_delivery(recording, stamps)[-1],
    }
    able: dict[str, str] = {}
    unable: dict[str, str] = {}
    for key, basis in ask.items():
        try:
            able[key] = basis()
        except ReplayError as error:
            unable[key] = str(error)
    return able, unable


def _before_its_turn(others: tuple[Floats, Floats], cycles: ObservedCycles, still: Bools, queued_us: Floats) -> Floats:
    """float64[n] us: a part of the cycle at the time, where another request was in the engine (``in_engine``).

    nan where the server stood still, bool[cycles] ``still``: when a request was sent meanwhile is not recorded.
    """
    begin_us, end_us = others
    known = np.nan_to_num(queued_us)
    there = np.searchsorted(begin_us, known, side="left") - np.searchsorted(np.sort(end_us), known, side="right")
    place = np.maximum(np.searchsorted(cycles.from_us, known, side="left") - 1, 0)
    # The same part for all would put every request at one point of the cycle, where a simulator whose
    # cycles begin at other times has it wait always long, or never.
    part = (np.arange(len(known)) + 0.5) * GOLDEN % 1.0
    return np.where(there > 0, np.where(still[place], np.nan, cycles.cycle_us[place] * part), 0.0)


def stalled_us(recording: Recording, cycles: ObservedCycles) -> Int64s:
    """int64[cycles]: by how much each is longer than usual for as many tokens where the server stood still; else 0."""
    size, of_all_us = np.full(len(cycles.cycle_us), -1), float(np.median(cycles.cycle_us))
    rows, number = recording.steps, "step_id"
    if rows.is_empty():
        rows, number = recording.iterations.where("NOT dummy"), "iteration"
    placed = rows.where("start_us IS NOT NULL").ordered(f"start_us, {number}")
    steps = placed.frame([number, "start_us", "prefill_tokens", "decode_tokens"])
    scheduled = (pl.col("prefill_tokens") + pl.col("decode_tokens")).shift(steps_behind(recording))
    known = pl.when(pl.col(number).diff(-1) == -1).then(scheduled)
    tokens = steps.select("start_us", tokens=known).unique("start_us", keep="first", maintain_order=True)
    at = pl.DataFrame({"start_us": cycles.from_us}).join(tokens, on="start_us", how="left", maintain_order="left")
    is_known = (at["tokens"] > 0).fill_null(value=False).to_numpy()
    size[is_known] = np.frexp(at["tokens"].to_numpy()[is_known])[1]
    alike = {int(one): cycles.cycle_us[size == one] for one in np.unique(size)}
    usual = usual_us({one: (float(np.median(of)), len(of)) for one, of in alike.items()}, of_all_us)
    of_size_us = np.array([usual[one] for one in size.tolist()])
    longer_us = (cycles.cycle_us - of_size_us).astype(np.int64)
    return np.where((longer_us > STALL_US) & (longer_us > of_size_us), longer_us, 0)


def _arrival_us(recording: Recording) -> Floats:
    return recording.requests["arrival_us"].to_numpy().astype(np.float64)


def _filled(recording: Recording, values_us: Floats, what: str) -> Int64s:
    known = ~np.isnan(values_us)
    if known.sum() < min(MIN_STAMPS, len(values_us)) or not known.any():
        count = int(known.sum())
        of = f"was recorded for only {counted(count, 'request')}" if count else "was not recorded for any request"
        raise ReplayError(f"{recording.alias}: {what} {of}; record journeys")
    return np.rint(np.where(known, values_us, np.median(values_us[known]))).astype(np.int64)


def _basis(values_us: Floats, source: str) -> str:
    known = int((~np.isnan(values_us)).sum())
    rest = "" if known == len(values_us) else ", the median of those for the others"
    return f"recorded: {source} of {known:,} of {len(values_us):,} requests{rest}"


ObservedParts = tuple[RequestTrace, ObservedCycles | None, tuple[Int64s, Int64s] | None, dict[str, str]]


def observed_parts(recording: Recording, mode: ReplayMode, trace: RequestTrace) -> ObservedParts:
    """The trace, step cycles and delivery with what the mode takes from the recording instead of a model."""
    basis: dict[str, str] = {}
    delivery_us = None
    forced = {name for name in ("step_time", "pre_queue", "schedule") if getattr(mode, name) == "recorded"}
    cycles, cycles_basis = observed_cycles(recording) if forced else (None, "")
    stamps = server_stamps(recording)
    if "step_time" in forced:
        basis["step time"] = cycles_basis
    if cycles is not None and "pre_queue" in forced:
        delay_us, basis["delay before the queue"] = observed_pre_queue(recording, stamps, cycles)
        trace = replace(trace, pre_queue_us=delay_us)
    if cycles is not None and "schedule" in forced:
        held_us, basis["schedule"] = observed_hold(recording, stamps, cycles)
        trace = replace(trace, held_us=held_us)
    if mode.output_processing == "recorded":
        first_us, last_us, basis["output processing"] = observed_delivery(recording, stamps)
        delivery_us = first_us, last_us
    return trace, cycles if "step_time" in forced else None, delivery_us, basis
