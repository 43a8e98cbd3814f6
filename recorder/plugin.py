"""The plugin that vLLM loads (entry point group ``vllm.general_plugins``): it wraps the scheduler of the engine core.

Without ``BLIS_REPLAY_RECORD=DIR`` in its environment it does nothing at all.  With it, each scheduler that is made
writes one file into that directory (``writer``).  Nothing here may reach the engine: whatever goes wrong in the
recorder ends the recording with one warning, and the scheduler has its own methods back.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from blis_replay.recorder.writer import (
    ARRIVAL,
    FINISH,
    PAUSE,
    STEP,
    UPDATE,
    Writer,
    facts_of,
    free_blocks_of,
    new_file,
    queue_depths_of,
)

DIRECTORY = "BLIS_REPLAY_RECORD"
# vLLM shows what is logged below its own name.
_LOG = logging.getLogger("vllm.blis_replay")
# Steps whose output is not in yet: pipelines have a handful.
_MOST_IN_FLIGHT = 1024
_WRAPPED = ("schedule", "update_from_output", "add_request", "_free_request", "set_pause_state", "shutdown")


def register() -> None:
    """Have every scheduler of this process recorded, if the environment asks for it; a second call changes nothing."""
    folder = os.environ.get(DIRECTORY)
    if not folder:
        return
    try:
        from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:
        _LOG.warning("blis-replay: nothing is recorded, this vLLM has no v1 scheduler (%s)", error)
        return
    _record_every(Scheduler, folder)


def _record_every(scheduler_class: Any, folder: str) -> None:
    made = scheduler_class.__init__
    if getattr(made, "records_steps", False):
        return

    @functools.wraps(made)
    def record_when_made(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        try:
            Recorder(self, folder)
        except Exception as error:
            _LOG.warning("blis-replay: nothing is recorded in %s (%s)", folder, error)

    record_when_made.records_steps = True  # type: ignore[attr-defined]
    scheduler_class.__init__ = record_when_made


class Recorder:
    """Records one scheduler, in whose methods it stands from its own making until it is given up or closed.

    Raises ``OSError`` if its file cannot be made.
    """

    def __init__(self, scheduler: Any, folder: str) -> None:
        facts = facts_of(scheduler)
        self._scheduler = scheduler
        self._writer = Writer(new_file(folder, facts), facts, self._give_up)
        self._steps = 0
        self._cost_ns = 0  # inside the wrappers since the last step was put down
        self._in_flight: dict[int, int] = {}  # id of a scheduler output -> its step
        self._speculates = bool(getattr(scheduler, "num_spec_tokens", 0))
        self._around("schedule", self._scheduled)
        self._around("update_from_output", self._updated)
        self._around("add_request", self._arrived)
        self._before("_free_request", self._finished)
        self._before("set_pause_state", self._paused)
        self._before("shutdown", self._closed)
        self._writer.start()
        _LOG.info("blis-replay: every engine step is recorded in %s", self._writer.path)

    def _around(self, name: str, note: Callable[..., None]) -> None:
        """Have ``note(begin_ns, end_ns, result, *arguments)`` called after a method of the scheduler."""
        original, clock = getattr(self._scheduler, name), time.monotonic_ns

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin_ns = clock()
            result = original(*args, **kwargs)
            end_ns = clock()
            try:
                note(begin_ns, end_ns, result, *args, *kwargs.values())
                self._cost_ns += clock() - end_ns
            except Exception as error:
                self._give_up(error)
            return result

        setattr(self._scheduler, name, wrapper)

    def _before(self, name: str, note: Callable[..., None]) -> None:
        """Have ``note(*arguments)`` called before a method of the scheduler, if it has such a method."""
        original, clock = getattr(self._scheduler, name, None), time.monotonic_ns
        if original is None:
            return

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin_ns = clock()
            try:
                note(*args, *kwargs.values())
                self._cost_ns += clock() - begin_ns
            except Exception as error:
                self._give_up(error)
            return original(*args, **kwargs)

        setattr(self._scheduler, name, wrapper)

    def _scheduled(self, begin_ns: int, end_ns: int, output: Any, *_arguments: Any) -> None:
        step, self._steps = self._steps, self._steps + 1
        if len(self._in_flight) >= _MOST_IN_FLIGHT:
            self._in_flight.clear()
        self._in_flight[id(output)] = step
        tokens = output.num_scheduled_tokens
        admitted = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        again = output.scheduled_cached_reqs
        if resumed := getattr(again, "resumed_req_ids", None):
            computed = zip(again.req_ids, again.num_computed_tokens)
            admitted += [(name, count) for name, count in computed if name in resumed]
        preempted = tuple(getattr(output, "preempted_req_ids", None) or ())
        running, waiting = queue_depths_of(self._scheduler)
        free, cost_ns, self._cost_ns = free_blocks_of(self._scheduler), self._cost_ns, 0
        # The dictionary goes on to the model runner, which may change it.
        record = (STEP, step, begin_ns, end_ns, running, waiting, free, cost_ns, dict(tokens), admitted, preempted)
        self._writer.put(record, 1 + len(tokens))

    def _updated(self, begin_ns: int, end_ns: int, result: Any, output: Any, *_arguments: Any) -> None:
        step = self._in_flight.pop(id(output), None)
        produced: list[tuple[str, int]] = []
        if self._speculates:
            # Otherwise one token comes of every request that has no prompt left, and nothing needs to be said.
            outputs = (one for many in result.values() for one in many.outputs)
            produced = [(one.request_id, len(one.new_token_ids)) for one in outputs]
        self._writer.put((UPDATE, step, begin_ns, end_ns, produced), 1 + len(produced))

    def _arrived(self, begin_ns: int, _end_ns: int, _result: Any, request: Any, *_arguments: Any) -> None:
        # One clock read right after the other: pairs of stamps tie the two.
        now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        hashes = tuple(getattr(request, "block_hashes", None) or ())
        stamps = (begin_ns, now_ns, wall_ns, getattr(request, "arrival_time", None))
        lengths = (request.num_prompt_tokens, request.max_tokens, getattr(request, "priority", 0))
        record = (ARRIVAL, request.request_id, *stamps, *lengths, list(_features_of(request)), hashes)
        self._writer.put(record, 1 + len(hashes))

    def _finished(self, request: Any, *_arguments: Any) -> None:
        status = getattr(request.status, "name", str(request.status))
        counts = (request.num_output_tokens, getattr(request, "num_preemptions", None), request.num_computed_tokens)
        self._writer.put((FINISH, request.request_id, time.monotonic_ns(), status, *counts), 1)

    def _paused(self, state: Any, *_arguments: Any) -> None:
        self._writer.put((PAUSE, time.monotonic_ns(), str(getattr(state, "name", state))), 1)

    def _closed(self, *_arguments: Any) -> None:
        self._restore()
        self._writer.close()

    def _give_up(self, error: Exception) -> None:
        """End the recording with one warning; from the engine's thread or the writer's."""
        self._restore()
        if self._writer.abandon():
            _LOG.warning(
                "blis-replay: the recording %s ends here, the server goes on (%s: %s)",
                *(self._writer.path, type(error).__name__, error),
            )

    def _restore(self) -> None:
        for name in _WRAPPED:
            self._scheduler.__dict__.pop(name, None)


def _features_of(request: Any) -> Iterator[str]:
    """What a request asks for that changes its schedule besides its lengths."""
    if getattr(request, "mm_features", None):
        yield "multimodal"
    if getattr(request, "use_structured_output", False):
        yield "structured_outputs"
    if getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None:
        yield "prompt_logprobs"
    if getattr(request, "pooling_params", None) is not None:
        yield "pooling"
