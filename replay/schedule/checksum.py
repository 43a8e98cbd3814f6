"""The engine's schedule for the requests of a recorded one, step by step: the first step in which they differ.

The engine is driven a step at a time with rows for times, so that each of its steps sees the queue of the recorded one.
Whatever it then decides otherwise comes from its rules or its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import Engine
from blis_replay.blis.kernel import loop
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, EngineConfig, KvCacheGroup, RequestTrace
from blis_replay.replay.schedule.recorded import COUNTS, NEVER, NOT_KNOWN_US, RECORDS, RecordedSchedule

_MOST_NAMED = 8


@dataclass(frozen=True)
class SimulatedSchedule:
    """What the engine did in each row: ``counts``, int64, of what it computed; ``kv_usage``, share of KV blocks used.

    ``kv_shared``: part of the usage that requests with prefix hits may share with others.  ``kv_more``: possible
    further usage, where a hit belongs to one of several requests.

    ``served``: rows in which each request was admitted first and got its first and last token, int64[requests, 3],
    -1: not yet.  ``preempted``: int64 per row.  ``error``: why the engine cannot serve them, ``""`` if it can.
    """

    counts: dict[str, Int64s]
    kv_usage: Floats
    kv_shared: Floats
    kv_more: Floats
    served: Int64s
    preempted: Int64s
    error: str = ""


@dataclass(frozen=True)
class Divergence:
    """The first step in which two schedules differ.

    ``row``: of the recorded schedule; ``step``: its own number; ``start_us``: when it began, None if not known.
    ``expected``, ``seen``: counts that differ, of the engine and of the recording, by name.  ``requests``: at most
    eight that the engine has in prefill or that wait, by index or id.
    """

    row: int
    step: int
    start_us: int | None
    expected: dict[str, float]
    seen: dict[str, float]
    requests: tuple[str, ...]


@dataclass(frozen=True)
class ScheduleCheck:
    """A comparison of ``steps`` steps; ``equal`` of them are equal before the first that differs.

    ``kv_equal``: steps whose KV usage is equal; ``kv_open``: whose usage is within what shared prefixes, or an engine
    that may have been idle, leave open;
    ``kv_divergence``: the first that is neither, before ``divergence``.  ``not_compared``: steps that the recorded
    requests do not explain.
    """

    schedule: RecordedSchedule
    engine: EngineConfig
    steps: int
    equal: int
    divergence: Divergence | None
    kv_equal: int = 0
    kv_open: int = 0
    kv_divergence: Divergence | None = None
    not_compared: int = 0
    simulated: SimulatedSchedule | None = field(default=None, repr=False)

    @property
    def first(self) -> Divergence | None:
        """The first step that differs, in its counts or in its KV usage."""
        found = [one for one in (self.divergence, self.kv_divergence) if one is not None]
        return min(found, key=lambda one: one.row) if found else None

    @property
    def reached(self) -> int:
        """Steps before the first that differs."""
        return self.steps if self.first is None else self.first.row - self.schedule.begin

    @property
    def whole(self) -> bool:
        """Whether no step differs, from the first to the last that served a request of the recording."""
        return self.first is None and not self.schedule.why


def check_schedule(schedule: RecordedSchedule, engine: EngineConfig) -> ScheduleCheck:
    """Compare a recorded schedule with what an engine with these arguments makes of the same queue."""
    simulated = simulated_schedule(schedule, engine)
    last = min(schedule.end + 1, len(schedule.step))
    part = slice(schedule.begin, last)
    rows = np.flatnonzero(np.any([schedule.counts[n][part] != simulated.counts[n][part] for n in COUNTS], axis=0))
    first = schedule.begin + int(rows[0]) if len(rows) else None
    compared = schedule.end - schedule.begin
    equal = compared if first is None else first - schedule.begin
    found = None if first is None else _divergence(schedule, simulated, first, COUNTS)
    kv_equal, kv_open, kv_row = _kv(
        schedule, simulated, slice(schedule.begin, schedule.begin + equal), engine.async_scheduling
    )
    return ScheduleCheck(
        schedule,
        engine,
        steps=compared,
        equal=equal,
        divergence=found,
        kv_equal=kv_equal,
        kv_open=kv_open,
        kv_divergence=None if kv_row is None else _divergence(schedule, simulated, kv_row, ("kv_usage",)),
        not_compared=len(schedule.step) - compared,
        simulated=simulated,
    )


def _kv(
    schedule: RecordedSchedule, simulated: SimulatedSchedule, part: slice, asynchronous: bool
) -> tuple[int, int, int | None]:
    """How many rows have equal KV usage, how many could have, and the first that has not."""
    seen, expected = schedule.kv_usage[part], simulated.kv_usage[part]
    known = ~(np.isnan(seen) | np.isnan(expected))
    idle = np.zeros(len(seen), np.bool_)
    if asynchronous and schedule.kv_at_end:
        # Before a step in which nobody goes on, the engine may have been idle, or have held the next one's blocks.
        following = np.append(simulated.counts["decode_requests"], 0)[part.start + 1 : part.stop + 1]
        idle = known & (following == 0)
    equal = known & (np.abs(seen - expected) <= schedule.kv_rounding)
    least = expected - simulated.kv_shared[part] - schedule.kv_rounding
    most = expected + simulated.kv_more[part] + schedule.kv_rounding
    between = known & ~equal & (((seen >= least) & (seen <= most)) | idle)
    wrong = np.flatnonzero(known & ~equal & ~between)
    return int(equal.sum()), int(between.sum()), part.start + int(wrong[0]) if len(wrong) else None


def _divergence(
    schedule: RecordedSchedule, simulated: SimulatedSchedule, row: int, names: tuple[str, ...]
) -> Divergence:
    expected = simulated.counts | {"kv_usage": simulated.kv_usage}
    seen = schedule.counts | {"kv_usage": schedule.kv_usage}
    differing = [name for name in names if expected[name][row] != seen[name][row]]
    start_us = int(schedule.start_us[row])
    return Divergence(
        row=row,
        step=int(schedule.step[row]),
        start_us=None if start_us == NOT_KNOWN_US else start_us,
        expected={name: expected[name][row].item() for name in differing},
        seen={name: seen[name][row].item() for name in differing},
        requests=_in_question(schedule, simulated, row),
    )


def _in_question(schedule: RecordedSchedule, simulated: SimulatedSchedule, row: int) -> tuple[str, ...]:
    """Requests that the engine admits at about that step, and those that wait; of decodes those that end then."""
    admitted, _first, last = simulated.served.T
    waiting = (schedule.requests["eligible"].to_numpy() <= row) & ((admitted < 0) | (admitted >= row))
    about = waiting | ((admitted >= 0) & (np.abs(admitted - row) <= 1)) | ((last >= 0) & (np.abs(last - row) <= 1))
    named = schedule.requests.filter(pl.Series(about)).select("request_index", "request_id").rows()
    texts = [f"request {index}" if index is not None else str(name or "unnamed") for index, name in named]
    return tuple(texts[:_MOST_NAMED])


def simulated_schedule(schedule: RecordedSchedule, engine: EngineConfig) -> SimulatedSchedule:
    """What the engine computes in each row, given the queue of that row."""
    steps, requests = len(schedule.step), schedule.requests
    eligible = requests["eligible"].to_numpy()
    aborted = requests["aborted"].to_numpy()
    prompts = requests["prompt_tokens"].to_numpy()
    trace = RequestTrace(
        arrival_us=np.minimum(eligible, NEVER),
        prompt_tokens=prompts,
        prefill_tokens=np.clip(requests["computed_tokens"].to_numpy(), 1, prompts),
        output_tokens=requests["output_tokens"].to_numpy(),
        abort_us=np.where(aborted >= NEVER, NEVER_US, aborted),
    )
    try:
        table, result = _served(trace, engine, schedule)
    except TraceError as error:
        counts = {name: np.zeros(steps, np.int64) for name in COUNTS}
        nothing = np.full(steps, np.nan)
        none = np.full((len(eligible), 3), -1)
        return SimulatedSchedule(counts, nothing, nothing, nothing, none, np.zeros(steps, np.int64), str(error))
    return _simulated(schedule, engine, result, table)


def _served(trace: RequestTrace, engine: EngineConfig, schedule: RecordedSchedule) -> tuple[Int64s, SimResult]:
    """What the engine schedules in each row, as ``Engine.serve_rows`` has it, and its result."""
    if engine.speculation is not None:
        raise TraceError("speculation: a schedule is not compared row by row with it")
    steps, until = len(schedule.step), min(schedule.end + 1, len(schedule.step))
    if engine.offloading is not None and engine.offloading.cpu_blocks == 0:  # a row begins when a load has ended
        engine = replace(engine, offloading=None)
    table = np.zeros((steps, loop.ROW_FIELDS), np.int64)
    table[:, loop.ROW_STEP] = -1
    running = Engine(trace, engine)
    table[:until] = running.serve_rows(schedule.begin, until)
    return table, running.result()


def _count_unprocessed(counts: dict[str, Int64s], first: Int64s, last: Int64s) -> None:
    """In step records a request is in prefill until its first token was processed: asynchronously a step longer."""
    following = first[(first >= 0) & ((last > first) | (last < 0))] + 1
    for name in COUNTS:
        np.add.at(counts[name], following, 1 if name.startswith("prefill") else -1)


def _simulated(schedule: RecordedSchedule, engine: EngineConfig, result: SimResult, table: Int64s) -> SimulatedSchedule:
    steps, rows = len(schedule.step), table[:, loop.ROW_STEP]
    usage, shared, more = np.full(steps, np.nan), np.zeros(steps), np.zeros(steps)
    known = rows >= 0
    row_of = np.full(len(result.steps) + 1, -1)
    row_of[rows[known]] = np.flatnonzero(known)
    admitted, first, last = (row_of[at] for at in (result.scheduled_step, result.first_step, result.last_step))
    if engine.num_gpu_blocks is not None:
        usable = engine.num_gpu_blocks - 1
        free = result.steps["free_blocks_end" if schedule.kv_at_end else "free_blocks"][rows[known]]
        usage[known] = 1 - free / usable
        requests = schedule.requests
        hits = (requests["prompt_tokens"] - requests["computed_tokens"]).to_numpy()
        either = requests["shared_hit"].to_numpy()
        # Asynchronously the next step has its blocks when the usage is taken.
        ahead = int(engine.async_scheduling and schedule.kv_at_end)
        for request in np.flatnonzero(((hits > 0) | (either > 0)) & (admitted >= 0)):
            begin = max(admitted[request] - ahead, 0)
            end = last[request] if last[request] >= 0 else steps
            prefilled = first[request] + 1 if first[request] >= 0 else steps
            blocks = _blocks_of_prefix(engine, max(hits[request], either[request]))
            shared[begin : end + (not schedule.kv_at_end)] += blocks / usable
            more[begin:prefilled] += _blocks_of_prefix(engine, either[request]) / usable
    counts = {name: table[:, place] for place, name in enumerate(COUNTS)}
    if engine.async_scheduling and schedule.source == RECORDS:
        _count_unprocessed(counts, first, last)
    served = np.column_stack([admitted, first, last])
    return SimulatedSchedule(counts, usage, shared, more, served, table[:, loop.ROW_PREEMPTED])


def _blocks_of_prefix(engine: EngineConfig, tokens: int) -> int:
    """Blocks that a request holds of a cached prefix, in all groups; of a window or chunk those that it still needs."""
    size, held = engine.block_size, 0
    for group in engine.kv_cache_groups or (KvCacheGroup("full"),):
        left = max(tokens - group.size + 1, 0) if group.kind == "window" else 0
        left = tokens // group.size * group.size if group.kind == "chunk" else left
        held += 0 if group.kind == "state" else tokens // size - left // size
    return held
