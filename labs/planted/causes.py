"""Causes of faults, each to any size: in a server, in what is stated of it, in its recording, in a simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.blis.latency.models import CorrectedModel, Latency, LatencyModel
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.speculation import Speculation
from blis_replay.ingest.rows import rows_of
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
# The step time, where all costs of a step are off by one factor.
PACE = "pace of steps"
ARGUMENTS = ("engine arguments",)

# Instrument checks that compare counts of client and server, and those that look at tokens of a request.
_COUNT_CHECKS = ("ledger", "completeness", "server_metrics")
_TOKEN_CHECKS = ("token_events", "clocks")
_MISSING = ("missing requests",)

# -- The server has another engine than the recording states ------------------------------------


def argument(name: str, real: Value, stated: Value, *also: str) -> Cause:
    """An engine argument; ``also``: components that are rightly blamed besides."""

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        engine: dict[str, Any] = {name: real}
        return replace(spec, engine=replace(spec.engine, **engine))

    size = f"{_written(real)}, {'not told' if stated is None else f'told as {_written(stated)}'}"
    return Cause(name, size, (name, *ARGUMENTS, *also), server=server, stated={name: stated})


def _written(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def blocks(real: int, stated: int | None) -> Cause:
    return replace(argument("num_gpu_blocks", real, stated, "KV blocks"), name="KV blocks")


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
        stated={"enable_prefix_caching": not on},
    )


def unchunked() -> Cause:
    """Prompts are computed whole or not at all."""

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        return replace(spec, engine=replace(spec.engine, enable_chunked_prefill=False, max_num_batched_tokens=4096))

    return replace(argument("enable_chunked_prefill", False, True), server=server)


def priorities() -> Cause:
    """Requests have three priorities, which are not recorded."""
    cause = argument("scheduling_policy", "priority", "fcfs", "scheduling decisions", "scheduling policy")
    return replace(cause, name="priority scheduling")


def speculation(accepted: float) -> Cause:
    """The server drafts three tokens per step."""
    drafts = Speculation(3, acceptance=(accepted, accepted**2, accepted**3))
    return Cause(
        "speculative decoding",
        f"on, {100 * accepted:g} % of first drafts accepted, told as off",
        ("speculative decoding", *ARGUMENTS),
        ("ledger", "step_cycle", "engine_arguments"),
        server=lambda spec: replace(spec, engine=replace(spec.engine, speculation=drafts)),
    )


# -- The simulator has other coefficients than the server ---------------------------------------


def _in_entries(changed: Callable[[ModelEntry], ModelEntry]) -> Callable[[WrongSimulator], WrongSimulator]:
    def simulator(wrong: WrongSimulator) -> WrongSimulator:
        release = wrong.release
        models = tuple(changed(entry) for entry in release.models)
        return replace(wrong, release=replace(release, sha256=f"{release.sha256} changed", models=models))

    return simulator


def _linear(latency: Latency) -> LatencyModel:
    if not isinstance(latency, LatencyModel):
        raise TypeError("the planted servers follow a line")
    return latency


def _context_cost(ns: int) -> Callable[[ModelEntry], ModelEntry]:
    return lambda entry: replace(entry, latency=replace(_linear(entry.latency), per_context_token_ns=ns))


def _scaled(**factor: float) -> Callable[[WrongSimulator], WrongSimulator]:
    def changed(entry: ModelEntry) -> ModelEntry:
        model = _linear(entry.latency)
        costs = {f"{name}_ns": round(getattr(model, f"{name}_ns") * by) for name, by in factor.items()}
        return replace(entry, latency=replace(model, **costs))

    return _in_entries(changed)


def line(**factor: float) -> Cause:
    """Costs of a step are scaled; one factor of all three is a pace."""
    size = ", ".join(f"{name.replace('_', ' ')} x {by:g}" for name, by in factor.items())
    blamed = (STEP_TIME, PACE) if len(factor) == 3 and len(set(factor.values())) == 1 else (STEP_TIME,)
    return Cause("step time", size, blamed, simulator=_scaled(**factor))


_COSTS = ("intercept", "per_prefill_token", "per_decode_token", "per_context_token", "per_1000_attended")


def every_step(by: float) -> Cause:
    scaled = _scaled(**dict.fromkeys(_COSTS, by))
    return Cause("step time", f"every step x {by:g}", (STEP_TIME, PACE), simulator=scaled)


def other_machine(intercept: float, prefill: float, decode: float) -> Cause:
    """Coefficients of another number of GPUs or of another model."""
    size = f"intercept x {intercept:g}, prefill token x {prefill:g}, decode x {decode:g}"
    scaled = _scaled(intercept=intercept, per_prefill_token=prefill, per_decode_token=decode)
    return Cause("coefficients of another machine", size, (STEP_TIME, PACE), simulator=scaled)


def tensor_parallelism(real: int, stated: int) -> Cause:
    """Coefficients of another number of GPUs."""
    return replace(other_machine(1.8, 1.9, 1.7), name="tensor parallelism", size=f"{real}, told as {stated}")


def other_revision() -> Cause:
    """Cheaper steps, dearer decodes, and a longer delay before the queue."""

    def changed(entry: ModelEntry) -> ModelEntry:
        own = _linear(entry.latency)
        intercept_ns, decode_ns = round(0.9 * own.intercept_ns), 2 * own.per_decode_token_ns
        delays = replace(entry.lifecycle, pre_queue_us=entry.lifecycle.pre_queue_us + 8_000)
        latency = replace(own, intercept_ns=intercept_ns, per_decode_token_ns=decode_ns)
        return replace(entry, latency=latency, lifecycle=delays)

    size = "intercept x 0.9, decode x 2, pre queue +8 ms"
    return Cause("release for another revision", size, (STEP_TIME, PRE_QUEUE), simulator=_in_entries(changed))


def delay(blamed: str, **more_us: float) -> Cause:
    """Delays are longer in the simulator; shorter below 0."""

    def changed(entry: ModelEntry) -> ModelEntry:
        longer = {name: getattr(entry.lifecycle, name) + us for name, us in more_us.items()}
        return replace(entry, lifecycle=replace(entry.lifecycle, **longer))

    size = ", ".join(f"{name.removesuffix('_us').replace('_', ' ')} {us / 1000:+g} ms" for name, us in more_us.items())
    return Cause(blamed, size, (blamed,), simulator=_in_entries(changed))


def context_cost(ns: int) -> Cause:
    return Cause(
        "step time",
        f"{ns} ns per context token at the server, 0 simulated",
        (STEP_TIME,),
        server=lambda spec: replace(spec, latency=replace(_linear(spec.latency), per_context_token_ns=ns)),
        simulator=_in_entries(_context_cost(0)),
    )


def fp8_cache(real: int, stated: int) -> Cause:
    """One byte per number in the KV cache, stated as two: twice the blocks fit, and reading one takes half the time."""

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        engine = replace(spec.engine, num_gpu_blocks=real)
        return replace(spec, engine=engine, latency=replace(_linear(spec.latency), per_context_token_ns=400))

    return Cause(
        "KV cache in fp8 told as bf16",
        f"{real} blocks told as {stated}, a context token 0.4 us for 0.8",
        ("KV blocks", STEP_TIME, *ARGUMENTS),
        server=server,
        stated={"num_gpu_blocks": stated},
        simulator=_in_entries(_context_cost(800)),
    )


def mode(name: str, text: str, *blamed: str) -> Cause:
    """The replay is asked to be wrong."""

    def simulator(wrong: WrongSimulator) -> WrongSimulator:
        return replace(wrong, replay=text if wrong.replay == "exact" else f"{wrong.replay},{text}")

    return Cause(name, text, blamed or (name,), simulator=simulator)


# -- Steps of the server take longer for a while -------------------------------------------------

_RUN_S = 40
# Spans of the run in which steps take longer, s from its start: the GPU reaches its power limit; another process has it
# for a while; another model has it for two seconds in every five.
_DISTURBED_S = {
    "power cap": ((25, _RUN_S),),
    "another process on the GPU": ((12, 18),),
    "another model on the GPU": tuple((start, start + 2) for start in range(1, _RUN_S, 5)),
}


def _slower(name: str, size: str, spans_s: Sequence[tuple[float, float]], extra_us: int, *also_blamed: str) -> Cause:
    """Each step takes ``extra_us`` longer within these spans."""
    from_us = [0, *(round(1e6 * second) for span in spans_s for second in span if second < _RUN_S)]
    more_us = [0, *np.resize([extra_us, 0], len(from_us) - 1).tolist()]

    def server(spec: SyntheticExperiment) -> SyntheticExperiment:
        latency = CorrectedModel(_linear(spec.latency), (0, 0, 0, 0), np.array(from_us), np.array(more_us))
        return replace(spec, latency=latency)

    def changed(entry: ModelEntry) -> ModelEntry:
        return entry if not isinstance(entry.latency, CorrectedModel) else replace(entry, latency=entry.latency.model)

    return Cause(name, size, (STEP_TIME, *also_blamed), server=server, simulator=_in_entries(changed))


def slow_window(extra_us: int) -> Cause:
    size = f"{extra_us / 1000:+g} ms per step at the server, from 10 to 20 s"
    return _slower("step time", size, [(10, 20)], extra_us)


def stood_still(for_us: int, at_s: int = 20) -> Cause:
    """The server stands still once."""
    size = f"once, for {for_us / 1e6:g} s at {at_s} s"
    return _slower("server stood still", size, [(at_s, at_s + 0.06)], for_us, "standstill", "cold start")


def disturbed(name: str, extra_us: int) -> Cause:
    """``name``: a key of ``_DISTURBED_S``."""
    spans_s = _DISTURBED_S[name]
    share = sum(until - start for start, until in spans_s) / _RUN_S
    size = f"{extra_us / 1000:+g} ms per step in {100 * share:.0f} % of the time"
    return _slower(name, size, spans_s, extra_us, PACE)


# -- Requests are missing, or recorded twice -----------------------------------------------------


def _recorded_requests(
    name: str,
    size: str,
    chosen: Callable[[pl.DataFrame], Int64s | Bools],
    checks: tuple[str, ...] = _COUNT_CHECKS,
    blamed: tuple[str, ...] = _MISSING,
) -> Cause:
    """``chosen``: of the true requests, their places in the recording, or whether each is in it."""

    def instruments(recorded: Recorded) -> Recorded:
        true = recorded.recording.requests.frame()
        return taken(recorded, np.arange(true.height)[chosen(true)])

    return Cause(name, size, blamed, checks, instruments=instruments)


def missing(share: float) -> Cause:
    size = f"{100 * share:g} %"
    return _recorded_requests("missing requests", size, lambda true: ~drawn(true.height, share))


def cut_off(share: float) -> Cause:
    name, size = "end of the recording missing", f"{100 * share:g} %"
    return _recorded_requests(name, size, lambda true: np.arange(round((1 - share) * true.height)), ("ledger",))


def missing_between(every_us: int, lost_us: int) -> Cause:
    """Another client, which was not recorded, sends for a while at regular times."""
    size = f"those of {lost_us / 1e6:g} s in every {every_us / 1e6:g}"
    return _recorded_requests(
        "missing requests", size, lambda true: true["arrival_us"].to_numpy() % every_us >= lost_us
    )


def every_other() -> Cause:
    """Half of the clients recorded, in turn."""
    return _recorded_requests("missing requests", "every other one", lambda true: np.arange(0, true.height, 2))


def twice(share: float) -> Cause:
    return _recorded_requests(
        "requests recorded twice",
        f"{100 * share:g} %",
        lambda true: np.repeat(np.arange(true.height), 1 + drawn(true.height, share)),
        ("completeness", "ledger"),
        ("repeated requests",),
    )


def second_client() -> Cause:
    """Half of the requests came from a client whose file is missing."""
    return _recorded_requests(
        "second client missing", "half of the requests", lambda true: _random(5).random(true.height) < 0.5
    )


def timeouts_dropped(share: float) -> Cause:
    """The client gave up on the slowest requests, and wrote nothing about them."""

    def chosen(true: pl.DataFrame) -> Bools:
        e2e_us = true["e2e_us"].to_numpy()
        in_time: Bools = e2e_us <= np.quantile(e2e_us, 1 - share)
        return in_time

    return _recorded_requests("aborted requests not written", f"the slowest {100 * share:g} %", chosen)


def begun_late(requests: int) -> Cause:
    """The prompts of the first requests are in the cache."""
    return _recorded_requests(
        "partly warm prefix cache",
        f"{requests} prompts served before",
        lambda true: np.arange(requests, true.height),
        ("prefix_cache", *_COUNT_CHECKS),
        ("prefix cache", *_MISSING),
    )


def warm_cache() -> Cause:
    """The recording begins with the second stage of a load: the prompts were served before."""

    def begun(recorded: Recorded) -> Recorded:
        later = np.flatnonzero(recorded.recording.requests["stage"].to_numpy() > 0)
        rest = taken(recorded, later)
        return replace(rest, recording=replace(rest.recording, stages=rest.recording.stages[1:]))

    name, size = "warm prefix cache", "from the stage before"
    return Cause(name, size, ("prefix cache",), ("prefix_cache",), instruments=begun)


def _random(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


# -- The client stamps or counts something else --------------------------------------------------


def _client(
    name: str, size: str, blamed: tuple[str, ...], checks: tuple[str, ...], *columns: pl.Expr, tokens: bool = False
) -> Cause:
    """``columns``: of the requests.  ``tokens``: the stamps of tokens are still the true ones."""

    def instruments(recorded: Recorded) -> Recorded:
        changed = with_requests(recorded, *columns)
        return changed if tokens else replace(changed, stamped=False)

    return Cause(name, size, blamed, checks, instruments=instruments)


_SENT, _TTFT, _E2E = map(pl.col, ("arrival_us", "ttft_us", "e2e_us"))


def late_sends(late_us: int) -> Cause:
    """A send is stamped when the request is long on its way."""
    columns = (_SENT + late_us, _TTFT - late_us, _E2E - late_us)
    blamed = ("send stamps", PRE_QUEUE)
    return _client("sends stamped late", f"{late_us / 1000:g} ms", blamed, ("clocks",), *columns, tokens=True)


def coarse_sends(grain_us: int) -> Cause:
    blamed, checks = ("arrivals", "send stamps"), ("clocks", "stationarity")
    coarse = _SENT // grain_us * grain_us
    return _client("coarse send stamps", f"{grain_us / 1e6:g} s", blamed, checks, coarse, tokens=True)


def slow_client(token_us: int) -> Cause:
    """The client takes so long per token that it reads, and the server does not wait."""
    stamps = (_TTFT + token_us, _E2E + token_us * pl.col("output_tokens"))
    return _client("slow client", f"{token_us / 1000:g} ms a token", (OUTPUT,), (), *stamps)


def polling_client(every_us: int) -> Cause:
    stamps = [(stamp + every_us - 1) // every_us * every_us for stamp in (_TTFT, _E2E)]
    blamed = (OUTPUT, PRE_QUEUE, "first-token stamps")
    return _client("client that polls", f"every {every_us / 1000:g} ms", blamed, ("clocks",), *stamps)


def role_chunk(share: float) -> Cause:
    """The first event of a stream, which carries a role and no token, is stamped as the first token."""

    def stamped(recorded: Recorded) -> Recorded:
        n = recorded.recording.requests.height
        early = drawn(n, share) if share < 1 else np.ones(n, np.bool_)
        at_once = 900 + np.arange(n) * 7919 % 200
        ttft_us = np.where(early, at_once, recorded.recording.requests["ttft_us"].to_numpy())
        return replace(with_requests(recorded, pl.lit(pl.Series("ttft_us", ttft_us))), stamped=False)

    name, size = "role chunk stamped as first token", f"TTFT 1 ms, {100 * share:g} %"
    return Cause(name, size, ("first-token stamps",), _TOKEN_CHECKS, instruments=stamped)


def buffering_proxy(every_us: int) -> Cause:
    """A proxy passes the stream on in chunks: the first so long after the first token, the last with the end."""
    blamed, size = (OUTPUT, "first-token stamps"), f"first chunk {every_us / 1000:g} ms late"
    late = pl.min_horizontal(_TTFT + every_us, _E2E).alias("ttft_us")
    return _client("proxy that batches chunks", size, blamed, _TOKEN_CHECKS, late)


def later_token_stamped(place: int = 2) -> Cause:
    gap_us = (_E2E - _TTFT) / (pl.col("output_tokens") - 1).clip(1)
    late = pl.min_horizontal(_TTFT + (place - 1) * gap_us, _E2E).round().cast(pl.Int64).alias("ttft_us")
    blamed = (OUTPUT, "first-token stamps")
    name = "second token stamped as first" if place == 2 else f"token {place} stamped as first"
    return _client(name, "all requests", blamed, _TOKEN_CHECKS, late)


def think_time(us: int) -> Cause:
    """The client's clock runs on until it is ready for its next request."""
    return _client("think time in E2E", f"{us / 1e6:g} s", (OUTPUT,), ("clocks", "server_metrics"), _E2E + us)


def wrong_unit() -> Cause:
    """TTFT in milliseconds, read as microseconds."""
    return _client("TTFT in another unit", "a thousandth", ("first-token stamps",), _TOKEN_CHECKS, _TTFT // 1000)


def stepped_client(at_us: int, by_us: int) -> Cause:
    """The client's clock is set in the middle of the run: what was in flight seems to have taken longer."""

    def late(stamp: pl.Expr) -> pl.Expr:
        return pl.when(stamp >= at_us).then(by_us).otherwise(0)

    columns = [_SENT + late(_SENT), *(stamp + late(_SENT + stamp) - late(_SENT) for stamp in (_TTFT, _E2E))]
    blamed, size = ("send stamps", "client clock", "server clock"), f"{by_us / 1e6:+g} s at {at_us / 1e6:g} s"
    return _client("client clock is set", size, blamed, ("clocks", "stationarity", "ledger"), *columns)


def believed_ignore_eos() -> Cause:
    """Outputs end where they end, and the client says that each had the length asked for."""

    def believed(recorded: Recorded) -> Recorded:
        source = pl.lit("max_tokens with ignore_eos").alias("output_tokens_source")
        changed = with_requests(recorded, pl.col("max_tokens").alias("output_tokens"), source)
        return replace(changed, recording=replace(changed.recording, ignore_eos=True), stamped=False)

    name, size = "ignore_eos believed", "all lengths 160"
    return Cause(name, size, ("output lengths",), ("ledger", "output_length"), instruments=believed)


def _prompts_counted(name: str, size: str, factor: float, checks: tuple[str, ...]) -> Cause:
    def counted(recorded: Recorded) -> Recorded:
        changed = with_requests(recorded, (pl.col("prompt_tokens") * factor).round().cast(pl.Int64))
        return replace(changed, recording=replace(changed.recording, prefix=None))

    return Cause(
        *(name, size, ("prompt lengths", "prefix cache"), checks),
        server=lambda spec: replace(spec, prefix_caching=False),
        stated={"enable_prefix_caching": False},
        instruments=counted,
    )


def short_prompts(share: float) -> Cause:
    size = f"{100 * share:g} % short"
    return _prompts_counted("prompt lengths without the template", size, 1 - share, ("ledger",))


def other_tokenizer(factor: float) -> Cause:
    checks = ("ledger",)
    return _prompts_counted("prompts counted by another tokenizer", f"x {factor:g}", factor, checks)


def _sent_earlier(name: str, size: str, earlier_us: Callable[[int], Int64s]) -> Cause:
    """The client sent each request before the server had it; the order stays that of arrival.

    ``earlier_us``: from the number of requests, int64[n], the difference for each.
    """

    def instruments(recorded: Recorded) -> Recorded:
        requests = recorded.recording.requests
        by_us = earlier_us(requests.height)
        sent_us = requests["arrival_us"].to_numpy() - by_us
        order = np.argsort(sent_us, kind="stable")
        by, zero_us = pl.lit(pl.Series("by", by_us, pl.Int64)), int(sent_us.min())  # time begins with the first send
        moved = with_requests(recorded, _SENT - by - zero_us, _TTFT + by, _E2E + by)
        moved = _with_server_stamps(moved, lambda at_us: at_us - zero_us)
        return taken(moved, order) if (np.diff(order) < 0).any() else moved

    return Cause(name, size, (PRE_QUEUE, "send stamps"), ("clocks",), instruments=instruments)


def connecting(us: int) -> Cause:
    """The client opens a connection per request, and starts its clock before that."""
    return _sent_earlier("time to connect", f"{us / 1000:g} ms", lambda n: np.full(n, us))


def _but_the_first(waits_us: Int64s) -> Int64s:
    waits_us[0] = 0
    return waits_us


def slow_front_end(share: float, us: int) -> Cause:
    """The API server holds some requests for a while before the engine has them."""
    size = f"{100 * share:g} % of requests {us / 1000:g} ms late"
    return _sent_earlier(
        "front end that stalls", size, lambda n: _but_the_first(np.where(_random(6).random(n) < share, us, 0))
    )


def gateway(every_us: int) -> Cause:
    """A gateway passes requests on only so often."""
    return _sent_earlier(
        "gateway that batches requests",
        f"up to {every_us / 1000:g} ms",
        lambda n: _but_the_first(_random(7).integers(0, every_us, n)),
    )


# -- The server's clock and records --------------------------------------------------------------

_STAMPS = (
    *("arrived_us", "queued_us", "scheduled_us", "first_token_us", "first_response_us"),
    *("finished_us", "departed_us"),
)


def _with_server_stamps(recorded: Recorded, changed: Callable[[pl.Expr], pl.Expr]) -> Recorded:
    moved = with_steps(recorded, changed(pl.col("start_us")).alias("start_us"))
    recording = moved.recording
    lifecycles = recording.lifecycles.frame().with_columns(changed(pl.col(name)).alias(name) for name in _STAMPS)
    events = recording.journey_events.frame().with_columns(changed(pl.col("time_us")).alias("time_us"))
    return replace(moved, recording=replace(recording, lifecycles=rows_of(lifecycles), journey_events=rows_of(events)))


def _server_clock(
    name: str, size: str, changed: Callable[[pl.Expr], pl.Expr], checks: tuple[str, ...] = ("clocks",)
) -> Cause:
    """Journeys and steps have other stamps."""
    blamed = ("server clock", "step clock")
    return Cause(name, size, blamed, checks, instruments=lambda recorded: _with_server_stamps(recorded, changed))


def server_clock(ahead_us: int) -> Cause:
    return _server_clock("server clock", f"{ahead_us / 1e6:+g} s", lambda us: us + ahead_us)


def drifting_server(per_million: int) -> Cause:
    faster = 1 + per_million / 1e6
    size = f"{per_million:+,} ppm"
    return _server_clock("server clock drifts", size, lambda us: (us * faster).round().cast(pl.Int64))


def stepped_server(at_us: int, by_us: int) -> Cause:
    """The server's clock is set in the middle of the run."""
    size = f"{by_us / 1e6:+g} s at {at_us / 1e6:g} s"
    return _server_clock(
        "server clock is set",
        size,
        lambda us: us + pl.when(us >= at_us).then(by_us).otherwise(0),
        ("clocks", "step_clock"),
    )


def time_zone(hours: int) -> Cause:
    """The server writes local time, and the client UTC."""
    cause = stepped_server(-(2**60), hours * 3_600_000_000)
    return replace(cause, name="server in another time zone", size=f"{hours:+d} h")


def step_clock(ahead_us: int, drift: float = 0.0) -> Cause:
    size = f"{ahead_us / 1e6:+g} s" if ahead_us else f"{100 * drift:g} % too fast"
    start_us = (pl.col("start_us") * (1 + drift)).cast(pl.Int64) + ahead_us
    checks = ("clocks", "ledger")
    return Cause(
        "step clock", size, ("step clock",), checks, instruments=lambda recorded: with_steps(recorded, start_us)
    )


def foreign_steps() -> Cause:
    def swapped(recorded: Recorded) -> Recorded:
        if recorded.truth is None:
            raise TypeError("only a synthetic server serves another load")
        spec = recorded.truth.spec
        other = generate(replace(spec, seed=spec.seed + 1, stages=tuple(reversed(spec.stages))))
        return replace(recorded, recording=replace(recorded.recording, steps=recording_of(other).steps))

    checks = ("ledger",)
    return Cause("steps of another run", "all of them", ("step records",), checks, instruments=swapped)


def lost_steps(from_us: int, until_us: int) -> Cause:
    """The recorder loses the steps of a few seconds."""

    def lost(recorded: Recorded) -> Recorded:
        kept = recorded.recording.steps.frame().filter(~pl.col("start_us").is_between(from_us, until_us))
        return replace(recorded, recording=replace(recorded.recording, steps=rows_of(kept)))

    size = f"from {from_us / 1e6:g} to {until_us / 1e6:g} s"
    checks = ("ledger", "step_clock", "recorder")
    return Cause("steps lost", size, ("step records",), checks, instruments=lost)


def step_ids_again(at_us: int) -> Cause:
    """The server is started again, and numbers its steps from 1 again."""

    def numbered(recorded: Recorded) -> Recorded:
        first = recorded.recording.steps.frame().filter(pl.col("start_us") >= at_us)["step_id"].min()
        after = pl.when(pl.col("start_us") >= at_us).then(pl.col("step_id") - first + 1)
        return with_steps(recorded, after.otherwise(pl.col("step_id")).alias("step_id"))

    checks = ("ledger", "step_clock", "clocks")
    return Cause("step ids begin again", f"at {at_us / 1e6:g} s", ("step records",), checks, instruments=numbered)


def warped(name: str, size: str, blamed: tuple[str, ...], warp: Callable[[pl.Expr], pl.Expr]) -> Cause:
    """The whole machine, its clients too, runs on another time: ``warp`` of every stamp.  Counters are left out."""

    def instruments(recorded: Recorded) -> Recorded:
        recording = recorded.recording
        end = _SENT + _E2E
        # Where the parts of a request begin, from the last to the first.
        begins = [end, *(end - pl.sum_horizontal(parts) for parts in (["decode_us"], ["decode_us", "prefill_us"]))]
        begins.append(begins[-1] - pl.col("queue_us"))
        parts = [
            (warp(begins[i]) - warp(begins[i + 1])).alias(part)
            for i, part in enumerate(("decode_us", "prefill_us", "queue_us"))
        ]
        sent = warp(_SENT)
        latencies = [(warp(_SENT + us) - sent).alias(us.meta.output_name()) for us in (_TTFT, _E2E)]
        start = pl.col("start_us")
        moved = with_steps(recorded, (warp(start + pl.col("duration_us")) - warp(start)).alias("duration_us"))
        moved = _with_server_stamps(with_requests(moved, sent, *latencies, *parts), warp)
        placed = rows_of(recording.iterations.frame().with_columns(warp(pl.col("start_us"))))
        counted = recording.aggregates.filter(~pl.col("metric").str.starts_with("server_"))
        return replace(moved, recording=replace(moved.recording, iterations=placed, aggregates=counted), stamped=False)

    return Cause(name, size, blamed, instruments=instruments)


def slower_run(by: float) -> Cause:
    """The machine takes ``by`` times as long for everything, and the load comes as much slower: all stamps."""

    def stretched(us: pl.Expr) -> pl.Expr:
        return (us * by).round().cast(pl.Int64)

    return warped("step time", f"every stamp x {by:g}", (STEP_TIME, PACE), stretched)


def slower_from(at_us: int, by: float) -> Cause:
    """The same from a time on."""

    def stretched(us: pl.Expr) -> pl.Expr:
        return us + ((us - at_us).clip(0) * (by - 1)).round().cast(pl.Int64)

    return warped("slower from a time on", f"every stamp x {by:g} from {at_us / 1e6:g} s", (STEP_TIME, PACE), stretched)


def frozen(at_us: int, for_us: int) -> Cause:
    """The machine stands still once, with the clients on it."""

    def late(us: pl.Expr) -> pl.Expr:
        return us + pl.when(us > at_us).then(for_us).otherwise(0)

    return warped("machine frozen", f"{for_us / 1e6:g} s at {at_us / 1e6:g} s", ("standstill", "cold start"), late)
