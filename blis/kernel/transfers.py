"""Offload of KV blocks to CPU memory: what that memory holds, and the transfers to and from it.

These are the rules of vLLM's ``OffloadingConnector``.  The CPU holds blocks of prompts by their keys, in the order of
their last use.  A step stores the blocks that it fills, if the CPU lacks them.  A store begins with the next step, and
its blocks cannot be read before it has ended.  A load holds its blocks on the CPU until it has ended.  Both directions
transfer one after the other, and the GPU finishes first what was launched before.  The engine sees that a transfer has
ended when it launches a step, and acts on it when that step's tokens are in.
"""

from __future__ import annotations

from typing import Annotated

from blis_replay.base.arrays import Int8s, Int32s, Int64s
from blis_replay.base.tables import Tables, reader
from blis_replay.blis.kernel.batch import given_now
from blis_replay.blis.kernel.pool import full_blocks, key_of
from blis_replay.blis.kernel.state import (
    ABORTED,
    COMPLETED,
    LINK,
    NONE,
    WAITING,
    Ends,
    Record,
    State,
    Table,
    compiled,
    dtype_of,
    i32,
    i64,
    insert,
    remove,
    separate,
)

# -- Offload.refs: loads that read a block on the CPU, or ... -----------------------------
PENDING, ABSENT = -1, -2
# -- Transfers in each direction ------------------------------------------------------------
STORES, LOADS = range(2)


class OffloadProgress:
    """What is on the CPU, and where the transfers stand."""

    blocks: i64  # that the CPU has room for, 0: what is loaded comes from another server
    used: i64
    evictable: i64  # of those, blocks that no transfer needs
    by_use: Ends  # keys of blocks, the one used longest ago at the head
    offers: i64  # counts up: stores that were asked for
    uses: i64  # counts up: ranks in the order of last use
    by_request: i64  # 1: all that a request accesses has its rank, and a request that starts anew offers all its blocks
    parked: Ends  # requests that hold blocks without running, linked by Links.growth
    parked_depth: i64
    ended: i64  # requests that are done since the last step
    launched_us: i64  # when the last step was launched
    begins: i64  # position of the first store that does not begin with the step
    given_up: i64  # requests in Offload.fenced, and the first of them that still holds blocks
    freed: i64
    scheduled: i64  # steps with tokens, and those whose tokens are in
    processed: i64
    held: i64  # requests in Offload.fetched
    launches: i64  # batches launched, and those that are in, with tokens or without
    landed: i64


class Way:
    """One direction of transfers.  Positions count up: rows of Offload.transfers, modulo their number."""

    fixed_us: i64
    block_us: i64
    free_us: i64  # when the last transfer ends
    taken: i64  # position of the first whose end the engine has not acted on
    seen: i64  # ... not seen
    begun: i64  # ... that has not begun
    added: i64  # position of the next


class Transfer:
    """Blocks of a request on their way."""

    request: i32
    first: i32  # block of the request
    end: i32
    blocks: i32  # transferred of those
    flushed: i64  # 1: a step waits for its end before it is launched
    offer: i64  # number of the store
    end_us: i64


class OffloadedRequest:
    """A request, as far as its blocks go to the CPU."""

    offered: i32  # leading blocks that were stored, or were there
    transfers: i32  # that have not been acted on
    loaded: i32  # 1: its parked blocks are loaded, 2: and can be looked up
    final: i32  # leading blocks offered when it is done
    rank: i64  # of what it accesses, 0: nothing yet
    remote: i64  # leading tokens that another server has computed, until they are asked for
    fetched_us: i64  # when another server has its blocks, NONE: none asks for them
    loaded_us: i64  # when its last load ended or will end, NONE: nothing was loaded


PROGRESS, WAY, TRANSFER, OFFLOADED = map(dtype_of, (OffloadProgress, Way, Transfer, OffloadedRequest))


class Offload(Tables):
    """What is needed beside ``State`` and ``Flight``."""

    at: Annotated[Record, PROGRESS, 0]
    ways: Annotated[Table, WAY, 1]  # [2]
    transfers: Annotated[Table, TRANSFER, 2]  # [2, a power of two]
    seen: Annotated[Int64s, 2]  # [2, 2] in batches in flight, ends of transfers that their launch saw
    requests: Annotated[Table, OFFLOADED, 1]
    refs: Int32s  # [keys]
    by_use: Annotated[Table, LINK, 1]  # [keys] neighbours in the order of last use
    used: Int64s  # [keys] rank in that order, and below it how near to the start of its prompt the block is
    offer: Int64s  # [keys] the last store in which the block was offered
    writer: Int64s  # [keys] the store that writes it, NONE: none
    loading: Int8s  # [keys] 1: it is being loaded
    source: Int32s  # [blocks of requests] the extent that a store reads
    accessed: Int8s  # [blocks of requests] 1: the request loaded it, stored it or found it on the CPU
    skipped: Int64s  # [requests] those that this step passes over
    ended: Int64s  # [requests] those that are done since the last step, in their order
    fenced: Annotated[Int64s, 2]  # [requests, 2] those given up in flight, and the step whose end frees their blocks
    fetched: Annotated[Int64s, 2]  # [requests, 2] those that have ended and hold blocks, and the launch that saw it


offload_of = reader(Offload)


# -- What the CPU holds ---------------------------------------------------------------------


@compiled
def place_of(state: State, request: int, i: int) -> int:
    """Where the i-th block of a request stands in the columns of blocks."""
    return state.facts[request].key_start + i


@compiled
def external_blocks(state: State, offload: Offload, request: int, hits: int) -> int:
    """Blocks behind its first ``hits`` that a request can load; NONE: it has to wait until that can be said."""
    own = offload.requests[request]
    if offload.at.by_request == 1:
        own.offered = 0
    if own.transfers > 0:
        return NONE
    end = min(full_blocks(state, state.requests[request].known), state.facts[request].key_count)
    i, waits = hits, False
    while i < end and offload.refs[key_of(state, request, i)] != ABSENT:
        key = key_of(state, request, i)
        waits = waits or offload.refs[key] == PENDING or offload.loading[key] == 1
        i += 1
    return NONE if waits else i - hits


@compiled
def use(offload: Offload, key: int, rank: int, i: int) -> None:
    """Put the i-th block of a prompt into the order of last use; of equal ranks the first of a prompt is the last."""
    used = (rank << 24) - i  # a request has fewer blocks
    before = offload.at.by_use.tail
    while before != NONE and offload.used[before] > used:
        before = offload.by_use[before].previous
    offload.used[key] = used
    insert(offload.by_use, offload.at.by_use, key, before)


@compiled
def next_rank(offload: Offload) -> int:
    """The rank of what is used now."""
    offload.at.uses += 1
    return offload.at.uses


@compiled
def access(state: State, offload: Offload, request: int, i: int) -> None:
    """A request loads its i-th block, finds it on the CPU, or wants to store it."""
    own, place, key = offload.requests[request], place_of(state, request, i), key_of(state, request, i)
    if offload.accessed[place] == 1:
        return
    offload.accessed[place] = 1
    if offload.at.by_request == 1:
        if own.rank == 0:
            own.rank = next_rank(offload)
        if offload.refs[key] != ABSENT and offload.used[key] < (own.rank << 24) - i:
            remove(offload.by_use, offload.at.by_use, key)
            use(offload, key, own.rank, i)


@compiled
def make_room(offload: Offload, blocks: int) -> bool:
    """Evict the blocks used longest ago that are not in the last offer; False, and nothing done, if too few are."""
    at = offload.at
    if blocks > at.evictable:
        return False
    found, key = 0, at.by_use.head
    while key != NONE and found < blocks:
        found += 1 if offload.refs[key] == 0 and offload.offer[key] != at.offers else 0
        key = offload.by_use[key].next
    if found < blocks:
        return False
    key = at.by_use.head
    while found > 0:
        after = offload.by_use[key].next
        if offload.refs[key] == 0 and offload.offer[key] != at.offers:
            remove(offload.by_use, offload.at.by_use, key)
            offload.refs[key] = ABSENT
            found -= 1
        key = after
    at.used -= blocks
    at.evictable -= blocks
    return True


@compiled
def note_use(state: State, offload: Offload, request: int) -> None:
    """A request is done: the blocks that it accessed were used last, its first one as the very last."""
    for i in range(state.facts[request].key_count - 1, -1, -1):
        if offload.accessed[place_of(state, request, i)] == 1:
            key = key_of(state, request, i)
            if offload.refs[key] != ABSENT:
                remove(offload.by_use, offload.at.by_use, key)
                use(offload, key, next_rank(offload), 0)


# -- Transfers ------------------------------------------------------------------------------


@compiled
def transfer_at(offload: Offload, direction: int, position: int) -> Record:
    """The row of a transfer."""
    return offload.transfers[direction, position & (offload.transfers.shape[1] - 1)]


@compiled
def add_transfer(offload: Offload, direction: int, request: int, first: int, end: int, blocks: int) -> None:
    """A transfer that has not begun."""
    way = offload.ways[direction]
    this = transfer_at(offload, direction, way.added)
    this.request, this.first, this.end, this.blocks = request, first, end, blocks
    this.flushed, this.offer = 0, offload.at.offers
    way.added += 1
    offload.requests[request].transfers += 1


@compiled
def load(state: State, offload: Offload, request: int, first: int, end: int) -> None:
    """Blocks of a request come from the CPU."""
    for i in range(first, end):
        key = key_of(state, request, i)
        if offload.refs[key] == 0:
            offload.at.evictable -= 1
        offload.refs[key] += 1
        offload.loading[key] = 1
        access(state, offload, request, i)
    offload.requests[request].offered = end
    add_transfer(offload, LOADS, request, first, end, end - first)


@separate
def store(state: State, offload: Offload, request: int, end: int, runs: bool) -> None:
    """Offer the first ``end`` blocks of a request to the CPU, but those offered before; ``runs``: it holds them."""
    at, own, this = offload.at, offload.requests[request], state.requests[request]
    if end <= own.offered or at.blocks == 0:
        return
    at.offers += 1
    lacks = 0
    for i in range(own.offered, end):
        key, place = key_of(state, request, i), place_of(state, request, i)
        offload.offer[key] = at.offers
        if runs:
            offload.source[place] = state.table[this.table_row, 2 * i]
        if offload.refs[key] == ABSENT:
            lacks += 1
        if offload.refs[key] != PENDING:
            access(state, offload, request, i)
    more = lacks - (at.blocks - at.used)
    if lacks > 0 and more > 0 and not make_room(offload, more):
        return  # it is offered again with its next step
    for i in range(own.offered, end):
        key = key_of(state, request, i)
        if offload.refs[key] == ABSENT:
            offload.refs[key] = PENDING
            offload.writer[key] = at.offers
            use(offload, key, own.rank if at.by_request == 1 else next_rank(offload), i)
    at.used += lacks
    if lacks > 0:
        add_transfer(offload, STORES, request, own.offered, end, lacks)
    own.offered = end


@compiled
def flush(state: State, offload: Offload, position: int) -> bool:
    """Whether the step has to wait for a store: its request was preempted, or has ended and a block is taken."""
    this = transfer_at(offload, STORES, position)
    if this.flushed == 0:
        status = state.requests[this.request].status
        if status == WAITING:
            this.flushed = 1
        elif status in (COMPLETED, ABORTED):
            for i in range(this.first, this.end):
                if offload.writer[key_of(state, this.request, i)] == this.offer:
                    extent = offload.source[place_of(state, this.request, i)]
                    if state.taken[extent] == state.at.step:
                        this.flushed = 1
    return this.flushed == 1


@separate
def plan_transfers(state: State, offload: Offload) -> None:
    """The stores of a batch that was built, and those that have to end before it is launched."""
    at, way = offload.at, offload.ways[STORES]
    at.begins = way.added
    request = state.at.running.head
    while request != NONE:
        this, facts = state.requests[request], state.facts[request]
        if given_now(state, request):
            tokens = min(this.computed + this.chunk, this.known)
            store(state, offload, request, full_blocks(state, min(tokens, facts.prompt_tokens)), True)
        request = state.links[request].running.next
    for i in range(at.ended):
        request = offload.ended[i]
        store(state, offload, request, offload.requests[request].final, False)
        note_use(state, offload, request)
    at.ended = 0
    before = at.begins
    for position in range(way.taken, way.added):
        if flush(state, offload, position) and position >= before:  # of the new ones only these begin at once
            exchange(offload, at.begins, position)
            at.begins += 1


@compiled
def exchange(offload: Offload, first: int, position: int) -> None:
    """Move a store before those from ``first`` on."""
    for i in range(position, first, -1):
        one, other = transfer_at(offload, STORES, i), transfer_at(offload, STORES, i - 1)
        one.request, other.request = other.request, one.request
        one.first, other.first = other.first, one.first
        one.end, other.end = other.end, one.end
        one.blocks, other.blocks = other.blocks, one.blocks
        one.flushed, other.flushed = other.flushed, one.flushed
        one.offer, other.offer = other.offer, one.offer


@compiled
def begin_transfers(offload: Offload, direction: int, end: int, start_us: int) -> None:
    """Let the transfers before a position begin."""
    way = offload.ways[direction]
    while way.begun < end:
        this = transfer_at(offload, direction, way.begun)
        way.free_us = max(start_us, way.free_us) + way.fixed_us + way.block_us * this.blocks
        this.end_us = way.free_us
        if direction == LOADS:
            offload.requests[this.request].loaded_us = way.free_us
        way.begun += 1


@compiled
def wait_for_flushed(offload: Offload, launch_us: int) -> int:
    """When a step is launched: stores that have to end before have ended."""
    way = offload.ways[STORES]
    for position in range(way.taken, way.begun):
        this = transfer_at(offload, STORES, position)
        if this.flushed == 1:
            launch_us = max(launch_us, this.end_us)
    return launch_us


@compiled
def see_transfers(offload: Offload, launch_us: int, batch: int) -> None:
    """Which transfers have ended when a step is launched; ``batch``: its place among those in flight."""
    for direction in range(2):
        way = offload.ways[direction]
        while way.seen < way.begun and transfer_at(offload, direction, way.seen).end_us <= launch_us:
            way.seen += 1
        offload.seen[batch, direction] = way.seen
    at = offload.at
    at.launches += 1
    for i in range(at.held):
        if offload.fetched[i, 1] == NONE and offload.requests[offload.fetched[i, 0]].fetched_us <= launch_us:
            offload.fetched[i, 1] = at.launches


@separate
def take_transfers(state: State, offload: Offload, direction: int) -> None:
    """Act on the transfers that the oldest batch saw."""
    at, way = offload.at, offload.ways[direction]
    while way.taken < offload.seen[0, direction]:
        this = transfer_at(offload, direction, way.taken)
        for i in range(this.first, this.end):
            key = key_of(state, this.request, i)
            if direction == LOADS:
                offload.refs[key] -= 1
                offload.loading[key] = 0
            elif offload.writer[key] == this.offer:
                offload.refs[key] = 0
                offload.writer[key] = NONE
            else:
                continue
            at.evictable += 1 if offload.refs[key] == 0 else 0
        offload.requests[this.request].transfers -= 1
        way.taken += 1
