"""Hypotheses on a recorded schedule: what makes the engine's steps equal to the recorded ones again.

An engine argument, a release, a hit in the prefix cache, a request that was given up.  Each is scored by the steps
that are equal with it.  Where several make all equal, or none does, no cause is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.engine_packs import engine_packs
from blis_replay.base.errors import ReplayError, TraceError
from blis_replay.blis.trace import RELEASE_ARGUMENTS, EngineConfig, release_arguments
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.followed import served_requests
from blis_replay.replay.engine import engine_values, replayed_engine, with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.schedule.checksum import ScheduleCheck, check_schedule
from blis_replay.replay.schedule.recorded import LOG, RecordedSchedule, recorded_schedule
from blis_replay.validate.explain.hypothesis import Hypothesis
from blis_replay.validate.explain.inputs import BLOCK_SIZES, BLOCKS, argument_hypothesis, stated_as
from blis_replay.validate.explain.rule import best_first

ARGUMENT, PREFIX, ABORTED, VERSION = "engine argument", "prefix cache", "aborted request", "version"
NOT_IDENTIFIED = "not identified"
MAX_STEPS = 5_000  # steps after the first that differs: to score a hypothesis takes as long as its steps
MAX_REQUESTS = 64  # requests that may have been given up
MAX_NAMED = 3  # causes that a sentence lists
_BLOCKS_TO_SPARE = 1 << 20
VLLM_VERSION, GROUPS = "vllm_version", "kv_cache_groups"
WINDOWS = (128, 256, 512, 1_024, 2_048, 4_096, 8_192)  # tokens; powers of two in the models with windows that vLLM has
# The arguments that go by the release, each without one.
_NO_RELEASE: dict[str, Any] = {one.name: one.default for one in fields(EngineConfig) if one.name in RELEASE_ARGUMENTS}


@dataclass(frozen=True)
class Meaning:
    """What makes the schedules equal, as a hypothesis; ``reached``: steps that are equal with it, of ``steps``."""

    hypothesis: Hypothesis
    reached: int = 0
    steps: int = 1

    @property
    def left(self) -> float:
        """The share of the steps that is not reached."""
        return 1 - self.reached / self.steps

    @property
    def cause(self) -> str:
        """Its kind: ARGUMENT, PREFIX, ABORTED, VERSION or NOT_IDENTIFIED."""
        if self.hypothesis.name in (PREFIX, ABORTED, NOT_IDENTIFIED):
            return self.hypothesis.name
        return VERSION if VLLM_VERSION in self.hypothesis.engine else ARGUMENT

    @property
    def sentence(self) -> str:
        """It in words."""
        return self.hypothesis.why

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


_Causes = Callable[[Recording, ScheduleCheck], Iterator[Hypothesis]]


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
    # Most often no argument explains it, and other causes take long to try.
    arguments = best_first(_better(recording, check, _CAUSES_OF_ENGINE), 0.0, exact=True)
    meaning = meaning_of(recording, check) if arguments else None
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
    if len(whole) == 1:
        return whole[0]
    either = "; or ".join(one.sentence for one in whole[:MAX_NAMED])
    if whole and {one.cause for one in whole} == {VERSION}:
        return replace(whole[0], hypothesis=replace(whole[0].hypothesis, why=either))
    if whole:
        nothing = _read_as(NOT_IDENTIFIED, f"several causes explain every step: {either}")
        return replace(whole[0], hypothesis=nothing)
    return _unexplained(check, max(better, key=lambda one: one.reached, default=None))


def _unexplained(check: ScheduleCheck, best: Meaning | None) -> Meaning:
    """No cause explains every step: what the counts say, and what comes closest."""
    begin, closest = check.schedule.begin, ""
    if best is not None:
        step = int(check.schedule.step[min(best.reached, len(check.schedule.step) - 1)])
        closest = f"; closest comes that {best.sentence}, with which the first difference is at step {step:,}"
    why = f" ({check.schedule.why})" if check.schedule.why else ""
    sentence = f"no engine argument, release, prefix hit or single request explains it{why}{closest}"
    return Meaning(_read_as(NOT_IDENTIFIED, sentence), begin + check.reached, begin + check.steps)


def _better(recording: Recording, check: ScheduleCheck, causes: Sequence[_Causes]) -> list[Meaning]:
    """Those with which more steps are equal."""
    first = check.schedule.begin + check.reached
    tried = (
        _scored(one, recording, check, first + MAX_STEPS) for of_kind in causes for one in of_kind(recording, check)
    )
    return [one for one in tried if one is not None and one.reached > first]


def _scored(one: Hypothesis, recording: Recording, check: ScheduleCheck, limit: int) -> Meaning | None:
    """With the steps up to ``limit`` that are equal; None where the engine cannot serve that."""
    schedule = one.schedule or check.schedule
    last = min(limit, len(schedule.step))
    try:
        served = _served(replace(schedule, end=min(schedule.end, last)), _changed(recording, check.engine, one))
    except TraceError:
        return None
    return None if served is None else Meaning(one, served.schedule.begin + served.reached, last)


def _changed(recording: Recording, engine: EngineConfig, hypothesis: Hypothesis) -> EngineConfig:
    """The engine of a check with the arguments, or the release, of a hypothesis; raises ``TraceError``."""
    arguments: dict[str, Any] = dict(hypothesis.engine)
    if VLLM_VERSION in arguments:
        arguments = _NO_RELEASE | release_arguments(engine_values(recording) | arguments)
    if GROUPS in arguments:
        arguments = {
            GROUPS: replayed_engine(with_engine(recording, arguments, "trial"), ReplayMode()).config.kv_cache_groups
        }
    return replace(engine, **arguments)


def _served(schedule: RecordedSchedule, engine: EngineConfig) -> ScheduleCheck | None:
    check = check_schedule(schedule, engine)
    return None if check.simulated is None or check.simulated.error else check


def _engine_arguments(_recording: Recording, check: ScheduleCheck) -> Iterator[Hypothesis]:
    """Arguments that the recorded steps themselves bound, where the assumed ones are others."""
    engine, begin = check.engine, check.schedule.begin
    counts = {name: count[begin:] for name, count in check.schedule.counts.items()}
    requests = int((counts["prefill_requests"] + counts["decode_requests"]).max(initial=0))
    tokens = int((counts["prefill_tokens"] + counts["decode_tokens"]).max(initial=0))
    alone = int(counts["prefill_tokens"][counts["prefill_requests"] == 1].max(initial=0))
    for name, seen in (("max_num_seqs", requests), ("max_num_batched_tokens", tokens)):
        assumed = int(getattr(engine, name))
        if seen and seen != assumed:
            yield argument_hypothesis(name, seen, assumed, at_least=seen > assumed)
    threshold = engine.long_prefill_token_threshold
    for value in ((alone,) if 0 < alone < engine.max_num_batched_tokens else ()) + ((0,) if threshold else ()):
        yield argument_hypothesis("long_prefill_token_threshold", value, threshold)
    for name in ("async_scheduling", "enable_chunked_prefill"):
        assumed = bool(getattr(engine, name))
        yield argument_hypothesis(name, not assumed, assumed)


def _releases(recording: Recording, check: ScheduleCheck) -> Iterator[Hypothesis]:
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
            yield one


def _memory(_recording: Recording, check: ScheduleCheck) -> Iterator[Hypothesis]:
    """The KV blocks that the recorded usage allows, in blocks of the assumed size and of others."""
    engine = check.engine
    for size in dict.fromkeys((engine.block_size, *BLOCK_SIZES)):
        sized = replace(engine, block_size=size, num_gpu_blocks=engine.num_gpu_blocks or _BLOCKS_TO_SPARE)
        same = size == engine.block_size and engine.num_gpu_blocks
        blocks = _blocks(check if same else _served(check.schedule, sized))
        if blocks is None or (size, blocks) == (engine.block_size, engine.num_gpu_blocks):
            continue
        if size == engine.block_size:
            yield argument_hypothesis(BLOCKS, blocks, engine.num_gpu_blocks)
        else:
            one = argument_hypothesis("block_size", size, engine.block_size)
            why = f"{one.why}, with about {blocks:,} blocks"
            yield replace(one, why=why, engine={"block_size": size, BLOCKS: blocks})


def _windows(recording: Recording, _check: ScheduleCheck) -> Iterator[Hypothesis]:
    """Groups of KV blocks with windows beside one of full attention, where only their number was recorded."""
    stated = str(engine_values(recording).get(GROUPS, ""))
    if stated.isdigit() and int(stated) > 1:
        for size in WINDOWS:
            yield argument_hypothesis(GROUPS, f"window {size} x{int(stated) - 1}, full", stated)


def blocks_that_fit(check: ScheduleCheck) -> int | None:
    """Where ``num_gpu_blocks`` is not known: the number of blocks that is the recorded usage in every step."""
    if check.engine.num_gpu_blocks is not None:
        return None
    return _blocks(_served(check.schedule, replace(check.engine, num_gpu_blocks=_BLOCKS_TO_SPARE)))


def _blocks(check: ScheduleCheck | None) -> int | None:
    """``num_gpu_blocks`` by which the used blocks are the recorded usage in every step before the counts differ."""
    if check is None or check.simulated is None or check.engine.num_gpu_blocks is None:
        return None
    part, rounding = slice(check.schedule.begin, check.schedule.begin + check.equal), check.schedule.kv_rounding
    used = np.rint(check.simulated.kv_usage[part] * (check.engine.num_gpu_blocks - 1))
    seen, shared = check.schedule.kv_usage[part], check.simulated.kv_shared[part]
    known = ~np.isnan(seen) & (used > 0) & (shared == 0) & (seen > 2 * rounding)
    if not known.any():
        return None
    low, high = (used[known] / (seen[known] + rounding)).max(), (used[known] / (seen[known] - rounding)).min()
    return round((low + high) / 2) + 1 if low <= high + 1 else None


def _read_as(cause: str, sentence: str, schedule: RecordedSchedule | None = None) -> Hypothesis:
    return Hypothesis(cause, sentence, "", schedule=schedule)


def _served_as(recording: Recording, served: pl.DataFrame | None, cause: str, sentence: str) -> Iterator[Hypothesis]:
    """The schedule if the requests were ``served`` (as ``recorded_schedule``), where that can be followed."""
    try:
        yield _read_as(cause, sentence, recorded_schedule(recording, served))
    except ReplayError:
        return


def _prefix_hits(recording: Recording, check: ScheduleCheck) -> Iterator[Hypothesis]:
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
        for one in _served_as(with_engine(recording, on, "trial"), None, PREFIX, sentence):
            yield replace(one, engine=on)
    served = served_requests(recording.requests, recording.lifecycles)
    if (served["cached_prompt_tokens"] > 0).any():
        unknown = served.with_columns(pl.lit(None, pl.Int64).alias("cached_prompt_tokens"))
        sentence = "the prefix hits that are recorded are not those of the steps"
        yield from _served_as(recording, unknown, PREFIX, sentence)


def _given_up(recording: Recording, check: ScheduleCheck) -> Iterator[Hypothesis]:
    """Each request that then runs, as if its client had given it up before that step.

    In step records at the first step that differs; in a log at the step whose counts cannot be those of the requests.
    """
    schedule, simulated = check.schedule, check.simulated
    if simulated is None or (not schedule.why if schedule.source == LOG else check.divergence is None):
        return
    row = schedule.end if schedule.source == LOG else schedule.begin + check.reached
    admitted, first, last = simulated.served.T
    if schedule.source != LOG:
        for request in np.flatnonzero((admitted >= 0) & (admitted < row) & (last >= row))[:MAX_REQUESTS].tolist():
            aborted = schedule.requests["aborted"].to_numpy().copy()
            aborted[request] = row
            requests = schedule.requests.with_columns(pl.Series("aborted", aborted))
            yield _read_as(ABORTED, _gave_up(schedule, request, row), replace(schedule, requests=requests))
        return
    served = served_requests(recording.requests, recording.lifecycles)
    running = np.flatnonzero((first >= 0) & (first < row) & ((last < 0) | (last >= row)))
    for request in running[-MAX_REQUESTS:].tolist():
        keys = schedule.requests.select("request_index", "request_id")[request]
        it = pl.all_horizontal(pl.col(name).eq_missing(keys[name].item()) for name in keys.columns)
        fewer = pl.when(it).then(row - int(first[request])).otherwise(pl.col("output_tokens"))
        changed = served.with_columns(fewer.alias("output_tokens"))
        yield from _served_as(recording, changed, ABORTED, _gave_up(schedule, request, row))


def _gave_up(schedule: RecordedSchedule, request: int, row: int) -> str:
    index, name = (schedule.requests[column][request] for column in ("request_index", "request_id"))
    named = f"request {index}" if index is not None else str(name or "a request")
    return f"{named} was given up before step {int(schedule.step[row]):,}"


# Every kind of cause; a further one is a function that yields hypotheses, and an entry here.
_CAUSES_OF_ENGINE: tuple[_Causes, ...] = (_engine_arguments, _memory, _windows, _releases)
_CAUSES = (*_CAUSES_OF_ENGINE, _prefix_hits, _given_up)
