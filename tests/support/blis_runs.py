"""Replays through a stand-in for the BLIS binary, and what they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recordings import make_recording

from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.replay.blis_binary import OWN, BlisBinary, find_build, own_release
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.plan import ReplayPlan

BLACKBOX = LatencyModel("blackbox", 6_900_000, 17_700, 2_800, rounding="truncate")
DELAYS = Lifecycle(pre_queue_us=1600.0, pre_queue_per_prompt_token_us=3.5, post_token_us=1800.0)


def release_of(
    latency: LatencyModel = BLACKBOX, lifecycle: Lifecycle = DELAYS, model: str = "some/Model"
) -> CoefficientRelease:
    """A release for a model, that of ``make_recording`` if none is named."""
    entry = ModelEntry(model, 1, latency, lifecycle)
    return CoefficientRelease("ours", "valid", "s", "s", "H100", "0" * 64, (entry,), fitted_on=())


def small_recording(count: int = 3, **engine: int | bool) -> Recording:
    """Requests 1 s apart, prompts of 100 and outputs of 5 tokens, answered in 20 + 40 ms."""
    return make_recording(
        {
            "arrival_us": [1_000_000 * i for i in range(count)],
            "prompt_tokens": [100] * count,
            "output_tokens": [5] * count,
            "ttft_us": [20_000] * count,
            "e2e_us": [60_000] * count,
        },
        engine=engine,
    )


def run_with(
    path: Path, recording: Recording, release: CoefficientRelease | None = None, model: str = OWN, **more: Any
) -> ReplayRun:
    """Replay with the stand-in at ``path``; a model of its own if there is no release."""
    build = find_build(str(path))
    blis = BlisBinary(build, release or own_release(build, model), "" if release else model, **more)
    return replay(recording, blis.release, simulator=blis)


def called(path: Path) -> dict[str, Any]:
    """What the stand-in was called with."""
    document: dict[str, Any] = json.loads((path.parent / "called.json").read_text())
    return document


def plan_of(recording: Recording) -> ReplayPlan:
    """The plan that a replay of the recording follows."""
    return replay(recording, release_of()).plan
