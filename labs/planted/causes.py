"""Causes of faults: what can be planted in a server, in a recording, in a simulator, each to any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from blis_replay.blis.latency.models import CorrectedModel, Latency, LatencyModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.rows import Rows, rows_of
from blis_replay_labs.planted.experiment import SyntheticExperiment
from blis_replay_labs.planted.faults import (
    Cause,
    Recorded,
    Value,
    WrongSimulator,
    drawn,
    taken,
    with_requests,
    with_steps,
)
from blis_replay_labs.planted.frames import recording_of
from blis_replay_labs.planted.generate import generate

STEP_TIME, PRE_QUEUE, OUTPUT = "step time", "delay before the queue", "output processing"
# The step time, where all that a step costs is off by one factor.
PACE = "pace of steps"
ARGUMENTS = ("engine arguments",)


def _server(**engine: Any) -> Callable[[SyntheticExperiment], SyntheticExperiment]:
    return lambda spec: replace(spec, engine=replace(spec.engine, **engine))


def argument(name: str, real: Value, told: Value, *also: str) -> Cause:
    """A server that runs with another argument than the recording says."""
    size = f"{_said(real)}, {'not told' if told is None else f'told as {_said(told)}'}"
    return Cause(name, size, (name, *ARGUMENTS, *also), server=_server(**{name: real}), told={name: told})


def _said(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def blocks(real: int, told: int | None) -> Cause:
    return replace(argument("num_gpu_blocks", real, told, "KV blocks"), name="KV blocks")


def scheduling(asynchronous: bool) -> Cause:
    cause = argument("async_scheduling", asynchronous, not asynchronous, "scheduling mode")
    return replace(cause, name="scheduling mode")


def cache(on: bool) -> Cause:
    return Cause(
        "prefix cache",
        f"{'on' if on else 'off'} at the server, told as {'off' if on else 'on'}",
        ("prefix cache",),
        ("prefix_cache",),
        server=lambda spec: replace(spec, prefix_caching=on),
        told={"enable_prefix_caching": not on},
    )


def entries(changed: Callable[[ModelEntry], ModelEntry]) -> Callable[[WrongSimulator], WrongSimulator]:
    def simulator(wrong: WrongSimulator) -> WrongSimulator:
        release: CoefficientRelease = wrong.release
        models = tuple(changed(entry) for entry in release.models)
        return replace(wrong, release=replace(release, sha256=f"{release.sha256} changed", models=models))

    return simulator


def linear(latency: Latency) -> LatencyModel:
    if not isinstance(latency, LatencyModel):
        raise TypeError("the planted servers follow a line")
    return latency


def _times(**factor: float) -> Callable[[WrongSimulator], WrongSimulator]:
    def changed(entry: ModelEntry) -> ModelEntry:
        line = linear(entry.latency)
        costs = {f"{name}_ns": round(getattr(line, f"{name}_ns") * by) for name, by in factor.items()}
        return replace(entry, latency=replace(line, **costs))

    return entries(changed)


def line(**factor: float) -> Cause:
    """Costs of a step that the simulator has wrong by a factor; one factor of all of them is a pace."""
    size = ", ".join(f"{name.replace('_', ' ')} x {by:g}" for name, by in factor.items())
    blamed = (STEP_TIME, PACE) if len(factor) == 3 and len(set(factor.values())) == 1 else (STEP_TIME,)
    return Cause("step time", size, blamed, simulator=_times(**factor))


_COSTS = ("intercept", "per_prefill_token", "per_decode_token", "per_context_token", "per_1000_attended")


def every_step(by: float) -> Cause:
    """Steps that all take so many times as long in the simulator."""
    return Cause("step time", f"every step x {by:g}", (STEP_TIME, PACE), simulator=_times(**dict.fromkeys(_COSTS, by)))


def delay(blamed: str, **more_us: float) -> Cause:
    """Delays that the simulator has too long by so much; too short below 0."""

    def changed(entry: ModelEntry) -> ModelEntry:
        longer = {name: getattr(entry.lifecycle, name) + us for name, us in more_us.items()}
        return replace(entry, lifecycle=replace(entry.lifecycle, **longer))

    size = ", ".join(f"{name.removesuffix('_us').replace('_', ' ')} {us / 1000:+g} ms" for name, us in more_us.items())
    return Cause(blamed, size, (blamed,), simulator=entries(changed))


def mode(name: str, text: str, *blamed: str) -> Cause:
    """A replay that was asked to be wrong."""

    def simulator(wrong: WrongSimulator) -> WrongSimulator:
        return replace(wrong, replay=text if wrong.replay == "exact" else f"{wrong.replay},{text}")

    return Cause(name, text, blamed or (name,), simulator=simulator)


def missing(share: float) -> Cause:
    def lost(recorded: Recorded) -> Recorded:
        n = recorded.recording.requests.height
        return taken(recorded, np.flatnonzero(~drawn(n, share)))

    checks = ("completeness", "littles_law", "sampling", "server_metrics")
    return Cause("missing requests", f"{100 * share:g} %", ("missing requests",), checks, instruments=lost)


def cut_off(share: float) -> Cause:
    def cut(recorded: Recorded) -> Recorded:
        return taken(recorded, np.arange(round((1 - share) * recorded.recording.requests.height)))

    return Cause(
        "end of the recording missing", f"{100 * share:g} %", ("missing requests",), ("completeness",), instruments=cut
    )


def missing_between(every_us: int, lost_us: int) -> Cause:
    """Requests of another client, which came for a while every so often, and of which nothing was recorded."""

    def lost(recorded: Recorded) -> Recorded:
        sent_us = recorded.recording.requests["arrival_us"].to_numpy()
        return taken(recorded, np.flatnonzero(sent_us % every_us >= lost_us))

    checks = ("completeness", "littles_law", "sampling", "server_metrics")
    size = f"those of {lost_us / 1e6:g} s in every {every_us / 1e6:g}"
    return Cause("missing requests", size, ("missing requests",), checks, instruments=lost)


def every_other() -> Cause:
    """Half of the clients recorded, in turn."""

    def lost(recorded: Recorded) -> Recorded:
        return taken(recorded, np.arange(0, recorded.recording.requests.height, 2))

    checks = ("completeness", "littles_law", "sampling", "server_metrics")
    return Cause("missing requests", "every other one", ("missing requests",), checks, instruments=lost)


def twice(share: float) -> Cause:
    def repeated(recorded: Recorded) -> Recorded:
        n = recorded.recording.requests.height
        return taken(recorded, np.repeat(np.arange(n), 1 + drawn(n, share)))

    checks = ("completeness", "littles_law", "sampling")
    return Cause("requests recorded twice", f"{100 * share:g} %", ("repeated requests",), checks, instruments=repeated)


def foreign_steps() -> Cause:
    def swapped(recorded: Recorded) -> Recorded:
        if recorded.truth is None:
            raise TypeError("only a synthetic server serves another load")
        spec = recorded.truth.spec
        other = generate(replace(spec, seed=spec.seed + 1, stages=tuple(reversed(spec.stages))))
        return replace(recorded, recording=replace(recorded.recording, steps=recording_of(other).steps))

    return Cause(
        "steps of another run", "all of them", ("step records",), ("littles_law", "reconstruction"), instruments=swapped
    )


def step_clock(ahead_us: int, drift: float = 0.0) -> Cause:
    def shifted(recorded: Recorded) -> Recorded:
        start_us = (pl.col("start_us") * (1 + drift)).cast(pl.Int64) + ahead_us
        return with_steps(recorded, start_us.alias("start_us"))

    size = f"{ahead_us / 1e6:+g} s" if ahead_us else f"{100 * drift:g} % too fast"
    return Cause("step clock", size, ("step clock",), ("clocks", "littles_law"), instruments=shifted)


STAMPS = (
    *("arrived_us", "handoff_us", "queued_us", "scheduled_us", "first_token_us", "first_response_us"),
    *("finished_us", "departed_us"),
)


def server_clock(ahead_us: int) -> Cause:
    """Journeys and steps on another clock than the client's."""

    def shifted(recorded: Recorded) -> Recorded:
        moved = with_steps(recorded, pl.col("start_us") + ahead_us)
        recording = moved.recording
        lifecycles = recording.lifecycles.frame().with_columns(pl.col(STAMPS) + ahead_us)
        events = recording.journey_events.frame().with_columns(pl.col("time_us") + ahead_us)
        changed = replace(recording, lifecycles=rows_of(lifecycles), journey_events=rows_of(events))
        return replace(moved, recording=changed)

    return Cause(
        "server clock", f"{ahead_us / 1e6:+g} s", ("server clock", "step clock"), ("clocks",), instruments=shifted
    )


def late_sends(late_us: int) -> Cause:
    """The client stamps a send when it is long on its way."""

    def late(recorded: Recorded) -> Recorded:
        less = [(pl.col(name) - late_us).alias(name) for name in ("ttft_us", "e2e_us")]
        return with_requests(recorded, pl.col("arrival_us") + late_us, *less)

    blamed = ("send stamps", PRE_QUEUE)
    return Cause("sends stamped late", f"{late_us / 1000:g} ms", blamed, ("clocks",), instruments=late)


def coarse_sends(grain_us: int) -> Cause:
    def coarse(recorded: Recorded) -> Recorded:
        return with_requests(recorded, pl.col("arrival_us") // grain_us * grain_us)

    blamed = ("arrivals", "send stamps")
    return Cause("coarse send stamps", f"{grain_us / 1e6:g} s", blamed, ("clocks", "stationarity"), instruments=coarse)


def slow_client(token_us: int) -> Cause:
    """A client that takes so long for each token that it reads: the server waits for nobody, the stamps are late."""

    def late(recorded: Recorded) -> Recorded:
        whole_us = pl.col("e2e_us") + token_us * pl.col("output_tokens")
        stamps = ((pl.col("ttft_us") + token_us).alias("ttft_us"), whole_us.alias("e2e_us"))
        return replace(with_requests(recorded, *stamps), stamped=False)

    return Cause("slow client", f"{token_us / 1000:g} ms a token", (OUTPUT,), instruments=late)


def polling_client(every_us: int) -> Cause:
    """A client that looks for tokens only so often."""

    def seen(recorded: Recorded) -> Recorded:
        stamps = [((pl.col(name) + every_us - 1) // every_us * every_us).alias(name) for name in ("ttft_us", "e2e_us")]
        return replace(with_requests(recorded, *stamps), stamped=False)

    blamed = (OUTPUT, PRE_QUEUE, "first-token stamps")
    return Cause("client that polls", f"every {every_us / 1000:g} ms", blamed, ("clocks",), instruments=seen)


def role_chunk(share: float) -> Cause:
    """The first event of a stream, which carries a role and no token, stamped as the first token."""

    def stamped(recorded: Recorded) -> Recorded:
        n = recorded.recording.requests.height
        early = drawn(n, share) if share < 1 else np.ones(n, np.bool_)
        at_once = 900 + np.arange(n) * 7919 % 200
        ttft_us = np.where(early, at_once, recorded.recording.requests["ttft_us"].to_numpy())
        return replace(with_requests(recorded, pl.Series("ttft_us", ttft_us)), stamped=False)  # type: ignore[arg-type]

    return Cause(
        "role chunk stamped as first token",
        f"TTFT 1 ms, {100 * share:g} %",
        ("first-token stamps",),
        ("token_events", "clocks"),
        instruments=stamped,
    )


def believed_ignore_eos() -> Cause:
    """Outputs that end where they end, and a client that says each had the length asked for."""

    def believed(recorded: Recorded) -> Recorded:
        source = pl.lit("max_tokens with ignore_eos").alias("output_tokens_source")
        length = pl.col("max_tokens").alias("output_tokens")
        changed = with_requests(recorded, length, source)
        recording = replace(changed.recording, ignore_eos=True)
        return replace(changed, recording=recording, stamped=False)

    return Cause(
        "ignore_eos believed", "all lengths 160", ("output lengths",), ("output_length",), instruments=believed
    )


def warm_cache() -> Cause:
    """A recording that begins with the second stage of a load: the prompts were served before, and not recorded."""

    def begun(recorded: Recorded) -> Recorded:
        later = np.flatnonzero(recorded.recording.requests["stage"].to_numpy() > 0)
        rest = taken(recorded, later)
        return replace(rest, recording=replace(rest.recording, stages=rest.recording.stages[1:]))

    size = "from the stage before"
    return Cause("warm prefix cache", size, ("prefix cache",), ("prefix_cache",), instruments=begun)


def short_prompts(share: float) -> Cause:
    def counted(recorded: Recorded) -> Recorded:
        shorter = (pl.col("prompt_tokens") * (1 - share)).round().cast(pl.Int64)
        changed = with_requests(recorded, shorter.alias("prompt_tokens"))
        return replace(changed, recording=replace(changed.recording, prefix=None))

    return Cause(
        "prompt lengths without the template",
        f"{100 * share:g} % short",
        ("prompt lengths", "prefix cache"),
        ("prefix_cache",),
        server=lambda spec: replace(spec, prefix_caching=False),
        told={"enable_prefix_caching": False},
        instruments=counted,
    )


def slower_run(by: float) -> Cause:
    """A machine that takes so many times as long for all it does, of a load that comes so much slower: all stamps."""
    lasting = {"requests": ("ttft_us", "e2e_us", "queue_us", "prefill_us", "decode_us"), "steps": ("duration_us",)}

    def slowed(recorded: Recorded) -> Recorded:
        recording = recorded.recording

        def stretched(rows: Rows, *names: str) -> Rows:
            return rows_of(rows.frame().with_columns((pl.col(names) * by).round().cast(pl.Int64)))

        changed = replace(
            recording,
            requests=stretched(recording.requests, "arrival_us", *lasting["requests"]),
            steps=stretched(recording.steps, "start_us", *lasting["steps"]),
            lifecycles=stretched(recording.lifecycles, *STAMPS),
            journey_events=stretched(recording.journey_events, "time_us"),
        )
        return replace(recorded, recording=changed)

    size = f"every stamp x {by:g}"
    return Cause("step time", size, (STEP_TIME, PACE), instruments=slowed)


def context_cost(ns: int) -> Cause:
    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        return replace(spec, latency=replace(linear(spec.latency), per_context_token_ns=ns))

    def simulator(entry: ModelEntry) -> ModelEntry:
        return replace(entry, latency=replace(linear(entry.latency), per_context_token_ns=0))

    size = f"{ns} ns per context token at the server, 0 simulated"
    return Cause("step time", size, (STEP_TIME,), server=server, simulator=entries(simulator))


def other_machine(intercept: float, prefill: float, decode: float) -> Cause:
    """Coefficients of another number of GPUs or of another model, each cost wrong by a factor of its own."""
    size = f"intercept x {intercept:g}, prefill token x {prefill:g}, decode x {decode:g}"
    factors = _times(intercept=intercept, per_prefill_token=prefill, per_decode_token=decode)
    return Cause("coefficients of another machine", size, (STEP_TIME, PACE), simulator=factors)


def step_ids_again(at_us: int) -> Cause:
    """A server that was started again, whose steps are numbered from 1 again."""

    def numbered(recorded: Recorded) -> Recorded:
        first = recorded.recording.steps.frame().filter(pl.col("start_us") >= at_us)["step_id"].min()
        after = pl.when(pl.col("start_us") >= at_us).then(pl.col("step_id") - first + 1)
        return with_steps(recorded, after.otherwise(pl.col("step_id")).alias("step_id"))

    checks = ("reconstruction", "step_clock", "clocks", "littles_law")
    return Cause("step ids begin again", f"at {at_us / 1e6:g} s", ("step records",), checks, instruments=numbered)


def stood_still(for_us: int) -> Cause:
    """A server that stands still once, 20 s after the start."""

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        from_us, more_us = np.array([0, 20_000_000, 20_060_000]), np.array([0, for_us, 0])
        return replace(spec, latency=CorrectedModel(linear(spec.latency), (0, 0, 0, 0), from_us, more_us))

    def simulator(entry: ModelEntry) -> ModelEntry:
        return entry if not isinstance(entry.latency, CorrectedModel) else replace(entry, latency=entry.latency.model)

    size = f"once, for {for_us / 1e6:g} s"
    return Cause("server stood still", size, (STEP_TIME,), server=server, simulator=entries(simulator))


def slow_window(extra_us: int) -> Cause:
    """Steps that take longer for ten seconds of the run."""

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        from_us, more_us = np.array([0, 10_000_000, 20_000_000]), np.array([0, extra_us, 0])
        corrected = CorrectedModel(linear(spec.latency), (0, 0, 0, 0), from_us, more_us)
        return replace(spec, latency=corrected)

    def simulator(entry: ModelEntry) -> ModelEntry:
        return entry if not isinstance(entry.latency, CorrectedModel) else replace(entry, latency=entry.latency.model)

    size = f"{extra_us / 1000:+g} ms per step at the server, from 10 to 20 s"
    return Cause("step time", size, (STEP_TIME,), server=server, simulator=entries(simulator))
