"""From a recording and a mode to what the simulator is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ReplayError, UnreplayableError, counted
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import FirstUse, Latency, Lifecycle, ObservedCycles
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, RequestTrace
from blis_replay.ingest.recording import PUBLISHED, RECORDED, Recording, Setting
from blis_replay.ingest.rows import Rows
from blis_replay.replay.engine import replayed_engine, with_captured_sizes
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.prefix import prefix_identity, prompt_tokens

if TYPE_CHECKING:
    from blis_replay.blis.closed_loop import Answered
    from blis_replay.replay.declared import DeclaredRequests
    from blis_replay.replay.transfers import Apart
    from blis_replay.replay.warm_up import Stalls

_FLAT_ARRIVALS_SEED = 42


@dataclass(frozen=True)
class ReplayPlan:
    """A recording made ready for the simulator.

    ``recording``, ``mode``: what is replayed; where only a summary was recorded, with requests made of it and the
    clients that sent them.  ``arguments``: engine arguments with those of the mode in place of the recorded ones;
    ``engine``: what a simulator gets of them.

    Request i of ``trace`` is request i of the recording (send order), also where the arrivals were replaced.
    ``basis``: in words, where arrivals, lengths and prefix hits come from, and what is forced.

    ``cycles``: observed step cycles in place of the latency model.  ``delivery_us``: observed us from the engine's
    first and last token to the client, int64[n] each, in place of the delays after the engine.  ``sessions``: int64[n],
    requests with one number are turns of one client of ``mode.loop``.  ``stalls``: of the server's first seconds.
    ``first_use``: kernels that the server compiles when it first needs them; ``captured_tokens``: most tokens of a
    captured CUDA graph, for which it has them.  ``captured_sizes``: sizes of captured graphs; None if unknown.
    ``answered``: which requests waited for an answer, as their client had a limit of requests in flight; None where it
    had none.  ``apart``: the server that prefilled for this one, None without one.
    """

    recording: Recording
    mode: ReplayMode
    arguments: Mapping[str, Setting]
    engine: EngineConfig
    trace: RequestTrace
    basis: dict[str, str]
    cycles: ObservedCycles | None = None
    delivery_us: tuple[Int64s, Int64s] | None = None
    sessions: Int64s | None = None
    stalls: Stalls | None = None
    first_use: FirstUse | None = None
    answered: Answered | None = None
    captured_tokens: int = 0
    captured_sizes: tuple[int, ...] | None = None
    pace: float | None = None
    apart: Apart | None = None

    @property
    def teacher_forced(self) -> bool:
        """Whether observed quantities take the place of modelled ones."""
        observed = (self.trace.pre_queue_us, self.trace.held_us, self.cycles, self.stalls, self.pace, self.delivery_us)
        return any(quantity is not None for quantity in observed)

    def latency(self, of_batches: Latency) -> Latency:
        """How long steps take: what was observed, or the model of batches with what the server's first seconds add."""
        if self.cycles is not None:
            return self.cycles
        of_batches = with_captured_sizes(of_batches, self.captured_sizes)
        if self.stalls is not None:
            of_batches = self.stalls.on(of_batches)
        if self.pace is not None:
            from blis_replay.replay.pace import at_pace

            of_batches = at_pace(of_batches, self.pace)
        if self.stalls is None and self.first_use is not None:
            return self.first_use.on(of_batches, self.captured_tokens, self.engine.max_num_batched_tokens)
        return of_batches

    def served(self, latency: Latency, lifecycle: Lifecycle) -> SimResult:
        """The requests through the engine, from their clients.  Raises ``TraceError`` as ``simulate`` does."""
        if self.answered is None and self.mode.loop is None:
            return simulate(self.trace, self.engine, latency, lifecycle)
        from blis_replay.blis.closed_loop import simulate_load  # only this needs it

        clients = self.mode.loop, self.sessions, self.answered
        return simulate_load(self.trace, self.engine, latency, lifecycle, *clients)

    @property
    def at_recorded_times(self) -> ReplayPlan:
        """The plan for a simulator that takes arrivals only."""
        if self.answered is None:
            return self
        return replace(self, answered=None, basis=self.basis | {"arrivals": "recorded, though they waited for answers"})

    def with_recorded_stalls(self, completed: Bools, ttft_us: Int64s) -> ReplayPlan:
        """The plan with the stalls that the recording shows beside a replay without them.

        ``completed``: bool[n], ``ttft_us``: int64[n], what that replay answered.
        """
        from blis_replay.replay.warm_up import recorded_stalls

        stalls, basis = recorded_stalls(self.recording, self.mode, completed, ttft_us)
        return replace(self, stalls=stalls, basis=self.basis | {"warm-up": basis})


def plan_replay(recording: Recording, mode: ReplayMode, entry: ModelEntry | None = None) -> ReplayPlan:
    """The requests, the engine and the observed quantities of a replay.

    ``entry``: the coefficients, for what they say of a new server and where the recording does not say how it
    scheduled.  Raises ``ReplayError`` if the recording lacks what the mode takes from it.
    """
    made_of_summary = recording.requests.height == 0
    if made_of_summary:
        from blis_replay.replay.summary import MADE, of_summary

        recording, mode = of_summary(recording, mode)
    engine = replayed_engine(recording, mode, entry)  # first: blocks are counted in its terms
    trace, basis = request_trace(engine.recording, mode)
    if engine.config.offloading is not None and trace.block_keys is None:
        raise UnreplayableError(
            f"{recording.slug}: an offload of KV blocks, and the recording does not say which prompts share blocks; "
            "leave out kv_offloading_size"
        )
    basis |= engine.basis
    sessions, cycles, delivery_us = None, None, None
    if mode.loop is not None:
        trace = replace(trace, abort_us=np.full(len(trace), NEVER_US))
        basis["arrivals"] = f"a closed loop of {mode.loop.concurrency} clients, none of which gives up"
    if mode.sessions == "prompts":
        from blis_replay.blis.closed_loop import sessions_of  # only this needs it

        sessions, basis["sessions"] = sessions_of(trace, recording.alias)
    if mode.teacher_forced:
        from blis_replay.replay.observed import observed_parts  # it reads steps and journeys, and only this needs it

        trace, cycles, delivery_us, forced_basis = observed_parts(engine.recording, mode, trace)
        basis |= forced_basis
    if engine.fitted_scheduling:
        basis["scheduling"] = engine.fitted_scheduling
    answered = None
    # What is sent a moment earlier or later meets another of the observed steps, and that adds up.
    waits = cycles is None and _waits_for_answers(mode, engine.config, trace)
    if recording.ground_truth == RECORDED and waits:
        answered, waited_basis = _answered(recording)
        basis |= waited_basis
    pace = None
    if entry is not None and mode.pace == "recorded" and cycles is None:
        pace, basis["pace"] = _pace(engine.recording, trace, engine.config, entry)
    first_use = None
    if entry is not None and entry.first_use is not None and mode.warm_up == "modelled" and cycles is None:
        from blis_replay.replay.warm_up import waits_for_kernels

        waits, basis["warm-up"] = waits_for_kernels(recording, entry.first_use, engine.captured_tokens)
        first_use = entry.first_use if waits else None
    if made_of_summary:
        basis["requests"] = MADE
    return ReplayPlan(
        recording=recording,
        mode=mode,
        arguments=engine.recording.engine,
        engine=engine.config,
        trace=trace,
        basis=basis,
        cycles=cycles,
        delivery_us=delivery_us,
        sessions=sessions,
        answered=answered,
        first_use=first_use,
        captured_tokens=engine.captured_tokens,
        captured_sizes=engine.captured_sizes,
        pace=pace,
    )


def _pace(recording: Recording, trace: RequestTrace, engine: EngineConfig, entry: ModelEntry) -> tuple[float, str]:
    from blis_replay.replay.pace import recorded_pace  # it serves the trace, and only this needs it

    if (pace := recorded_pace(recording, trace, engine, entry)) is None:
        raise ReplayError(
            f"{recording.alias}: its steps do not tell the pace of the server; record them (`blis-replay record`)"
        )
    return pace.factor, f"recorded: step times of the coefficients, {pace.factor:.3f} times as long"


def _waits_for_answers(mode: ReplayMode, engine: EngineConfig, trace: RequestTrace) -> bool:
    """Whether arrivals are the recorded ones, of a run that can be simulated as a closed loop."""
    recorded = mode.arrivals == "recorded" and mode.rate == 1.0 and mode.loop is None and mode.sessions == "none"
    simple = engine.speculation is None and engine.data_parallel_size == 1 and trace.priority is None
    return recorded and simple and bool((trace.abort_us == NEVER_US).all())


def _answered(recording: Recording) -> tuple[Answered | None, dict[str, str]]:
    """The requests that waited for an answer, in load stages in which the client stood at a limit."""
    from blis_replay.ingest.overload import client_limits  # only recorded requests need it

    limits = client_limits(recording)
    if not limits:
        return None, {}
    from blis_replay.blis.closed_loop import Answered, answered_of

    times = recording.requests.frame(["stage", "arrival_us", "e2e_us"])
    arrival_us, e2e_us = (times[name].to_numpy() for name in ("arrival_us", "e2e_us"))
    if times["e2e_us"].null_count():
        return None, {}
    after, later_us = np.full(len(arrival_us), -1), np.zeros(len(arrival_us), np.int64)
    for limit in limits:
        rows = np.flatnonzero(times["stage"].eq_missing(limit.stage).to_numpy())
        of_stage = answered_of(arrival_us[rows], arrival_us[rows] + e2e_us[rows], limit.in_flight)
        after[rows] = np.where(of_stage.after >= 0, rows[of_stage.after], -1)
        later_us[rows] = of_stage.later_us
    waited = int((after >= 0).sum())
    held = ", ".join(f"{limit.in_flight:,}" for limit in limits)
    basis = f"recorded; {waited:,} wait for the answers that they waited for, as the client held {held} in flight"
    return Answered(after, later_us), {"arrivals": basis}


def request_trace(recording: Recording, mode: ReplayMode) -> tuple[RequestTrace, dict[str, str]]:
    """The requests of a recording for a simulator, and in words what they rest on.

    Raises ``ReplayError`` if it has no requests, or no decode lengths of the kind that the mode asks for.
    """
    requests = recording.requests
    if requests.height == 0:
        raise UnreplayableError(
            f"{recording.slug}: the recording has no requests to replay; ingest its per-request records"
        )
    prompts, lengths, length_basis = _lengths(recording, mode)
    prefill_tokens, block_keys, prefix_basis = _prefix(recording, mode, prompts)
    arrival_us, arrival_basis = _arrivals(recording, mode)
    if mode.rate != 1:
        arrival_us = np.rint(arrival_us / mode.rate).astype(np.int64)
        arrival_basis += f", {mode.rate:g} times as fast"
    trace = RequestTrace(
        arrival_us=arrival_us,
        prompt_tokens=prompts,
        prefill_tokens=prefill_tokens,
        output_tokens=lengths,
        abort_us=_aborts(requests, arrival_us),
        block_keys=block_keys,
    )
    return trace, {"arrivals": arrival_basis, "output tokens": length_basis, "prefix cache": prefix_basis}


def _prefix(recording: Recording, mode: ReplayMode, prompts: Int64s) -> tuple[Int64s, BlockKeys | None, str]:
    """Uncached prompt tokens where they are numbers, block identities where those are known, and the basis."""
    if mode.prefix == "none":
        return prompts, None, "whole prompts"
    caching = recording.engine.get("enable_prefix_caching")
    if caching is not None and not caching.value:
        return prompts, None, "whole prompts: the engine caches no prefixes"
    if mode.prefix != "recorded":
        return prompts, *_declared(mode.prefix, recording).blocks(prompts)
    identity = prefix_identity(recording, prompts)
    if identity is not None:
        return prompts, *identity
    from blis_replay.replay.prefix_estimate import estimate_prefix  # it reads steps, and only this needs it

    estimate = estimate_prefix(recording, prompts)
    return estimate.prefill_tokens, None, estimate.basis


def _lengths(recording: Recording, mode: ReplayMode) -> tuple[Int64s, Int64s, str]:
    """Prompt and output tokens, and in words how the outputs are known."""
    if mode.lengths not in ("true", "re-tokenised"):
        return _declared(mode.lengths, recording).lengths()
    prompts = prompt_tokens(recording)
    column = "output_tokens" if mode.lengths == "true" else "output_tokens_reported"
    lengths, remark = recording.requests[column], ""
    if mode.lengths == "true":
        lengths, remark = _with_those_given_up(recording.requests, lengths)
    if lengths.null_count():
        raise UnreplayableError(
            f"{recording.slug}: the {'' if mode.lengths == 'true' else 're-tokenised '}output length is unknown for "
            f"{lengths.null_count():,} of {counted(len(lengths), 'request')}; record server usage, or max_tokens with "
            "ignore_eos"
        )
    if mode.lengths == "true":
        sources = recording.requests["output_tokens_source"].drop_nulls().unique(maintain_order=True).to_list()
        basis = " and ".join(sources) + remark
    else:
        basis = "counted by tokenising the returned text again"
    # An empty reply counts 0 tokens when tokenised again; the engine yields at least one.
    return prompts, np.maximum(lengths.to_numpy().astype(np.int64), 1), basis


def _with_those_given_up(requests: Rows, lengths: pl.Series) -> tuple[pl.Series, str]:
    """Lengths with what failed requests would have gone on to, had their clients held on; and that in words."""
    unknown = int((lengths.is_null() & (requests["status"] != "ok")).sum())
    if not unknown or lengths.null_count() == len(lengths):
        return lengths, ""
    until_given_up = requests["max_tokens"].fill_null(lengths.max())
    completed = (requests["status"] == "ok").fill_null(False)
    filled = pl.select(pl.when(lengths.is_null() & ~completed).then(until_given_up).otherwise(lengths)).to_series()
    return filled, f"; of {unknown} given up: what they asked for, else the longest"


def _arrivals(recording: Recording, mode: ReplayMode) -> tuple[Int64s, str]:
    recorded = recording.requests["arrival_us"].to_numpy().astype(np.int64)
    if mode.arrivals == "recorded":
        return drawn_arrivals(recording, 0), sent_as(recording)
    if mode.arrivals != "flat":
        return _declared(mode.arrivals, recording).arrivals()
    planned_us = sum(stage.duration_us for stage in recording.stages) or int(recorded[-1])
    rng = np.random.default_rng(_FLAT_ARRIVALS_SEED)
    gaps = rng.exponential(planned_us / len(recorded), len(recorded))
    return np.floor(np.cumsum(gaps)).astype(np.int64), "Poisson at the mean rate of the run, stages flattened"


def drawn_arrivals(recording: Recording, seed: int) -> Int64s:
    """int64[n], us, ascending: when requests came, uniform within the time that is known where nobody stamped them."""
    arrival_us: Int64s = recording.requests["arrival_us"].to_numpy().astype(np.int64)
    if recording.ground_truth != PUBLISHED:
        return arrival_us
    within_us = recording.requests["arrival_within_us"].fill_null(0).to_numpy()
    drawn = arrival_us + np.random.default_rng(seed).uniform(-1, 1, len(arrival_us)) * within_us
    return np.sort(np.maximum(np.rint(drawn), 0).astype(np.int64))


def sent_as(recording: Recording) -> str:
    """In words, where the send times of a recording are from."""
    unplaced = "reconstructed from published rates" if recording.ground_truth == PUBLISHED else "as recorded"
    return next((clock.placed for clock in recording.clocks[:1] if clock.placed), unplaced)


def _aborts(requests: Rows, arrival_us: Int64s) -> Int64s:
    """When clients gave up: a recorded failure holds on for its recorded duration."""
    failed = (requests["status"] != "ok").to_numpy()
    duration_us = requests["e2e_us"].fill_null(0).to_numpy()
    return np.where(failed, arrival_us + np.maximum(duration_us, 0), NEVER_US).astype(np.int64)


def _declared(kind: str, recording: Recording) -> DeclaredRequests:
    from blis_replay.replay.declared import declared_requests  # most replays have recorded requests

    return declared_requests(kind, recording)
