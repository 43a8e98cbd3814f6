"""The batch of every engine step, reconstructed from journeys (teacher forcing: what ran, not what should have).

::

    built = reconstruct(recording)
    reconstructed_steps(built)      # totals of every step

What is exact and what is not is said row by row (``certain``): hits in the prefix cache are recorded of some
admissions only (``prefill_work``), and journeys that were not recorded are in no total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.admissions import SEVERAL_TOKENS, Admissions, admissions_of
from blis_replay.ingest.steps.prefill import (
    CERTAIN_SOURCES,
    DEALT_OUT,
    Budget,
    Chunks,
    ChunkSteps,
    chunk_steps,
    lay_chunks,
    prefill_work,
)
from blis_replay.ingest.steps.records import is_asynchronous, steps_by_id


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
    """The decodes of admissions, one token per step from ``first`` to ``last``; one element per admission with any.

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
    """Requests per step of ``steps``: ``running`` (in the running list), ``decodes`` and others.

    ``lagging``: decodes labelled prefill; ``fresh``: in prefill before their first token; ``again``: after it;
    ``doubtful``: with uncertain steps.
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


# One row per step.  A decode is one token, the last one, at or past the end of the prompt; recomputing is prefill.
TOTALS_SCHEMA: dict[str, type[pl.DataType]] = {
    "step_id": pl.Int64,
    "running": pl.Int64,  # in the running list after schedule(), with tokens or without
    "prefill_requests": pl.Int64,
    "decode_requests": pl.Int64,
    "prefill_tokens": pl.Int64,
    "decode_tokens": pl.Int64,
    "decode_context_tokens": pl.Int64,  # KV tokens that the decodes attend to, with their own
    "labelled_prefill_requests": pl.Int64,  # the same split as a step record labels it
    "labelled_decode_requests": pl.Int64,
    "labelled_prefill_tokens": pl.Int64,
    "labelled_decode_tokens": pl.Int64,
    "certain": pl.Boolean,  # they follow from the records, if all journeys were recorded
}

# Chunks and steps beyond which records are taken for mistaken rather than worked on.
MOST_CHUNKS = 20_000_000
MOST_STEPS = 5_000_000
_FEW = 0.01  # share of journeys with more tokens than steps; up to it they are mistakes in the recording


@dataclass(frozen=True)
class Reconstruction:
    """What is known of all batches, in the size of the journeys.

    ``hit_sources``: of each admission, one of ``prefill_work.HIT_SOURCES``; ``chunk_context_tokens``: of each chunk,
    KV tokens of its request with those of the chunk.
    """

    admissions: Admissions
    decodes: Decodes
    chunks: Chunks
    chunk_context_tokens: Int64s
    hit_sources: pl.Series

    def step_range(self) -> tuple[int, int]:
        """The first and the last step in which a request of the journeys ran."""
        frame = self.admissions.frame
        first, last = frame["start_step"].min(), frame["last_step"].max()
        return (int(first), int(last)) if isinstance(first, int) and isinstance(last, int) else (1, 0)


def reconstruct(recording: Recording) -> Reconstruction:
    """The batches of a recording with journeys.

    Raises ``ReconstructionError`` without journeys, where requests got several tokens a step (speculative
    decoding), and where there would be more than MOST_CHUNKS prefill chunks.
    """
    admissions = admissions_of(recording)
    refuse(admissions.journeys, admissions.remarks)
    return reconstruction_of(recording, admissions)


def reconstruction_of(recording: Recording, admissions: Admissions) -> Reconstruction:
    """The batches of these admissions; ``recording``: with the records of their steps."""
    frame = admissions.frame
    steps, decodes = _prefill_steps(frame), decodes_of(frame, is_asynchronous(recording))
    sampled = steps_by_id(recording.steps)["step_id"].to_numpy()
    work = prefill_work(recording, frame, steps, batch_counts(frame, decodes, steps, sampled))
    chunks = _laid(recording, frame, steps, decodes, work)
    hit_tokens = frame["known_tokens"].to_numpy() - work["work_tokens"].to_numpy()
    return Reconstruction(admissions, decodes, chunks, _context(chunks, hit_tokens), work["hit_source"])


def reconstructed_steps(built: Reconstruction, step_ids: Int64s | None = None) -> pl.DataFrame:
    """``TOTALS_SCHEMA`` of the given steps, or of all in which a request of the journeys ran.

    Raises ``ReconstructionError`` for more than MOST_STEPS steps.
    """
    steps = _steps(built) if step_ids is None else np.asarray(step_ids, np.int64)
    decodes, chunks = built.decodes, built.chunks
    counts = batch_counts(built.admissions.frame, decodes, chunks.steps, steps)
    at, had, short = chunks.steps.step_id, _had_tokens(built), _is_decode(built)
    fresh, again = (sum_at(at[chosen], steps, chunks.tokens[chosen]) for chosen in (~had, had))
    shorter = sum_at(at[short], steps)
    decoding, lagging = counts["decodes"].to_numpy() + shorter, counts["lagging"].to_numpy()
    # Whether a recompute is a decode depends on its own tokens, not on the sum.
    unsure = sum_at(at[~chunks.sum_certain | (chunks.steps.last & had & ~chunks.certain)], steps)
    columns = {
        "step_id": steps,
        "running": counts["running"],
        "prefill_requests": counts["fresh"] + counts["again"] - shorter,
        "decode_requests": decoding,
        "prefill_tokens": fresh + again - shorter,
        "decode_tokens": decoding,
        "decode_context_tokens": decodes.context_at(steps)
        + sum_at(at[short], steps, built.chunk_context_tokens[short]),
        "labelled_prefill_requests": counts["fresh"] + lagging,
        "labelled_decode_requests": counts["again"] + counts["decodes"] - lagging,
        "labelled_prefill_tokens": fresh + lagging,
        "labelled_decode_tokens": again + counts["decodes"] - lagging,
        "certain": (counts["doubtful"] == 0).to_numpy() & (unsure == 0),
    }
    return pl.DataFrame(columns, schema=TOTALS_SCHEMA)


def computed_prompts(built: Reconstruction) -> pl.DataFrame:
    """Per journey: ``journey``, and ``computed_tokens`` and ``hit_source`` of its first admission."""
    admissions = built.admissions.frame
    tokens = np.bincount(built.chunks.steps.admission, built.chunks.tokens, len(admissions)).astype(np.int64)
    rows = admissions.select("journey").with_columns(
        pl.Series("computed_tokens", tokens), built.hit_sources.alias("hit_source")
    )
    return rows.unique("journey", keep="first", maintain_order=True)


def _prefill_steps(frame: pl.DataFrame) -> ChunkSteps:
    start, last = frame["start_step"].to_numpy(), frame["last_step"].to_numpy()
    ended = frame["prefill_end_step"].is_not_null().to_numpy()
    end = np.where(ended, frame["prefill_end_step"].fill_null(0).to_numpy(), last)
    # As a double, because mistaken step ids may add up to more than an integer holds.
    if float(np.maximum(end - start + 1, 0).sum(dtype=np.float64)) > MOST_CHUNKS:
        raise ReconstructionError(f"journeys with more than {MOST_CHUNKS} prefill chunks: their steps are mistaken")
    return chunk_steps(start, end, ended)


def _laid(recording: Recording, frame: pl.DataFrame, steps: ChunkSteps, decodes: Decodes, work: pl.DataFrame) -> Chunks:
    budget = _budget(recording)
    counts = batch_counts(frame, decodes, steps, steps.unfinished_steps())
    chunks = lay_chunks(
        steps,
        work["work_tokens"].to_numpy(),
        (work["hit_source"].is_in([*CERTAIN_SOURCES]) & frame["certain"]).to_numpy(),
        budget,
        budget.step_tokens - counts["decodes"].to_numpy(),
        (counts["doubtful"] == 0).to_numpy(),
    )
    # What a step's records leave for several admissions is certain as a sum.
    dealt = (work["hit_source"] == DEALT_OUT).to_numpy()[steps.admission]
    return replace(chunks, sum_certain=chunks.sum_certain | dealt)


def _had_tokens(built: Reconstruction) -> Bools:
    """bool[chunks]: of a request that had generated tokens."""
    return np.asarray(built.admissions.frame["output_tokens"].to_numpy()[built.chunks.steps.admission] > 0)


def _is_decode(built: Reconstruction) -> Bools:
    """bool[chunks]: one token at the end of what is known, beyond the prompt, is a decode, however it came about."""
    return np.asarray(built.chunks.steps.last & _had_tokens(built) & (built.chunks.tokens == 1))


def refuse(journeys: int, remarks: Mapping[str, int]) -> None:
    """Raise ``ReconstructionError`` without journeys, and for too many with several tokens per step."""
    if not journeys:
        raise ReconstructionError("no journeys were recorded")
    several = remarks.get(SEVERAL_TOKENS, 0)
    if several > _FEW * journeys:
        raise ReconstructionError(
            f"{several} of {journeys} requests got more tokens than they ran steps: speculative decoding is "
            "not reconstructed"
        )


def _budget(recording: Recording) -> Budget:
    engine = recording.engine
    tokens, threshold = (
        int(engine[name].value) if name in engine else 0
        for name in ("max_num_batched_tokens", "long_prefill_token_threshold")
    )
    return Budget(tokens, threshold)


def _context(chunks: Chunks, hit_tokens: Int64s) -> Int64s:
    """int64[chunks]: the hit and all chunks of the request so far."""
    upto, admission = np.cumsum(chunks.tokens), chunks.steps.admission
    first = np.searchsorted(admission, admission)
    return np.asarray(hit_tokens[admission] + upto - upto[first] + chunks.tokens[first], np.int64)


def _steps(built: Reconstruction) -> Int64s:
    first, last = built.step_range()
    if last - first >= MOST_STEPS:
        raise ReconstructionError(f"steps {first} to {last} are more than {MOST_STEPS}: name the steps that are wanted")
    return np.arange(first, last + 1)
