"""What a run is made of: records and tables, and the lists that their rows are in.

A state is a plain value: it can be copied, stored and resumed.  Requests are numbered
in the order in which they queue.  Lists are tables of links, -1 is "none".

The classes name the fields of one record (``state.at.now_us``) or of the rows of a table
(``state.requests[request].status``).  Compiled code resolves the names.  Python reads
columns: ``state.requests["status"]``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Int32s, Int64s
from blis_replay.base.functions import by_address, cache_folder, decorators
from blis_replay.base.tables import Tables, reader

FOLDER = Path(__file__).parent
entry, compiled = decorators(FOLDER, inline=True)
# The step time of a latency kind, which may be another distribution's; its compiled functions share one file.
of_kind = by_address(FOLDER)
# For long functions that run seldom: to copy them into each caller takes a quarter of the time of compiling.
_, separate = decorators(FOLDER)

# Rows of one of the classes below.
Table = NDArray[Any]
# A table of one row; to compiled functions, the row.
Record = Any


NEVER = 2**62
# A step by a model of real numbers takes an hour at most: an exponential can overflow.
LONGEST_STEP_US = 3.6e9
NONE = -1

# -- Request.status -------------------------------------------------------------------
NEW, WAITING, PREFILLING, DECODING, LAST_IN_FLIGHT, COMPLETED, ABORTED, PARKED = range(8)

# -- What ``groups.operate`` does, at ``Config.groups_at`` ----------------------------------
FIND, LACKS, ADMIT, ENTER, LEAVE, LEAVE_DUE, BEGIN_DECODING, END_DECODING, RELEASE, ATTENDED = range(10)

# -- Config.uncached_blocks_first: of whose freed blocks those without contents are taken first
EVERYWHERE, OF_WINDOWS = 1, 2

# -- Extent.depth of blocks whose contents cannot be looked up ----------------------------
UNKEYED = -1

# Widths of fields.
i64 = int
i32 = int
i16 = int
f64 = float


class Config:
    """Engine arguments."""

    max_num_seqs: i64
    max_active_seqs: i64  # most running requests
    max_num_batched_tokens: i64
    token_budget: i64  # of one call
    max_model_len: i64
    block_size: i64
    block_shift: i64  # of a block size that is a power of two, which one; else -1
    long_prefill_threshold: i64
    chunked_prefill: i64
    prefix_caching: i64
    priority_policy: i64
    batches_in_flight: i64  # 1: synchronous, 2: asynchronous
    max_steps_without_token: i64  # after these the run is stuck
    num_blocks: i64  # without the reserved one
    watermark_blocks: i64  # blocks that an admission leaves free, unless nothing runs
    prefill_interval: i64  # steps from one with prefill to the next with prefill, while somebody decodes
    # Switches, 1 or 0: ``trace.Behaviours`` says what they are.
    aborts_before_tokens: i64
    adaptive_threshold: i64
    full_prompt_admission: i64
    lone_prefill_uncapped: i64
    uncached_blocks_first: i64  # 0, EVERYWHERE or OF_WINDOWS
    exact_preemption_cursor: i64
    pass_outlives_preemption: i64
    segments_of_step: i64  # no step ends more of them
    keys_of_step: i64  # no step gives more of them
    ring_mask: i64  # State.finish_head has a power of two of slots, more than any request has steps
    # Of KV-cache groups (``groups``):
    groups_at: i64  # address of ``groups.operate``, 0: all layers share their blocks
    growing: i64  # blocks that a request takes for each block size of its tokens: one, or one for each group
    windowed: i64  # 1: some layers give blocks up while a request runs
    frees_processed: i64  # 1: they keep those that tokens in flight attend to
    offloads: i64  # 1: KV blocks also go to CPU memory (``transfers``), each cached block being an extent of its own


class Ends:
    """Both ends of a doubly linked list, NONE if it is empty."""

    head: i64
    tail: i64


class Progress:
    """Where the run stands.

    ``waiting_before``, ``running_before``, ``free_before``: depths and free blocks before the tokens of the last
    batch came in, which may be later than the time that a run was advanced to.
    """

    now_us: i64
    step: i64  # number of the next step that is scheduled, empty ones included
    rows: i64  # steps in State.steps: batches with tokens
    growth_slot: i64  # the step modulo block size
    submitted: i64  # requests known to the engine
    arrived: i64  # requests that have queued (or were given up before)
    next_abort: i64  # position in abort_order
    abort_due_us: i64  # nobody gives up before
    waiting_depth: i64
    running_depth: i64
    decoding_requests: i64  # members that ask for one decode token in the next step
    decoding_context: i64  # KV tokens those would attend to, their own included
    decoding_attended: i64  # where layers have windows: the same, summed over the groups
    widening: i64  # by how much that sum grows with the next step
    free_blocks: i64
    free_queue: Ends  # extents of free blocks, the first to be taken at its head
    running: Ends  # in order of admission
    prefilling: Ends  # members of the running list that are still in prefill, in the same order
    admissions: i64  # counts up: the place of a request in the running list
    free_rows: i64  # rows of State.table that nobody uses
    extents_used: i64  # rows of State.extents that were ever used
    spare_extent: i64  # first row that has no blocks any more; the others follow by Extent.queue
    keys_used: i64
    keyed_decoding: i64  # decoding requests whose generated blocks have keys
    segments: i64
    device_free_us: i64  # when the device is done with the last batch
    in_flight: i64  # batches scheduled whose tokens are not in yet
    preempted_in_call: i64
    steps_without_token: i64
    waiting_before: i64
    running_before: i64
    free_before: i64
    steps_with_tokens: i64
    last_prefill_step: i64  # of those, the last with prefill
    left_waiting: i64  # 1: the last admissions left somebody in the queue, so that prefills are not held back


class Grouping:
    """What holds of all KV-cache groups."""

    retention: i64  # windows cache what ends at a multiple of it, DENSE: all, 0: what the prompt's end needs
    once: i64  # 1: one pass over the groups finds a prefix
    states: i64  # blocks that a request has however long it is, and groups of layers that attend to no KV tokens
    found: i64  # blocks of the prefix that was looked up last, which every group has
    keys: i64  # that were known beforehand; each group has as many


class Group:
    """Layers that share tables of blocks."""

    kind: i64
    window: i64  # tokens of the window or of the chunk
    most_admitted: i64  # blocks of a request that an admission counts at most, NONE: all
    first_alike: i64  # the first group of the same layers: they are looked up together
    alike: i64  # of that first one: how many such groups there are, itself included; else 0
    column: i64  # of its runs of blocks in State.table


class Held:
    """The blocks of one group that a running request holds, as runs in State.table."""

    left: i32  # leading blocks that it has given up: the first run begins with the next
    first: i32  # the first run that it holds
    end: i32  # runs up to the last one


class Batch:
    """The batch just scheduled."""

    prefill_tokens: i64
    decode_tokens: i64
    context_tokens: i64  # sum of the KV tokens that the decodes attend to in a mean layer, their own included
    attended_tokens: i64  # the same of the prefill tokens
    whole_context_tokens: i64  # of KV-cache groups: ``context_tokens`` of a layer that keeps all
    grouped_context_tokens: i64  # ... and summed over the groups
    prefill_requests: i64
    prefill_cap: i64  # no request is given more prefill tokens, 0: no such bound
    defers_prefill: i64  # 1: no request is given prefill tokens
    has_prefill: i64  # 1: a request got prefill tokens (a single uncached token does not count)
    admitted: i64
    free_before: i64
    served: i64  # decoding requests that got their token
    first_tokens: i64  # prefills that end with this batch, each with a token
    kernels: i64  # bits of those that batches have needed so far (kernel.step_time, FIRST_USE); never set back


class Step:
    """A step that had tokens; a row fills one line of the processor's cache.  Depths are those after scheduling."""

    start_us: i64  # on the device
    end_us: i64
    scheduled_us: i64  # when schedule() ran
    context_tokens: i64  # KV tokens that the decodes attend to in a layer that keeps all
    prefill_tokens: i32
    waiting_depth: i32
    free_blocks_before: i32  # before schedule(), after it, and after the update with its tokens
    free_blocks: i32
    free_blocks_end: i32
    decode_tokens: i16
    prefill_requests: i16
    running_depth: i16
    admitted: i16
    preempted: i16
    finished: i16


class Facts:
    """What is known of a request beforehand."""

    queued_us: i64  # when it reaches the waiting queue
    abort_us: i64  # when its client gives up
    prompt_tokens: i32
    total_tokens: i32  # prompt and all output tokens
    given_hit: i32  # cached prompt tokens that are known as a number only
    key_start: i32  # keys of its full blocks: State.keys[key_start : key_start + key_count]
    key_count: i32
    rank: i32  # place in the waiting order
    urgency: i32  # victims: greatest first (priority, arrival time); ties are equal


class Request:
    """Where a request stands; all 0 until it queues."""

    status: i32
    step_offset: i32  # while decoding: computed tokens at the start of step s are s - step_offset
    blocks_held: i32  # not kept up while decoding: one for each block size of computed tokens
    table_row: i32
    keyed: i32  # 1 if somebody may look up the blocks that it generates, else 0
    segment_start: i32  # first step of the current run of steps that all gave a token
    admission: i32  # place in the running list
    computed: i32  # tokens with KV, while in prefill
    known: i32  # prompt and generated tokens, while not decoding
    chunk: i32  # tokens given in the call of ...
    chunk_step: i32  # ... this step
    blocks_entered: i32  # leading blocks that are in the prefix cache
    extents_held: i32  # in State.table: the extents of those
    dynamic_key: i32  # first key of its blocks beyond key_count, given at a preemption


class Outcome:
    """What results say of a request; NONE: not yet."""

    scheduled_us: i64  # first admission
    scheduled_step: i32
    first_step: i32
    last_step: i32
    preemptions: i32
    cached_tokens: i32  # hit at the first admission
    resume_cached_tokens: i32  # hits at later admissions, summed


class Link:
    """The neighbours of a row in a doubly linked list."""

    next: i32
    previous: i32


class Links:
    """The lists that a request is in."""

    running: Link
    prefilling: Link
    growth: Link  # decoding requests by the step, modulo block size, that needs a new block
    finish: Link  # requests by the step that gives their last token, modulo the ring


class Leaving:
    """What windows have to do with a request."""

    junction: i32  # tokens of a prefix that some groups have and others have not
    next_left: i32  # processed tokens with which a window leaves its first block
    due: i32  # while decoding, the step in which it does
    slot: i32  # the list of State.leave_head that the request is in, NONE: it ends before
    next: i32  # there, in the order of the running list
    previous: i32


class Extent:
    """KV blocks that are cached, held and freed together, see ``pool`` and ``free_queue``."""

    ref_count: i32  # running requests that hold it
    blocks: i32
    depth: i32  # place of its first block in the prompts that have it, or UNKEYED
    keys_at: i32  # its keys are State.keys[keys_at :]; given at a preemption they are -keys_at - 2 and following
    rest: i32  # what was cut off behind it last
    twin: i32  # next extent in the cache under the same key, in order of entry (only extents of one block have twins)
    queue: Link  # in the free queue, while nobody holds it


_WIDTHS: dict[str, Any] = {"i64": np.int64, "i32": np.int32, "i16": np.int16, "f64": np.float64}


def kept_in() -> Path | None:
    """The folder of the compiled kernel, None where none can be written."""
    return cache_folder(FOLDER)


def dtype_of(row: type) -> np.dtype[Any]:
    """The dtype of the records that a class describes; its fields are numbers, or records of this module."""
    fields = row.__annotations__.items()
    return np.dtype((np.record, [(name, _WIDTHS.get(kind) or dtype_of(globals()[kind])) for name, kind in fields]))


CONFIG, PROGRESS, BATCH, STEP, EXTENT = map(dtype_of, (Config, Progress, Batch, Step, Extent))
FACTS, REQUEST, OUTCOME, LINK, LINKS = map(dtype_of, (Facts, Request, Outcome, Link, Links))
GROUPING, GROUP, HELD, LEAVING = map(dtype_of, (Grouping, Group, Held, Leaving))


def extents_of(usable: int) -> Table:
    """A row per extent that there can be: a cached one a block, and between two of them blocks without contents.

    The first is all blocks.  The others take no memory until they are used.
    """
    extents = np.empty(2 * usable + 2, EXTENT)
    extents[0] = (0, usable, UNKEYED, NONE, NONE, NONE, (NONE, NONE))
    return extents


class State(Tables):
    """Everything a run needs and produces."""

    config: Annotated[Record, CONFIG, 0]
    at: Annotated[Record, PROGRESS, 0]
    batch: Annotated[Record, BATCH, 0]
    flight: Int64s  # [4]: rows of the batches in flight, the oldest first (NONE: empty), then their ends, us
    facts: Annotated[Table, FACTS, 1]  # [requests]
    requests: Annotated[Table, REQUEST, 1]  # [requests]
    outcomes: Annotated[Table, OUTCOME, 1]  # [requests]
    links: Annotated[Table, LINKS, 1]  # [requests]
    abort_order: Int64s  # requests by abort_us
    by_rank: Int64s  # request of a rank
    heap: Int64s  # waiting requests, a binary heap of ranks
    growth_head: Int32s  # [block size]
    growth_count: Int64s  # [block size]
    finish_head: Int32s  # [ring]
    keys: Int32s  # block keys, see BlockKeys
    extents: Annotated[Table, EXTENT, 1]  # [twice the blocks and some]
    extent_of_key: Int32s  # [keys] the extent in the cache with this key, or the one it was cut off from
    table: Annotated[Int32s, 2]  # [rows, 2 * blocks of a request] extents that a running request holds, their blocks
    free_rows: Int64s
    steps: Annotated[Table, STEP, 1]  # [capacity], grows
    segments: Annotated[Int64s, 2]  # [capacity, 3]: request, first row, rows that all gave it a token; grows
    # Of KV-cache groups, else empty:
    grouping: Annotated[Record, GROUPING, 0]
    groups: Annotated[Table, GROUP, 1]
    held: Annotated[Table, HELD, 1]  # [rows * groups]
    leaving: Annotated[Table, LEAVING, 1]  # [requests]
    leave_head: Int32s  # [block size] decoding requests by the step, modulo block size, in which they leave a block
    widening_less: Int64s  # [ring] by how much ``widening`` shrinks at a step: windows that are full
    attended_less: Int64s  # [ring] by how much ``decoding_attended`` shrinks at a step: chunks that begin
    # Of an offload, else empty:
    taken: Int32s  # [extents] the last step that took a block, or admitted a request that holds it


# A state, in compiled code: of the words that an entry was given.
state_of = reader(State)


# -- Doubly linked lists ---------------------------------------------------------------------


@compiled
def insert(links: Table, ends: Ends, row: int, before: int) -> None:
    """Put a row into a list behind the row ``before``; NONE: at its head."""
    after = ends.head if before == NONE else links[before].next
    links[row].previous, links[row].next = before, after
    if before == NONE:
        ends.head = row
    else:
        links[before].next = row
    if after == NONE:
        ends.tail = row
    else:
        links[after].previous = row


@compiled
def remove(links: Table, ends: Ends, row: int) -> None:
    """Take a row out of a list."""
    before, after = links[row].previous, links[row].next
    if before == NONE:
        ends.head = after
    else:
        links[before].next = after
    if after == NONE:
        ends.tail = before
    else:
        links[after].previous = before
