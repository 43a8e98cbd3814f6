"""Causes of faults that come from how a server is run and watched: other tenants, clocks, gateways, heat, gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl

from blis_replay.blis.latency.models import CorrectedModel
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.speculation import Speculation
from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.rows import rows_of
from blis_replay_labs.planted.causes import (
    ARGUMENTS,
    OUTPUT,
    PACE,
    PRE_QUEUE,
    STAMPS,
    STEP_TIME,
    argument,
    entries,
    line,
    linear,
)
from blis_replay_labs.planted.experiment import SyntheticExperiment
from blis_replay_labs.planted.faults import Cause, Recorded, taken, with_requests, with_steps

_COUNTS = ("completeness", "littles_law", "sampling", "server_metrics")


def unchunked() -> Cause:
    """Prompts that are computed whole or not at all."""

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        return replace(spec, engine=replace(spec.engine, enable_chunked_prefill=False, max_num_batched_tokens=4096))

    return replace(argument("enable_chunked_prefill", False, True), server=server)


def priorities() -> Cause:
    """Requests of three priorities, of which the recording knows nothing."""
    cause = argument("scheduling_policy", "priority", "fcfs", "scheduling decisions", "scheduling policy")
    return replace(cause, name="priority scheduling")


def ranks(real: int) -> Cause:
    """Several engines behind one address."""
    return argument("data_parallel_size", real, 1)


def speculation(accepted: float) -> Cause:
    """A server that drafts three tokens a step, told as one that drafts none."""
    drafts = Speculation(3, acceptance=(accepted, accepted**2, accepted**3))
    return Cause(
        "speculative decoding",
        f"on, {100 * accepted:g} % of first drafts accepted, told as off",
        ("speculative decoding", *ARGUMENTS),
        ("reconstruction", "step_cycle", "littles_law", "engine_arguments"),
        server=lambda spec: replace(spec, engine=replace(spec.engine, speculation=drafts)),
    )


def tensor_parallelism(real: int, told: int) -> Cause:
    """Coefficients for another number of GPUs than the server has."""
    cause = line(intercept=1.8, per_prefill_token=1.9, per_decode_token=1.7)
    return replace(cause, name="tensor parallelism", size=f"{real}, told as {told}", blamed=(STEP_TIME, PACE))


def other_revision() -> Cause:
    """Coefficients for another revision of engine and model: cheaper steps, dearer decodes, a longer way in."""

    def changed(entry: ModelEntry) -> ModelEntry:
        own = linear(entry.latency)
        intercept_ns, decode_ns = round(0.9 * own.intercept_ns), 2 * own.per_decode_token_ns
        delays = replace(entry.lifecycle, pre_queue_us=entry.lifecycle.pre_queue_us + 8_000)
        latency = replace(own, intercept_ns=intercept_ns, per_decode_token_ns=decode_ns)
        return replace(entry, latency=latency, lifecycle=delays)

    size = "intercept x 0.9, decode x 2, pre queue +8 ms"
    return Cause("release for another revision", size, (STEP_TIME, PRE_QUEUE), simulator=entries(changed))


def fp8_cache(real: int, told: int) -> Cause:
    """A KV cache of one byte a number, told as one of two: twice as many blocks fit, and reading one takes half."""

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        engine = replace(spec.engine, num_gpu_blocks=real)
        return replace(spec, engine=engine, latency=replace(linear(spec.latency), per_context_token_ns=400))

    def simulator(entry: ModelEntry) -> ModelEntry:
        return replace(entry, latency=replace(linear(entry.latency), per_context_token_ns=800))

    size = f"{real} blocks told as {told}, a context token 0.4 us for 0.8"
    named = ("KV blocks", STEP_TIME, *ARGUMENTS)
    told_of = {"num_gpu_blocks": told}
    return Cause("KV cache in fp8 told as bf16", size, named, server=server, told=told_of, simulator=entries(simulator))


def slower(from_us: tuple[int, ...], extra_us: int, name: str) -> Cause:
    """Steps that take longer from the first, third, ... of these times on, until the next one."""
    more_us = np.resize([extra_us, 0], len(from_us))

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        at_us = np.concatenate([[0], from_us])
        corrected = CorrectedModel(linear(spec.latency), (0, 0, 0, 0), at_us, np.concatenate([[0], more_us]))
        return replace(spec, latency=corrected)

    def simulator(entry: ModelEntry) -> ModelEntry:
        return entry if not isinstance(entry.latency, CorrectedModel) else replace(entry, latency=entry.latency.model)

    size = f"{extra_us / 1000:+g} ms per step in {100 * _share(from_us):.0f} % of the time"
    return Cause(name, size, (STEP_TIME, PACE), server=server, simulator=entries(simulator))


_RUN_US = 40_000_000


def _share(from_us: tuple[int, ...]) -> float:
    edges = np.append(from_us, _RUN_US) if len(from_us) % 2 else np.array(from_us)
    return float((edges[1::2] - edges[::2]).sum()) / _RUN_US


def throttled(extra_us: int) -> Cause:
    """A GPU that reaches its power limit after 25 s."""
    return slower((25_000_000,), extra_us, "power cap")


def other_process(extra_us: int) -> Cause:
    """Another process on the GPU, for 6 s."""
    return slower((12_000_000, 18_000_000), extra_us, "another process on the GPU")


def other_model(extra_us: int) -> Cause:
    """A second model on the GPU, which computes for two seconds in every five."""
    from_us = tuple(s * 1_000_000 for start in range(1, 40, 5) for s in (start, start + 2))
    return slower(from_us, extra_us, "another model on the GPU")


def second_client() -> Cause:
    """Half of the requests came from a client whose file is missing."""

    def lost(recorded: Recorded) -> Recorded:
        n = recorded.recording.requests.height
        return taken(recorded, np.flatnonzero(np.random.Generator(np.random.PCG64(5)).random(n) < 0.5))

    return Cause("second client missing", "half of the requests", ("missing requests",), _COUNTS, instruments=lost)


def timeouts_dropped(share: float) -> Cause:
    """A client that gave up on the slowest requests, and wrote nothing about them."""

    def lost(recorded: Recorded) -> Recorded:
        e2e_us = recorded.recording.requests["e2e_us"].to_numpy()
        return taken(recorded, np.flatnonzero(e2e_us <= np.quantile(e2e_us, 1 - share)))

    size = f"the slowest {100 * share:g} %"
    return Cause("aborted requests not written", size, ("missing requests",), _COUNTS, instruments=lost)


def begun_late(requests: int) -> Cause:
    """A recording that begins after so many requests, whose prompts are in the cache."""

    def begun(recorded: Recorded) -> Recorded:
        return taken(recorded, np.arange(requests, recorded.recording.requests.height))

    size = f"{requests} prompts served before"
    named = ("prefix cache", "missing requests")
    return Cause("partly warm prefix cache", size, named, ("prefix_cache", *_COUNTS), instruments=begun)


def buffering_proxy(every_us: int) -> Cause:
    """A proxy that passes the stream on in pieces: the first so long after the first token, the last with the end."""

    def held(recorded: Recorded) -> Recorded:
        ttft_us = pl.min_horizontal(pl.col("ttft_us") + every_us, pl.col("e2e_us"))
        return replace(with_requests(recorded, ttft_us.alias("ttft_us")), stamped=False)

    named = (OUTPUT, "first-token stamps")
    size = f"first chunk {every_us / 1000:g} ms late"
    return Cause("proxy that batches chunks", size, named, ("token_events", "clocks"), instruments=held)


def second_token_stamped() -> Cause:
    """A client that takes the second token for the first."""

    def late(recorded: Recorded) -> Recorded:
        gap_us = (pl.col("e2e_us") - pl.col("ttft_us")) / (pl.col("output_tokens") - 1).clip(1)
        ttft_us = (pl.col("ttft_us") + gap_us).round().cast(pl.Int64).alias("ttft_us")
        return replace(with_requests(recorded, ttft_us), stamped=False)

    named = (OUTPUT, "first-token stamps")
    return Cause("second token stamped as first", "all requests", named, ("token_events", "clocks"), instruments=late)


def wrong_unit() -> Cause:
    """TTFT in milliseconds, read as microseconds."""

    def thousandth(recorded: Recorded) -> Recorded:
        return replace(with_requests(recorded, (pl.col("ttft_us") // 1000).alias("ttft_us")), stamped=False)

    named, checks = ("first-token stamps",), ("token_events", "clocks")
    return Cause("TTFT in another unit", "a thousandth", named, checks, instruments=thousandth)


def _sent_earlier(recorded: Recorded, earlier_us: Int64s) -> Recorded:
    """The client sent each request so much earlier than the server had it; still in order of arrival."""
    sent_us = recorded.recording.requests["arrival_us"].to_numpy() - earlier_us
    order = np.argsort(sent_us, kind="stable")
    by = pl.Series("by", earlier_us, pl.Int64)
    longer = [(pl.col(name) + by).alias(name) for name in ("ttft_us", "e2e_us")]
    # Time begins with the first send.
    zero_us = int(sent_us.min())
    moved = with_requests(recorded, (pl.col("arrival_us") - by - zero_us).alias("arrival_us"), *longer)
    moved = _server_stamps(moved, lambda at_us: at_us - zero_us)
    return taken(moved, order) if (np.diff(order) < 0).any() else moved


def connecting(us: int) -> Cause:
    """A client that opens a connection for each request, and starts its clock before that."""

    def earlier(recorded: Recorded) -> Recorded:
        return _sent_earlier(recorded, np.full(recorded.recording.requests.height, us))

    named = (PRE_QUEUE, "send stamps")
    return Cause("time to connect", f"{us / 1000:g} ms", named, ("clocks",), instruments=earlier)


def slow_front_end(share: float, us: int) -> Cause:
    """An API server that holds some requests for a while before the engine has them."""

    def held(recorded: Recorded) -> Recorded:
        n = recorded.recording.requests.height
        late = np.random.Generator(np.random.PCG64(6)).random(n) < share
        late[0] = False
        return _sent_earlier(recorded, np.where(late, us, 0))

    size = f"{100 * share:g} % of requests {us / 1000:g} ms late"
    return Cause("front end that stalls", size, (PRE_QUEUE, "send stamps"), ("clocks",), instruments=held)


def gateway(every_us: int) -> Cause:
    """A gateway that passes requests on only so often."""

    def held(recorded: Recorded) -> Recorded:
        n = recorded.recording.requests.height
        waits_us = np.random.Generator(np.random.PCG64(7)).integers(0, every_us, n)
        waits_us[0] = 0
        return _sent_earlier(recorded, waits_us)

    size = f"up to {every_us / 1000:g} ms"
    return Cause("gateway that batches requests", size, (PRE_QUEUE, "send stamps"), ("clocks",), instruments=held)


def drifting_server(per_million: int) -> Cause:
    """Journeys and steps on a clock that runs fast."""
    faster = 1 + per_million / 1e6

    def drifted(recorded: Recorded) -> Recorded:
        return _server_stamps(recorded, lambda at_us: (at_us * faster).round().cast(pl.Int64))

    named, checks = ("server clock", "step clock"), ("clocks",)
    return Cause("server clock drifts", f"{per_million:+,} ppm", named, checks, instruments=drifted)


def stepped_server(at_us: int, by_us: int) -> Cause:
    """A server whose clock was set in the middle of the run."""

    def stepped(recorded: Recorded) -> Recorded:
        return _server_stamps(recorded, lambda us: us + pl.when(us >= at_us).then(by_us).otherwise(0))

    named, size = ("server clock", "step clock"), f"{by_us / 1e6:+g} s at {at_us / 1e6:g} s"
    return Cause("server clock is set", size, named, ("clocks", "step_clock"), instruments=stepped)


def stepped_client(at_us: int, by_us: int) -> Cause:
    """A client whose clock was set in the middle of the run: what was in flight seems to have taken longer."""

    def stepped(recorded: Recorded) -> Recorded:
        def late(stamp: pl.Expr) -> pl.Expr:
            return pl.when(stamp >= at_us).then(by_us).otherwise(0)

        sent = pl.col("arrival_us")
        longer = [(pl.col(name) + late(sent + pl.col(name)) - late(sent)).alias(name) for name in ("ttft_us", "e2e_us")]
        return replace(with_requests(recorded, sent + late(sent), *longer), stamped=False)

    named, size = ("send stamps", "client clock", "server clock"), f"{by_us / 1e6:+g} s at {at_us / 1e6:g} s"
    return Cause("client clock is set", size, named, ("clocks", "stationarity", "littles_law"), instruments=stepped)


def _server_stamps(recorded: Recorded, changed: Callable[[pl.Expr], pl.Expr]) -> Recorded:
    moved = with_steps(recorded, changed(pl.col("start_us")).alias("start_us"))
    recording = moved.recording
    lifecycles = recording.lifecycles.frame().with_columns(changed(pl.col(name)).alias(name) for name in STAMPS)
    events = recording.journey_events.frame().with_columns(changed(pl.col("time_us")).alias("time_us"))
    return replace(moved, recording=replace(recording, lifecycles=rows_of(lifecycles), journey_events=rows_of(events)))


def time_zone(hours: int) -> Cause:
    """A server that writes local time, and a client that writes UTC."""
    cause = stepped_server(-(2**60), hours * 3_600_000_000)
    return replace(cause, name="server in another time zone", size=f"{hours:+d} h")


def lost_steps(from_us: int, until_us: int) -> Cause:
    """A recorder that lost the steps of a few seconds."""

    def lost(recorded: Recorded) -> Recorded:
        kept = recorded.recording.steps.frame().filter(~pl.col("start_us").is_between(from_us, until_us))
        return replace(recorded, recording=replace(recorded.recording, steps=rows_of(kept)))

    size = f"from {from_us / 1e6:g} to {until_us / 1e6:g} s"
    checks = ("sampling", "step_clock", "littles_law", "reconstruction", "recorder")
    return Cause("steps lost", size, ("step records",), checks, instruments=lost)


def other_tokenizer(factor: float) -> Cause:
    """Prompts counted by another tokenizer."""

    def counted(recorded: Recorded) -> Recorded:
        longer = (pl.col("prompt_tokens") * factor).round().cast(pl.Int64)
        changed = with_requests(recorded, longer.alias("prompt_tokens"))
        return replace(changed, recording=replace(changed.recording, prefix=None))

    return Cause(
        "prompts counted by another tokenizer",
        f"x {factor:g}",
        ("prompt lengths", "prefix cache"),
        ("prefix_cache", "completeness", "reconstruction"),
        server=lambda spec: replace(spec, prefix_caching=False),
        told={"enable_prefix_caching": False},
        instruments=counted,
    )
