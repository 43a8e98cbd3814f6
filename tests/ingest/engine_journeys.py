"""Journeys of a simulated run, written down while the engine is driven step by step, and its own table of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from builders import recording
from numpy.typing import NDArray

from blis_replay.blis.engine import Engine
from blis_replay.blis.kernel import state as k
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, LIFECYCLE_SCHEMA, Recording, Setting
from blis_replay.ingest.rows import rows_of

RUNNING = (k.PREFILLING, k.DECODING, k.LAST_IN_FLIGHT)
ARGUMENTS = (
    *("max_num_batched_tokens", "async_scheduling", "enable_prefix_caching"),
    *("long_prefill_token_threshold", "scheduling_policy"),
)


def settings_of(**engine: Any) -> dict[str, Setting]:
    """Engine arguments as a recording has them."""
    return {name: Setting(value, "recorded") for name, value in engine.items()}


def journeys(rows: list[dict[str, Any]], **fields: Any) -> Recording:
    """A recording of journeys; ``rows``: JOURNEY_EVENT_SCHEMA, sorted here by journey and time."""
    events = pl.DataFrame(rows, schema=JOURNEY_EVENT_SCHEMA).sort("journey", "time_us", maintain_order=True)
    lifecycles = pl.DataFrame(fields.pop("lifecycles"), schema=LIFECYCLE_SCHEMA)
    return recording(journey_events=rows_of(events), lifecycles=lifecycles, **fields)


@dataclass
class _Log:
    """What a driver writes down: events, and of each request its last prefill's end, and tokens before it."""

    asynchronous: bool
    events: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, int]] = field(default_factory=list)
    step_of_row: dict[int, int] = field(default_factory=dict)
    prefill_end: dict[int, int] = field(default_factory=dict)
    had: dict[int, int] = field(default_factory=dict)

    def note(self, journey: int, name: str, time_us: int, step: int, **values: Any) -> None:
        row = {"journey": journey, "event": f"journey.{name}", "time_us": time_us, "step_id": step}
        self.events.append(row | values)

    def abort(self, journey: int, time_us: int, step: int, ran: bool) -> None:
        """Given up after ``step``: the output of the last step is in only where scheduling is synchronous."""
        processed = step - self.asynchronous
        end, had = self.prefill_end.get(journey), self.had.get(journey, 0)
        if ran and end is not None:
            had += max(0, processed - end + 1)
            late = {"journey": journey, "event": "journey.FIRST_TOKEN", "step_id": step}
            self.events = [e for e in self.events if not (end > processed and late.items() <= e.items())]
        self.note(journey, "FINISHED", time_us, step, output_tokens=had, finish_status="aborted")


def _columns(server: Engine, *names: str) -> list[NDArray[np.int64]]:
    tables = (server.state.facts, server.state.requests, server.state.outcomes)
    columns = {name: table[name] for table in tables for name in table.dtype.names or ()}
    return [columns[name].astype(np.int64) for name in names]


def serve(trace: RequestTrace, engine: EngineConfig, step_us: Any) -> tuple[Recording, pl.DataFrame]:
    """The journeys as a recording, and the engine's steps, empty ones included.

    ``step_us``: duration of a batch.
    """
    server, log = Engine(trace, engine), _Log(engine.async_scheduling)
    step = 0
    while True:
        status, preemptions = _columns(server, "status", "preemptions")
        batch = server.schedule()
        now_us = server.now_us
        after, preempted, known, prompt = _columns(server, "status", "preemptions", "known", "prompt_tokens")
        for journey in np.flatnonzero((after == k.ABORTED) & (status != k.ABORTED) & (status != k.NEW)).tolist():
            log.abort(journey, now_us, step, ran=status[journey] in RUNNING)
        if batch is None:
            break
        step += 1
        for journey in np.flatnonzero((status == k.NEW) & (after != k.NEW) & (after != k.ABORTED)).tolist():
            log.note(journey, "QUEUED", now_us, step - 1, output_tokens=0)
        for journey in np.flatnonzero(preempted > preemptions).tolist():
            log.had[journey] = int(known[journey] - prompt[journey])
            log.prefill_end.pop(journey, None)
            log.note(journey, "PREEMPTED", now_us, step)
        ran = np.isin(after, RUNNING)
        for journey in np.flatnonzero(ran & np.isin(status, (k.NEW, k.WAITING))).tolist():
            kind = "RESUME" if preempted[journey] else "FIRST"
            log.note(journey, "SCHEDULED", now_us, step, output_tokens=log.had.get(journey, 0), schedule_kind=kind)
        if batch.prefill_tokens + batch.decode_tokens:
            log.step_of_row[int(server.state.at[0].rows)] = step
        ended = ran & (after != k.PREFILLING) & np.isin(status, (k.NEW, k.WAITING, k.PREFILLING))
        server.run(max(1, int(step_us(batch))))
        for journey in np.flatnonzero(ended).tolist():
            log.prefill_end[journey] = step
            if not log.had.get(journey):
                log.note(journey, "FIRST_TOKEN", int(server.state.at[0].device_free_us), step, output_tokens=1)
        log.steps.append(
            {
                "step_id": step,
                "start_us": now_us,
                "running": batch.running,
                "prefill_requests": batch.prefill_requests,
                "decode_requests": batch.decode_tokens,
                "prefill_tokens": batch.prefill_tokens,
                "decode_context_tokens": batch.context_tokens,
            }
        )
    return _recording(server, log, engine), pl.DataFrame(log.steps)


def _recording(server: Engine, log: _Log, engine: EngineConfig) -> Recording:
    status, last, total, prompt, cached = _columns(
        server, "status", "last_step", "total_tokens", "prompt_tokens", "cached_tokens"
    )
    for journey in np.flatnonzero(status == k.COMPLETED).tolist():
        row, tokens = int(last[journey]), int(total[journey] - prompt[journey])
        ended_us = int(server.state.steps["end_us"][row])
        step = log.step_of_row[row]
        log.note(journey, "FINISHED", ended_us, step, output_tokens=tokens, finish_status="length")
    lifecycles = [
        {
            "journey": journey,
            "core_request_id": f"r{journey}",
            "prompt_tokens": int(prompt[journey]),
            "max_tokens": int(total[journey] - prompt[journey]),
            "cached_prompt_tokens": int(cached[journey]) if cached[journey] >= 0 else None,
        }
        for journey in range(len(prompt))
    ]
    arguments = settings_of(**{name: getattr(engine, name) for name in ARGUMENTS})
    return journeys(log.events, lifecycles=lifecycles, engine=arguments)
