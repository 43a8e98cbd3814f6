"""What a run needs beside ``State`` whose running requests are visited one by one in every step.

These are runs with drafts (``draft_batch``), and with several groups of KV blocks (``groups``).
"""

from __future__ import annotations

from typing import Annotated

from blis_replay.base.arrays import Int8s, Int64s
from blis_replay.base.tables import Tables, reader
from blis_replay.blis.kernel.state import Record, Table, dtype_of, i32, i64

# -- Group.kind: what a layer attends to --------------------------------------------------
FULL, WINDOW, CHUNK = range(3)
KEPT = 0  # no block
# -- Extent.keys_at of a block here: its place in State.extent_of_key, NONE, or ...
UNFINDABLE = -2  # ... it is cached, and nobody can look it up
DENSE = -1  # Grouping.retention: every block is cached


class Drafted:
    """Progress of a request beyond what ``Request`` has, whose ``known`` tokens are those that have arrived."""

    outputs: i32  # tokens generated so far
    drafts: i32  # to be verified when it is scheduled next
    placeholders: i32  # asynchronously: tokens that steps in flight give if all their drafts are accepted
    in_flight: i32  # tokens of batches that are not in yet
    stale: i32  # those of them from before a preemption, whose rejections count no more
    cached: i32  # tokens whose blocks may be looked up
    given_drafts: i32  # by the call that is at work
    in_prefill: i32  # 1: its last batch did not reach its last known token
    segment_row: i32  # the steps that gave a token each: the last one's row, and how many
    segment_rows: i32
    # Of KV-cache groups (``groups``):
    junction: i32  # tokens of a prefix that some groups have and others have not
    slots_held: i32  # tokens for which every group has blocks
    next_left: i32  # processed tokens with which a window leaves its first block
    next_entered: i32  # tokens with which a block becomes full


class DraftConfig:
    """What is drafted."""

    tokens: i32  # most drafts after one token
    lookahead: i32  # slots that a drafter with a KV cache of its own takes beyond the batch
    lookahead_at_admission: i32  # the same for a request that is admitted
    cached_as_accepted: i32  # 1: synchronously too, a block is cached in the step that accepts its last token
    drops_last_hit: i32  # 1: a cached prefix is used without its last block
    hash_lookahead: i32  # tokens that have to be known behind a block before it is cached
    once_more: i32  # 1: asynchronously, a request whose last token is in flight decodes once more, for nothing
    keeps_drafts: i32  # 1: a preempted request keeps the drafts that were not verified
    pads: i32  # 1: a request that is admitted for one token takes part in a batch of decodes with empty drafts
    pads_or_waits: i32  # 1: it is not admitted where they would go beyond max_model_len
    pads_alone: i32  # 1: it has them also where no running request takes part
    frees_processed: i32  # 1: a window leaves a block only when no token in flight attends to it


class Group:
    """Layers that share tables of blocks."""

    kind: i64
    block_size: i64
    window: i64  # tokens of the window or of the chunk
    most_admitted: i64  # blocks of a request that an admission counts at most, NONE: all
    first_alike: i64  # the first group of the same layers: they are looked up together
    column: i64  # of its blocks in State.table


class Grouping:
    """What holds of all groups."""

    alignment: i64  # cached prefixes are multiples of it, tokens
    retention: i64  # windows cache what ends at a multiple of it, DENSE: all, 0: what the prompt's end needs
    once: i64  # 1: one pass over the groups finds a prefix


class Held:
    """The blocks that a request holds in a group, by row of ``State.table`` and group."""

    blocks: i32  # entries of its table
    first: i32  # entries before it are KEPT
    entered: i32  # leading entries that the prefix cache has, or need not have


DRAFT_CONFIG, DRAFTED = dtype_of(DraftConfig), dtype_of(Drafted)
GROUP, GROUPING, HELD = dtype_of(Group), dtype_of(Grouping), dtype_of(Held)


class Flight(Tables):
    """What is needed beside ``State``."""

    config: Annotated[Record, DRAFT_CONFIG, 0]
    requests: Annotated[Table, DRAFTED, 1]  # [requests]
    batches: Annotated[
        Int64s, 3
    ]  # [2, running, 4]: in batches in flight, request, tokens, drafts (NONE: padding), 1: gives a token
    counts: Int64s  # [2] members of these batches
    start: Int64s  # [requests] where those of a request begin in the following
    drafted: Int8s  # by the output tokens that a request has, less one: how many are drafted behind them
    accepted: Int8s  # and how many of those would be accepted
    grouping: Annotated[Record, GROUPING, 0]
    groups: Annotated[Table, GROUP, 1]  # none: one group, as ``pool`` has it
    held: Annotated[Table, HELD, 1]  # [running * groups]


flight_of = reader(Flight)
