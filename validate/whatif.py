"""The same requests on the same simulator with other engine arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from blis_replay.blis.errors import SimulatorError
from blis_replay.blis.release import CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.engine_overrides import EngineOverrides, EngineValue
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.executor_ledger import Progress
from blis_replay.replay.executors import ExecutorName, map_jobs
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.comparison.compare import simulated_samples
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.metrics import latency_statistics


@dataclass(frozen=True)
class WhatIfPoint:
    """A replay with some engine arguments.

    ``overrides``: in the place of the recorded arguments.  ``values``: simulated numbers by name
    (``simulated_values``), None with the ``reason`` if the engine cannot run, or not serve a request.
    """

    overrides: EngineOverrides
    values: dict[str, float | None] | None
    reason: str | None = None


@dataclass(frozen=True)
class WhatIf:
    """Replays of one recording; ``recorded`` is that with its own engine arguments."""

    recording: Recording
    release: CoefficientRelease
    basis: dict[str, str]
    recorded: WhatIfPoint
    points: tuple[WhatIfPoint, ...]


def what_if(
    recording: Recording,
    release: CoefficientRelease,
    changes: Sequence[EngineOverrides],
    *,
    executor: ExecutorName = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> WhatIf:
    """Replay a recording with its own engine arguments and with each of the changes.

    Raises what ``replay`` does with the recorded arguments, ``ReplayError`` as ``map_jobs``, and
    ``NothingToJudgeError`` if the engine cannot serve the requests with any of the changes.
    """
    as_recorded = replay(recording, release)
    work = partial(_point, recording, release)
    points = map_jobs(work, changes, executor=executor, workers=workers, progress=progress)
    if changes and all(point.values is None for point in points):
        raise NothingToJudgeError(f"{recording.alias}: nothing could be simulated: {points[0].reason}")
    recorded = WhatIfPoint((), simulated_values(as_recorded))
    return WhatIf(recording, release, as_recorded.plan.basis, recorded, tuple(points))


def grid(fixed: EngineOverrides, sweeps: Mapping[str, Sequence[EngineValue]]) -> list[EngineOverrides]:
    """Every combination of the sweeps, the last one running fastest, each with the fixed overrides."""
    combinations = product(*(tuple((name, value) for value in values) for name, values in sweeps.items()))
    return [(*fixed, *combination) for combination in combinations]


def simulated_values(run: ReplayRun) -> dict[str, float | None]:
    """What a replay says of its engine, over the requests that it completed.

    Latencies in ms; ``requests_per_s`` and ``output_tokens_per_s`` from the first arrival to the last
    token at a client, as are the means of ``running`` and ``waiting`` (requests, by time);
    ``kv_peak``: largest share of KV blocks in use at once, None where memory has no bound;
    ``cut_short``: requests whose output ended at ``max_model_len``.
    """
    result, done = run.result, run.simulated.completed
    latencies = latency_statistics(simulated_samples(run, done), result.inter_token_gaps(done))
    duration_us = float((run.plan.trace.arrival_us + run.e2e_us)[done].max(initial=0) - run.plan.trace.arrival_us[0])
    per_s = 1e6 / duration_us if duration_us else 0.0
    steps, blocks = result.steps, run.plan.engine.num_gpu_blocks
    lasted_us = steps["end_us"] - steps["start_us"]
    in_batch_us = float((steps["running_depth"] * lasted_us).sum())
    waited_us = (np.where(result.scheduled_us >= 0, result.scheduled_us, run.plan.trace.abort_us) - result.queued_us)[
        done
    ]
    tokens = run.simulated.output_tokens
    values: dict[str, float | None] = {
        f"{metric}_{name}_ms": us / 1000 if (us := latencies[metric].get(name)) is not None else None
        for metric in ("ttft", "itl", "e2e")
        for name in ("mean", "p99")
    }
    return values | {
        "requests_per_s": int(done.sum()) * per_s,
        "output_tokens_per_s": int(tokens[done].sum()) * per_s,
        "running": in_batch_us * per_s / 1e6,
        "waiting": float(waited_us.sum()) * per_s / 1e6,
        "preemptions": int(result.preemptions.sum()),
        "kv_peak": None if blocks is None else 1 - float(steps["free_blocks"].min(initial=blocks - 1)) / (blocks - 1),
        "completed": int(done.sum()),
        "cut_short": int((tokens < run.plan.trace.output_tokens)[done].sum()),
    }


def _point(recording: Recording, release: CoefficientRelease, overrides: EngineOverrides) -> WhatIfPoint:
    try:
        run = replay(recording, release, ReplayMode(engine=overrides))
    except (SimulatorError, ReplayError) as error:
        return WhatIfPoint(overrides, None, str(error))
    return WhatIfPoint(overrides, simulated_values(run))
