"""What a run needs beside ``State`` whose running requests are visited one by one in every step.

These are runs with drafts (``draft_batch``).
"""

from __future__ import annotations

from typing import Annotated

from blis_replay.base.arrays import Int8s, Int64s
from blis_replay.base.tables import Tables, reader
from blis_replay.blis.kernel.state import Record, Table, dtype_of, i32


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
    stays: i32  # 1: its blocks stay when it ends, until another server has fetched them


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


DRAFT_CONFIG, DRAFTED = dtype_of(DraftConfig), dtype_of(Drafted)


class Flight(Tables):
    """What is needed beside ``State``."""

    config: Annotated[Record, DRAFT_CONFIG, 0]
    requests: Annotated[Table, DRAFTED, 1]  # [requests]
    batches: Annotated[Int64s, 3]  # [2, running, 4] in flight: request, tokens, drafts (NONE: padded), 1: gives a token
    counts: Int64s  # [2] members of these batches
    start: Int64s  # [requests] where those of a request begin in the following
    drafted: Int8s  # by the output tokens that a request has, less one: how many are drafted behind them
    accepted: Int8s  # and how many of those would be accepted


flight_of = reader(Flight)
