"""A run of many requests, in memory that does not grow with their number.

The kernel's tables have a row for every request, but a row takes memory only from just before its arrival until it is
done.  Finished steps go to a temporary file.
"""

from __future__ import annotations

import mmap
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Int32s, Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.result import SimResult, outcomes_of
from blis_replay.blis.setup import enter, state_and_facts
from blis_replay.blis.trace import MOST_STEPS, EngineConfig, RequestTrace

# Requests whose rows enter and leave memory together.
STRETCH = 50_000
# Columns of results that can be stored in fewer bytes.
_WIDTHS = dict.fromkeys(("scheduled_step", "first_step", "last_step", "status"), np.int32)


class LongRun:
    """``state``: the kernel state of a run of ``trace``, with requests in ``order``, as in ``setup.new_state``."""

    def __init__(self, trace: RequestTrace, engine: EngineConfig, eligible_us: Int64s, order: Int64s) -> None:
        tables: list[_Pages] = []

        def table(rows: int, dtype: np.dtype[Any]) -> k.Table:
            tables.append(_Pages(rows, dtype))
            return tables[-1].table

        state, self._facts = state_and_facts(trace, engine, eligible_us, order, table, 0)
        of_steps = table(MOST_STEPS, k.STEP)
        (self._pages_of_facts, *self._pages_of_requests), self._pages_of_steps = tables[:-1], tables[-1]
        # The first of those who never give up is looked at when all others have: let that be the last, if there is one.
        aborting = self._facts["abort_us"] < k.NEVER
        last = np.flatnonzero(~aborting)[-1:]
        abort_order = np.concatenate([state.abort_order[: int(aborting.sum())], last])
        self._looked_at = int(last[0]) if aborting.any() and len(last) else len(trace)
        state.facts["abort_us"][abort_order] = self._facts["abort_us"][abort_order]
        self.state = state.replaced(abort_order=abort_order, steps=of_steps)
        self._order = order
        self._left = self._steps = 0
        self._columns: dict[str, NDArray[Any]] = {}
        self._segments: list[Int32s] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``result``
        # Step and time at the ends of the last stretches.
        self._ends: deque[tuple[int, int]] = deque()

    def stretches(self, now: Callable[[], k.State]) -> Iterator[int]:
        """Until when (us) the run can go on each time, with the requests that come before; ``now``: its state."""
        requests = len(self._order)
        for first in range(0, requests, STRETCH):
            last = min(first + STRETCH, requests)
            # Who comes next is looked at too.
            enter(self.state, self._facts, first, min(last + 1, requests))
            yield int(self._facts["queued_us"][last]) if last < requests else k.NEVER
            self.state = now()
            self._leave(self._done(last))
        self._leave(requests)

    def _done(self, entered: int) -> int:
        """The first request that is not done, or may still be looked at."""
        at, ring = self.state.at[0], int(self.state.config[0].ring_mask) + 1
        # Who gave up stays among those that end with the step of the last token; ``ring`` steps later it has passed.
        self._ends.append((int(at.step), int(at.now_us)))
        while len(self._ends) > 1 and self._ends[1][0] <= at.step - ring:
            self._ends.popleft()
        passed_us = self._ends[0][1] if self._ends[0][0] <= at.step - ring else k.NONE
        status = self.state.requests["status"][self._left : entered]
        abort_us = self._facts["abort_us"][self._left : entered]
        ended = (status == k.COMPLETED) | ((status == k.ABORTED) & (abort_us <= passed_us))
        return self._left + (len(ended) if ended.all() else int(np.argmin(ended)))

    def _leave(self, done: int) -> None:
        """What there is to say of requests before ``done`` and of steps that have ended is kept, and no more."""
        at = self.state.at
        place = self._order[self._left : done]
        for name, values in outcomes_of(self.state, slice(self._left, done)).items():
            if name not in self._columns:
                self._columns[name] = np.zeros(len(self._order), _WIDTHS.get(name, np.int64))
            if values.any():  # zeros that are not written take no memory
                self._columns[name][place] = values
        segments = self.state.segments[: at[0].segments].astype(np.int32)
        segments[:, 0] = self._order[segments[:, 0]]
        self._segments.append(segments)
        at["segments"] = 0
        steps = int(at[0].rows) - int(at[0].in_flight)
        self._write(self.state.steps[self._steps : steps])
        self._left, self._steps = done, max(self._steps, steps)
        self._pages_of_facts.give_back(min(done, self._looked_at))
        for pages in self._pages_of_requests:
            pages.give_back(done)
        self._pages_of_steps.give_back(self._steps)

    def _write(self, steps: k.Table) -> None:
        try:
            self._file.write(steps.view(np.uint8).data)
            self._file.flush()
        except OSError as error:
            raise TraceError(
                f"the steps of so many requests are kept in {tempfile.gettempdir()}: {error.strerror}; make room, or "
                "name another folder with TMPDIR"
            ) from error

    def result(self, arrival_us: Int64s, queued_us: Int64s, lifecycle: Lifecycle) -> SimResult:
        """Of the whole run, when all stretches are over; arguments as in ``read_result``."""
        steps = np.empty(0, k.STEP)
        if self._steps:
            steps = np.frombuffer(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), k.STEP)
        self._file.close()
        segments = np.concatenate(self._segments)
        self._segments.clear()
        return SimResult(arrival_us, queued_us, **self._columns, steps=steps, segments=segments, lifecycle=lifecycle)


class _Pages:
    """A table of zeros that takes memory where rows were written, until they are given back."""

    def __init__(self, rows: int, dtype: np.dtype[Any]) -> None:
        self._map = mmap.mmap(-1, max(rows, 1) * dtype.itemsize)
        self._row_bytes, self._given_back = dtype.itemsize, 0
        self.table: k.Table = np.frombuffer(self._map, dtype)

    def give_back(self, rows: int) -> None:
        """The first ``rows``, which are zeros then."""
        upto = rows * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if upto > self._given_back and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, self._given_back, upto - self._given_back)
            self._given_back = upto
