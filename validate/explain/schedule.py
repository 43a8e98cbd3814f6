"""Hypotheses on a recorded schedule: what makes the engine's steps equal to the recorded ones again.

An engine argument, a release, a hit in the prefix cache, a request that was given up.  Each is scored by the steps
that are equal with it.  Where several make all equal, or none does, no cause is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.engine_packs import engine_packs
from blis_replay.base.errors import ReplayError, TraceError
from blis_replay.blis.trace import RELEASE_ARGUMENTS, EngineConfig, release_arguments
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.followed import served_requests
from blis_replay.replay.engine import replayed_engine, with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.schedule.checksum import ScheduleCheck, check_schedule
from blis_replay.replay.schedule.recorded import LOG, RecordedSchedule, recorded_schedule
from blis_replay.validate.explain.hypothesis import Hypothesis
from blis_replay.validate.explain.inputs import argument_hypothesis, stated_as
from blis_replay.validate.explain.rule import best_first

ARGUMENT, PREFIX, ABORTED, VERSION = "engine argument", "prefix cache", "aborted request", "version"
NOT_IDENTIFIED = "not identified"
MAX_STEPS = 5_000  # steps after the first that differs: to score a hypothesis takes as long as its steps
MAX_REQUESTS = 64  # requests that may have been given up
MAX_NAMED = 3  # causes that a sentence lists
_BLOCK_SIZES = (16, 32, 64, 128)
_BLOCKS_TO_SPARE = 1 << 20
VLLM_VERSION = "vllm_version"
# The arguments that go by the release, each without one.
_NO_RELEASE: dict[str, Any] = {one.name: one.default for one in fields(EngineConfig) if one.name in RELEASE_ARGUMENTS}


@dataclass(frozen=True)
class Meaning:
    """What makes the schedules equal: ``cause``, one of the above; ``sentence``, in words; ``hypothesis``, the change.

    ``reached``: steps that are equal with it, of ``steps``.
    """

    cause: str
    sentence: str
    hypothesis: Hypothesis
    reached: int = 0
    steps: int = 1

    @property
    def left(self) -> float:
        """The share of the steps that is not reached."""
        return 1 - self.reached / self.steps

    @property
    def argument(self) -> tuple[str, int | bool | str | None]:
        """Name and value of the engine argument that is wrong; ``""`` and None of another cause."""
        return next(iter(self.hypothesis.engine.items())) if self.cause == ARGUMENT else ("", None)

    @property
    def document(self) -> dict[str, object]:
        """It in JSON."""
        argument, value = self.argument
        counts = {"reached": self.reached, "steps": self.steps}
        return {"cause": self.cause, "sentence": self.sentence, **counts, "argument": argument, "value": value}


_Causes = Callable[[Recording, ScheduleCheck], Iterator[Meaning]]


def has_every_step(recording: Recording) -> bool:
    """Whether every step may have been recorded: by the findings, as rows of a store take time to read."""
    return any(finding.check in ("iterations", "recorder") for finding in recording.findings)


def said_by_schedule(recording: Recording, mode: ReplayMode) -> tuple[str, Hypothesis | None]:
    """A proof in words that the replayed engine schedules every recorded step as the server did; else empty.

    Without a proof, the only engine argument or release with which it does, as a hypothesis; else None.
    """
    if not has_every_step(recording):
        return "", None
    try:
        engine = replayed_engine(recording, mode).config
        if engine.data_parallel_size > 1:
            return "", None
        check = check_schedule(recorded_schedule(recording), engine)
    except ReplayError:
        return "", None
    if check.whole:
        return f"the engine's schedule is equal to the recorded one in all {check.steps:,} steps", None
    if not best_first(_better(recording, check, _CAUSES_OF_ENGINE), 0.0, exact=True):
        return "", None  # most often, and other causes take long to try
    meaning = meaning_of(recording, check)
    if meaning is None or meaning.cause not in (ARGUMENT, VERSION):
        return "", None
    steps = f"{check.reached:,} of {meaning.steps:,} steps are scheduled as recorded, and all with it"
    return "", replace(meaning.hypothesis, basis=steps, recorded=True)


def meaning_of(recording: Recording, check: ScheduleCheck) -> Meaning | None:
    """What the first difference of a check means; None if every step was compared and is equal."""
    if check.whole:
        return None
    better = _better(recording, check, _CAUSES)
    whole = list({one.sentence: one for one in best_first(better, 0.0, exact=True)}.values())
    causes = {one.cause for one in whole}
    if len(whole) == 1:
        return whole[0]
    either = "; or ".join(one.sentence for one in whole[:MAX_NAMED])
    if causes == {VERSION}:
        return replace(whole[0], sentence=either)
    if whole:
        return replace(whole[0], cause=NOT_IDENTIFIED, sentence=f"several causes explain every step: {either}")
    return _unexplained(check, max(better, key=lambda one: one.reached, default=None))


def _better(recording: Recording, check: ScheduleCheck, causes: Sequence[_Causes]) -> list[Meaning]:
    """Those with which more steps are equal."""
    first = check.schedule.begin + check.reached
    open_ones = (one for of_kind in causes for one in of_kind(recording, check))
    scored = [_scored(one, recording, check, first + MAX_STEPS) for one in open_ones]
    return [one for one in scored if one is not None and one.reached > first]


def _scored(one: Meaning, recording: Recording, check: ScheduleCheck, limit: int) -> Meaning | None:
    """With the steps up to ``limit`` that are equal; None where the engine cannot serve that."""
    schedule = one.hypothesis.schedule or check.schedule
    last = min(limit, len(schedule.step))
    cut = replace(schedule, end=last) if schedule.end > last else schedule
    try:
        served = _served(cut, _changed(recording, check.engine, one.hypothesis))
    except TraceError:
        return None
    if served is None:
        return None
    return replace(one, reached=served.schedule.begin + served.reached, steps=last)


def _changed(recording: Recording, engine: EngineConfig, hypothesis: Hypothesis) -> EngineConfig:
    """The engine of a check with the arguments, or the release, of a hypothesis; raises ``TraceError``."""
    arguments: dict[str, Any] = dict(hypothesis.engine)
    if VLLM_VERSION in arguments:
        given = {name: setting.value for name, setting in recording.engine.items()}
        arguments = _NO_RELEASE | release_arguments(given | arguments)
    return replace(engine, **arguments)


def _served(schedule: RecordedSchedule, engine: EngineConfig) -> ScheduleCheck | None:
    check = check_schedule(schedule, engine)
    return None if check.simulated is None or check.simulated.error else check


def _engine_arguments(_recording: Recording, check: ScheduleCheck) -> Iterator[Meaning]:
    """Arguments that the recorded steps themselves bound, where the assumed ones are others."""
    engine, counts = check.engine, check.schedule.counts
    part = slice(check.schedule.begin, None)
    requests = int((counts["prefill_requests"] + counts["decode_requests"])[part].max(initial=0))
    tokens = int((counts["prefill_tokens"] + counts["decode_tokens"])[part].max(initial=0))
    alone = counts["prefill_requests"][part] == 1
    longest = int(counts["prefill_tokens"][part][alone].max(initial=0))
    for name, seen in (("max_num_seqs", requests), ("max_num_batched_tokens", tokens)):
        assumed = int(getattr(engine, name))
        if seen and seen != assumed:
            server = f"{seen:,}" if seen < assumed else f"at least {seen:,}"
            why = f"the simulator has {name} {assumed:,}, and the server {server}"
            yield _argument(f"{name} is {server}, not {assumed:,}", {name: seen}, assumed, why)
    threshold, name = engine.long_prefill_token_threshold, "long_prefill_token_threshold"
    if 0 < longest < engine.max_num_batched_tokens:
        yield _argument(f"{name} is {longest:,}", {name: longest}, threshold)
    if threshold:
        yield _argument(f"{name} is not set", {name: 0}, threshold)
    scheduling = "synchronous" if engine.async_scheduling else "asynchronous"
    asynchronous, chunked = engine.async_scheduling, engine.enable_chunked_prefill
    yield _argument(f"scheduling is {scheduling}", {"async_scheduling": not asynchronous}, asynchronous)
    words = f"chunked prefill is {'off' if chunked else 'on'}"
    yield _argument(words, {"enable_chunked_prefill": not chunked}, chunked)


def _argument(sentence: str, engine: Mapping[str, int | bool], assumed: object, why: str = "") -> Meaning:
    name, value = next(iter(engine.items()))
    hypothesis = argument_hypothesis(name, value, assumed)
    return Meaning(ARGUMENT, sentence, replace(hypothesis, engine=engine, why=why or hypothesis.why))


def _releases(recording: Recording, check: ScheduleCheck) -> Iterator[Meaning]:
    """The rules of every other release."""
    setting = recording.engine.get(VLLM_VERSION)
    assumed, tried = "0.15.1" if setting is None else setting.value, [check.engine]
    for pack in engine_packs():
        one = Hypothesis(
            VLLM_VERSION,
            f"the simulator schedules as vLLM {assumed}, and the server as from {pack.first} on",
            stated_as(VLLM_VERSION, pack.first),
            engine={VLLM_VERSION: pack.first},
        )
        engine = _changed(recording, check.engine, one)
        if engine not in tried:
            tried.append(engine)
            yield Meaning(VERSION, f"the server schedules as vLLM does from {pack.first} on, not as {assumed}", one)


def _memory(_recording: Recording, check: ScheduleCheck) -> Iterator[Meaning]:
    """The KV blocks that the recorded usage allows, in blocks of the assumed size and of others."""
    engine = check.engine
    for size in dict.fromkeys((engine.block_size, *_BLOCK_SIZES)):
        sized = replace(engine, block_size=size, num_gpu_blocks=engine.num_gpu_blocks or _BLOCKS_TO_SPARE)
        same = size == engine.block_size and engine.num_gpu_blocks
        blocks = _blocks(check if same else _served(check.schedule, sized))
        if blocks is None or (size, blocks) == (engine.block_size, engine.num_gpu_blocks):
            continue
        if size == engine.block_size:
            assumed = "unlimited" if engine.num_gpu_blocks is None else f"{engine.num_gpu_blocks:,}"
            words = f"num_gpu_blocks is about {blocks:,}, not {assumed}"
            yield _argument(words, {"num_gpu_blocks": blocks}, engine.num_gpu_blocks)
        else:
            words = f"block_size is {size}, not {engine.block_size}, with about {blocks:,} blocks"
            yield _argument(words, {"block_size": size, "num_gpu_blocks": blocks}, engine.block_size)


def blocks_that_fit(check: ScheduleCheck) -> int | None:
    """Where ``num_gpu_blocks`` is not known: the number of blocks that is the recorded usage in every step."""
    if check.engine.num_gpu_blocks is not None:
        return None
    return _blocks(_served(check.schedule, replace(check.engine, num_gpu_blocks=_BLOCKS_TO_SPARE)))


def _blocks(check: ScheduleCheck | None) -> int | None:
    """``num_gpu_blocks`` by which the used blocks are the recorded usage in every step before the counts differ."""
    if check is None or check.simulated is None or check.engine.num_gpu_blocks is None:
        return None
    part = slice(check.schedule.begin, check.schedule.begin + check.equal)
    used = np.rint(check.simulated.kv_usage[part] * (check.engine.num_gpu_blocks - 1))
    seen, shared = check.schedule.kv_usage[part], check.simulated.kv_shared[part]
    known = ~np.isnan(seen) & (used > 0) & (shared == 0) & (seen > 2 * check.schedule.kv_rounding)
    if not known.any():
        return None
    low = (used[known] / (seen[known] + check.schedule.kv_rounding)).max()
    high = (used[known] / (seen[known] - check.schedule.kv_rounding)).min()
    return round((low + high) / 2) + 1 if low <= high + 1 else None


def _prefix_hits(recording: Recording, check: ScheduleCheck) -> Iterator[Meaning]:
    """What the prefix cache held, otherwise than assumed."""
    requests = check.schedule.requests
    if check.schedule.source != LOG:
        if (requests["computed_tokens"] < requests["prompt_tokens"]).any():
            nothing = requests.with_columns(pl.col("prompt_tokens").alias("computed_tokens"))
            sentence = "the steps computed prompt tokens that count as prefix hits"
            yield _read_as(PREFIX, sentence, replace(check.schedule, requests=nothing))
        return
    if not check.engine.enable_prefix_caching:
        on = {"enable_prefix_caching": True}
        sentence = "the server has found prompts in its prefix cache, which counts as switched off"
        for one in _scheduled(with_engine(recording, on, "trial"), None, PREFIX, sentence):
            yield replace(one, hypothesis=replace(one.hypothesis, engine=on))
    served = served_requests(recording.requests, recording.lifecycles)
    if (served["cached_prompt_tokens"] > 0).any():
        unknown = served.with_columns(pl.lit(None, pl.Int64).alias("cached_prompt_tokens"))
        sentence = "the prefix hits that are recorded are not those of the steps"
        yield from _scheduled(recording, unknown, PREFIX, sentence)


def _read_as(cause: str, sentence: str, schedule: RecordedSchedule) -> Meaning:
    return Meaning(cause, sentence, Hypothesis(cause, sentence, "", schedule=schedule))


def _scheduled(recording: Recording, served: pl.DataFrame | None, cause: str, sentence: str) -> Iterator[Meaning]:
    """The schedule if the requests were ``served`` (as ``recorded_schedule``), where that can be followed."""
    try:
        yield _read_as(cause, sentence, recorded_schedule(recording, served))
    except ReplayError:
        return


def _given_up(_recording: Recording, check: ScheduleCheck) -> Iterator[Meaning]:
    """In step records: each request that then runs, as if its client had given it up before that step."""
    if check.schedule.source == LOG or check.simulated is None or check.divergence is None:
        return
    row = check.schedule.begin + check.reached
    admitted, _first, last = check.simulated.served.T
    running = np.flatnonzero((admitted >= 0) & (admitted < row) & (last >= row))
    for request in running[:MAX_REQUESTS].tolist():
        aborted = check.schedule.requests["aborted"].to_numpy().copy()
        aborted[request] = row
        requests = check.schedule.requests.with_columns(pl.Series("aborted", aborted))
        name = _name(requests, request)
        sentence = f"{name} was given up before step {int(check.schedule.step[row]):,}"
        yield _read_as(ABORTED, sentence, replace(check.schedule, requests=requests))


def _name(requests: pl.DataFrame, row: int) -> str:
    index, name = requests["request_index"][row], requests["request_id"][row]
    return f"request {index}" if index is not None else str(name or "a request")


def _ended_early(recording: Recording, check: ScheduleCheck) -> Iterator[Meaning]:
    """In a log whose counts cannot be those of the requests: one of them ended early."""
    schedule, simulated = check.schedule, check.simulated
    if schedule.source != LOG or not schedule.why or simulated is None:
        return
    served, end = served_requests(recording.requests, recording.lifecycles), schedule.end
    _admitted, first, last = simulated.served.T
    running = np.flatnonzero((first >= 0) & (first < end) & ((last < 0) | (last >= end)))
    for place in running[-MAX_REQUESTS:].tolist():
        row = schedule.requests.row(place, named=True)
        shorter = pl.when(_is(served, row)).then(end - int(first[place])).otherwise(pl.col("output_tokens"))
        sentence = f"{_name(schedule.requests, place)} was given up before step {int(schedule.step[end]):,}"
        changed = served.with_columns(shorter.alias("output_tokens"))
        yield from _scheduled(recording, changed, ABORTED, sentence)


def _is(requests: pl.DataFrame, row: dict[str, object]) -> pl.Series:
    same = pl.col("request_index").eq_missing(pl.lit(row["request_index"], pl.Int64))
    same &= pl.col("request_id").eq_missing(pl.lit(row["request_id"], pl.String))
    return requests.select(same).to_series()


def _unexplained(check: ScheduleCheck, best: Meaning | None) -> Meaning:
    """No cause explains every step: what the counts say, and what comes closest."""
    row, closest = check.schedule.begin + check.reached, ""
    if best is not None:
        step = int(check.schedule.step[min(best.reached, len(check.schedule.step) - 1)])
        closest = f"; closest comes that {best.sentence}, with which the first difference is at step {step:,}"
    why = f" ({check.schedule.why})" if check.schedule.why else ""
    sentence = f"no engine argument, release, prefix hit or single request explains it{why}{closest}"
    nothing = Hypothesis(NOT_IDENTIFIED, sentence, "")
    return Meaning(NOT_IDENTIFIED, sentence, nothing, row, check.schedule.begin + check.steps)


# Every kind of cause; a further one is a function that yields meanings, and an entry here.
_CAUSES_OF_ENGINE: tuple[_Causes, ...] = (_engine_arguments, _memory, _releases)
_CAUSES = (*_CAUSES_OF_ENGINE, _prefix_hits, _given_up, _ended_early)
