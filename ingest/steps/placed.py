"""Start times of the iterations in a server's log, from the requests that they served.

The log stamps whole seconds only.  But a token reaches its client after the step that computed it, and a request
arrives before the step that admits it.  The server measured how long each request waited, was in prefill and decoded.
Two outputs are at least the engine's wait for the model apart.  So each output has an earliest and a latest time, and a
step starts between the output before it and its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.ingest.recording import IDENTITIES, ITERATION_SCHEMA, Recording, TokenEvents
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.steps.followed import NONE, Followed, followed_log
from blis_replay.ingest.steps.records import is_asynchronous

_NEVER, _FOREVER = -(1 << 60), 1 << 60
_PASSES = 4  # bounds of different requests move each other; in practice they settle within these passes


@dataclass
class _Bounds:
    """Earliest and latest time of each output, int64[steps] us; ``waited``: the waits for the model, summed up."""

    early: Int64s
    late: Int64s
    waited: Int64s

    def tighten(self) -> None:
        """Two outputs are at least the engine's wait for the second apart."""
        self.early = np.maximum.accumulate(self.early - self.waited) + self.waited
        self.late = np.minimum.accumulate((self.late - self.waited)[::-1])[::-1] + self.waited

    def tie(self, first: Int64s, last: Int64s, apart_us: Int64s) -> None:
        """Bounds between outputs whose distance is known."""
        for bound, at in ((self.early, np.maximum.at), (self.late, np.minimum.at)):
            there, back = bound[first] + apart_us, bound[last] - apart_us
            at(bound, last, there)
            at(bound, first, back)


def place(recording: Recording, scratch: Scratch) -> Recording:
    """The recording with ``start_us`` and ``uncertainty_us`` of the iterations that can be placed beside its requests.

    How far that went, and why not further, is among what is missing.
    """
    if recording.iterations.is_empty() or recording.requests.is_empty():
        return recording
    log, why = followed_log(recording)
    if log is None or any(clock.constructed for clock in recording.clocks[:1]):
        remark = f"when iterations began: {why or 'the clock of the requests was made up'}"
        return replace(recording, missing=(*recording.missing, remark))
    if log.remark:
        recording = replace(recording, missing=(*recording.missing, log.remark))
    part = slice(log.walk.begin, log.walk.end)
    if part.stop <= part.start:
        return recording
    start_us, uncertainty_us = _starts(recording, log.iterations, log.served, log.walk)
    times = log.iterations[part].select(
        "engine", "iteration", start_us=pl.Series(start_us), uncertainty_us=pl.Series(uncertainty_us)
    )
    rows = recording.iterations.frame().drop("start_us", "uncertainty_us")
    placed = rows.join(times, on=["engine", "iteration"], how="left").select(ITERATION_SCHEMA.keys())
    return replace(recording, iterations=scratch.hold(placed))


def _starts(
    recording: Recording, iterations: pl.DataFrame, served: pl.DataFrame, walk: Followed
) -> tuple[Int64s, Int64s]:
    """int64[steps explained]: the start of each in us, and how far the true one can be from it."""
    lead = 2 if is_asynchronous(recording) else 1
    own_us = iterations["elapsed_us"].to_numpy()[walk.begin : walk.end]
    steps = len(own_us)
    bounds = _Bounds(np.full(steps, _NEVER), np.full(steps, _FOREVER), np.cumsum(own_us))
    begun_us = np.full(steps, _NEVER)
    _bound_by_requests(recording, served, walk, bounds, begun_us)
    if recording.token_events is not None:
        _bound_by_tokens(recording.token_events, served, walk, bounds)
    ties = _ties(served, walk)
    for _ in range(_PASSES):
        bounds.early = np.maximum(bounds.early, begun_us + own_us)
        bounds.tighten()
        bounds.tie(*ties)
    bounds.tighten()
    # Where nobody decodes and nobody was in prefill before, the engine may have been idle.
    part = slice(walk.begin, walk.end)
    busy = iterations["decode_requests"].to_numpy()[part] > 0
    begin = np.zeros(steps, np.int64)
    np.add.at(begin, walk.admitted[(walk.admitted >= 0) & (walk.admitted < walk.end)] - walk.begin, 1)
    busy |= iterations["prefill_requests"].to_numpy()[part] > begin
    return _between(bounds, begun_us, own_us, busy, lead)


def _between(bounds: _Bounds, begun_us: Int64s, own_us: Int64s, busy: Bools, lead: int) -> tuple[Int64s, Int64s]:
    """Starts between the earliest and the latest time of each, and how far the true ones can be from them.

    The latest outputs include the way to the client.  That takes less than the smallest distance between the two
    times of any step, so half of this distance is subtracted.  ``busy``: the engine went on with the step at once,
    when the output of the step ``lead`` before was in.
    """
    steps = len(own_us)
    way_us = int((bounds.late - bounds.early).min()) // 2
    before = np.full((2, steps), _NEVER)
    if steps > lead:
        before[:, lead:] = bounds.early[:-lead], bounds.late[:-lead]
    late = np.minimum.accumulate((bounds.late - own_us)[::-1])[::-1]
    early = np.maximum.accumulate(np.maximum(before[0], begun_us))
    early = np.where(early <= _NEVER // 2, late - way_us, early)
    latest_us = np.where(busy & (before[1] > _NEVER // 2), np.minimum(before[1], late), late) - way_us
    start_us = np.maximum.accumulate(np.clip(latest_us, early, np.maximum(late, early)))
    return start_us, np.maximum(np.maximum(start_us - early, late - start_us), 1)


def _bound_by_requests(
    recording: Recording, served: pl.DataFrame, walk: Followed, bounds: _Bounds, begun_us: Int64s
) -> None:
    """By arrival, first and last token of each request; ``begun_us`` takes the arrivals, by admitting step."""
    server = recording.clock("server")
    loose_us = (server.uncertainty_us or 0) if server is not None and server.placed == IDENTITIES else 0
    known = (walk.admitted >= 0) & (walk.first >= 0) & (walk.last < walk.end)
    admitted, first, last = (steps[known] - walk.begin for steps in (walk.admitted, walk.first, walk.last))
    column = {name: served[name].cast(pl.Float64).fill_null(np.nan).to_numpy()[known] for name in _TIMES}
    # What the server stamped is off by the offset between its clock and the client's, if that is not known better.
    arrived = column["arrived_us"] - np.where(served["at_server"].to_numpy()[known], loose_us, 0)
    alone = served["request_index"].is_null().to_numpy()[known]
    _least(begun_us, admitted, arrived)
    _least(bounds.early, first, arrived + column["queue_us"] + column["prefill_us"])
    _least(bounds.early, last, arrived + column["queue_us"] + column["prefill_us"] + column["decode_us"])
    _most(bounds.late, first, column["first_token_us"] + np.where(alone, loose_us, 0))
    _most(bounds.late, last, column["last_token_us"] + np.where(alone, loose_us, 0))


_TIMES = ("arrived_us", "queue_us", "prefill_us", "decode_us", "first_token_us", "last_token_us")


def _least(bound: Int64s, at: Int64s, us: NDArray[np.float64]) -> None:
    known = ~np.isnan(us)
    np.maximum.at(bound, at[known], np.floor(us[known]).astype(np.int64))


def _most(bound: Int64s, at: Int64s, us: NDArray[np.float64]) -> None:
    known = ~np.isnan(us)
    np.minimum.at(bound, at[known], np.ceil(us[known]).astype(np.int64))


def _ties(served: pl.DataFrame, walk: Followed) -> tuple[Int64s, Int64s, Int64s]:
    """Steps of first and last tokens, and the time between them as the server measured it."""
    known = (walk.first >= 0) & (walk.last < walk.end) & served["decode_us"].is_not_null().to_numpy()
    first, last = walk.first[known] - walk.begin, walk.last[known] - walk.begin
    return first, last, served["decode_us"].to_numpy()[known].astype(np.int64)


def _bound_by_tokens(events: TokenEvents, served: pl.DataFrame, walk: Followed, bounds: _Bounds) -> None:
    """By every token that its client stamped, where a request has as many stamps as tokens."""
    stamps = np.memmap(events.path, np.int64, "r") if events.path.stat().st_size else np.empty(0, np.int64)
    rows = served.select("request_index", "output_tokens").with_columns(
        pl.Series("first", walk.first), pl.Series("last", walk.last)
    )
    usable = rows.drop_nulls().filter((pl.col("first") != NONE) & (pl.col("last") < walk.end))
    for index, tokens, first, last in usable.iter_rows():
        if int(events.counts[index]) != tokens:
            continue
        begin = int(events.offsets[index])
        own_us = stamps[begin : begin + tokens] - events.zero_us
        part = slice(first - walk.begin, last + 1 - walk.begin)
        bounds.late[part] = np.minimum(bounds.late[part], own_us)
