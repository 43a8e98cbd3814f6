"""What a simulator is to a replay: something that answers a plan with client latencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ReleaseError, ReplayError, TraceError
from blis_replay.blis.releases.release import UNKNOWN_HARDWARE, CoefficientRelease, ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.ingest.recording import Recording
from blis_replay.replay.plan import ReplayPlan


@dataclass(frozen=True)
class Simulated:
    """What a simulator answers, in request order.

    ``completed``: bool[n].  ``ttft_us``, ``e2e_us``, ``output_tokens``: int64[n], meaningful where ``completed``.
    ``engine``: the run step by step, None from a simulator that reports requests only.
    ``asynchronous``: whether steps were scheduled while the one before ran.  ``differences``:
    how the simulator differs from the recorded engine for this plan, one sentence each.  ``peak_bytes``: the largest
    memory of the simulator's process, None where that is this process.  ``scheduled_us``: int64[n], from a request's
    send to its first schedule, None if not reported.  ``fitted_on``: recordings that a program says it was fitted on,
    by name or hash; None if it does not say.
    """

    completed: Bools
    ttft_us: Int64s
    e2e_us: Int64s
    output_tokens: Int64s
    engine: SimResult | None = None
    asynchronous: bool = False
    differences: tuple[str, ...] = ()
    peak_bytes: int | None = None
    scheduled_us: Int64s | None = None
    fitted_on: tuple[str, ...] | None = None


class Simulator(Protocol):
    """A simulator with its coefficients."""

    @property
    def name(self) -> str:
        """As answers name it: ``embedded`` or ``blis``."""

    @property
    def release(self) -> CoefficientRelease:
        """The coefficients that it runs with."""

    @property
    def reports_steps(self) -> bool:
        """Whether its answers have the run step by step."""

    def entry_for(self, recording: Recording) -> ModelEntry | None:
        """The coefficients for a recording, None if they are the simulator's own."""

    def serve(self, plan: ReplayPlan) -> Simulated:
        """Serve the requests of a plan in virtual time."""


def model_of(recording: Recording) -> str:
    """The model that was recorded; raises ``ReplayError`` for a recording that names none."""
    if recording.model is None:
        raise ReplayError(
            f"{recording.alias}: no file of it names the model, so no coefficients are its own; "
            "say it with `blis-replay ingest --model NAME`, or choose some with `blis-replay simulate --engine FILE`"
        )
    return recording.model


def entry_of(release: CoefficientRelease, recording: Recording, extrapolate: bool = False) -> ModelEntry:
    """The coefficients of a release for a recording; raises ``ReleaseError`` if it has none.

    ``extrapolate``: where none were fitted to its tensor parallelism, data type and GPU, those of its model on others.
    """
    model = model_of(recording)
    try:
        entry = release.entry_for(model, recording.tensor_parallelism, recording.alias, recording.served_dtype)
    except ReleaseError:
        if not extrapolate:
            raise
        return release.entry_for(model, None, recording.alias)
    if not extrapolate and other_gpu(release, recording):  # a small error would be chance
        raise ReleaseError(
            f"release {release.name} is for {release.hardware}, and {recording.alias} was recorded on "
            f"{recording.hardware}; calibrate on a run of that machine, or if it is the same GPU, name it so "
            "(hardware in exp-config.yaml); `gate --extrapolate` judges nevertheless"
        )
    return entry


def other_gpu(release: CoefficientRelease, recording: Recording) -> bool:
    """Whether release and recording name different GPUs; one that names none may be any."""
    recorded, made_for = recording.hardware, release.hardware
    if recorded is None or recorded == made_for or UNKNOWN_HARDWARE in made_for:
        return False
    from blis_replay.blis.latency.gpu_names import another_gpu  # most recordings name it as the release does

    return another_gpu(recorded, made_for)


@dataclass(frozen=True)
class EmbeddedEngine:
    """The engine of this package with a coefficient release.

    ``extrapolate``: take the coefficients of the model whatever its tensor parallelism and data type.
    """

    release: CoefficientRelease
    extrapolate: bool = False
    name: str = "embedded"
    reports_steps: bool = True

    def entry_for(self, recording: Recording) -> ModelEntry:
        """The release's entry; ``ReleaseError`` if it is invalid or has none."""
        self.release.refuse_if_invalid()
        return entry_of(self.release, recording, self.extrapolate)

    def prepared(self, plan: ReplayPlan) -> ReplayPlan:
        """The plan as it is served: that of one server by itself."""
        return plan

    def serve(self, plan: ReplayPlan) -> Simulated:
        """The plan through the engine; raises ``TraceError`` with the name of the recording if it cannot be run."""
        entry = self.entry_for(plan.recording)
        latency = plan.latency(entry.latency)
        try:
            result = plan.served(latency, entry.lifecycle)
        except TraceError as error:
            raise TraceError(f"{plan.recording.alias}: {error}") from None
        ttft_us, e2e_us = result.ttft_us, result.e2e_us
        if plan.delivery_us is not None:
            first_us, last_us = plan.delivery_us
            ttft_us = result.first_token_us - result.arrival_us + first_us
            e2e_us = np.maximum(result.finished_us - result.arrival_us + last_us, ttft_us)
        return Simulated(
            completed=result.completed,
            ttft_us=ttft_us,
            e2e_us=e2e_us,
            output_tokens=result.output_tokens,
            engine=result,
            asynchronous=plan.engine.async_scheduling,
        )
