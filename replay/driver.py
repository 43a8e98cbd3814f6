"""The replay driver: a recording through a simulator with a coefficient release."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ReplayError
from blis_replay.blis.releases.fit import Outside
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.blis.result import SimResult, TokenGaps
from blis_replay.blis.trace import RequestTrace
from blis_replay.ingest.recording import Recording, columns_of
from blis_replay.ingest.rows import no_rows
from blis_replay.ingest.store.recordings import TABLES
from blis_replay.replay.engine import MOST_KINDS_OF_CACHE, kinds_of_cache, left_out, outside_of, refuse_sizes
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, plan_replay
from blis_replay.replay.simulator import EmbeddedEngine, Simulated, Simulator

EXTRAPOLATED = "extrapolated"  # in ``ReplayRun.basis``: which steps lie beyond what the coefficients were fitted on


@dataclass(frozen=True)
class ReplayRun:
    """A finished replay: what was simulated, with what, and the client's view of it.

    ``entry``: None if the simulator ran with coefficients of its own.  ``simulator``: its name.
    ``not_simulated``: what the recorded engine used and the simulator has not, one sentence each: such a run says
    nothing of the simulator.
    ``outside``: steps outside the batches that the coefficients were fitted on, of a pair those of the server that they
    leave less sure; None if few or unknown.
    """

    recording: Recording
    release: CoefficientRelease
    entry: ModelEntry | None
    mode: ReplayMode
    plan: ReplayPlan
    simulator: str
    simulated: Simulated
    not_simulated: tuple[str, ...] = ()
    outside: Outside | None = None

    @property
    def arrival_us(self) -> Int64s:
        """int64[n] in request order: when the requests were sent in the replay."""
        engine = self.simulated.engine
        return self.plan.trace.arrival_us if engine is None else engine.arrival_us

    @property
    def ttft_us(self) -> Int64s:
        """int64[n] in request order, meaningful where ``simulated.completed``."""
        return self.simulated.ttft_us

    @property
    def e2e_us(self) -> Int64s:
        """int64[n] in request order, meaningful where ``simulated.completed``."""
        return self.simulated.e2e_us

    @property
    def basis(self) -> dict[str, str]:
        """In words, where the inputs of the replay come from, and whether its steps are extrapolated."""
        extrapolated = {} if self.outside is None else {EXTRAPOLATED: str(self.outside)}
        kinds = kinds_of_cache(self.recording)
        how = "here every layer keeps all of a context"
        if self.plan.engine.kv_cache_groups:
            how = "blocks of each group simulated; a step costs what a mean layer attends to"
        alike = {} if kinds is None else {"kinds of KV cache": f"{kinds}; {how}"}
        return self.plan.basis | extrapolated | alike

    @property
    def result(self) -> SimResult:
        """The run step by step.  Raises ``ReplayError`` if the simulator reports requests only."""
        if self.simulated.engine is None:
            raise ReplayError(f"the simulator {self.simulator} reports no steps; use --simulator embedded")
        return self.simulated.engine

    def token_gaps(self) -> TokenGaps:
        """Gaps between output tokens as the client sees them; count completed requests only.

        With observed delivery, its mean growth from the first to the last token is spread evenly over all tokens.
        Raises ``ReplayError`` as ``result`` does.
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

    ``simulator``: the embedded engine with ``release`` if None; another one brings its own coefficients.  Raises
    ``ReleaseError`` if the release is invalid or lacks the model, ``ReplayError`` or ``TraceError`` if the recording
    cannot be replayed or the simulator did not complete every request that the recording completed.
    """
    mode = mode or ReplayMode()
    simulator = simulator or EmbeddedEngine(release)
    entry = simulator.entry_for(recording)
    refuse_sizes(recording, mode, entry, simulator.release.name if entry else simulator.name)
    if mode.pace == "recorded" and entry is None:
        raise ReplayError(f"{simulator.name} has coefficients of its own, beside which no pace is known; leave it out")
    own = simulator if isinstance(simulator, EmbeddedEngine) else None
    embedded = own is not None
    # Another program that runs our coefficients has no kernels to compile.
    plan = plan_replay(recording, mode, entry if embedded or entry is None else replace(entry, first_use=None))
    plan = plan.at_recorded_times if own is None else own.prepared(plan)
    simulated = simulator.serve(plan)
    if mode.warm_up == "recorded":
        plan = plan.with_recorded_stalls(simulated.completed, simulated.ttft_us)
        simulated = simulator.serve(plan)
    lost = (plan.recording.requests["status"] == "ok").to_numpy() & ~simulated.completed
    if lost.any():
        raise ReplayError(
            f"{recording.slug}: the simulator did not complete {int(lost.sum())} requests that the recording "
            "completed, so there is nothing to compare; check the engine arguments"
        )
    missing = _not_simulated(recording, plan, simulated, embedded)
    beyond = None if plan.cycles else outside_of(entry, simulated.engine, plan.engine.kv_cache_groups)
    if (apart := plan.apart) is not None:
        name = apart.prefill.alias
        # Groups of KV blocks too: which of them are sent was not compared.
        missing += tuple(f"{name}: {what}" for what in left_out(apart.prefill, apart.engine, embedded))
        groups, fitted = apart.engine.kv_cache_groups, simulator.entry_for(apart.prefill)
        also = None if plan.cycles else outside_of(fitted, apart.producer, groups)
        both = [one for one in (beyond, also and replace(also, of=name)) if one is not None]
        beyond = max(both, key=lambda one: (one.unsure, one.matters), default=None)
    return ReplayRun(
        recording=plan.recording,
        release=simulator.release,
        entry=entry,
        mode=plan.mode,
        plan=plan,
        simulator=simulator.name,
        simulated=simulated,
        not_simulated=missing,
        outside=beyond,
    )


def _not_simulated(recording: Recording, plan: ReplayPlan, simulated: Simulated, embedded: bool) -> tuple[str, ...]:
    """What is not simulated; without groups of KV blocks where one gives the same schedule.

    Groups change what is found in the prefix cache and how much memory there is.  They do nothing where no prompt
    shares a block, and where each group could hold all that was in use (vllm/v1/core/kv_cache_coordinator.py).
    """
    kinds, blocks, result = kinds_of_cache(recording), plan.engine.num_gpu_blocks, simulated.engine
    alike = kinds is not None and result is not None and plan.trace.block_keys is None
    if kinds is not None and result is not None and blocks is not None:
        from blis_replay.ingest.readers.server.layers import groups_in_words  # few models have several groups

        known = groups_in_words(kinds)
        most = int(kinds) if kinds.isdigit() else len(known) if known else MOST_KINDS_OF_CACHE
        alike = alike and result.blocks_in_use * most < blocks  # one of them is the null block
    return left_out(recording, plan.engine, embedded, alike=alike)


def without_rows(run: ReplayRun) -> ReplayRun:
    """What a run was of, by whom and how, without its requests and steps: small enough to keep hundreds of them."""
    recording, plan, simulated = run.recording, run.plan, run.simulated
    nothing = np.empty(0, np.int64)
    tables: dict[str, Any] = {name: no_rows(columns_of(name)) for name in TABLES}
    recording = replace(recording, **tables, prefix=None)
    trace = RequestTrace(nothing, nothing, nothing, nothing, nothing)
    return replace(
        run,
        recording=recording,
        plan=replace(plan, recording=recording, trace=trace, sessions=None, cycles=None, delivery_us=None),
        simulated=replace(
            simulated,
            completed=nothing.astype(np.bool_),
            ttft_us=nothing,
            e2e_us=nothing,
            output_tokens=nothing,
            engine=None,
        ),
    )
