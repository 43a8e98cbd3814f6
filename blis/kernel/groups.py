"""KV-cache groups: layers with blocks of their own, such as sliding windows beside full attention.

All groups take their blocks from one pool, each one block for each block size of tokens.  Blocks that a window has left
are freed while the request runs, and a cached prefix is used as far as every group has it.

A request holds runs of blocks of each group, as ``pool`` has them: pairs in ``State.table`` of an extent and how many
of its blocks, NONE for blocks that nobody can look up.  The first of them is ``Held.left``.  Unlike those of ``pool``,
earlier blocks may be freed before later ones, so each key of an extent names it, also behind a cut.  The keys of an
extent are numbers that follow each other.

The kernel calls ``operate`` by its address.  So these rules are compiled, by themselves, only where there are groups.
"""

from __future__ import annotations

from blis_replay.base.tables import column
from blis_replay.blis.kernel.free_queue import (
    append_unkeyed,
    key_in_extent,
    new_extent,
    prepend_unkeyed,
    release_extent,
    take_blocks,
    unlink,
)
from blis_replay.blis.kernel.pool import blocks_for, full_blocks, modulo_block, split
from blis_replay.blis.kernel.queues import computed_now, in_flight_input, last_token_step, leave_bucket
from blis_replay.blis.kernel.state import (
    ADMIT,
    ATTENDED,
    BEGIN_DECODING,
    DECODING,
    END_DECODING,
    ENTER,
    EVERYWHERE,
    FIND,
    LACKS,
    LEAVE,
    LEAVE_DUE,
    NONE,
    OF_WINDOWS,
    UNKEYED,
    State,
    Table,
    compiled,
    of_kind,
    separate,
    state_of,
)

# -- Group.kind: what a layer attends to --------------------------------------------------
FULL, WINDOW, CHUNK = range(3)
DENSE = -1  # Grouping.retention: every block is cached


@of_kind
def operate(operation: int, address: int, request: int, first: int, second: int) -> int:
    """Do one of the operations of ``kernel.state`` on the state at an address."""
    state = state_of(address)
    if operation == LEAVE:
        leave(state, request, first, second)
    elif operation == LEAVE_DUE:
        return leave_due(state)
    elif operation == FIND:
        return find_prefix(state, request, first)
    elif operation == LACKS:
        return 1 if lacks_blocks(state, request, first, second) else 0
    elif operation == ADMIT:
        admit(state, request, first, second)
    elif operation == ENTER:
        enter(state, request, first)
    elif operation == BEGIN_DECODING:
        await_leaving(state, request, first)
        enter_leaving(state, request)
        begin_attending(state, request, first, second)
    elif operation == END_DECODING:
        forget_leaving(state, request)
        end_attending(state, request, first)
    elif operation == ATTENDED:
        return attended_through(state, first + second) - attended_through(state, first)
    else:
        release(state, request, first)
    return 0


@compiled
def skipped_blocks(state: State, g: int, computed: int) -> int:
    """Leading blocks of a group that nothing behind the first ``computed`` tokens attends to."""
    group = state.groups[g]
    if group.kind == WINDOW:
        return full_blocks(state, max(computed - group.window + 1, 0))
    return full_blocks(state, computed // group.window * group.window) if group.kind == CHUNK else 0


# -- Looking cached prefixes up ----------------------------------------------------------------


@compiled
def key_of(state: State, request: int, g: int, i: int) -> int:
    """Place in ``State.extent_of_key`` of a request's i-th full block of a group; NONE if it has no key."""
    this, facts = state.requests[request], state.facts[request]
    if i < facts.key_count:
        return g * state.grouping.keys + state.keys[facts.key_start + i]
    if this.dynamic_key == NONE:
        return NONE
    of_group = full_blocks(state, facts.total_tokens) + 1 - facts.key_count  # as many as pool.give_keys gives
    return this.dynamic_key + g * of_group + i - facts.key_count


@compiled
def extent_at(state: State, request: int, g: int, i: int) -> int:
    """The extent in the cache that has the i-th block of a request; NONE if it is not cached."""
    key = key_of(state, request, g, i)
    return NONE if key < 0 else state.extent_of_key[key]


@compiled
def cached_from(state: State, request: int, g: int, i: int, most: int) -> int:
    """How many of a request's blocks from the i-th on, at most ``most``, are in the extent that has the i-th."""
    extent = extent_at(state, request, g, i)
    if extent == NONE:
        return 0
    this = state.extents[extent]
    most = min(most, this.depth + this.blocks - i)
    # Equal keys have equal keys before them: mostly all are alike, else halving finds where they part.
    low, high, middle = 1, most, most
    while low < high:
        if key_of(state, request, g, i + middle - 1) == key_in_extent(state, extent, i + middle - 1 - this.depth):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


@compiled
def all_cached_from(state: State, request: int, g: int, first: int, end: int) -> int:
    """The block up to which, from ``first`` on and to ``end`` at most, all groups like ``g`` have everything cached."""
    i, common = first, 1
    while i < end and common > 0:
        common = end - i
        for other in range(g, len(state.groups)):
            if common > 0 and state.groups[other].first_alike == g:
                common = cached_from(state, request, other, i, common)
        i += common
    return i


@compiled
def all_cached_to(state: State, request: int, g: int, i: int) -> int:
    """How many blocks in a row that end with the i-th all groups like ``g`` have cached in one extent each."""
    common = i + 1
    for other in range(g, len(state.groups)):
        if common > 0 and state.groups[other].first_alike == g:
            extent = extent_at(state, request, other, i)
            common = 0 if extent == NONE else min(common, i + 1 - state.extents[extent].depth)
    return common


@compiled
def append_run(state: State, row: int, g: int, extent: int, blocks: int) -> None:
    """A run of blocks of a group behind those of a row of the table."""
    held = state.held[row * len(state.groups) + g]
    at = state.groups[g].column + 2 * held.end
    state.table[row, at], state.table[row, at + 1] = extent, blocks
    held.end += 1


@compiled
def note_found(state: State, request: int, row: int, g: int, first: int, end: int) -> None:
    """Note the cached blocks of a request from ``first`` to ``end`` - 1 in a row of the table."""
    held = state.held[row * len(state.groups) + g]
    held.left, held.first, held.end = first, 0, 0
    i = first
    while i < end:
        blocks = cached_from(state, request, g, i, end - i)
        append_run(state, row, g, extent_at(state, request, g, i), blocks)
        i += blocks


@separate
def look_up(state: State, request: int, row: int, g: int, most: int) -> int:
    """Blocks of the longest prefix of at most ``most`` that the groups like ``g`` have; they are noted."""
    group, size, first = state.groups[g], state.config.block_size, 0
    if group.kind == WINDOW:
        need = max((group.window - 1 + size - 1) // size, 1)
        end, run = most, 0  # blocks from ``end`` - ``run`` to ``end`` - 1 are cached
        while end > run and run < need:
            blocks = all_cached_to(state, request, g, end - run - 1)
            if blocks > 0:
                run += blocks
            else:
                end, run = end - run - 1, 0
        run = min(run, need)
        first = end - run
        blocks = end
    else:
        if group.kind == CHUNK:
            first = most * size // group.window * group.window // size
        blocks = all_cached_from(state, request, g, first, most)
    for other in range(g, len(state.groups)):
        if state.groups[other].first_alike == g:
            note_found(state, request, row, other, first, blocks)
    return blocks


@separate
def find_prefix(state: State, request: int, row: int) -> int:
    """Blocks of the longest prefix that every group has cached; they are noted in a row, and not held yet.

    vllm/v1/core/kv_cache_coordinator.py: lookups go on until no group has less than another, full attention first.
    """
    groups = len(state.groups)
    state.leaving[request].junction = 0
    state.grouping.found = 0
    for g in range(groups):
        held = state.held[row * groups + g]
        held.left = held.first = held.end = 0
    if state.config.prefix_caching == 0 or groups == 0:
        return 0
    hit = full_blocks(state, state.requests[request].known - 1)
    longest, whole, looked, settled = 0, hit, False, False
    while not settled:
        current = hit
        for windows in range(2):
            for g in range(groups):
                if state.groups[g].first_alike == g and (state.groups[g].kind != FULL) == (windows == 1):
                    if windows == 0 and looked:
                        current = min(current, whole)
                    else:
                        current = look_up(state, request, row, g, current)
                        longest = max(longest, current)
                    if windows == 0:
                        whole = current
        looked = True
        settled = current >= hit or state.grouping.once == 1
        hit = min(hit, current)
    if longest > hit:
        state.leaving[request].junction = longest * state.config.block_size
    state.grouping.found = hit
    return hit


# -- Blocks of a request -----------------------------------------------------------------------


@separate
def lacks_blocks(state: State, request: int, hit: int, slots: int) -> bool:
    """Whether too few blocks are free to admit a request with ``hit`` tokens of the prefix that was found for it."""
    at, config, found = state.at, state.config, state.grouping.found
    row, free = state.free_rows[at.free_rows - 1], at.free_blocks - state.grouping.states
    if at.running_depth > 0:
        free -= config.watermark_blocks
    blocks, whole, wanted, wanted_of_whole = blocks_for(state, slots), 0, 0, 0
    if config.full_prompt_admission == 1:
        whole = blocks_for(state, min(state.requests[request].known, config.max_model_len))
    for g in range(len(state.groups)):
        group, skipped = state.groups[g], skipped_blocks(state, g, hit)
        known = max(skipped, found)
        wanted += max(blocks - known, 0)
        wanted_of_whole += max((min(whole, group.most_admitted) if group.most_admitted >= 0 else whole) - known, 0)
        # Of the found prefix, what nobody holds is among the free blocks.
        held, i = state.held[row * len(state.groups) + g], state.held[row * len(state.groups) + g].left
        for run in range(held.end):
            end = i + state.table[row, group.column + 2 * run + 1]
            if state.extents[state.table[row, group.column + 2 * run]].ref_count == 0:
                free -= max(min(end, found) - max(i, skipped), 0)
            i = end
    return max(wanted, wanted_of_whole) > free


@separate
def admit(state: State, request: int, hit: int, slots: int) -> None:
    """Hold the found prefix of a request that has just begun to run, and blocks for ``slots`` tokens."""
    this, found, wanted = state.requests[request], state.grouping.found, state.grouping.states
    row, blocks = this.table_row, blocks_for(state, slots)
    for g in range(len(state.groups)):
        first = max(state.held[row * len(state.groups) + g].left, skipped_blocks(state, g, hit))
        hold_found(state, row, g, first, found)
        wanted += blocks - max(found, first)
    take_blocks(state, wanted)
    this.blocks_held = blocks
    note_next(state, request)


@compiled
def hold_found(state: State, row: int, g: int, first: int, end: int) -> None:
    """Hold the blocks from ``first`` to ``end`` - 1 of those that were noted in a row of the table."""
    held, column = state.held[row * len(state.groups) + g], state.groups[g].column
    begin, noted = held.left, held.end
    held.left, held.end = first, 0
    for run in range(noted):
        extent, behind = state.table[row, column + 2 * run], begin + state.table[row, column + 2 * run + 1]
        blocks = min(behind, end) - max(begin, first)
        if blocks > 0:
            before = max(begin, first) - state.extents[extent].depth
            if before > 0:
                extent = cut(state, extent, before)
            if blocks < state.extents[extent].blocks:
                cut(state, extent, blocks)
            if state.extents[extent].ref_count == 0:
                unlink(state, extent)
                state.at.free_blocks -= blocks
            state.extents[extent].ref_count += 1
            append_run(state, row, g, extent, blocks)
        begin = behind


@separate
def cut(state: State, extent: int, blocks: int) -> int:
    """Cut an extent behind its first ``blocks`` blocks; the new extent with the others."""
    rest = split(state, extent, blocks)
    for i in range(1, state.extents[rest].blocks):
        state.extent_of_key[key_in_extent(state, rest, i)] = rest
    return rest


@compiled
def note_next(state: State, request: int) -> None:
    """Note with how many processed tokens a window leaves its first block."""
    row, groups, left = state.requests[request].table_row, len(state.groups), 2**30
    for g in range(groups):
        group = state.groups[g]
        behind = (state.held[row * groups + g].left + 1) * state.config.block_size
        if group.kind == WINDOW:
            left = min(left, behind + group.window - 1)
        elif group.kind == CHUNK:
            left = min(left, (behind + group.window - 1) // group.window * group.window)
    state.leaving[request].next_left = left


@separate
def leave(state: State, request: int, computed: int, cached: int) -> None:
    """Free what the windows of a running request have left; tokens in flight still attend to what is before them.

    ``cached``: tokens whose full blocks can be looked up; NONE: of a request without drafts, whose ``computed`` tokens
    are those that are computed or in flight.
    """
    if cached == NONE:
        cached = computed
        if state.requests[request].status == DECODING and in_flight_input(state, request, False):
            cached -= 1
        if state.config.frees_processed == 1:
            computed -= in_flight_of(state, request, state.at.step)
    if computed < state.leaving[request].next_left:
        return
    row, groups = state.requests[request].table_row, len(state.groups)
    for g in range(groups):
        skipped = skipped_blocks(state, g, computed)
        if skipped > state.held[row * groups + g].left:
            give_up(state, request, g, skipped, full_blocks(state, cached), True)
    note_next(state, request)
    if state.requests[request].status == DECODING:
        await_leaving(state, request, state.at.step + 1)
        if leaving_slot(state, request) != state.leaving[request].slot:
            forget_leaving(state, request)
            enter_leaving(state, request)


@separate
def release(state: State, request: int, cached: int) -> None:
    """Give up all blocks of a request, group by group; those that its first ``cached`` tokens fill are cached."""
    this = state.requests[request]
    full = full_blocks(state, cached) if state.config.prefix_caching == 1 else 0
    for g in range(len(state.groups)):
        give_up(state, request, g, this.blocks_held, full, False)
    append_free(state, state.grouping.states, False)


@compiled
def give_up(state: State, request: int, g: int, last: int, full: int, runs: bool) -> None:
    """Give up the blocks before ``last``, the last one first; unheld and cached ones are taken last.

    ``runs``: the request goes on; a chunk gives blocks up as a window does only then.
    """
    this, row = state.requests[request], state.requests[request].table_row
    held, first = state.held[row * len(state.groups) + g], state.held[row * len(state.groups) + g].left
    dense = state.groups[g].kind != WINDOW or state.grouping.retention == DENSE
    cached, lost = 0, 0
    if dense:
        begin = max(first, this.blocks_entered)
        cached = max(min(full, last) - begin, 0)
        lost = max(last - begin, 0) - cached
    else:
        for i in range(max(first, this.blocks_entered), last):
            if i < full and is_reachable(state, request, g, i):
                cached += 1
            else:
                lost += 1
    windowed = state.groups[g].kind == WINDOW or (state.groups[g].kind == CHUNK and runs)
    first_is = state.config.uncached_blocks_first
    append_free(state, lost, first_is == EVERYWHERE or (first_is == OF_WINDOWS and windowed))
    append_free(state, cached, False)
    run, before, end = held.first, first, min(last, this.blocks_entered)
    while run < held.end and before + run_at(state, row, g, run)[1] <= end:
        before += run_at(state, row, g, run)[1]
        run += 1
    if run < held.end and before < end:  # only a part of this run is left
        extent, blocks = run_at(state, row, g, run)
        at = state.groups[g].column + 2 * run
        state.table[row, at], state.table[row, at + 1] = (
            give_up_front(state, extent, end - before),
            blocks - end + before,
        )
    for whole in range(run - 1, held.first - 1, -1):
        give_up_run(state, *run_at(state, row, g, whole))
    held.first, held.left = run, last


@compiled
def run_at(state: State, row: int, g: int, run: int) -> tuple[int, int]:
    """A run of blocks of a row of the table: its extent, or NONE, and how many."""
    at = state.groups[g].column + 2 * run
    return state.table[row, at], state.table[row, at + 1]


@compiled
def give_up_run(state: State, extent: int, blocks: int) -> None:
    """Give up the first blocks of a run; those that nobody can look up have no extent."""
    if extent == NONE:
        append_free(state, blocks, state.config.uncached_blocks_first == EVERYWHERE)
    else:
        state.at.free_blocks += release_extent(state, extent, blocks)


@compiled
def give_up_front(state: State, extent: int, blocks: int) -> int:
    """Give up the first blocks of a run, which has more; the extent with which the others begin, or NONE."""
    if extent == NONE:
        append_free(state, blocks, state.config.uncached_blocks_first == EVERYWHERE)
        return NONE
    rest, before = extent, 0
    while before + state.extents[rest].blocks <= blocks:
        before += state.extents[rest].blocks
        rest = state.extents[rest].rest
    if before < blocks:
        part = rest
        if state.extents[rest].ref_count == 1:
            part = cut_front(state, rest, blocks - before)
        else:
            rest = cut(state, rest, blocks - before)
        state.at.free_blocks += release_extent(state, part, blocks - before)
    if before > 0:
        state.at.free_blocks += release_extent(state, extent, before)
    return rest


@compiled
def cut_front(state: State, extent: int, blocks: int) -> int:
    """Cut the first blocks off an extent that only one request holds; the new extent has them."""
    front = new_extent(state)
    this, other = state.extents[extent], state.extents[front]
    other.ref_count, other.blocks, other.depth, other.keys_at = 1, blocks, this.depth, this.keys_at
    other.rest = other.twin = NONE
    for i in range(blocks):
        state.extent_of_key[key_in_extent(state, front, i)] = front
    this.blocks -= blocks
    this.depth += blocks
    this.keys_at -= blocks  # the keys follow each other, see set_keys
    return front


@compiled
def append_free(state: State, count: int, first: bool) -> None:
    """Blocks that nobody can look up are free; ``first``: they are taken next."""
    if count > 0:
        if first:
            prepend_unkeyed(state, count)
        else:
            append_unkeyed(state, count)
        state.at.free_blocks += count


# -- When windows leave blocks of decoding requests --------------------------------------------


@compiled
def in_flight_of(state: State, request: int, step: int) -> int:
    """Tokens of a request in flight when a step is scheduled: those that the step before gave it, asynchronously."""
    this = state.requests[request]
    if state.config.batches_in_flight == 1:
        return 0
    if this.chunk_step == step - 1:
        return this.chunk
    return 1 if this.status == DECODING and this.segment_start != step else 0


@compiled
def await_leaving(state: State, request: int, step: int) -> None:
    """Note in which step, from ``step`` on, a window leaves a block of a decoding request."""
    this = state.leaving[request]
    due, in_flight, steady = this.next_left + state.requests[request].step_offset, 0, 0
    if state.config.frees_processed == 1:
        in_flight, steady = in_flight_of(state, request, step), state.config.batches_in_flight - 1
    this.due = step if step - in_flight >= due else max(step + 1, due + steady)


@compiled
def leaving_slot(state: State, request: int) -> int:
    """The bucket of the step in which a decoding request leaves a block; NONE if it ends before."""
    due = state.leaving[request].due
    return modulo_block(state, due) if due <= last_token_step(state, request) else NONE


@compiled
def enter_leaving(state: State, request: int) -> None:
    """Into the bucket of the step in which a block is left, in the order of the running list."""
    this = state.leaving[request]
    slot, before, after = leaving_slot(state, request), NONE, NONE
    this.slot = slot
    if slot == NONE:
        return
    after = state.leave_head[slot]
    while after != NONE and state.requests[after].admission < state.requests[request].admission:
        before, after = after, state.leaving[after].next
    this.next, this.previous = after, before
    if after != NONE:
        state.leaving[after].previous = request
    if before == NONE:
        state.leave_head[slot] = request
    else:
        state.leaving[before].next = request


@compiled
def forget_leaving(state: State, request: int) -> None:
    """A request decodes no more, or leaves a block in another step."""
    if state.leaving[request].slot != NONE:
        leave_bucket(state.leaving, state.leave_head, state.leaving[request].slot, request)


@separate
def leave_due(state: State) -> int:
    """Free what the windows of decoding requests leave in this step; the blocks for their growth that it has taken.

    Requests come in the order of the running list, and take blocks between what they free.  That only counts where
    there are too few blocks without contents at the head of the queue.
    """
    at, taken, admission = state.at, 0, NONE
    slot, growth = at.growth_slot, column(state.links, "growth")
    request, growing, grows = state.leave_head[slot], state.growth_count[slot], NONE
    if request != NONE and growing > 0:
        head = state.extents[at.free_queue.head]
        if head.depth != UNKEYED or head.blocks <= growing:
            grows = next_admitted(state, growth, state.growth_head[slot], NONE)
    while request != NONE:
        following, admission = state.leaving[request].next, state.requests[request].admission
        if state.leaving[request].due <= at.step:
            while grows != NONE and state.requests[grows].admission < admission:
                take_blocks(state, state.config.growing)
                taken += state.config.growing
                grows = next_admitted(state, growth, state.growth_head[slot], state.requests[grows].admission)
            leave(state, request, computed_now(state, request), NONE)
        request = following
    return taken


@compiled
def next_admitted(state: State, links: Table, request: int, admission: int) -> int:
    """Of a bucket that begins with ``request``, the first one of the running list behind ``admission``, or NONE."""
    following = NONE
    while request != NONE:
        this = state.requests[request].admission
        if this > admission and (following == NONE or this < state.requests[following].admission):
            following = request
        request = links[request].next
    return following


# -- What layers attend to -----------------------------------------------------------------------
# What decodes attend to grows by one token in each step, but in a window that is full, and begins anew with a chunk.
# So its sum is kept by how much it grows, and lists of the steps in which that changes.


@compiled
def attended_through(state: State, tokens: int) -> int:
    """KV tokens that the first ``tokens`` tokens of a request attend to, with themselves, summed over the groups."""
    total = 0
    for g in range(len(state.groups)):
        kind, size, alike = state.groups[g].kind, state.groups[g].window, state.groups[g].alike
        growing, whole = tokens, 0
        if kind == WINDOW:
            growing = min(tokens, size)
            whole = (tokens - growing) * size
        elif kind == CHUNK and tokens >= size:
            growing = tokens % size
            whole = tokens // size * (size * (size + 1) // 2)
        total += alike * (whole + growing * (growing + 1) // 2)
    return total


@compiled
def begin_attending(state: State, request: int, step: int, passed_over: int) -> None:
    """Add a decoding request to what decodes attend to in ``step``; 1: the sum is still that of the step before."""
    context = step - state.requests[request].step_offset + 1
    attended = attended_through(state, context) - attended_through(state, context - 1)
    growth = note_attending(state, request, context, 1)
    state.at.decoding_attended += attended - passed_over * growth
    state.at.widening += growth


@compiled
def end_attending(state: State, request: int, computed: int) -> None:
    """Take a request with ``computed`` tokens out of what decodes attend to."""
    state.at.decoding_attended -= attended_through(state, computed + 1) - attended_through(state, computed)
    state.at.widening -= note_attending(state, request, computed + 1, -1)


@separate
def note_attending(state: State, request: int, context: int, sign: int) -> int:
    """Enter the steps in which a decode with ``context`` tokens fills a window or begins a chunk, or leave them (-1).

    By how much what it attends to grows with the next step, but for a chunk that begins.
    """
    # The step after the last one is counted too: only then is the request taken out.
    growth, last, mask = 0, state.facts[request].total_tokens, state.config.ring_mask
    offset = state.requests[request].step_offset - 1  # a decode with n tokens is in the step n + offset
    for g in range(len(state.groups)):
        kind, size, alike = state.groups[g].kind, state.groups[g].window, state.groups[g].alike
        growth += alike
        if kind == WINDOW:
            if context >= size:
                growth -= alike
            elif size <= last:
                state.widening_less[(size + offset) & mask] += sign * alike
        elif kind == CHUNK and alike > 0:
            begins = ((context - 1) // size + 1) * size + 1
            while begins <= last:
                state.attended_less[(begins + offset) & mask] += sign * alike * size
                begins += size
    return growth


# -- The cache ---------------------------------------------------------------------------------


@separate
def enter(state: State, request: int, full: int) -> None:
    """Cache the first ``full`` blocks of a request, whose keys are known."""
    this, row = state.requests[request], state.requests[request].table_row
    for g in range(len(state.groups)):
        i = max(this.blocks_entered, state.held[row * len(state.groups) + g].left)
        while i < full:
            extent, blocks = NONE, 0
            if not is_reachable(state, request, g, i):
                while i + blocks < full and not is_reachable(state, request, g, i + blocks):
                    blocks += 1
            else:
                extent = new_extent(state)
                blocks = set_keys(state, request, g, extent, i, full)
            append_run(state, row, g, extent, blocks)
            i += blocks
    this.blocks_entered = full


@compiled
def is_reachable(state: State, request: int, g: int, i: int) -> bool:
    """Whether a later request could use the i-th block of a group (``SlidingWindowManager.reachable_block_mask``)."""
    group, size, retention = state.groups[g], state.config.block_size, state.grouping.retention
    if group.kind != WINDOW or retention == DENSE:
        return True
    need = (group.window - 1 + size - 1) // size
    if retention > 0:
        stretch = retention // size
        if i % stretch >= stretch - need:
            return True
    end = full_blocks(state, state.facts[request].prompt_tokens - 1)
    if end - need <= i < end:
        return True
    end = full_blocks(state, state.leaving[request].junction)
    return end - need <= i < end


@compiled
def set_keys(state: State, request: int, g: int, extent: int, i: int, full: int) -> int:
    """Enter a new extent that begins with a request's i-th block, which is held; how many blocks it has.

    It ends before ``full``, a key that does not follow, or a cached one.  A block that is cached already is alone,
    behind those that have the same key.
    """
    key, blocks = key_of(state, request, g, i), 0
    first = state.extent_of_key[key]
    if first != NONE:
        first = isolated(state, first, i)
        while state.extents[first].twin != NONE:
            first = state.extents[first].twin
        state.extents[first].twin = extent
        blocks = 1
    else:
        follows = True
        while follows:
            state.extent_of_key[key + blocks] = extent
            blocks += 1
            follows = i + blocks < full and key_of(state, request, g, i + blocks) == key + blocks
            follows = follows and state.extent_of_key[key + blocks] == NONE
            follows = follows and is_reachable(state, request, g, i + blocks)
    this = state.extents[extent]
    this.ref_count, this.blocks, this.depth = 1, blocks, i
    this.keys_at = -key - 2  # like keys that are given at a preemption
    this.rest = this.twin = NONE
    return blocks


@compiled
def isolated(state: State, extent: int, depth: int) -> int:
    """The block of an extent at this depth, as an extent of its own."""
    if depth > state.extents[extent].depth:
        extent = cut(state, extent, depth - state.extents[extent].depth)
    if state.extents[extent].blocks > 1:
        cut(state, extent, 1)
    return extent
