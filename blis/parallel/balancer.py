"""How vLLM spreads requests over the ranks of data parallelism: what its front ends know, and whom they choose.

Ranks report their counts to a coordinator, which publishes them to the front ends; a front end sends a request to the
rank with the least score (vllm/v1/engine/coordinator.py and core_client.py).  Messages take no time.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.tables import Tables, reader
from blis_replay.blis.kernel.state import ABORTED, COMPLETED, NEVER, Record, Table, dtype_of, i64
from blis_replay.blis.parallel.instances import Stack, compiled
from blis_replay.blis.trace import EngineConfig

# The coordinator publishes what has changed this often, and else this often; and not in a lull shorter than the last.
CHANGED_MS, UNCHANGED_MS, LULL_MS = 100, 5_000, 50


class Coordinator:
    """The coordinator, and the clock of ranks in lockstep.  Switches are 1 or 0 (``trace.Behaviours``)."""

    counts_in_flight: i64
    ties_rotate: i64
    reports: i64  # ranks say how many requests they have
    reports_before: i64  # before a step too, not only after it
    lockstep: i64
    waits_for_lull: i64
    published_us: i64
    heard_us: i64  # the last message
    changed: i64  # since the last publication
    kept: i64  # counts of a whole step are still to be published
    newest_step: i64  # of the counts that were reported
    now_us: i64  # of the lockstep
    device_free_us: i64
    running: i64
    steps: i64  # of this wave, a wave being the time from idle ranks to idle ranks, and all before it


class Counts:
    """What is said of a rank."""

    waiting: i64
    running: i64
    free_blocks: i64


class Message:
    """Counts on their way to the coordinator."""

    at_us: i64
    step: i64
    counts: Counts


COORDINATOR, COUNTS = map(dtype_of, (Coordinator, Counts))
MESSAGE = np.dtype((np.record, [("at_us", np.int64), ("step", np.int64), ("counts", COUNTS)]))
# What was said before a rank's turn is delivered by then; a turn says two things, and at one time there are two turns.
_PENDING = 8


class Balancer(Tables):
    """The coordinator, the front ends, and what they know of the ranks.  Front ends take the requests in turn."""

    coordinator: Annotated[Record, COORDINATOR, 0]
    told: Annotated[Table, COUNTS, 1]  # [ranks] those that the coordinator has
    kept: Annotated[Table, COUNTS, 1]  # [ranks] those of the last whole step
    said: Annotated[Table, COUNTS, 1]  # [ranks] those that a rank reported last
    seen: Annotated[Table, COUNTS, 2]  # [front ends, ranks] those that a front end goes by
    awake: Int64s  # [front ends] whether it takes the ranks for running
    first: Int64s  # [front ends] the rank that it looks at first
    in_flight: Annotated[Int64s, 2]  # [front ends, ranks] its requests there
    open: Annotated[Int64s, 3]  # [ranks, requests, 2] requests there, by their numbers there, and their front ends
    opened: Int64s  # [ranks] how many
    pending: Annotated[Table, MESSAGE, 2]  # [ranks, _PENDING]
    pendings: Int64s  # [ranks] how many
    busy: Int64s  # [ranks] of the loop


balancer_of = reader(Balancer)


def new_balancer(engine: EngineConfig, requests: int, blocks: int) -> Balancer:
    """The balancer before the first request; ranks are in lockstep where experts are spread over them."""
    ranks, behaviours = engine.data_parallel_size, engine.behaviours
    fronts = engine.api_server_count or ranks
    coordinator = np.zeros(1, COORDINATOR)
    lockstep = engine.mixture_of_experts or not behaviours.dense_ranks_apart
    coordinator["lockstep"] = lockstep
    coordinator["counts_in_flight"] = behaviours.balancer_counts_in_flight
    coordinator["ties_rotate"] = behaviours.balancer_ties_rotate
    coordinator["reports"] = lockstep or behaviours.balancer_counts_in_flight
    coordinator["reports_before"] = behaviours.counts_before_step
    coordinator["waits_for_lull"] = lockstep or not behaviours.balancer_counts_in_flight
    coordinator["newest_step"] = -1
    counts = np.zeros((fronts + 3, ranks), COUNTS)
    counts["free_blocks"] = blocks
    return Balancer(
        coordinator=coordinator,
        told=counts[0],
        kept=counts[1],
        said=counts[2],
        seen=counts[3:],
        awake=np.zeros(fronts, np.int64),
        first=ranks * np.arange(fronts, dtype=np.int64) // fronts,
        in_flight=np.zeros((fronts, ranks), np.int64),
        open=np.zeros((ranks, requests if behaviours.balancer_counts_in_flight else 0, 2), np.int64),
        opened=np.zeros(ranks, np.int64),
        pending=np.zeros((ranks, _PENDING), MESSAGE),
        pendings=np.zeros(ranks, np.int64),
        busy=np.zeros(ranks, np.int64),
    )


# -- The front ends ------------------------------------------------------------------------


@compiled
def choose_rank(stack: Stack, balancer: Balancer, request: int, now_us: int) -> int:
    """The rank for a request, by its number by arrival, at the front end that has it."""
    front = request % len(balancer.first)
    coordinator, ranks = balancer.coordinator, len(balancer.told)
    chosen, least = 0, float(NEVER)
    for i in range(ranks):
        rank = (balancer.first[front] + i) % ranks
        score = score_of(stack, balancer, front, rank)
        if score < least:
            chosen, least = rank, score
    # Its own view of who waits, until the next publication.
    balancer.seen[front, chosen].waiting += len(balancer.first)
    if coordinator.ties_rotate == 1:
        balancer.first[front] = (balancer.first[front] + 1) % ranks
    balancer.in_flight[front, chosen] += 1
    if balancer.awake[front] == 0:  # it tells the coordinator that it wakes somebody
        balancer.awake[front] = 1
        coordinator.heard_us = now_us
    return chosen


@compiled
def score_of(stack: Stack, balancer: Balancer, front: int, rank: int) -> float:
    """How loaded a front end takes a rank to be."""
    seen = balancer.seen[front, rank]
    if balancer.coordinator.counts_in_flight == 0:
        return float(seen.waiting * 4 + seen.running)
    own = len(balancer.first) * balancer.in_flight[front, rank]
    used = 1.0 - seen.free_blocks / stack.config.num_blocks
    return float(max(own, seen.waiting + seen.running) + seen.waiting * 6.0 * max(0.0, used - 0.5))


@compiled
def note_open(balancer: Balancer, rank: int, local: int, front: int) -> None:
    """A request has reached a rank, where it has the number ``local``."""
    if balancer.coordinator.counts_in_flight == 1:
        place = balancer.opened[rank]
        balancer.open[rank, place, 0] = local
        balancer.open[rank, place, 1] = front
        balancer.opened[rank] = place + 1


@compiled
def forget_finished(stack: Stack, balancer: Balancer, now_us: int) -> None:
    """Take the requests that were finished before ``now_us`` out of those in flight."""
    if balancer.coordinator.counts_in_flight == 0:
        return
    for rank in range(len(balancer.opened)):
        left = 0
        for place in range(balancer.opened[rank]):
            local, front = balancer.open[rank, place, 0], balancer.open[rank, place, 1]
            status = stack.requests[rank, local].status
            done_us = NEVER
            if status == COMPLETED:
                done_us = stack.steps[rank, stack.outcomes[rank, local].last_step].end_us
            elif status == ABORTED:
                done_us = stack.facts[rank, local].abort_us
            if done_us < now_us:
                balancer.in_flight[front, rank] -= 1
            else:
                balancer.open[rank, left, 0] = local
                balancer.open[rank, left, 1] = front
                left += 1
        balancer.opened[rank] = left


# -- The coordinator -------------------------------------------------------------------------


@compiled
def post(balancer: Balancer, rank: int, at_us: int, step: int, waiting: int, running: int, free_blocks: int) -> None:
    """A rank reports its counts where they have changed."""
    said = balancer.said[rank]
    if balancer.coordinator.reports == 0 or (said.waiting == waiting and said.running == running):
        return
    said.waiting, said.running, said.free_blocks = waiting, running, free_blocks
    message = balancer.pending[rank, balancer.pendings[rank]]
    message.at_us, message.step = at_us, step
    copy_counts(said, message.counts)
    balancer.pendings[rank] += 1


@compiled
def deliver(balancer: Balancer, until_us: int) -> None:
    """Take the messages of all ranks before a time, in their order, and publish what is due before it.

    Of what is said and what is due at the same time, what is said comes first.
    """
    while True:
        first, earliest_us = -1, until_us
        for rank in range(len(balancer.pendings)):
            if balancer.pendings[rank] > 0 and balancer.pending[rank, 0].at_us < earliest_us:
                first, earliest_us = rank, balancer.pending[rank, 0].at_us
        if first < 0:
            break
        publish_before(balancer, earliest_us)
        hear(balancer, first, balancer.pending[first, 0])
        balancer.pendings[first] -= 1
        for place in range(balancer.pendings[first]):
            balancer.pending[first, place] = balancer.pending[first, place + 1]
    if until_us < NEVER:
        publish_before(balancer, until_us)


@compiled
def hear(balancer: Balancer, rank: int, message: Message) -> None:
    """The coordinator takes the counts of a rank; in lockstep those of the step before are then complete."""
    coordinator = balancer.coordinator
    if coordinator.lockstep == 1 and message.step > coordinator.newest_step:
        if coordinator.changed == 1:
            coordinator.kept = 1
            for i in range(len(balancer.told)):
                copy_counts(balancer.told[i], balancer.kept[i])
        coordinator.newest_step = message.step
    copy_counts(message.counts, balancer.told[rank])
    coordinator.changed = 1
    coordinator.heard_us = message.at_us


@compiled
def publish_before(balancer: Balancer, now_us: int) -> None:
    """Publish to all front ends as often as it is due before a time."""
    coordinator = balancer.coordinator
    while True:
        since_ms = coordinator.heard_us // 1_000 - coordinator.published_us // 1_000
        wait_ms = (CHANGED_MS if coordinator.changed == 1 else UNCHANGED_MS) - since_ms
        least_ms = LULL_MS if coordinator.waits_for_lull == 1 and coordinator.kept == 0 else 0
        due_us = coordinator.heard_us + max(least_ms, wait_ms) * 1_000
        if due_us >= now_us:
            return
        counts = balancer.kept if coordinator.kept == 1 else balancer.told
        for front in range(len(balancer.first)):
            for rank in range(len(counts)):
                copy_counts(counts[rank], balancer.seen[front, rank])
            balancer.awake[front] = coordinator.running
        if coordinator.kept == 1:
            coordinator.kept = 0
        else:
            coordinator.changed = 0
        coordinator.published_us = coordinator.heard_us = due_us


@compiled
def copy_counts(source: Counts, target: Counts) -> None:
    """The counts of one record into another."""
    target.waiting = source.waiting
    target.running = source.running
    target.free_blocks = source.free_blocks
