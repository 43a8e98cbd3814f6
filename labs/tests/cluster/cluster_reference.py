"""What routers must decide, told from the finished runs alone: slow, sharing nothing with the cluster's loop."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import RequestTrace
from blis_replay_labs.cluster.simulate import ClusterResult


def loads(trace: RequestTrace, result: ClusterResult, request: int, seen_us: int) -> list[int]:
    """Requests sent to each instance before this one and not finished before ``seen_us``; nobody gives up."""
    finished_us = trace.arrival_us + result.whole.e2e_us
    left = (np.arange(len(trace)) < request) & (finished_us >= seen_us)
    return [int((left & (result.instance == i)).sum()) for i in range(len(result.instances))]


def used_blocks(run: SimResult, blocks: int, seen_us: int) -> int:
    """Blocks in use just before ``seen_us``, from the table of steps: after the last thing that changed them."""
    used, last = 0, (-1, -1)
    for step in run.steps:
        # At one moment the tokens of a step come in first, and then the next batch is scheduled.
        changes = [((step["end_us"], 0), step["free_blocks_end"]), ((step["scheduled_us"], 1), step["free_blocks"])]
        for when, free in changes:
            if last <= when and when[0] < seen_us:
                used, last = blocks - int(free), when
    return used


class RouterMemory:
    """The blocks sent to one instance, the least recently sent forgotten."""

    def __init__(self, size: int) -> None:
        self.size, self.keys = size, OrderedDict[int, None]()

    def share(self, prompt: list[int]) -> float:
        """Share of a prompt's blocks, from the first on, that are remembered."""
        matched = 0
        while matched < len(prompt) and prompt[matched] in self.keys:
            matched += 1
        return matched / len(prompt) if prompt else 0.0

    def send(self, prompt: list[int]) -> None:
        """Remember a prompt; its first block is the most recent."""
        for key in reversed(prompt):
            self.keys[key] = None
            self.keys.move_to_end(key)
            if len(self.keys) > self.size:
                self.keys.popitem(last=False)
