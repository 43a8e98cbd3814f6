"""What a run is made of: arrays and numbers, nothing else.

A state is a plain value: it can be copied, stored and resumed.  Requests are numbered
in the order in which they queue.  Lists are arrays of links, -1 is "none".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

# Unsigned, an index needs no test for counting from the end.
index = np.uint64

NEVER = 2**62
# A step by a model of real numbers takes an hour at most: an exponential can overflow.
LONGEST_STEP_US = 3.6e9
NONE = -1

# -- Request status ------------------------------------------------------------------
NEW, WAITING, PREFILLING, DECODING, LAST_IN_FLIGHT, COMPLETED, ABORTED = range(7)

# -- State.config: engine arguments ----------------------------------------------------
(
    MAX_NUM_SEQS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_MODEL_LEN,
    BLOCK_SIZE,
    LONG_PREFILL_THRESHOLD,
    CHUNKED_PREFILL,
    PREFIX_CACHING,
    PRIORITY_POLICY,
    BATCHES_IN_FLIGHT,  # 1: synchronous, 2: asynchronous
    PATIENCE,  # barren turns after which nothing will ever move again
    NUM_BLOCKS,  # without the reserved one
    RING_MASK,  # State.finish_head has a power of two of slots, more than any request has steps
    CPU_BLOCKS,  # room of the CPU tier, 0: there is none
    FETCH_US,  # that the device takes to fetch a block from there
) = range(14)
CONFIG_SIZE = 14

# -- State.at: where the run stands ----------------------------------------------------
(
    NOW,  # us
    STEP,  # number of the next turn that schedules, empty ones included
    ROWS,  # steps in State.steps: batches with tokens
    GROWTH_SLOT,  # the same modulo block size
    SUBMITTED,  # requests known to the engine
    ARRIVED,  # requests that have queued (or were given up before)
    NEXT_ABORT,  # position in abort_order
    WAITING_DEPTH,
    RUNNING_DEPTH,
    DECODING_REQUESTS,  # members that ask for one decode token in the next step
    DECODING_CONTEXT,  # KV tokens those would attend to, each one's own included
    FREE_BLOCKS,
    QUEUE_HEAD,  # the free queue: pieces, the first to be taken at its head
    QUEUE_TAIL,
    RUN_HEAD,  # running list, in order of admission
    RUN_TAIL,
    PREFILL_HEAD,  # its members that are still in prefill, in the same order
    PREFILL_TAIL,
    ADMISSIONS,  # counts up: the place of a request in the running list
    FREE_ROWS,  # rows of State.table that nobody uses
    PIECES_USED,  # rows of State.piece that were ever used
    SPARE_PIECE,  # first of those without a piece, linked by QUEUE_AFTER
    KEYS_USED,
    KEYED_DECODING,  # decoding requests whose generated blocks have keys
    SEGMENTS,
    DEVICE_FREE,  # us: when the device is done with the last batch
    IN_FLIGHT,  # batches scheduled whose tokens are not in yet
    PREEMPTED_IN_CALL,
    BARREN_TURNS,  # turns since one gave a token
    WAITING_BEFORE,  # depths and free blocks before the tokens of the last batch came in, which may be
    RUNNING_BEFORE,  # later than the time that a run was advanced to
    FREE_BEFORE,
    CPU_USED,  # blocks in the CPU tier
    CPU_STORED,  # blocks that were copied there, and back
    CPU_FETCHED,
) = range(35)
AT_SIZE = 35

# -- State.batch: the batch just scheduled ------------------------------------------------
(
    BATCH_PREFILL_TOKENS,
    BATCH_DECODE_TOKENS,
    BATCH_CONTEXT_TOKENS,
    BATCH_PREFILL_REQUESTS,
    BATCH_ADMITTED,
    BATCH_FREE_BEFORE,
    BATCH_SERVED,  # decoding requests that got their token
    BATCH_FIRST_TOKENS,  # prefills that end with this batch, each with a token
    BATCH_ATTENDED_TOKENS,  # KV tokens that its prefill tokens attend to, each one's own included, summed
) = range(9)
BATCH_SIZE = 9

# -- State.steps: one row a step; empty turns have none.  Counts of requests have two bytes, so a row
#    fills one line of the processor's cache --------------------------------------------------------
STEP_DTYPE = np.dtype(
    [
        ("start_us", np.int64),  # on the device
        ("end_us", np.int64),
        ("scheduled_us", np.int64),  # when schedule() ran
        ("context_tokens", np.int64),  # KV tokens that the decodes attend to
        ("prefill_tokens", np.int32),
        ("waiting_depth", np.int32),  # depths are those after scheduling
        ("free_blocks_before", np.int32),  # before schedule(), after it, and after the update with its tokens
        ("free_blocks", np.int32),
        ("free_blocks_end", np.int32),
        ("decode_tokens", np.int16),
        ("prefill_requests", np.int16),
        ("running_depth", np.int16),
        ("admitted", np.int16),
        ("preempted", np.int16),
        ("finished", np.int16),
    ]
)


# -- State.request: one row a request ----------------------------------------------------------
(
    STATUS,
    BASE,  # while decoding: computed tokens at the start of step s are s - BASE
    BLOCKS_HELD,  # not kept up while decoding: one for each block size of computed tokens
    TABLE_ROW,
    KEYED,  # 1 if somebody may look up the blocks that it generates, else 0
    SEGMENT_START,  # first turn of the current run of turns that all gave a token
    TOTAL_TOKENS,  # prompt and all output tokens
    ADMISSION,  # place in the running list
    COMPUTED,  # tokens with KV, while in prefill
    KNOWN,  # prompt and generated tokens, while not decoding
    CHUNK,  # tokens given in the call of ...
    CHUNK_STEP,  # ... this step
    BLOCKS_ENTERED,  # leading blocks that are in the prefix cache
    PIECES_HELD,  # in State.table: the pieces of those
    DYNAMIC_KEY,  # first key of its blocks beyond KEY_COUNT, given at a preemption
    KEY_START,  # keys of its full blocks: State.keys[KEY_START : KEY_START + KEY_COUNT]
    KEY_COUNT,
    PROMPT_TOKENS,
    GIVEN_HIT,  # cached prompt tokens that are known as a number only
    RANK,  # place in the waiting order
    URGENCY,  # victims: greatest first (priority, arrival time); ties are equal
    SCHEDULED_STEP,
    FIRST_STEP,
    LAST_STEP,
    PREEMPTIONS,
    CACHED_TOKENS,  # hit at the first admission
    RESUME_CACHED_TOKENS,  # hits at later admissions, summed
) = range(27)
REQUEST_COLUMNS = 27

# -- State.link: one row a request, places in doubly linked lists ----------------------------
(
    RUN_NEXT,
    RUN_PREV,
    PREFILL_NEXT,
    PREFILL_PREV,
    GROWTH_NEXT,  # decoding requests by the step, modulo block size, that needs a new block
    GROWTH_PREV,
    FINISH_NEXT,  # requests by the step that gives their last token, modulo the ring
    FINISH_PREV,
) = range(8)
LINK_COLUMNS = 8

# -- State.piece: one row a piece of blocks, see pool and free_queue ---------------------------------
(
    HOLDERS,  # running requests that hold it
    PIECE_BLOCKS,
    DEPTH,  # place of its first block in the prompts that have it; ALIKE: it has no contents to be found
    KEYS_AT,  # its keys are State.keys[KEYS_AT :]; given at a preemption they are -KEYS_AT - 2 and following
    REST,  # what was cut off behind it last
    TWIN,  # next piece in the cache under the same key, in order of entry (only pieces of one block have twins)
    QUEUE_BEFORE,  # in the free queue, while nobody holds it
    QUEUE_AFTER,
) = range(8)
PIECE_COLUMNS = 8
ALIKE = -1


class State(NamedTuple):
    """Everything a run needs and produces; the constants above name rows and columns."""

    config: Int64s
    at: Int64s
    batch: Int64s
    flight: Int64s  # [2, 2] batches in flight, oldest first: row (NONE: empty) and end, us
    request: Int32s  # [requests, REQUEST_COLUMNS], column after column: who runs together stands together
    queued_us: Int64s  # [requests] when it reaches the waiting queue
    abort_us: Int64s  # [requests] when its client gives up
    scheduled_us: Int64s  # [requests] first admission, NONE before
    link: Int32s  # [requests, LINK_COLUMNS]
    abort_order: Int64s  # requests by abort_us
    by_rank: Int64s  # request of a rank
    heap: Int64s  # waiting requests, a binary heap of ranks
    growth_head: Int32s  # [block size]
    growth_count: Int64s  # [block size]
    finish_head: Int32s  # [ring]
    keys: Int32s  # block keys, see BlockKeys
    piece: Int32s  # [twice the blocks and some, PIECE_COLUMNS]
    found: Int32s  # [keys] the piece in the cache with this key, or the one it was cut off from
    cpu_newer: Int32s  # [keys + 1] the CPU tier's blocks by last use, see recency; [1] without one
    cpu_older: Int32s
    table: Int32s  # [rows, 2 * blocks of a request] cached pieces that a running request holds, and their blocks then
    free_rows: Int64s
    steps: NDArray[np.void]  # [capacity] of STEP_DTYPE, grows
    segments: Int64s  # [capacity, 3]: request, first row, rows that all gave it a token; grows
