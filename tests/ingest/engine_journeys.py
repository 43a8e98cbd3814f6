"""Recordings of journeys: hand-made ones, and those of a run of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from builders import recording

from blis_replay.blis.engine import Engine
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, LIFECYCLE_SCHEMA, Recording, Setting
from blis_replay.ingest.rows import rows_of
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth
from blis_replay_labs.planted.frames import recording_of


def settings_of(**engine: Any) -> dict[str, Setting]:
    """Engine arguments as a recording has them."""
    return {name: Setting(value, "recorded") for name, value in engine.items()}


def journeys(rows: list[dict[str, Any]], **fields: Any) -> Recording:
    """A recording of journeys; ``rows``: JOURNEY_EVENT_SCHEMA, sorted here by journey and time."""
    events = pl.DataFrame(rows, schema=JOURNEY_EVENT_SCHEMA).sort("journey", "time_us", maintain_order=True)
    lifecycles = pl.DataFrame(fields.pop("lifecycles"), schema=LIFECYCLE_SCHEMA)
    return recording(journey_events=rows_of(events), lifecycles=lifecycles, **fields)


def serve(trace: RequestTrace, engine: EngineConfig, step_us: Any) -> tuple[Recording, list[tuple[int, int, int]]]:
    """The journeys of a run in which nobody gives up, and running requests, decodes and their context of every step.

    ``step_us``: duration of a batch.  An empty call of the scheduler counts as a step, and is no row of the engine.
    """
    server, steps, step_of_row = Engine(trace, engine), list[tuple[int, int, int]](), [0]
    while (batch := server.schedule()) is not None:
        steps.append((batch.running, batch.decode_tokens, batch.context_tokens))
        if batch.prefill_tokens + batch.decode_tokens:
            step_of_row.append(len(steps))
        server.run(max(1, int(step_us(batch))))
    nothing = np.zeros(len(trace), np.int64)
    spec = replace(SyntheticExperiment(), engine=engine, prefix_caching=False)
    made = recording_of(SyntheticTruth(spec, trace, server.result(), nothing, nothing, nothing, nothing, nothing))
    numbered = made.journey_events.frame().with_columns(pl.col("step_id").replace_strict(dict(enumerate(step_of_row))))
    return replace(made, journey_events=rows_of(numbered)), steps
