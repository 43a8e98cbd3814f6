"""What follows of a batch from admissions alone: who is in it, and as what the recorder labels them.

The recorder counts a request as prefill while none of its tokens has been processed (trace-formats 1.4).  So the
first decode of a request is still labelled prefill where scheduling is asynchronous, and what a preempted
request computes again is labelled decode if it had generated anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.prefill_chunks import ChunkSteps

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


def open_at(first: Int64s, last: Int64s, steps: Int64s, weight: Int64s | None = None) -> Int64s:
    """int64[steps]: how many spans from ``first`` to ``last`` hold each step, or the sum of their weights."""

    def before(at: Int64s, side: Literal["left", "right"]) -> Int64s:
        if weight is None:
            return np.searchsorted(np.sort(at, kind="stable"), steps, side)
        order = np.argsort(at, kind="stable")
        sums = np.concatenate([[0], np.cumsum(weight[order])])
        return np.asarray(sums[np.searchsorted(at[order], steps, side)])

    return np.asarray(before(first, "right") - before(last, "left"), np.int64)


def sum_at(step_id: Int64s, steps: Int64s, weight: Int64s | None = None) -> Int64s:
    """int64[steps]: how many of ``step_id`` are each step, or the sum of their weights."""
    return open_at(step_id, step_id, steps, weight)


@dataclass(frozen=True)
class Decodes:
    """The decodes of admissions, one token a step from ``first`` to ``last``; one element an admission that has any.

    ``context_less_step``: KV tokens that a decode attends to, its own included, less the step.  ``lagging_step``: those
    in which one is still labelled prefill.
    """

    admission: Int64s
    first: Int64s
    last: Int64s
    context_less_step: Int64s
    lagging_step: Int64s

    def at(self, steps: Int64s) -> Int64s:
        """int64[steps]: requests that decode."""
        return open_at(self.first, self.last, steps)

    def context_at(self, steps: Int64s) -> Int64s:
        """int64[steps]: KV tokens that they attend to."""
        return open_at(self.first, self.last, steps, self.context_less_step) + steps * self.at(steps)


def decodes_of(admissions: pl.DataFrame, asynchronous: bool) -> Decodes:
    """The decodes of ``ADMISSION_SCHEMA``."""
    decoding = admissions.with_row_index("admission").filter(pl.col("prefill_end_step") < pl.col("last_step"))
    admission, end, last, known, had = (
        decoding[name].to_numpy().astype(np.int64)
        for name in ("admission", "prefill_end_step", "last_step", "known_tokens", "output_tokens")
    )
    return Decodes(admission, end + 1, last, known - end, end[had == 0] + 1 if asynchronous else end[:0])


def batch_counts(admissions: pl.DataFrame, decodes: Decodes, chunks: ChunkSteps, steps: Int64s) -> pl.DataFrame:
    """One row a step of ``steps``, requests: ``running``, in the running list; ``decodes``, of which ``lagging`` are
    labelled prefill; ``fresh``, in prefill before their first token, and ``again``, after it; ``doubtful``, of
    which the steps are not certain.
    """
    had = admissions["output_tokens"].to_numpy()[chunks.admission] > 0
    start, held, certain = (admissions[name].to_numpy() for name in ("start_step", "held_until_step", "certain"))
    return pl.DataFrame(
        {
            "step_id": steps,
            "running": open_at(start, held, steps),
            "decodes": decodes.at(steps),
            "lagging": sum_at(decodes.lagging_step, steps),
            "fresh": sum_at(chunks.step_id[~had], steps),
            "again": sum_at(chunks.step_id[had], steps),
            "doubtful": open_at(start[~certain], held[~certain], steps),
        }
    )
