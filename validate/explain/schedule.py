"""Hypotheses on a recorded schedule: what makes the engine's steps equal to the recorded ones again.

An engine argument, a release, a hit in the prefix cache, a request that was given up or that no file has.  Each is
scored by the steps that are equal with it.  Where several make all equal, or none does, no cause is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.engine_packs import engine_packs
from blis_replay.blis.errors import TraceError
from blis_replay.blis.trace import RELEASE_ARGUMENTS, EngineConfig, release_arguments
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.followed import SERVED_SCHEMA, served_requests
from blis_replay.replay.engine import replayed_engine, with_engine
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.schedule.checksum import ScheduleCheck, check_schedule
from blis_replay.replay.schedule.recorded import LOG, RecordedSchedule, recorded_schedule
from blis_replay.validate.explain.rule import best_first

ARGUMENT, PREFIX, ABORTED, UNKNOWN, VERSION = (
    "engine argument",
    "prefix cache",
    "aborted request",
    "request that no file records",
    "version",
)
NOT_IDENTIFIED = "not identified"
MAX_STEPS = 5_000  # steps after the first that differs: a trial takes as long as the steps that it goes through
MAX_REQUESTS = 64  # requests that may have been given up
MAX_NAMED = 3  # causes that a sentence lists
MAX_AT_ONCE = 4  # requests that come with one that no file has
_BLOCK_SIZES = (16, 32, 64, 128)
_LONG = 1 << 20  # output tokens of a request whose end is not known
_BLOCKS_TO_SPARE = 1 << 20
_IDENTITY = ("request_index", "request_id")


@dataclass(frozen=True)
class Meaning:
    """``cause``: one of the above; ``sentence``: in words; ``reached``: steps that are equal with it, of ``steps``.

    ``argument``, ``value``: of an engine argument.
    """

    cause: str
    sentence: str
    reached: int
    steps: int
    argument: str = ""
    value: int | bool | None = None

    @property
    def left(self) -> float:
        """The share of the steps that is not reached."""
        return 1 - self.reached / self.steps


@dataclass(frozen=True)
class _Trial:
    cause: str
    sentence: str
    schedule: RecordedSchedule
    engine: EngineConfig
    argument: str = ""
    value: int | bool | None = None


def has_every_step(recording: Recording) -> bool:
    """Whether every step may have been recorded: by the findings, as rows of a store take time to read."""
    return any(finding.check in ("iterations", "recorder") for finding in recording.findings)


def proof_of(recording: Recording, mode: ReplayMode) -> str:
    """In words, that the replayed engine schedules every recorded step as the server did; else empty."""
    if not has_every_step(recording):
        return ""
    try:
        engine = replayed_engine(recording, mode).config
        if engine.data_parallel_size > 1:
            return ""
        check = check_schedule(recorded_schedule(recording), engine)
    except ReplayError:
        return ""
    return f"the engine's schedule is equal to the recorded one in all {check.steps:,} steps" if check.whole else ""


def meaning_of(recording: Recording, check: ScheduleCheck) -> Meaning | None:
    """What the first difference of a check means; None if there is none and every step was compared."""
    if check.whole:
        return None
    first = check.schedule.begin + check.reached
    scored = [_scored(trial, first + MAX_STEPS) for causes in _CAUSES for trial in causes(recording, check)]
    found = [one for one in scored if one is not None and one.reached > first]
    whole = list({one.sentence: one for one in best_first(found, 0.0, exact=True)}.values())
    causes = {one.cause for one in whole}
    if len(whole) == 1 or causes == {UNKNOWN}:  # where exactly it stood among those that came with it is no matter
        return whole[0]
    either = "; or ".join(one.sentence for one in whole[:MAX_NAMED])
    if causes == {VERSION}:
        return replace(whole[0], sentence=either)
    if whole:
        several = f"several causes explain every step: {either}"
        return Meaning(NOT_IDENTIFIED, several, whole[0].reached, whole[0].steps)
    return _unexplained(check, max(found, key=lambda one: one.reached, default=None))


def _scored(trial: _Trial, limit: int) -> Meaning | None:
    """The equal steps of a trial, up to ``limit``; None where the engine cannot serve that."""
    last = min(limit, len(trial.schedule.step))
    cut = trial.schedule.end > last
    check = _served(replace(trial.schedule, end=last) if cut else trial.schedule, trial.engine)
    if check is None:
        return None
    reached = check.schedule.begin + check.reached
    return Meaning(trial.cause, trial.sentence, reached, last, trial.argument, trial.value)


def _served(schedule: RecordedSchedule, engine: EngineConfig) -> ScheduleCheck | None:
    check = check_schedule(schedule, engine)
    return None if check.simulated is None or check.simulated.error else check


def _engine_arguments(_recording: Recording, check: ScheduleCheck) -> Iterator[_Trial]:
    for argument, value, sentence in _arguments(check):
        try:
            engine = replace(check.engine, **{argument: value})  # type: ignore[arg-type]
        except TraceError:
            continue
        yield _Trial(ARGUMENT, sentence, check.schedule, engine, argument, value)


def _arguments(check: ScheduleCheck) -> Iterator[tuple[str, int | bool, str]]:
    """Arguments that the recorded steps themselves bound, where the assumed ones are others."""
    engine, counts = check.engine, check.schedule.counts
    part = slice(check.schedule.begin, None)
    requests = int((counts["prefill_requests"] + counts["decode_requests"])[part].max(initial=0))
    tokens = int((counts["prefill_tokens"] + counts["decode_tokens"])[part].max(initial=0))
    alone = counts["prefill_requests"][part] == 1
    longest = int(counts["prefill_tokens"][part][alone].max(initial=0))
    for argument, seen in (("max_num_seqs", requests), ("max_num_batched_tokens", tokens)):
        assumed = int(getattr(engine, argument))
        if seen and seen != assumed:
            what = f"{seen:,}" if seen < assumed else f"at least {seen:,}"
            yield argument, seen, f"{argument} is {what}, not {assumed:,}"
    if 0 < longest < engine.max_num_batched_tokens:
        yield "long_prefill_token_threshold", longest, f"long_prefill_token_threshold is {longest:,}"
    if engine.long_prefill_token_threshold:
        yield "long_prefill_token_threshold", 0, "long_prefill_token_threshold is not set"
    scheduling = "synchronous" if engine.async_scheduling else "asynchronous"
    yield "async_scheduling", not engine.async_scheduling, f"scheduling is {scheduling}"
    turned = not engine.enable_chunked_prefill
    yield "enable_chunked_prefill", turned, f"chunked prefill is {'on' if turned else 'off'}"


def _releases(recording: Recording, check: ScheduleCheck) -> Iterator[_Trial]:
    """The rules of every other release."""
    given = {name: setting.value for name, setting in recording.engine.items()}
    tried, packs = [check.engine], engine_packs()
    plain: dict[str, Any] = {
        field.name: field.default for field in fields(EngineConfig) if field.name in RELEASE_ARGUMENTS
    }
    for pack in packs:
        of_release = release_arguments(given | {"vllm_version": pack.first})
        engine = replace(check.engine, **plain | of_release)
        if engine not in tried:
            tried.append(engine)
            assumed = given.get("vllm_version", "0.15.1")
            sentence = f"the server schedules as vLLM does from {pack.first} on, not as {assumed}"
            yield _Trial(VERSION, sentence, check.schedule, engine)


def _memory(_recording: Recording, check: ScheduleCheck) -> Iterator[_Trial]:
    """The KV blocks that the recorded usage allows, in blocks of the assumed size and of others."""
    engine = check.engine
    for size in dict.fromkeys((engine.block_size, *_BLOCK_SIZES)):
        sized = replace(engine, block_size=size, num_gpu_blocks=engine.num_gpu_blocks or _BLOCKS_TO_SPARE)
        same = size == engine.block_size and engine.num_gpu_blocks
        blocks = _blocks(check if same else _served(check.schedule, sized))
        if blocks is None or (size, blocks) == (engine.block_size, engine.num_gpu_blocks):
            continue
        argument, value = ("num_gpu_blocks", blocks) if size == engine.block_size else ("block_size", size)
        assumed = "unlimited" if engine.num_gpu_blocks is None else f"{engine.num_gpu_blocks:,}"
        words = f"num_gpu_blocks is about {blocks:,}, not {assumed}"
        if argument == "block_size":
            words = f"block_size is {size}, not {engine.block_size}, with about {blocks:,} blocks"
        yield _Trial(ARGUMENT, words, check.schedule, replace(sized, num_gpu_blocks=blocks), argument, value)


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
    told = ~np.isnan(seen) & (used > 0) & (shared == 0) & (seen > 2 * check.schedule.kv_rounding)
    if not told.any():
        return None
    low = (used[told] / (seen[told] + check.schedule.kv_rounding)).max()
    high = (used[told] / (seen[told] - check.schedule.kv_rounding)).min()
    return round((low + high) / 2) + 1 if low <= high + 1 else None


def _prefix_hits(recording: Recording, check: ScheduleCheck) -> Iterator[_Trial]:
    """What the prefix cache held, otherwise than assumed."""
    requests = check.schedule.requests
    if check.schedule.source != LOG:
        if (requests["computed_tokens"] < requests["prompt_tokens"]).any():
            nothing = requests.with_columns(pl.col("prompt_tokens").alias("computed_tokens"))
            schedule = replace(check.schedule, requests=nothing)
            yield _Trial(PREFIX, "the steps computed prompt tokens that count as prefix hits", schedule, check.engine)
        return
    if not check.engine.enable_prefix_caching:
        on = with_engine(recording, {"enable_prefix_caching": True}, "trial")
        sentence = "the server has found prompts in its prefix cache, which counts as switched off"
        yield from _scheduled(on, None, PREFIX, sentence, replace(check.engine, enable_prefix_caching=True))
    served = served_requests(recording.requests, recording.lifecycles)
    if (served["cached_prompt_tokens"] > 0).any():
        unknown = served.with_columns(pl.lit(None, pl.Int64).alias("cached_prompt_tokens"))
        sentence = "the prefix hits that are recorded are not those of the steps"
        yield from _scheduled(recording, unknown, PREFIX, sentence, check.engine)


def _scheduled(
    recording: Recording,
    served: pl.DataFrame | None,
    cause: str,
    sentence: str,
    engine: EngineConfig,
) -> Iterator[_Trial]:
    try:
        yield _Trial(cause, sentence, recorded_schedule(recording, served), engine)
    except ReplayError:
        return


def _given_up(_recording: Recording, check: ScheduleCheck) -> Iterator[_Trial]:
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
        yield _Trial(ABORTED, sentence, replace(check.schedule, requests=requests), check.engine)


def _name(requests: pl.DataFrame, row: int) -> str:
    index, name = requests["request_index"][row], requests["request_id"][row]
    return f"request {index}" if index is not None else str(name or "a request")


def _other_requests(recording: Recording, check: ScheduleCheck) -> Iterator[_Trial]:
    """In a log whose counts cannot be those of the requests: one of them ended early, or there is one more."""
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
        yield from _scheduled(recording, changed, ABORTED, sentence, check.engine)
    yield from _one_more(recording, check, served)


def _is(requests: pl.DataFrame, row: dict[str, object]) -> pl.Series:
    same = pl.col("request_index").eq_missing(pl.lit(row["request_index"], pl.Int64))
    same &= pl.col("request_id").eq_missing(pl.lit(row["request_id"], pl.String))
    return requests.select(same).to_series()


def _one_more(recording: Recording, check: ScheduleCheck, served: pl.DataFrame) -> Iterator[_Trial]:
    """One request more among those whose prompts are not what the steps computed, at each place there is."""
    schedule = check.schedule
    admitted = pl.col("admitted")
    known = set(schedule.requests.filter(admitted < schedule.since).select(_IDENTITY).rows())
    first = next((i for i, row in enumerate(served.select(_IDENTITY).rows()) if row not in known), served.height)
    begun = schedule.requests.filter(admitted.is_between(schedule.since, schedule.end)).height
    tokens = int(schedule.counts["prefill_tokens"][schedule.since : schedule.end + 1].sum())
    for number in range(max(begun - MAX_AT_ONCE, 1), begun + 1):
        others = served["prompt_tokens"].slice(first, number - 1).fill_null(0)
        prompt = tokens - int(others.sum())
        if prompt < 1:
            continue
        for place in range(first, min(first + number, served.height + 1)):
            yield from _with_lengths(recording, check, served, place, prompt)


def _with_lengths(
    recording: Recording, check: ScheduleCheck, served: pl.DataFrame, place: int, prompt: int
) -> Iterator[_Trial]:
    """With a request of that prompt, which decodes until the counts say that somebody has ended."""
    engine = check.engine
    step = int(check.schedule.step[check.schedule.since])
    for trial in _scheduled(recording, _with_one_more(served, place, prompt, _LONG), UNKNOWN, "", engine):
        found = trial.schedule
        if found.end <= check.schedule.end or not found.why:
            continue
        for first in range(check.schedule.since, min(check.schedule.end + 1, found.end)):
            output = found.end - first
            sentence = (
                f"a request of {prompt:,} prompt tokens and {output:,} output tokens that no file records was served "
                f"from step {step:,} on"
            )
            changed = _with_one_more(served, place, prompt, output)
            yield from _scheduled(recording, changed, UNKNOWN, sentence, engine)


def _with_one_more(served: pl.DataFrame, place: int, prompt: int, output: int) -> pl.DataFrame:
    values: dict[str, object] = dict.fromkeys(SERVED_SCHEMA) | {
        "arrived_us": served["arrived_us"][min(place, served.height - 1)],
        "at_server": True,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_prompt_tokens": 0,
        "status": "ok",
    }
    more = pl.DataFrame([values], schema=SERVED_SCHEMA, orient="row")
    return pl.concat([served.head(place), more, served.tail(served.height - place)])


def _unexplained(check: ScheduleCheck, best: Meaning | None) -> Meaning:
    """No cause explains every step: what the counts say, and what comes closest."""
    row, closest = check.schedule.begin + check.reached, ""
    if best is not None:
        step = int(check.schedule.step[min(best.reached, len(check.schedule.step) - 1)])
        closest = f"; closest comes that {best.sentence}, with which the first difference is at step {step:,}"
    why = f" ({check.schedule.why})" if check.schedule.why else ""
    sentence = f"no engine argument, release, prefix hit or single request explains it{why}{closest}"
    return Meaning(NOT_IDENTIFIED, sentence, row, check.schedule.begin + check.steps)


# Every kind of cause; a further one is a function that yields trials, and an entry here.
_CAUSES = (_engine_arguments, _memory, _releases, _prefix_hits, _given_up, _other_requests)
