"""The real vLLM engine core in virtual time: only the device is replaced, by a linear cost.

`simulate` feeds a workload to vLLM's own EngineCore and calls its `step_fn`: `step`, or `step_with_batch_queue` with
two batches in flight. The device runs a batch in virtual time, and its future moves the clock when the engine core
waits for it. What is imitated is the loop around the step: it hands over arrivals and clients that give up.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from oracle_offload import EMPTY_TURN_US, Offload
from oracle_record import Recording
from oracle_vllm import (
    TOKEN_TAG_STRIDE,
    FailedError,
    SpecError,
    TooLongError,
    known_args,
    make_core,
    make_request,
    model_output,
)

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
    preemptions: int = 0
    admitted: bool = False
    aborted: bool = False
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
    padded: set[str] = field(default_factory=set)
    start_us: int = 0
    end_us: int = 0
    transfers: Any = None


@dataclass
class Engine:
    """The engine core under test, the virtual clock, the workload still to come, and what was recorded."""

    b_ns: list[int]
    tracks: dict[str, Track]
    pending: deque[Track]
    aborts: deque[tuple[int, str]]
    max_steps: int | None = None
    core: Any = None
    offload: Any = None
    kv_total: int = 0
    now_us: int = 0
    device_free_us: int = 0
    in_flight: deque[Batch] = field(default_factory=deque)
    computed: dict[str, int] = field(default_factory=dict)
    drafting: list[str] = field(default_factory=list)
    preempted: list[list[Any]] = field(default_factory=list)
    step_rows: list[dict[str, int]] = field(default_factory=list)
    tokens: list[list[Any]] = field(default_factory=list)
    schedule: list[dict[str, Any]] = field(default_factory=list)
    empty_turns: int = 0
    end_us: int = 0


def simulate(spec: dict[str, Any], max_steps: int | None = None) -> Recording:
    """Run a workload through vLLM's engine core in virtual time; times in integer microseconds from zero.

    `spec["engine_args"]` loses the arguments that this release does not know. Raises SpecError for a workload that vLLM
    would refuse, or TooLongError past `max_steps` or where it never goes on.
    """
    check_spec(spec)
    spec["engine_args"] = known_args(spec["engine_args"])
    try:
        engine = _build_engine(spec, max_steps)
        _run(engine)
    except SpecError:
        raise
    except (AssertionError, TypeError, ValueError) as error:
        raise FailedError(f"this release fails: {error.__class__.__name__}: {error}") from error
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


def _build_engine(spec: dict[str, Any], max_steps: int | None) -> Engine:
    tracks = {
        request["request_id"]: Track(index, request, sum(n for _, _, n in request["prompt"]))
        for index, request in enumerate(spec["requests"])
    }
    if len(tracks) != len(spec["requests"]):
        raise SpecError("requests: a request_id occurs twice; give each its own")
    aborts = sorted(
        (request["abort_us"], request["request_id"]) for request in spec["requests"] if "abort_us" in request
    )
    engine = Engine(spec["step_time"]["b_ns"], tracks, deque(tracks.values()), deque(aborts), max_steps)
    run, drafts = (lambda output: _run_batch(engine, output)), (lambda: _take_drafts(engine))
    engine.core = make_core(spec["engine_args"], run, drafts)
    scheduler = engine.core.scheduler
    if "kv_offloading" in spec["engine_args"]:
        blocks, *times_us = spec["engine_args"]["kv_offloading"]
        engine.offload = Offload(engine.core, times_us) if blocks else _remote(times_us)
    engine.kv_total = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    schedule, update = scheduler.schedule, scheduler.update_from_output
    _watch_preemptions(engine)
    scheduler.schedule = lambda *args: _note_schedule(engine, schedule, args)
    scheduler.update_from_output = lambda *args: _note_update(engine, update, args)
    return engine


def _remote(times_us: list[int]) -> Any:
    from oracle_remote import Remote

    return Remote(times_us[:2])


# --- the loop around the engine core's step, and the device --------------------------------------------------------


def _run(engine: Engine) -> None:
    core = engine.core
    while engine.pending or core.batch_queue or core.scheduler.has_requests():
        idle = not core.batch_queue and not core.scheduler.has_requests()
        _take_messages(engine, idle=idle)
        if core.scheduler.has_requests() or core.batch_queue:
            _, executed = core.step_fn()
            core.post_step(executed)
            if engine.offload and not executed and core.scheduler.has_requests():
                engine.now_us += EMPTY_TURN_US


def _take_messages(engine: Engine, *, idle: bool) -> None:
    """Hand over what has come by now, in order of time; an idle engine first sleeps until the next arrival."""
    if idle and engine.pending:
        engine.now_us = max(engine.now_us, engine.pending[0].spec["arrival_us"])
    while engine.pending and engine.pending[0].spec["arrival_us"] <= engine.now_us:
        track = engine.pending.popleft()
        track.queued_us = engine.now_us
        track.request = make_request(track.spec, engine.core)
        engine.core.add_request(track.request)
    for rid in _due_aborts(engine):
        engine.core.abort_requests([rid])
        engine.aborts.popleft()


def _due_aborts(engine: Engine) -> list[str]:
    """Whose client has given up by now.  Handed over one by one: of several vLLM's order is that of a set of texts."""
    due = [rid for at_us, rid in takewhile(lambda abort: abort[0] <= engine.now_us, engine.aborts)]
    for rid in due:
        engine.tracks[rid].aborted = engine.tracks[rid].finished[1] < 0
    return due


def _run_batch(engine: Engine, output: Any) -> "VirtualFuture":
    """Give the batch just scheduled its time on the device: b_ns summed, rounded half up. An empty one takes none."""
    batch = engine.in_flight[-1]
    launch_us = engine.now_us
    if engine.offload:
        launch_us = engine.offload.before(output, engine.now_us, engine.device_free_us)
        engine.device_free_us = max(engine.device_free_us, launch_us)
    batch.start_us = batch.end_us = launch_us
    if batch.row:
        row, (b0, b1, b2, b3) = batch.row, engine.b_ns
        cost_ns = b0 + b1 * row["prefill_tokens"] + b2 * row["decode_tokens"] + b3 * row["decode_context_tokens"]
        row["duration_us"] = (cost_ns + 500) // 1000
        batch.start_us = max(engine.now_us, engine.device_free_us)
        batch.end_us = engine.device_free_us = batch.start_us + row["duration_us"]
        row["t_start_us"], row["t_end_us"] = batch.start_us, batch.end_us
        for rid in output.num_scheduled_tokens:
            track = engine.tracks[rid]
            if track.first_scheduled[1] < 0:
                track.first_scheduled = (batch.start_us, batch.step)
    if engine.offload:
        batch.transfers = engine.offload.after(output, engine.device_free_us)
    return VirtualFuture(engine, batch)


@dataclass
class VirtualFuture:
    """The model's output of a batch; whoever waits for it moves the clock to the end of the batch."""

    engine: Engine
    batch: Batch

    def done(self) -> bool:
        return self.batch.end_us <= self.engine.now_us

    def add_done_callback(self, _: Any) -> None:
        """Nothing goes wrong here that vLLM would want to hear of."""

    def result(self) -> Any:
        engine, batch = self.engine, self.batch
        engine.now_us = max(engine.now_us, batch.end_us)
        # Older releases have no such queue: they notice a client that gives up at the next turn.
        if hasattr(engine.core, "aborts_queue"):
            for rid in _due_aborts(engine):
                engine.core.aborts_queue.put([rid])
                engine.core._process_aborts_queue()
        scheduled = batch.output.num_scheduled_tokens
        sampled: dict[str, list[int]] = {rid: [] for rid in scheduled}
        for rid in batch.emits:
            sampled[rid] = _next_tokens(engine.tracks[rid], _accepted(engine, batch, rid))
        engine.drafting = batch.emits
        return model_output(sampled, batch.transfers)


def _accepted(engine: Engine, batch: Batch, rid: str) -> int:
    """How many of the drafts in the batch the model agrees with; those that only fill a batch up are no drafts."""
    drafts = len(batch.output.scheduled_spec_decode_tokens.get(rid, ()))
    if drafts == 0 or rid in batch.padded:
        return 0
    return min(_of_next_token(engine.tracks[rid], "accepted"), drafts)


def _take_drafts(engine: Engine) -> dict[str, list[int]]:
    """What the proposer drafts behind the tokens that the requests of the last batch have been given."""
    tracks = {rid: engine.tracks[rid] for rid in engine.drafting}
    return {rid: [0] * _of_next_token(track, "drafted") for rid, track in tracks.items() if track.finished[1] < 0}


def _of_next_token(track: Track, what: str) -> int:
    """A digit of the request's `drafted` or `accepted`: one for each output token that there is already."""
    return int(track.spec[what][track.request.num_output_tokens - 1])


# --- what is recorded ----------------------------------------------------------------------------------------------


def _watch_preemptions(engine: Engine) -> None:
    """Note each victim, when it returns to the queue, and the computed tokens that it has lost by then."""
    queue = engine.core.scheduler.waiting
    prepend = queue.prepend_request

    def note_and_prepend(request: Any) -> None:
        engine.preempted.append([request.request_id, engine.computed[request.request_id]])
        engine.tracks[request.request_id].preemptions += 1
        prepend(request)

    queue.prepend_request = note_and_prepend


def _note_schedule(engine: Engine, schedule: Any, args: tuple[Any, ...]) -> Any:
    """One schedule() call, with the queue depths and free blocks around it."""
    scheduler, pool = engine.core.scheduler, engine.core.scheduler.kv_cache_manager.block_pool
    known = {rid: _known_tokens(request) for rid, request in scheduler.requests.items()}
    engine.computed = {request.request_id: request.num_computed_tokens for request in scheduler.running}
    running = set(engine.computed)
    before = (len(scheduler.running), scheduler.get_request_counts()[1], pool.get_num_free_blocks())
    empty_preempted, engine.preempted = engine.preempted, []
    output = schedule(*args)
    step = len(engine.step_rows)
    if output.total_num_scheduled_tokens == 0:
        engine.preempted = empty_preempted + engine.preempted
        _count_empty_turn(engine)
        engine.in_flight.append(Batch(output, -1, {}, []))
        return output
    engine.empty_turns = 0
    if engine.max_steps is not None and step >= engine.max_steps:
        done = sum(track.finished[1] >= 0 for track in engine.tracks.values())
        raise TooLongError(f"not done after {step} steps, {done} of {len(engine.tracks)} requests finished")
    preempted, engine.preempted = engine.preempted, []
    row: dict[str, int] = {"step": step, "t_sched_us": engine.now_us, "t_start_us": 0, "t_end_us": 0, "duration_us": 0}
    row |= {"running_before": before[0], "waiting_before": before[1]}
    row |= dict(zip(("running", "waiting"), scheduler.get_request_counts(), strict=True))
    composition, emits = _composition(engine, output, known)
    admitted, resumed = _admissions(engine, output, running)
    drafted = output.scheduled_spec_decode_tokens
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
    line |= {"drafts": {rid: len(drafts) for rid, drafts in drafted.items()}} if drafted else {}
    engine.in_flight.append(Batch(output, step, row, emits, set(admitted)))
    return output


def _known_tokens(request: Any) -> int:
    """Prompt and generated tokens; those in flight (asynchronous scheduling), drafts among them, count as known."""
    return int(request.num_tokens + request.num_output_placeholders)


def _count_empty_turn(engine: Engine) -> None:
    engine.empty_turns += 1
    if engine.empty_turns > MAX_EMPTY_TURNS:
        raise TooLongError(f"{MAX_EMPTY_TURNS} turns without work after step {len(engine.step_rows) - 1}: no progress")


def _composition(engine: Engine, output: Any, known: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """The batch's prefill and decode counts, and the requests whose last known token it computes."""
    prefills, contexts, prefill_tokens, decode_tokens = 0, [], 0, 0
    emits = []
    for rid, n in output.num_scheduled_tokens.items():
        track = engine.tracks[rid]
        drafts = len(output.scheduled_spec_decode_tokens.get(rid, ()))
        # schedule() has advanced num_computed_tokens already.
        end = track.request.num_computed_tokens
        last_known = end - drafts == known[rid]
        if last_known:
            emits.append(rid)
        if n == 1 + drafts and last_known and end - n >= track.prompt_tokens:
            contexts.append(end)
            decode_tokens += n
        else:
            prefills += 1
            prefill_tokens += n
            track.prefill_tokens += n
    return {
        "num_prefill_reqs": prefills,
        "num_decode_reqs": len(contexts),
        "prefill_tokens": prefill_tokens,
        "decode_tokens": decode_tokens,
        "decode_context_tokens": sum(contexts),
        "scheduled_tokens": output.total_num_scheduled_tokens,
    }, emits


def _admissions(engine: Engine, output: Any, running: set[str]) -> tuple[dict[str, int], list[str]]:
    """Prefix-cache tokens of each admitted request, in scheduling order, and those admitted after a preemption."""
    admitted, resumed = {}, []
    for rid, n in output.num_scheduled_tokens.items():
        if rid in running:
            continue
        track = engine.tracks[rid]
        # schedule() has advanced num_computed_tokens already.
        admitted[rid] = hit_tokens = track.request.num_computed_tokens - n
        if track.admitted:
            resumed.append(rid)
            track.resume_cached += hit_tokens
        else:
            track.admitted, track.cached = True, hit_tokens
    return admitted, resumed


def _note_update(engine: Engine, update: Any, args: tuple[Any, ...]) -> Any:
    """Let the scheduler take the sampled tokens, and note token and finish times."""
    batch = engine.in_flight.popleft()
    if batch.output is not args[0]:
        raise SpecError(f"step {batch.step}: the engine core takes the outputs of its batches in another order")
    outputs = update(*args)
    if not batch.row:
        return outputs
    engine.end_us = batch.end_us
    for rid in batch.emits:
        track = engine.tracks[rid]
        # Some releases run a decode more for a request whose last token is in flight, and drop its token.
        if not track.aborted and track.finished[1] < 0:
            _note_tokens(engine, batch, track)
    batch.row["kv_free_end"] = engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return outputs


def _next_tokens(track: Track, accepted: int) -> list[int]:
    first = (GENERATED_TAG_BASE + track.index) * TOKEN_TAG_STRIDE + track.request.num_output_tokens
    return list(range(first, first + 1 + accepted))


def _note_tokens(engine: Engine, batch: Batch, track: Track) -> None:
    if track.request.num_output_tokens == track.emitted:
        raise SpecError(f"request {track.spec['request_id']}: the scheduler dropped a token of step {batch.step}")
    moment = (batch.end_us, batch.step)
    if track.emitted == 0:
        track.first_token = moment
    for emitted in range(track.emitted, track.request.num_output_tokens):
        engine.tokens.append([track.spec["request_id"], emitted, batch.step, batch.end_us])
    track.emitted = track.request.num_output_tokens
    if track.request.is_finished():
        track.finished = moment
        batch.row["num_finished"] += 1


def _request_row(track: Track) -> list[Any]:
    spec = track.spec
    if track.finished[1] < 0 and not track.aborted:
        raise SpecError(f"request {spec['request_id']}: never finished")
    return [
        *(spec["request_id"], spec["arrival_us"], spec["priority"], track.prompt_tokens, spec["output_tokens"]),
        *(spec["prefix_group"], spec["prefix_len"], track.queued_us),
        *track.first_scheduled,
        *track.first_token,
        *track.finished,
        *(track.emitted, track.preemptions, track.cached, track.resume_cached, track.prefill_tokens),
    ]
