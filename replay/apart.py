"""Prefill and decode on two servers: a producer and a consumer engine, replayed as one.

The producer computes a prompt and one token.  ``hand_over_us`` later the request is in the queue of the consumer, which
loads the KV blocks of the prompt while the request is parked.  The producer holds the blocks until they are loaded.
Both engines are the kernel's; a request's first token for its client is the consumer's.

Each engine waits for the other, so they are simulated in turns until nothing changes.  That ends: a load changes what
the producer does only after its own end.  So if a turn is right up to a time, the next one is right up to the end of
the first load after it, and there are at most as many turns as requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.engine_packs import choose_pack
from blis_replay.base.errors import UnreplayableError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, EngineConfig, Offloading, why_not_offloaded
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, plan_replay
from blis_replay.replay.schedule.recorded import USUAL_QUANTILE
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.replay.transfers import Apart, TransferCosts, given_costs, parts_of

# Connectors that load while the request is parked, and hold the producer's blocks until then.
_CONNECTORS = ("NixlConnector", "NixlPullConnector")
# What ends a request's id inside vLLM's engine, since 0.12.
_SUFFIX = "-[0-9a-f]{8}$"
_STAMPS = ("arrived_us", "queued_us", "scheduled_us", "finished_us", "first_token_us")
_SIZE = "kv_offloading_size"
_NOTHING_LOADED = Offloading(0, 0, 0, 0, 0)
_TIED = "record both servers with `blis-replay record`, on machines whose clocks agree"


@dataclass(frozen=True)
class ApartEngine(EmbeddedEngine):
    """The embedded engine twice: ``prefill`` is the recording of the server that prefills for the one replayed.

    ``costs``: of the transfers, as the user gave them (``given_costs``); the others are fitted on the pair.
    """

    prefill: Recording | None = None
    costs: str = ""
    name: str = "pair"

    def prepared(self, plan: ReplayPlan) -> ReplayPlan:
        """The consumer's plan with what the producer hands over, and when.

        Raises ``UnreplayableError`` naming what is not known or not simulated.
        """
        if self.prefill is None:
            return plan
        given = given_costs(self.costs)
        pair = _Pair(self, plan, self.prefill)
        fits = pair.fitted(given)
        costs = TransferCosts(**{"hand_over_us": 0, "load_block_us": 0} | given | fits)
        producer, turns = pair.settled(costs)
        apart = Apart(
            prefill=self.prefill,
            producer=producer,
            engine=pair.of_producer,
            row=pair.row,
            costs=costs,
            fitted=tuple(name for name in vars(costs) if name in fits),
            turns=turns,
            observed_us=pair.observed_us,
            by_itself=pair.by_itself,
        )
        queued_us = pair.handed_over_us(producer, costs)
        if (queued_us < pair.plan.trace.arrival_us).any():
            raise UnreplayableError(f"{pair.name}: requests came to it before their clients sent them; {_TIED}")
        consumer = pair.consumer(queued_us, costs)
        return replace(consumer, apart=apart, basis=plan.basis | {"prefill": apart.in_words()})


class _Pair:
    """Two recordings whose requests were joined, and the plan of each server.

    ``row``: int64[n], the producer's request of each of the consumer's.  ``observed_us``: as ``Apart.observed_us``.
    ``came_us``: float64[n], when each was in the consumer's queue, on the clock of the client; nan: not recorded.
    """

    def __init__(self, engine: ApartEngine, plan: ReplayPlan, prefill: Recording) -> None:
        decode, mode = plan.recording, plan.mode
        _refuse(mode)
        entry, own = engine.entry_for(prefill), engine.entry_for(decode)
        own_mode = replace(mode, pre_queue="modelled", output_processing="modelled", engine=())
        first = plan_replay(prefill, own_mode, entry)
        self.plan, self.name, self.name_of_producer = plan.at_recorded_times, decode.alias, prefill.alias
        self.by_itself = mode.pre_queue == "recorded"
        self.engine = _transferring(decode, plan.engine)
        self.of_producer = replace(_transferring(prefill, first.engine), offloading=_NOTHING_LOADED)
        self.latency, self.lifecycle = plan.latency(own.latency), own.lifecycle
        self.latency_of_producer, self.lifecycle_of_producer = first.latency(entry.latency), entry.lifecycle
        stamps, rows = joined(decode, prefill)
        # The producer's stamps on the wall clock of the consumer's.
        behind_us = _wall_zero_us(prefill) - _wall_zero_us(decode)
        arrived_us, *of_producer = (stamps[f"{name}_of_producer"] + behind_us for name in _STAMPS[:4])
        self.queued_us, self.admitted_us, first_us = (
            stamps[name] for name in ("queued_us", "scheduled_us", "first_token_us")
        )
        self.done_us = of_producer[-1]
        ttft_us = decode.requests["ttft_us"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        self.observed_us = parts_of(ttft_us, [*of_producer, self.queued_us, self.admitted_us, first_us])
        self.ttft = {f"ttft_us in {decode.alias}": ttft_us}
        tied = {f"arrived_us in {prefill.alias}": arrived_us, f"first_token_us in {decode.alias}": first_us}
        _need(f"put the client's result beside {decode.alias}, and {_TIED}", self.ttft | tied)
        # The clock of the client: the way to the producer is half of the shortest way there and back.
        way_us = np.nanmin(ttft_us - (first_us - arrived_us)) / 2
        later_us = behind_us + way_us - np.nanmin(arrived_us - plan.trace.arrival_us)
        if np.isnan(later_us) or way_us < 0:
            raise UnreplayableError(f"{decode.alias}: its clock and that of {prefill.alias} do not fit; {_TIED}")
        self.came_us, shift_us = self.queued_us + later_us - behind_us, round(float(later_us))
        came_us = first.trace.arrival_us + shift_us
        order = np.argsort(came_us, kind="stable")
        order = order[came_us[order] >= 0]  # what came before warmed the server up
        place = np.full(len(came_us), -1)
        place[order] = np.arange(len(order))
        self.row = np.where(rows >= 0, place[rows], -1)
        if (self.row[rows >= 0] < 0).any():
            raise UnreplayableError(f"{prefill.alias}: requests of {decode.alias} came before their clients sent them")
        gone_us = np.where(first.trace.abort_us == NEVER_US, NEVER_US, first.trace.abort_us + shift_us)
        moved = replace(first.trace, arrival_us=np.arange(len(came_us)), abort_us=gone_us).part(order)
        self.trace = replace(moved, arrival_us=came_us[order])
        if first.cycles is not None:
            self.latency_of_producer = replace(first.cycles, from_us=first.cycles.from_us + shift_us)

    def settled(self, costs: TransferCosts) -> tuple[SimResult, int]:
        """The producer's run beside that of the consumer, and how often it was simulated until it stayed the same."""
        fetched_us = np.full(len(self.trace), -1)
        before: SimResult | None = None
        for turn in range(1, len(self.trace) + 3):
            trace = replace(self.trace, fetched_us=fetched_us)
            result = simulate(trace, self.of_producer, self.latency_of_producer, self.lifecycle_of_producer)
            if before is not None and (result.finished_us == before.finished_us).all():
                return result, turn
            consumer = self.consumed(self.handed_over_us(result, costs), costs)
            # What is in the consumer's cache already is free when the request is admitted.
            loaded_us = consumer.loaded_us
            loaded_us = np.where(loaded_us < 0, consumer.result().scheduled_us, loaded_us)
            fetched_us, before = np.full(len(self.trace), -1), result
            fetched_us[self.row[self.row >= 0]] = loaded_us[self.row >= 0]
        raise UnreplayableError(f"{self.name}: the two servers did not settle in {turn} turns of simulation")

    def handed_over_us(self, producer: SimResult, costs: TransferCosts) -> Int64s:
        """int64[n]: when each request is in the consumer's queue, as recorded where it is replayed by itself.

        A request without a token of the producer comes when its client is gone.
        """
        done, gone_us = producer.completed[self.row] & (self.row >= 0), self.plan.trace.abort_us
        gone_us = np.where(gone_us == NEVER_US, NEVER_US, gone_us + 1)
        queued_us = np.where(done, producer.finished_us[self.row] + costs.hand_over_us, gone_us)
        if not self.by_itself:
            return queued_us
        return np.where(np.isnan(self.came_us), queued_us, np.nan_to_num(self.came_us)).astype(np.int64)

    def consumer(self, queued_us: Int64s, costs: TransferCosts) -> ReplayPlan:
        """The consumer's plan for requests that are queued then."""
        trace = self.plan.trace
        prompts = trace.prompt_tokens
        trace = replace(
            trace, pre_queue_us=queued_us - trace.arrival_us, external_tokens=prompts, prefill_tokens=prompts
        )
        offloading = Offloading(0, costs.load_us, costs.load_block_us, 0, 0)
        return replace(self.plan, trace=trace, engine=replace(self.engine, offloading=offloading))

    def consumed(self, queued_us: Int64s, costs: TransferCosts) -> Engine:
        """The consumer after its run."""
        plan = self.consumer(queued_us, costs)
        engine = Engine(plan.trace, plan.engine, self.lifecycle)
        engine.advance(self.latency)
        return engine

    def fitted(self, given: dict[str, int]) -> dict[str, int]:
        """The costs that were not given and are used, as they follow from the recordings."""
        seen_us, unknown = self.observed_us["hand_over"], np.isnan(self.came_us[self.row >= 0]).any()
        # Whoever gives the hand-over, the clock of the client is tied to that of the consumer by the producer's.
        if not np.isnan(seen_us).all() and np.nanmedian(seen_us) < 0:
            raise UnreplayableError(
                f"{self.name}: by its clock requests came before {self.name_of_producer} had prefilled them; name the "
                f"server that prefilled with --prefill, and {_TIED}"
            )
        fits, queued = {}, {f"queued_us in {self.name}": self.queued_us}
        if "hand_over_us" not in given and (unknown or not self.by_itself):
            stamps = {f"finished_us in {self.name_of_producer}": self.done_us}
            _need("give hand_over_us with --transfer", self.ttft | stamps | queued)
            fits["hand_over_us"] = round(float(np.nanmedian(seen_us)))
        if not {"load_us", "load_block_us"} <= given.keys():
            stamps = {f"scheduled_us in {self.name}": self.admitted_us}
            _need("give load_us and load_block_us with --transfer", self.ttft | queued | stamps)
            fits |= self._loads_us(given)
        return fits

    def _loads_us(self, given: dict[str, int]) -> dict[str, int]:
        """Times of a load with which the quickest tenth of the requests waits as long as it did; others wait for more.

        What a block adds is the difference between the longer and the shorter half of the prompts, where they differ.
        """
        wait_us, blocks = self.observed_us["load"], -(-self.plan.trace.prompt_tokens // self.engine.block_size)
        known, fits = ~np.isnan(wait_us), {}
        longer = known & (blocks > np.median(blocks[known]))
        shorter = known & ~longer
        if "load_block_us" not in given and longer.any():
            grown_us = _usual(wait_us[longer]) - _usual(wait_us[shorter])
            grown_blocks = float(blocks[longer].mean() - blocks[shorter].mean())
            fits["load_block_us"] = max(round(grown_us / grown_blocks), 0)
        if "load_us" in given:
            return fits
        usual_us, each_us = _usual(wait_us), (given | fits).get("load_block_us", 0)
        queued_us = np.where(np.isnan(self.queued_us), NEVER_US, np.nan_to_num(self.queued_us)).astype(np.int64)
        low, high = 0, max(round(usual_us), 1)
        while high - low > max(usual_us / 1_000, 1):
            load_us = (low + high) // 2
            result = self.consumed(queued_us, TransferCosts(0, load_us, each_us)).result()
            waited_us = (result.scheduled_us - result.queued_us)[known]
            low, high = (load_us, high) if _usual(waited_us) < usual_us else (low, load_us)
        return {"load_us": high, **fits}


def _need(remedy: str, stamps: dict[str, Floats]) -> None:
    """Raise ``UnreplayableError`` naming those that no request has; all, where none has them together."""
    if np.isnan(sum(stamps.values())).all():
        missing = [name for name, us in stamps.items() if np.isnan(us).all()] or list(stamps)
        raise UnreplayableError(f"no request has {' and '.join(missing)}; {remedy}")


def joined(decode: Recording, prefill: Recording) -> tuple[dict[str, Floats], Int64s]:
    """By the ids that both servers wrote: their stamps of each request of ``decode``, and its request in ``prefill``.

    float64[n] by name of ``_STAMPS``, us from the zero of each recording, those of ``prefill`` with ``_of_producer``
    behind the name; nan where not recorded, -1 for a request that failed before it was prefilled.  Raises
    ``UnreplayableError`` for other requests that were not prefilled there.
    """
    both = _stamps(decode).join(_stamps(prefill), on="id", how="inner", suffix="_of_producer")
    rows = decode.requests.select("request_index", "status").join(
        both.unique("request_index", keep="none"), on="request_index", how="left", maintain_order="left"
    )
    if lost := int((rows["request_index_of_producer"].is_null() & (rows["status"] == "ok")).sum()):
        raise UnreplayableError(
            f"{decode.alias}: {lost} of {rows.height} requests have no request of their id in {prefill.alias}; give "
            "the recording of the server that prefilled them, and have the proxy send both servers one X-Request-Id"
        )
    names = [f"{name}{side}" for name in _STAMPS for side in ("", "_of_producer")]
    stamps = {name: rows[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in names}
    for side in ("", "_of_producer"):
        stamps[f"queued_us{side}"] = _sent_to_engine(stamps[f"arrived_us{side}"], stamps[f"queued_us{side}"])
    return stamps, rows["request_index_of_producer"].fill_null(-1).to_numpy()


def _sent_to_engine(arrived_us: Floats, queued_us: Floats) -> Floats:
    """float64[n]: when each request was there for the engine, which stamps it as queued only behind its step."""
    way_us = queued_us - arrived_us
    if np.isnan(way_us).all():
        return queued_us
    return np.fmin(queued_us, arrived_us + _usual(way_us))


def _usual(values_us: Floats | Int64s) -> float:
    """What it takes where nothing else is waited for: the tenth of them that is quickest."""
    return float(np.nanquantile(values_us, USUAL_QUANTILE))


def _stamps(recording: Recording) -> pl.DataFrame:
    journeys = recording.lifecycles.frame().drop_nulls("request_index")
    own = pl.coalesce("api_request_id", pl.col("core_request_id").str.replace(_SUFFIX, ""))
    return journeys.select("request_index", own.alias("id"), *_STAMPS).drop_nulls("id")


def _wall_zero_us(recording: Recording) -> int:
    """What the server's wall clock showed at the recording's zero."""
    zeros = [clock.zero_us for clock in recording.clocks if clock.kind == "epoch"]
    if not zeros:
        raise UnreplayableError(f"{recording.alias}: it has no time of day of its server; {_TIED}")
    return zeros[0]


def _refuse(mode: ReplayMode) -> None:
    """Raise ``UnreplayableError`` for what a pair is not replayed with."""
    recorded = [name for name in ("schedule", "warm_up") if getattr(mode, name) == "recorded"]
    others = [name for name in ("arrivals", "lengths", "prefix") if getattr(mode, name) != getattr(ReplayMode(), name)]
    if wrong := [*recorded, *others, *(["rate"] if mode.rate != 1 else []), *(["clients"] if mode.loop else [])]:
        raise UnreplayableError(f"--prefill replays what both servers recorded; leave out {', '.join(wrong)}")


def _transferring(recording: Recording, engine: EngineConfig) -> EngineConfig:
    """Its engine, if it sent or got KV blocks in a way that is simulated; raises ``UnreplayableError`` if not."""
    config, version = recording.argument("kv_transfer_config"), str(recording.argument("vllm_version", ""))
    choice = choose_pack(version) if version else None
    if choice is None or choice.release not in choice.pack.offloading:
        raise UnreplayableError(
            f"{recording.alias}: vLLM {version or 'of unknown release'} was not compared with a "
            "prefill on another server; 0.31 to 0.33 were"
        )
    words = dict(word.partition("=")[::2] for word in str(config or "").split())
    if words.get("kv_connector") not in _CONNECTORS:
        named = words.get("kv_connector", "no kv_transfer_config")
        raise UnreplayableError(f"{recording.alias}: {named}; simulated are {' and '.join(_CONNECTORS)}")
    if why := why_not_offloaded(engine) or ("an offload to CPU memory" if recording.argument(_SIZE) else ""):
        raise UnreplayableError(f"{recording.alias}: a prefill on another server is not simulated with {why}")
    return engine
