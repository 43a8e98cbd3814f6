"""The replay driver: a recording through a simulator with a coefficient release."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from blis_replay.blis.releases.fit import Outside, outside
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.blis.result import SimResult, TokenGaps
from blis_replay.compiled.arrays import Bools, Int64s
from blis_replay.ingest.recording import UNKNOWN, Recording
from blis_replay.replay.engine import not_simulated, refuse_sizes
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, plan_replay, with_kernels
from blis_replay.replay.profile import MADE, of_summary
from blis_replay.replay.simulator import EmbeddedEngine, Simulated, Simulator
from blis_replay.replay.warm_up import recorded_stalls


@dataclass(frozen=True)
class ReplayRun:
    """A finished replay: what was simulated, with what, and the client's view of it.

    ``simulator``: its name.  ``entry``: None if the simulator ran with coefficients of its
    own.  ``ttft_us``, ``e2e_us``: int64[n] in request order, meaningful where
    ``simulated.completed``; they carry the mode's reporting conventions (surplus step).
    ``outside``: steps outside of what the coefficients were fitted on, None where there are few or nobody knows.
    """

    recording: Recording
    release: CoefficientRelease
    entry: ModelEntry | None
    mode: ReplayMode
    plan: ReplayPlan
    simulator: str
    simulated: Simulated
    ttft_us: Int64s
    e2e_us: Int64s
    outside: Outside | None = None

    @property
    def result(self) -> SimResult:
        """The run step by step.  Raises ``ReplayError`` if the simulator reports requests only."""
        if self.simulated.engine is None:
            raise ReplayError(f"the simulator {self.simulator} reports no steps; use --simulator embedded")
        return self.simulated.engine

    def token_gaps(self) -> TokenGaps:
        """Gaps between output tokens as the client sees them; count completed requests only.

        With observed ways to the client, every token is as much later than the one before as the last is
        than the first, on average over all requests.  Raises ``ReplayError`` as ``result`` does.
        """
        return self.result.token_gaps(self._post_token_us())

    def pooled_gaps(self, chosen: Bools) -> tuple[Int64s, Int64s]:
        """The same as ``(gap_us, count)``, ascending and distinct; ``chosen``: bool[n], completed requests."""
        return self.result.inter_token_gaps(chosen, self._post_token_us())

    def _post_token_us(self) -> int | None:
        """How much later than the one before each token comes to the client; None as the lifecycle has it."""
        if self.plan.delivery_us is None:
            return None
        first_us, last_us = self.plan.delivery_us
        tokens = int(np.maximum(self.simulated.output_tokens - 1, 0).sum())
        return round(int((last_us - first_us).sum()) / max(tokens, 1))


def replay(
    recording: Recording,
    release: CoefficientRelease,
    mode: ReplayMode | None = None,
    simulator: Simulator | None = None,
) -> ReplayRun:
    """Replay the requests of a recording; the default mode is exact replay.

    ``simulator``: the embedded engine with ``release`` if None; another one brings its own
    coefficients.  Raises ``ReleaseError`` if the release is invalid or lacks the model,
    ``ReplayError`` or ``TraceError`` if the recording cannot be replayed, and
    ``ReplayError`` if the simulator failed or did not complete every request that the
    recording completed.
    """
    mode = mode or ReplayMode()
    simulator = simulator or EmbeddedEngine(release)
    if mode.surplus_steps and not simulator.reports_steps:
        raise ReplayError(
            f"surplus_steps=1 needs the duration of steps, which {simulator.name} does not report; "
            "leave it out, or use --simulator embedded"
        )
    summed_up = recording.requests.height == 0
    recording, mode = of_summary(recording, mode)
    entry = simulator.entry_for(recording)
    refuse_sizes(recording, mode, entry, simulator.release.name if entry else simulator.name)
    plan = _as_fitted(plan_replay(recording, mode), recording, mode, entry)
    if entry is not None and isinstance(simulator, EmbeddedEngine):
        plan = with_kernels(plan, recording, mode, entry.first_use)
    simulated = simulator.serve(recording, plan)
    if mode.warm_up == "recorded":
        stalls, basis = recorded_stalls(recording, mode, simulated.completed, simulated.ttft_us)
        plan = replace(plan, stalls=stalls, basis=plan.basis | {"warm-up": basis})
        simulated = simulator.serve(recording, plan)
    beyond = _outside(simulated, plan, entry)
    if beyond is not None:
        plan = replace(plan, basis=plan.basis | {"extrapolated": str(beyond)})
    if summed_up:
        plan = replace(plan, basis=plan.basis | {"requests": MADE})
    recorded = {name: setting.value for name, setting in recording.engine.items()}
    simulated = replace(simulated, not_simulated=not_simulated(recorded, isinstance(simulator, EmbeddedEngine)))
    completed_in_recording = (recording.requests["status"] == "ok").to_numpy()
    lost = completed_in_recording & ~simulated.completed
    if lost.any():
        raise ReplayError(
            f"{recording.slug}: the simulator did not complete {int(lost.sum())} requests that the recording "
            "completed, so there is nothing to compare; check the engine arguments"
        )
    run = ReplayRun(
        recording=recording,
        release=simulator.release,
        entry=entry,
        mode=mode,
        plan=plan,
        simulator=simulator.name,
        simulated=simulated,
        ttft_us=simulated.ttft_us,
        e2e_us=simulated.e2e_us,
        outside=beyond,
    )
    return _with_surplus_steps(run)


def _outside(simulated: Simulated, plan: ReplayPlan, entry: ModelEntry | None) -> Outside | None:
    """The steps outside of what the coefficients were fitted on, where both are known; observed ones have no model."""
    if simulated.engine is None or entry is None or entry.fit is None or entry.fit.steps is None or plan.cycles:
        return None
    return outside(simulated.engine.steps, entry.fit.steps, entry.latency)


def _as_fitted(plan: ReplayPlan, recording: Recording, mode: ReplayMode, entry: ModelEntry | None) -> ReplayPlan:
    """The plan with the scheduling that the coefficients were fitted under, where the recording says nothing of it."""
    known = recording.engine["async_scheduling"].source != UNKNOWN
    if known or mode.scheduling != "recorded" or entry is None or entry.fit is None:
        return plan
    engine = replace(plan.engine, async_scheduling=entry.fit.scheduling == "asynchronous")
    scheduling = f"{entry.fit.scheduling}, as the coefficients were fitted; the recording does not say"
    return replace(plan, engine=engine, basis=plan.basis | {"scheduling": scheduling})


def _with_surplus_steps(run: ReplayRun) -> ReplayRun:
    if run.mode.surplus_steps == 0:
        return run
    surplus_us = run.mode.surplus_steps * (run.result.last_step_us + run.result.post_token_us)
    return replace(run, e2e_us=run.e2e_us + surplus_us.astype(np.int64))
