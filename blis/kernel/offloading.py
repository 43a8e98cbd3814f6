"""Schedule and loop with an offload of KV blocks to CPU memory: requests whose blocks are being loaded are parked.

A request whose prefix goes on in CPU memory gets its blocks and is parked until they are loaded.  Parked requests do
not count as running, and come before those that wait.  A request is passed over while blocks that it could load are
being stored, or loaded for another one.  With two batches in flight, blocks of a request in flight are not given up.

Running requests and tokens follow ``draft_batch`` and ``drafting``.
"""

from __future__ import annotations

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.tables import column, table_of
from blis_replay.blis.kernel.batch import enter_running, hold_prefix
from blis_replay.blis.kernel.draft_batch import (
    close_segment,
    end_batch,
    give,
    leave_running,
    list_batch,
    note_cached,
    walk_running,
)
from blis_replay.blis.kernel.drafting import forget_oldest, take_tokens
from blis_replay.blis.kernel.flight import Flight, flight_of
from blis_replay.blis.kernel.loop import (
    ARRIVED,
    BATCH,
    NEEDS_ROOM,
    REACHED,
    STUCK,
    await_arrival,
    lacks_room,
    land_oldest,
    put_in_flight,
    take_arrivals,
)
from blis_replay.blis.kernel.pool import allocate_slots, blocks_for, find_cached_blocks, full_blocks
from blis_replay.blis.kernel.queues import (
    first_waiting,
    give_up_blocks,
    leave_list,
    leave_queue,
    next_given_up,
    queue_up,
    start_running,
    stop_prefill,
)
from blis_replay.blis.kernel.schedule import begin_batch, lacks_blocks, note_admission
from blis_replay.blis.kernel.state import (
    ABORTED,
    NEW,
    NONE,
    PARKED,
    WAITING,
    State,
    compiled,
    entry,
    insert,
    remove,
    separate,
    state_of,
)
from blis_replay.blis.kernel.step_time import batch_duration_us
from blis_replay.blis.kernel.transfers import (
    LOADS,
    STORES,
    Offload,
    add_transfer,
    begin_transfers,
    external_blocks,
    load,
    offload_of,
    plan_transfers,
    see_transfers,
    take_transfers,
    wait_for_flushed,
)

# vLLM's engine sleeps so long after a turn without tokens, while there is still something to wait for.
EMPTY_TURN_US = 1_000


@entry
def advance(
    state: State, flight: Flight, offload: Offload, until_us: int, kind: int, int_params: Int64s, float_params: Floats
) -> int:
    """As ``loop.advance``."""
    run, own, cpu = state_of(state), flight_of(flight), offload_of(offload)
    ints, floats = table_of(int_params), table_of(float_params)
    while True:
        answer = _next_batch(run, own, cpu, until_us)
        if answer != BATCH:
            return answer
        start_us = max(run.at.now_us, run.at.device_free_us)
        _run_batch(run, own, cpu, batch_duration_us(kind, ints, floats, run.batch, start_us))


@entry
def next_batch(state: State, flight: Flight, offload: Offload, until_us: int) -> int:
    """As ``loop.next_batch``."""
    run = state_of(state)
    return _next_batch(run, flight_of(flight), offload_of(offload), until_us)


@entry
def run_batch(state: State, flight: Flight, offload: Offload, duration_us: int) -> None:
    """As ``loop.run_batch``."""
    run = state_of(state)
    _run_batch(run, flight_of(flight), offload_of(offload), duration_us)


@compiled
def _next_batch(state: State, flight: Flight, offload: Offload, until_us: int) -> int:
    at = state.at
    while True:
        if at.now_us >= until_us:
            return REACHED
        if lacks_room(state):
            return NEEDS_ROOM
        if at.steps_without_token > state.config.max_steps_without_token:
            return STUCK
        take_arrivals(state)
        take_aborts(state, flight, offload)
        if has_work(state, offload):
            schedule(state, flight, offload)
            return BATCH
        if at.in_flight > 0:
            update(state, flight, offload)
            if has_work(state, offload):
                at.now_us += EMPTY_TURN_US
            continue
        answer = await_arrival(state, until_us)
        if answer != ARRIVED:
            return answer


@compiled
def has_work(state: State, offload: Offload) -> bool:
    """Whether the engine goes on with its turns: a request is not done, or a transfer has not been acted on."""
    at, cpu = state.at, offload.at
    if at.running_depth + at.waiting_depth + cpu.parked_depth + cpu.ended + cpu.held > 0:
        return True
    return (
        offload.ways[STORES].taken < offload.ways[STORES].added or offload.ways[LOADS].taken < offload.ways[LOADS].added
    )


# -- One schedule() --------------------------------------------------------------------------


@compiled
def schedule(state: State, flight: Flight, offload: Offload) -> None:
    """Build one batch: running requests in their order, then parked ones, then waiting ones."""
    at, parked = state.at, offload.at.parked_depth
    at.waiting_depth += parked
    begin_batch(state, False)
    at.waiting_depth -= parked
    budget = walk_running(state, flight)
    if at.preempted_in_call == 0:
        budget = admit_parked(state, flight, offload, budget)
        admit_waiting(state, flight, offload, budget)
    plan_transfers(state, offload)
    end_batch(state, flight)


@compiled
def admit_parked(state: State, flight: Flight, offload: Offload, budget: int) -> int:
    """Go on with parked requests whose blocks are loaded; the budget that is left, 0 if one found no room."""
    at, request = state.at, offload.at.parked.head
    while request != NONE and budget > 0 and at.running_depth < state.config.max_active_seqs:
        after = state.links[request].growth.next
        this, own = state.requests[request], offload.requests[request]
        if own.loaded > 0:
            if own.loaded == 1:
                own.loaded = 2
                note_cached(state, flight, request, this.computed)
                this.computed = min(this.computed, this.known - 1)  # the last known token is always computed
            tokens = tokens_of_admission(state, request, this.computed, budget)
            if tokens == 0 or lacks_blocks(state, request, 0, this.computed + tokens, this.blocks_held):
                return 0
            unpark(state, offload, request)
            start_running(state, request)
            run_admitted(state, flight, request, tokens)
            budget -= tokens
        request = after
    return budget


@compiled
def admit_waiting(state: State, flight: Flight, offload: Offload, budget: int) -> None:
    """Admit or park waiting requests until something is short; those that cannot be looked up yet are passed over."""
    at, config, skipped, short = state.at, state.config, 0, False
    while at.waiting_depth > 0 and budget > 0 and at.running_depth < config.max_active_seqs and not short:
        request = first_waiting(state)
        row = state.free_rows[at.free_rows - 1]
        hits, free_hits, extents = find_cached_blocks(state, request, row)
        external, held = external_blocks(state, offload, request, hits), hits - free_hits
        computed, own = (hits + external) * config.block_size, offload.requests[request]
        if own.remote > hits * config.block_size:
            external, computed = blocks_for(state, own.remote) - hits, own.remote
        if external == NONE:
            leave_queue(state, request)
            offload.skipped[skipped] = request
            skipped += 1
        elif external > 0:
            short = lacks_blocks(state, request, 0, computed, held) or lacks_unreserved(
                state, flight, offload, hits + external - held
            )
            if not short:
                leave_queue(state, request)
                hold_prefix(state, request, row, hits, extents)
                park(state, flight, offload, request, computed)
                if own.remote > 0:
                    add_transfer(offload, LOADS, request, 0, 0, external)
                else:
                    load(state, offload, request, hits, hits + external)
                own.remote = 0
        else:
            tokens = tokens_of_admission(state, request, computed, budget)
            short = tokens == 0 or lacks_blocks(state, request, 0, computed + tokens, held)
            if not short:
                enter_running(state, request, row, hits, extents)
                state.requests[request].computed = computed
                flight.requests[request].cached = computed
                own.remote = 0
                run_admitted(state, flight, request, tokens)
                budget -= tokens
    for i in range(skipped):
        queue_up(state, offload.skipped[i])


@compiled
def tokens_of_admission(state: State, request: int, computed: int, budget: int) -> int:
    """Tokens that a request is given with its admission; 0: it needs a batch with more room."""
    tokens = state.requests[request].known - computed
    if 0 < state.batch.prefill_cap < tokens:
        tokens = state.batch.prefill_cap
    if tokens > budget and state.config.chunked_prefill == 0:
        return 0
    return min(tokens, budget)


@compiled
def run_admitted(state: State, flight: Flight, request: int, tokens: int) -> None:
    """The first tokens of a request that has just begun to run; all that it holds counts as allocated in this step."""
    this = state.requests[request]
    allocate_slots(state, request, this.computed + tokens)
    note_admission(state, request, this.computed)
    flight.requests[request].in_prefill = 1 if this.computed + tokens < this.known else 0
    give(state, flight, request, tokens)
    note_allocated(state, request)


@compiled
def note_allocated(state: State, request: int) -> None:
    """Note the step in which a request was allocated its cached blocks."""
    this = state.requests[request]
    for i in range(this.extents_held):
        state.taken[state.table[this.table_row, 2 * i]] = state.at.step


@compiled
def lacks_unreserved(state: State, flight: Flight, offload: Offload, blocks: int) -> bool:
    """Whether too few blocks are free for a load, beside those that prefills and parked requests still need."""
    reserved, request = 0, state.at.running.head
    while request != NONE:
        if flight.requests[request].in_prefill == 1:
            reserved += remaining_blocks(state, request)
        request = state.links[request].running.next
    request = offload.at.parked.head
    while request != NONE:
        reserved += remaining_blocks(state, request)
        request = state.links[request].growth.next
    spare = state.config.watermark_blocks if state.at.running_depth > 0 else 0
    return blocks + spare > state.at.free_blocks - reserved


@compiled
def remaining_blocks(state: State, request: int) -> int:
    """Blocks that a request still needs for all its known tokens."""
    this = state.requests[request]
    return max(blocks_for(state, this.known) - this.blocks_held, 0)


# -- Parked requests -------------------------------------------------------------------------


@compiled
def park(state: State, flight: Flight, offload: Offload, request: int, computed: int) -> None:
    """Hold blocks for the tokens that are found or loaded; the request waits behind those parked, or by its rank."""
    this, at = state.requests[request], offload.at
    flight.requests[request].cached = this.blocks_held * state.config.block_size
    allocate_slots(state, request, computed)
    note_allocated(state, request)
    this.computed = computed
    this.status = PARKED
    offload.requests[request].loaded = 0
    before = at.parked.tail
    if state.config.priority_policy == 1:
        while before != NONE and state.facts[before].rank > state.facts[request].rank:
            before = state.links[before].growth.previous
    insert(column(state.links, "growth"), at.parked, request, before)
    at.parked_depth += 1


@compiled
def unpark(state: State, offload: Offload, request: int) -> None:
    """Out of the parked requests; it keeps its blocks."""
    remove(column(state.links, "growth"), offload.at.parked, request)
    offload.at.parked_depth -= 1


# -- The batch on the device ------------------------------------------------------------------


@compiled
def _run_batch(state: State, flight: Flight, offload: Offload, duration_us: int) -> None:
    """Launch the batch just scheduled, with the transfers around it."""
    at, batch, cpu = state.at, state.batch, offload.at
    list_batch(state, flight, at.in_flight)
    launch_us = max(at.now_us, cpu.launched_us)
    begin_transfers(offload, STORES, cpu.begins, max(launch_us, at.device_free_us))
    launch_us = wait_for_flushed(offload, launch_us)
    cpu.launched_us = launch_us
    at.device_free_us = max(at.device_free_us, launch_us)
    at.waiting_depth += cpu.parked_depth
    tokens = put_in_flight(state, duration_us)
    at.waiting_depth -= cpu.parked_depth
    begin_transfers(offload, LOADS, offload.ways[LOADS].added, launch_us if cpu.blocks == 0 else at.device_free_us)
    see_transfers(offload, launch_us, at.in_flight - 1)
    if batch.first_tokens > 0 or cpu.held > 0:  # what is held comes free at its time
        at.steps_without_token = 0
    else:
        at.steps_without_token += 1
    at.step += 1
    if tokens > 0:
        cpu.scheduled += 1
    if at.in_flight == state.config.batches_in_flight or not (tokens > 0 or has_work(state, offload)):
        update(state, flight, offload)
    if tokens == 0 and has_work(state, offload):
        at.now_us += EMPTY_TURN_US


@compiled
def update(state: State, flight: Flight, offload: Offload) -> None:
    """The tokens of the oldest batch are in, and what it saw of the transfers.  Clients that gave up come first."""
    row = land_oldest(state)
    offload.at.landed += 1
    if state.config.aborts_before_tokens == 1:
        take_aborts(state, flight, offload)
    if row != NONE:
        offload.at.processed += 1
        free_fenced(state, flight, offload)
    finished = 0
    for i in range(flight.counts[0]):
        request, tokens = flight.batches[0, i, 0], flight.batches[0, i, 1]
        ends = take_tokens(state, flight, request, tokens, flight.batches[0, i, 2], flight.batches[0, i, 3] == 1, row)
        if ends == 1:
            end(state, offload, request, state.facts[request].prompt_tokens)
            if flight.requests[request].stays == 1 and state.requests[request].table_row != NONE:
                offload.fetched[offload.at.held, 0], offload.fetched[offload.at.held, 1] = request, NONE
                offload.at.held += 1
        finished += ends
    forget_oldest(flight)
    take_transfers(state, offload, STORES)
    position, until = offload.ways[LOADS].taken, offload.seen[0, LOADS]
    take_transfers(state, offload, LOADS)
    while position < until:
        request = offload.transfers[LOADS, position & (offload.transfers.shape[1] - 1)].request
        if state.requests[request].status == PARKED:
            offload.requests[request].loaded = 1
        else:
            give_up_blocks(state, request, flight.requests[request].cached)
        position += 1
    for direction in range(2):
        offload.seen[0, direction] = offload.seen[1, direction]
    free_fetched(state, flight, offload)
    if row == NONE:
        return
    this = state.steps[row]
    this.finished = finished
    this.free_blocks_end = state.at.free_blocks


@separate
def free_fetched(state: State, flight: Flight, offload: Offload) -> None:
    """Free the blocks that another server has fetched, as far as a batch that is in saw it."""
    at, kept = offload.at, 0
    for i in range(at.held):
        request, seen = offload.fetched[i, 0], offload.fetched[i, 1]
        if seen != NONE and seen <= at.landed:
            give_up_blocks(state, request, flight.requests[request].cached)
        else:
            offload.fetched[kept, 0], offload.fetched[kept, 1] = request, seen
            kept += 1
    at.held = kept


@compiled
def end(state: State, offload: Offload, request: int, tokens: int) -> None:
    """A request is done; the next step offers the blocks that ``tokens`` tokens fill once more."""
    offload.requests[request].final = full_blocks(state, tokens)
    offload.ended[offload.at.ended] = request
    offload.at.ended += 1


@separate
def take_aborts(state: State, flight: Flight, offload: Offload) -> None:
    """Clients that have given up by now.  Blocks that are being loaded, or that a batch in flight writes, stay held."""
    while True:
        request = next_given_up(state)
        if request == NONE:
            break
        this, own = state.requests[request], flight.requests[request]
        status, tokens = this.status, 0
        if status == WAITING:
            leave_queue(state, request)
        elif status == PARKED:
            unpark(state, offload, request)
            if offload.requests[request].loaded > 0:
                give_up_blocks(state, request, own.cached)
        elif status != NEW:
            tokens = min(this.computed, this.known, state.facts[request].prompt_tokens)
            if own.in_flight == 0 or state.config.batches_in_flight == 1:
                leave_running(state, flight, request)
            else:
                stop_prefill(state, request)
                leave_list(state, request)
                offload.fenced[offload.at.given_up, 0] = request
                offload.fenced[offload.at.given_up, 1] = offload.at.scheduled
                offload.at.given_up += 1
        close_segment(state, flight, request)
        if status != NEW:
            end(state, offload, request, tokens)
        this.status = ABORTED


@compiled
def free_fenced(state: State, flight: Flight, offload: Offload) -> None:
    """Free the blocks of requests that were given up in flight, once no batch writes them any more."""
    at = offload.at
    while at.freed < at.given_up and offload.fenced[at.freed, 1] <= at.processed:
        request = offload.fenced[at.freed, 0]
        give_up_blocks(state, request, flight.requests[request].cached)
        at.freed += 1
