"""The simulator: requests, engine arguments and a latency model in, a result out.

``simulate`` serves a whole trace.  An ``Engine`` can be driven a step at a time, or to a
given time, and resumed; both are the same kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import TraceError, evicting_for_ever
from blis_replay.blis.kernel import loop
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import KernelModel, step_duration_us
from blis_replay.blis.latency.models import BatchFeatures, Latency, Lifecycle, StepTime
from blis_replay.blis.result import SimResult, check_conservation, read_result
from blis_replay.blis.setup import eligible_times, new_state, queueing_times, with_room
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

if TYPE_CHECKING:
    from blis_replay.blis.kernel.flight import Flight
    from blis_replay.blis.kernel.transfers import Offload
    from blis_replay.blis.long_run import LongRun

# Requests; of more only those under way are in memory.
LONG_RUN = 100_000


def simulate(
    trace: RequestTrace, engine: EngineConfig, latency: Latency | StepTime, lifecycle: Lifecycle | None = None
) -> SimResult:
    """Serve ``trace`` in virtual time with vLLM V1 scheduling.

    Returns a :class:`SimResult` in the order of the trace.  Raises ``TraceError`` for a
    request that the engine can never serve (prompt beyond ``max_model_len``, more KV blocks
    than there are), or if requests evict each other for ever (priority ties can; vLLM
    hangs then).  Outputs end at ``max_model_len``.  Equal input gives byte-equal output.
    With data parallelism the steps are those of one rank after the other (``parallel.ranks``).
    """
    if engine.data_parallel_size > 1:
        from blis_replay.blis.parallel.ranks import simulate_ranks

        return simulate_ranks(trace, engine, latency, lifecycle)[0]
    running = Engine(
        trace, engine, lifecycle, long=len(trace) > LONG_RUN and not engine.walked and not engine.kv_cache_groups
    )
    for until_us in (NEVER_US,) if running.long is None else running.long.stretches(lambda: running.state):
        running.advance(latency, until_us)
    result = running.result()
    check_conservation(trace.abort_us, running.state, result)
    return result


class Engine:
    """A server in virtual time, between steps.

    Its ``state`` is a plain value (``kernel.state.State``): ``copy.deepcopy(engine)`` is a
    second server that goes on from here.  A ``long`` one can only be driven through all of its stretches.
    """

    def __init__(
        self, trace: RequestTrace, engine: EngineConfig, lifecycle: Lifecycle | None = None, *, long: bool = False
    ) -> None:
        if engine.data_parallel_size > 1:
            raise TraceError("data_parallel_size: several ranks are not driven step by step; give it 1")
        self.trace = trace
        self.lifecycle = lifecycle or Lifecycle()
        self.queued_us = queueing_times(trace, self.lifecycle)
        eligible_us = eligible_times(trace, self.queued_us)
        self.order = np.argsort(eligible_us, kind="stable")
        self.long: LongRun | None = None
        self._rules: Any = loop
        self._flight: Flight | None = None
        self._offload: Offload | None = None
        if long:
            from blis_replay.blis.long_run import LongRun

            self.long = LongRun(trace, engine, eligible_us, self.order)
        self.state = self.long.state if self.long else new_state(trace, engine, eligible_us, self.order)
        if engine.walked:
            from blis_replay.blis.drafting import new_flight
            from blis_replay.blis.kernel import drafting

            self._rules, self._flight = drafting, new_flight(trace, engine, self.order)
        if engine.offloading is not None:
            from blis_replay.blis.kernel import offloading
            from blis_replay.blis.offloading import new_offload

            self._rules = offloading
            self._offload = new_offload(self.state, engine, engine.offloading, trace, self.order)

    @property
    def _tables(self) -> tuple[Any, ...]:
        """What functions of ``_rules`` are given first."""
        return tuple(tables for tables in (self.state, self._flight, self._offload) if tables is not None)

    @property
    def now_us(self) -> int:
        """Where the run stands."""
        return int(self.state.at["now_us"].item())

    def advance(self, latency: Latency | StepTime, until_us: int = NEVER_US) -> None:
        """Go on until nothing is left to do, or no step can be scheduled before ``until_us``."""
        if not hasattr(latency, "for_kernel"):
            while (batch := self.schedule(until_us)) is not None:
                self.run(max(int(latency.step_time(batch)), 1))
            return
        model = latency.for_kernel()
        self._with_room(lambda: self._rules.advance(*self._tables, until_us, *model))

    def advance_to_answer(self, model: KernelModel, until_us: int, seen: int) -> tuple[bool, int]:
        """Go on until a step from row ``seen`` on answered a request, or nothing is left to do before ``until_us``.

        Whether one did, and the row after it, with which to ask again.
        """
        if self._flight is not None:
            from blis_replay.blis.drafting import advance_to_answer

            return advance_to_answer(self, model, until_us, seen)

        def ahead() -> int:
            nonlocal seen
            answer, seen = loop.advance_to_answer(self.state, until_us, *model, seen)
            return answer

        return self._with_room(ahead) == loop.BATCH, seen

    def schedule(self, until_us: int = NEVER_US) -> BatchFeatures | None:
        """Build the next batch, if one can be scheduled before ``until_us``; ``run`` must follow.

        A batch may be empty (all members wait for their last token); it takes no time.
        """
        answer = self._with_room(lambda: self._rules.next_batch(*self._tables, until_us))
        return self._features() if answer == loop.BATCH else None

    def advance_kept(self, latency: Latency) -> k.Table:
        """Go on until nothing is left to do; the batches with tokens (``kernel.state.BATCH``), one for each step."""
        model, kept = latency.for_kernel(), np.zeros(0, k.BATCH)
        if self._flight is not None:
            batches = []
            while (batch := self.schedule()) is not None:
                batches += [self.state.batch.copy()] if batch.prefill_tokens + batch.decode_tokens > 0 else []
                self.run(step_duration_us(*model, self.state.batch, batch.start_us))
            return np.concatenate([kept, *batches])

        def go_on() -> int:
            nonlocal kept
            kept = np.concatenate([kept, np.zeros(len(self.state.steps) - len(kept), k.BATCH)])
            return loop.advance_kept(self.state, kept, *model)

        self._with_room(go_on)
        return kept[: self.state.at["rows"].item()]

    def serve_rows(self, first: int, last: int) -> Int64s:
        """Schedule one batch with tokens in each row from ``first`` to ``last`` - 1, row numbers for times.

        A request can be served from the row on that is its time of arrival, and is gone from that of its abort on.
        Returns int64[last, ROW_FIELDS] (``kernel.loop``); step -1: nothing was scheduled.
        """
        if self._offload is not None:
            raise TraceError("rows have no time in which KV blocks could be offloaded; leave out offloading")
        table = np.zeros((last, loop.ROW_FIELDS), np.int64)
        table[:, loop.ROW_STEP] = -1
        row = first
        if self._flight is not None:
            from blis_replay.blis.drafting import serve_rows

            serve_rows(self, first, last, table)
            return table

        def ahead() -> int:
            nonlocal row
            answer, row = loop.serve_rows(self.state, row, last, table)
            return answer

        self._with_room(ahead)
        return table

    def run(self, duration_us: int) -> None:
        """Let the batch just scheduled take this long."""
        self._rules.run_batch(*self._tables, duration_us)

    def result(self) -> SimResult:
        """What has happened so far; requests in the order of the trace."""
        if self.long is not None:
            return self.long.result(self.trace.arrival_us, self.queued_us, self.lifecycle)
        return read_result(self.state, self.order, self.trace.arrival_us, self.queued_us, self.lifecycle)

    @property
    def loaded_us(self) -> Int64s:
        """int64[n] in the order of the trace: when the last load of KV blocks of each request ended, -1 without one."""
        loaded_us = np.full(len(self.order), -1, np.int64)
        if self._offload is not None:
            loaded_us[self.order] = self._offload.requests["loaded_us"]
        return loaded_us

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        twin = copy.copy(self)
        twin.state = self.state.copy()
        twin._flight = self._flight and self._flight.copy()
        twin._offload = self._offload and self._offload.copy()
        return twin

    def _with_room(self, go_on: Callable[[], int]) -> int:
        """The last answer of the kernel, given room whenever it wants some; raises if nothing will ever move again."""
        while (answer := go_on()) == loop.NEEDS_ROOM:
            self.state = with_room(self.state)
        if answer == loop.STUCK:
            raise evicting_for_ever(self.now_us)
        return answer

    def _features(self) -> BatchFeatures:
        at, batch = self.state.at, self.state.batch
        return BatchFeatures(
            prefill_tokens=batch["prefill_tokens"].item(),
            prefill_requests=batch["prefill_requests"].item(),
            decode_tokens=batch["decode_tokens"].item(),
            context_tokens=batch["context_tokens"].item(),
            running=at["running_depth"].item(),
            waiting=at["waiting_depth"].item(),
            start_us=max(at["now_us"].item(), at["device_free_us"].item()),
        )
