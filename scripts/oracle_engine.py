"""The real vLLM scheduler in virtual time: only the device is replaced, by a linear cost.

`simulate` feeds a workload to vLLM's own Scheduler or AsyncScheduler (with its request queue, KV cache manager and
block pool, built from vLLM's own configuration objects) and records what it decides. The two loops are those of
vLLM's engine core: `step` and `step_with_batch_queue` with two batches in flight.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from oracle_record import Recording
from oracle_vllm import TOKEN_TAG_STRIDE, SpecError, TooLongError, make_config, make_request, make_scheduler

GENERATED_TAG_BASE = 20000
# No workload needs that many turns without work one after the other; a scheduler that takes them does not progress.
MAX_EMPTY_TURNS = 10_000


@dataclass
class Track:
    """One request's way through the engine, as recorded in requests.csv."""

    index: int
    spec: dict[str, Any]
    prompt_tokens: int
    request: Any = None
    queued_us: int = -1
    first_scheduled: tuple[int, int] = (-1, -1)
    first_token: tuple[int, int] = (-1, -1)
    finished: tuple[int, int] = (-1, -1)
    emitted: int = 0
    cached: int = 0
    resume_cached: int = 0
    prefill_tokens: int = 0


@dataclass
class Batch:
    """One scheduled batch: the scheduler's output, its row of steps.csv so far, and who gets a token."""

    output: Any
    step: int
    row: dict[str, int]
    emits: list[str]
    start_us: int = 0
    end_us: int = 0


@dataclass
class Engine:
    """The scheduler under test, the workload still to come, and what was recorded."""

    scheduler: Any
    b_ns: list[int]
    tracks: dict[str, Track]
    pending: deque[Track]
    kv_total: int
    make_request: Any
    preempted: list[list[Any]] = field(default_factory=list)
    step_rows: list[dict[str, int]] = field(default_factory=list)
    tokens: list[list[Any]] = field(default_factory=list)
    schedule: list[dict[str, Any]] = field(default_factory=list)
    empty_turns: int = 0
    end_us: int = 0
    max_steps: int | None = None


def simulate(spec: dict[str, Any], max_steps: int | None = None) -> Recording:
    """Run a workload through vLLM's scheduler in virtual time; times in integer microseconds from zero.

    Raises SpecError for a workload that vLLM would refuse or could never finish, or TooLongError past `max_steps`.
    """
    check_spec(spec)
    engine = _build_engine(spec)
    engine.max_steps = max_steps
    run = _run_async if spec["engine_args"]["async_scheduling"] else _run_sync
    run(engine)
    rows = [_request_row(track) for track in engine.tracks.values()]
    steps, tokens = [list(row.values()) for row in engine.step_rows], _in_request_order(engine)
    return Recording(rows, steps, tokens, engine.schedule, engine.end_us)


def _in_request_order(engine: Engine) -> list[list[Any]]:
    return sorted(engine.tokens, key=lambda token: (engine.tracks[token[0]].index, token[1]))


def check_spec(spec: dict[str, Any]) -> None:
    """Raise SpecError where a request could never run to its end: too long for the model, the pool or the batch."""
    args = spec["engine_args"]
    arrivals = [request["arrival_us"] for request in spec["requests"]]
    if not arrivals or arrivals != sorted(arrivals):
        raise SpecError("requests: none, or not in order of arrival_us; give at least one, sorted")
    if args["num_gpu_blocks"] < 2:
        raise SpecError("num_gpu_blocks: one block is reserved; give at least 2")
    for request in spec["requests"]:
        prompt = sum(n for _, _, n in request["prompt"])
        most_computed = min(prompt + request["output_tokens"], args["max_model_len"]) - 1
        place = f"request {request['request_id']}: "
        if not 0 < prompt < args["max_model_len"] or request["output_tokens"] < 1:
            raise SpecError(f"{place}{prompt} prompt tokens; give 1 to max_model_len - 1, and at least one output")
        if any(start + n > TOKEN_TAG_STRIDE for _, start, n in request["prompt"]):
            raise SpecError(f"{place}a prompt segment runs past {TOKEN_TAG_STRIDE} tokens; split it over several tags")
        if -(-most_computed // args["block_size"]) > args["num_gpu_blocks"] - 1:
            raise SpecError(f"{place}{most_computed} tokens never fit into the pool; give more num_gpu_blocks")


def _build_engine(spec: dict[str, Any]) -> Engine:
    args = spec["engine_args"]
    config = make_config(args)
    scheduler, hasher = make_scheduler(config, args)
    tracks = {
        request["request_id"]: Track(index, request, sum(n for _, _, n in request["prompt"]))
        for index, request in enumerate(spec["requests"])
    }
    if len(tracks) != len(spec["requests"]):
        raise SpecError("requests: a request_id occurs twice; give each its own")
    engine = Engine(
        scheduler=scheduler,
        b_ns=spec["step_time"]["b_ns"],
        tracks=tracks,
        pending=deque(tracks.values()),
        kv_total=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        make_request=lambda track: make_request(track.spec, hasher),
    )
    _record_preemptions(engine)
    return engine


def _record_preemptions(engine: Engine) -> None:
    """Note each victim and the computed tokens it loses, then let vLLM preempt it."""
    preempt = engine.scheduler._preempt_request

    def note_and_preempt(request: Any, timestamp: float) -> None:
        engine.preempted.append([request.request_id, request.num_computed_tokens])
        preempt(request, timestamp)

    engine.scheduler._preempt_request = note_and_preempt


# --- the two loops of the engine core -----------------------------------------------------------------------------


def _run_sync(engine: Engine) -> None:
    now_us = 0
    while engine.pending or engine.scheduler.has_requests():
        now_us = _enqueue_arrivals(engine, now_us, idle=not engine.scheduler.has_requests())
        batch = _schedule_batch(engine, now_us)
        _start_batch(engine, batch, now_us)
        now_us = batch.end_us
        _update(engine, batch)


def _run_async(engine: Engine) -> None:
    """vLLM's step_with_batch_queue: fill the queue of two first; a full queue waits for its oldest batch."""
    now_us = device_free_us = 0
    in_flight: deque[Batch] = deque()
    while engine.pending or in_flight or engine.scheduler.has_requests():
        idle = not in_flight and not engine.scheduler.has_requests()
        now_us = _enqueue_arrivals(engine, now_us, idle=idle)
        if engine.scheduler.has_requests():
            batch = _schedule_batch(engine, now_us)
            in_flight.append(batch)
            _start_batch(engine, batch, max(now_us, device_free_us))
            if batch.output.total_num_scheduled_tokens > 0:
                device_free_us = batch.end_us
                if len(in_flight) < 2 and in_flight[0].end_us > now_us:
                    continue
        batch = in_flight.popleft()
        if batch.output.total_num_scheduled_tokens > 0:
            now_us = max(now_us, batch.end_us)
        _update(engine, batch)


def _enqueue_arrivals(engine: Engine, now_us: int, *, idle: bool) -> int:
    """Queue what has arrived; an idle engine first sleeps until the next arrival. Returns the time of this turn."""
    if idle and engine.pending:
        now_us = max(now_us, engine.pending[0].spec["arrival_us"])
    while engine.pending and engine.pending[0].spec["arrival_us"] <= now_us:
        track = engine.pending.popleft()
        track.queued_us = now_us
        track.request = engine.make_request(track)
        engine.scheduler.add_request(track.request)
    return now_us


def _schedule_batch(engine: Engine, now_us: int) -> Batch:
    """One schedule() call, with the queue depths and free blocks around it."""
    scheduler, pool = engine.scheduler, engine.scheduler.kv_cache_manager.block_pool
    known = {rid: _known_tokens(request) for rid, request in scheduler.requests.items()}
    before = (len(scheduler.running), len(scheduler.waiting), pool.get_num_free_blocks())
    empty_preempted, engine.preempted = engine.preempted, []
    output = scheduler.schedule()
    step = len(engine.step_rows)
    if output.total_num_scheduled_tokens == 0:
        engine.preempted = empty_preempted + engine.preempted
        _count_empty_turn(engine)
        return Batch(output, -1, {}, [])
    engine.empty_turns = 0
    if engine.max_steps is not None and step >= engine.max_steps:
        done = sum(track.finished[1] >= 0 for track in engine.tracks.values())
        raise TooLongError(f"not done after {step} steps, {done} of {len(engine.tracks)} requests finished")
    preempted, engine.preempted = engine.preempted, []
    row: dict[str, int] = {"step": step, "t_sched_us": now_us, "t_start_us": 0, "t_end_us": 0, "duration_us": 0}
    row |= {"running_before": before[0], "waiting_before": before[1]}
    row |= {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
    composition, emits = _composition(engine, output, known)
    admitted, resumed = _admissions(output)
    row |= composition
    row |= {"num_admitted": len(admitted), "num_preempted": len(preempted), "num_finished": 0}
    row |= {"kv_total": engine.kv_total, "kv_free_before": before[2], "kv_free": pool.get_num_free_blocks()}
    engine.step_rows.append(row)
    line: dict[str, Any] = {"step": step, "sched": dict(output.num_scheduled_tokens)}
    line |= {"admitted": admitted} if admitted else {}
    line |= {"resumed": resumed} if resumed else {}
    line |= {"preempted": preempted} if preempted else {}
    line |= {"preempted_before": empty_preempted} if empty_preempted else {}
    engine.schedule.append(line)
    for rid, hit_tokens in admitted.items():
        if rid in resumed:
            engine.tracks[rid].resume_cached += hit_tokens
        else:
            engine.tracks[rid].cached = hit_tokens
    return Batch(output, step, row, emits)


def _known_tokens(request: Any) -> int:
    """Prompt and generated tokens, a token in flight (asynchronous scheduling) counted as known."""
    return int(request.num_tokens + request.num_output_placeholders)


def _count_empty_turn(engine: Engine) -> None:
    engine.empty_turns += 1
    if engine.empty_turns > MAX_EMPTY_TURNS:
        raise SpecError(f"{MAX_EMPTY_TURNS} turns without work after step {len(engine.step_rows) - 1}: no progress")


def _composition(engine: Engine, output: Any, known: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """The batch's prefill and decode counts, and the requests whose last known token it computes."""
    prefills, contexts, prefill_tokens = 0, [], 0
    emits = []
    for rid, n in output.num_scheduled_tokens.items():
        track = engine.tracks[rid]
        # schedule() has advanced num_computed_tokens already.
        end = track.request.num_computed_tokens
        if end == known[rid]:
            emits.append(rid)
        if n == 1 and end == known[rid] and end - 1 >= track.prompt_tokens:
            contexts.append(end)
        else:
            prefills += 1
            prefill_tokens += n
            track.prefill_tokens += n
    return {
        "num_prefill_reqs": prefills,
        "num_decode_reqs": len(contexts),
        "prefill_tokens": prefill_tokens,
        "decode_tokens": len(contexts),
        "decode_context_tokens": sum(contexts),
        "scheduled_tokens": output.total_num_scheduled_tokens,
    }, emits


def _admissions(output: Any) -> tuple[dict[str, int], list[str]]:
    """Prefix-cache tokens of each admitted request, in scheduling order, and those admitted after a preemption."""
    cached = output.scheduled_cached_reqs
    hits = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    hits |= {
        rid: hit
        for rid, hit in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        if rid in cached.resumed_req_ids
    }
    admitted = {rid: hits[rid] for rid in output.num_scheduled_tokens if rid in hits}
    return admitted, [rid for rid in admitted if rid in cached.resumed_req_ids]


def _start_batch(engine: Engine, batch: Batch, start_us: int) -> None:
    """Give the batch its time on the device: b_ns summed, rounded half up to microseconds. An empty one takes none."""
    batch.start_us = batch.end_us = start_us
    if not batch.row:
        return
    row, (b0, b1, b2, b3) = batch.row, engine.b_ns
    cost_ns = b0 + b1 * row["prefill_tokens"] + b2 * row["num_decode_reqs"] + b3 * row["decode_context_tokens"]
    row["duration_us"] = (cost_ns + 500) // 1000
    batch.end_us = start_us + row["duration_us"]
    row["t_start_us"], row["t_end_us"] = start_us, batch.end_us
    for rid in batch.output.num_scheduled_tokens:
        track = engine.tracks[rid]
        if track.first_scheduled[1] < 0:
            track.first_scheduled = (start_us, batch.step)


def _update(engine: Engine, batch: Batch) -> None:
    """Hand the sampled tokens to the scheduler and note token and finish times."""
    from vllm.v1.outputs import ModelRunnerOutput

    order = list(batch.output.num_scheduled_tokens)
    emits = set(batch.emits)
    sampled = [[_next_token(engine.tracks[rid])] if rid in emits else [] for rid in order]
    engine.scheduler.update_from_output(
        batch.output, ModelRunnerOutput(order, {rid: i for i, rid in enumerate(order)}, sampled)
    )
    if not batch.row:
        return
    engine.end_us = batch.end_us
    for rid in batch.emits:
        _note_token(engine, batch, engine.tracks[rid])
    batch.row["kv_free_end"] = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def _next_token(track: Track) -> int:
    return int((GENERATED_TAG_BASE + track.index) * TOKEN_TAG_STRIDE + track.request.num_output_tokens)


def _note_token(engine: Engine, batch: Batch, track: Track) -> None:
    if track.request.num_output_tokens != track.emitted + 1:
        raise SpecError(f"request {track.spec['request_id']}: the scheduler dropped a token of step {batch.step}")
    moment = (batch.end_us, batch.step)
    engine.tokens.append([track.spec["request_id"], track.emitted, batch.step, batch.end_us])
    if track.emitted == 0:
        track.first_token = moment
    track.emitted += 1
    if track.request.is_finished():
        track.finished = moment
        batch.row["num_finished"] += 1


def _request_row(track: Track) -> list[Any]:
    spec = track.spec
    if track.finished[1] < 0:
        raise SpecError(f"request {spec['request_id']}: never finished")
    return [
        *(spec["request_id"], spec["arrival_us"], spec["priority"], track.prompt_tokens, spec["output_tokens"]),
        *(spec["prefix_group"], spec["prefix_len"], track.queued_us),
        *track.first_scheduled,
        *track.first_token,
        *track.finished,
        *(track.emitted, track.request.num_preemptions, track.cached, track.resume_cached, track.prefill_tokens),
    ]
