"""How many tokens each admission had to compute: its known tokens less what it found in the prefix cache.

Only some hits are recorded: by a snapshot of the step of the admission, or by any snapshot (of the first admission).
Others follow from the recorded tokens of a step, if it has a single admission with an unknown hit.  Where they leave
it to several, it is dealt out in proportion.  All others are
assumed to have found the share that those on record found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.records import one_a_step

_WITHOUT_LIMIT = 2**62


@dataclass(frozen=True)
class Budget:
    """Engine arguments: tokens a step, tokens per request in a step (0: no limit of its own)."""

    step_tokens: int
    chunk_tokens: int


@dataclass(frozen=True)
class ChunkSteps:
    """One element a chunk, by admission and step.

    ``admission``: row of the admissions; ``last``: whether it ended its prefill.
    """

    admission: Int64s
    step_id: Int64s
    last: Bools

    def unfinished_steps(self) -> Int64s:
        """The steps with a chunk that did not end its prefill, ascending."""
        return np.unique(self.step_id[~self.last])


@dataclass(frozen=True)
class Chunks:
    """The tokens of each of the ``steps``; ``certain``: they follow from the records, ``sum_certain``: the sum of
    the chunks of their step does."""

    steps: ChunkSteps
    tokens: Int64s
    certain: Bools
    sum_certain: Bools


def chunk_steps(start_step: Int64s, end_step: Int64s, ended: Bools) -> ChunkSteps:
    """A chunk for each step from start to end of each admission; the last one ends the prefill if it ``ended``."""
    # Odd records can say that a prefill ended before it began: it has no chunk then.
    count = np.maximum(end_step - start_step + 1, 0)
    admission = np.repeat(np.arange(len(count)), count)
    step_id = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - start_step, count)
    return ChunkSteps(admission, step_id, ended[admission] & (step_id == end_step[admission]))


def lay_chunks(
    steps: ChunkSteps,
    work_tokens: Int64s,
    work_certain: Bools,
    budget: Budget,
    free_tokens: Int64s,
    free_certain: Bools,
) -> Chunks:
    """Tokens of each chunk.

    ``work_tokens``: what each admission had to compute, in order of admission; ``free_tokens``: of each of the
    ``unfinished_steps``, the budget less decodes; ``*_certain``: whether that is so.
    """
    if budget.chunk_tokens:
        return _of_one_length(steps, work_tokens, work_certain, budget, free_tokens, free_certain)
    stretches = _Stretches.of(steps.unfinished_steps(), free_tokens)
    number = stretches.number_at(steps.step_id)
    low, high = stretches.used_before(steps.step_id), stretches.used_with(steps.step_id)
    begun, reached, fits = _first_come_first_served(steps, number, low, high, work_tokens)
    shared = np.minimum(reached[steps.admission], high) - np.maximum(begun[steps.admission], low)
    tokens = np.where(number >= 0, np.maximum(shared, 0), work_tokens[steps.admission])
    return Chunks(steps, tokens, *_certainty(steps, stretches, work_certain, fits, free_certain))


@dataclass(frozen=True)
class _Stretches:
    """Stretches of consecutive steps that used up their budget.

    ``full``: those steps, ascending; ``number``: the stretch of each; ``used``: its budget up to and with each.
    """

    full: Int64s
    number: Int64s
    used: Int64s

    @staticmethod
    def of(full: Int64s, free_tokens: Int64s) -> _Stretches:
        number = np.cumsum(np.diff(full, prepend=full[:1]) > 1, dtype=np.int64)
        used, starts = np.cumsum(free_tokens), np.flatnonzero(np.diff(number, prepend=-1))
        before = (used - free_tokens)[starts]
        return _Stretches(full, number, used - np.repeat(before, np.diff(np.append(starts, len(full)))))

    def at(self, values: Int64s, step_id: Int64s, other: int | Int64s) -> Int64s:
        """The value of each step that is full, of others ``other``."""
        if not len(self.full):
            return np.full(len(step_id), other)
        place = np.minimum(np.searchsorted(self.full, step_id), len(self.full) - 1)
        return np.where(self.full[place] == step_id, values[place], other)

    def number_at(self, step_id: Int64s) -> Int64s:
        """The stretch of a step, else -1; it goes on to the step after its last full one, where a prefill ends."""
        return self.at(self.number, step_id, self.at(self.number, step_id - 1, -1))

    def used_before(self, step_id: Int64s) -> Int64s:
        return self.at(self.used, step_id - 1, 0)

    def used_with(self, step_id: Int64s) -> Int64s:
        return self.at(self.used, step_id, _WITHOUT_LIMIT)

    def where_all(self, number: Int64s, flags: Bools) -> Bools:
        """bool[stretches]: all flags of a stretch."""
        agreed = np.ones(int(self.number[-1]) + 1 if len(self.full) else 0, bool)
        np.logical_and.at(agreed, number, flags)
        return agreed


def _certainty(
    steps: ChunkSteps, stretches: _Stretches, work_certain: Bools, fits: Bools, free_certain: Bools
) -> tuple[Bools, Bools]:
    """``certain`` and ``sum_certain`` of each chunk."""
    number = stretches.number_at(steps.step_id)
    inside = number >= 0
    admission, where = steps.admission[inside], number[inside]
    known = stretches.where_all(where, work_certain[admission])
    agreed = stretches.where_all(where, fits[admission])
    certain = work_certain[steps.admission]
    certain[inside] = (known & agreed & stretches.where_all(stretches.number, free_certain))[where]
    # The budget was used up whatever a hit was, unless what is known contradicts the steps.
    full_certain = free_certain & (agreed | ~known)[stretches.number]
    sums = stretches.at(full_certain.astype(np.int64), steps.step_id, certain.astype(np.int64))
    return certain, sums == 1


def _first_come_first_served(
    steps: ChunkSteps, number: Int64s, low: Int64s, high: Int64s, work_tokens: Int64s
) -> tuple[Int64s, Int64s, Bools]:
    """Where in the budget of its stretch each admission's share begins and ends, and whether its steps agree.

    A request that left before its prefill ended was the last in line and took all there was.
    """
    count = len(work_tokens)
    begun, reached, fits = np.zeros(count, np.int64), np.zeros(count, np.int64), np.ones(count, bool)
    first = np.flatnonzero(np.diff(steps.admission, prepend=-1))
    final = np.append(first[1:], len(steps.admission)) - 1
    before, here = 0, -1
    for a, b in zip(first[number[first] >= 0].tolist(), final[number[first] >= 0].tolist(), strict=True):
        request = steps.admission[a]
        before, here = (before if number[a] == here else 0), number[a]
        begun[request] = max(before, low[a])
        wanted = begun[request] + work_tokens[request]
        after = min(max(wanted, low[b] + 1), high[b]) if steps.last[b] else high[b]
        fits[request] = begun[request] == before and (after == wanted if steps.last[b] else after < wanted)
        reached[request] = before = after
    return begun, reached, fits


def _of_one_length(
    steps: ChunkSteps,
    work_tokens: Int64s,
    work_certain: Bools,
    budget: Budget,
    free_tokens: Int64s,
    free_certain: Bools,
) -> Chunks:
    """Chunks as long as the threshold, the last one the rest; certain where that is possible within the budget."""
    chunks = np.bincount(steps.admission, minlength=len(work_tokens))
    rest = work_tokens - budget.chunk_tokens * (chunks - 1)
    tokens = np.where(steps.last, np.clip(rest, 1, budget.chunk_tokens)[steps.admission], budget.chunk_tokens)
    full = steps.unfinished_steps()
    place = np.searchsorted(full, steps.step_id)
    shared = np.isin(steps.step_id, full)
    possible = (rest >= 1) & (rest <= budget.chunk_tokens) | ~_ended(steps, len(work_tokens))
    while True:
        # Whoever got less than a whole chunk in one step has more left in the next, and leaves others less there.
        most = np.where((possible & work_certain)[steps.admission], tokens, budget.chunk_tokens)
        asked = np.bincount(place[shared], most[shared], minlength=len(full))
        within = ~shared
        within[shared] = (free_certain & (asked <= free_tokens))[place[shared]]
        held = possible.copy()
        np.logical_and.at(held, steps.admission, within)
        if (held == possible).all():
            break
        possible = held
    certain = possible[steps.admission] & (work_certain[steps.admission] | ~steps.last)
    return Chunks(steps, tokens, certain, certain)


def _ended(steps: ChunkSteps, count: int) -> Bools:
    ended = np.zeros(count, bool)
    ended[steps.admission[steps.last]] = True
    return ended


CACHING_OFF, SNAPSHOT, STEP_TOTALS, DEALT_OUT, ASSUMED = (
    "prefix caching is off",
    "snapshot",
    "tokens of its step",
    "share of the tokens of its step",
    "assumed",
)
HIT_SOURCES = (CACHING_OFF, SNAPSHOT, STEP_TOTALS, DEALT_OUT, ASSUMED)
CERTAIN_SOURCES = (CACHING_OFF, SNAPSHOT, STEP_TOTALS)
_SOURCE = pl.Enum(HIT_SOURCES)
_STEP_COUNTS = ("running_depth", "prefill_requests", "decode_requests", "prefill_tokens", "decode_tokens")


def prefill_work(
    recording: Recording, admissions: pl.DataFrame, chunks: ChunkSteps, counts: pl.DataFrame
) -> pl.DataFrame:
    """One row an admission: ``work_tokens``, at least 1, and ``hit_source``, one of HIT_SOURCES.

    ``admissions``: ``ADMISSION_SCHEMA``; ``counts``: ``batch_counts`` of the sampled steps.
    """
    rows = admissions.with_row_index("admission").with_columns(pl.col("admission").cast(pl.Int64))
    known = _on_record(recording, rows)
    solved = _solved(known, _left_by_step(recording, known, chunks, counts))
    return _assumed(solved).select(pl.col("work_tokens").clip(1, pl.col("known_tokens")), "hit_source")


def _on_record(recording: Recording, rows: pl.DataFrame) -> pl.DataFrame:
    """With ``work_tokens`` and ``hit_source`` where the hit itself is recorded."""
    caching = recording.engine.get("enable_prefix_caching")
    if caching is not None and not caching.value:
        return rows.with_columns(
            pl.col("known_tokens").alias("work_tokens"), pl.lit(CACHING_OFF, _SOURCE).alias("hit_source")
        )
    journeys = recording.lifecycles.frame(["journey", "core_request_id"]).rename({"core_request_id": "request_id"})
    # Only those of the steps in which admissions began: there can be many more snapshots.
    begun = rows.select("journey", "start_step").unique()
    shown = pl.concat(
        part.join(journeys, on="request_id")
        .select("journey", pl.col("step_id").alias("start_step"), "computed_tokens")
        .join(begun, on=["journey", "start_step"], how="semi")
        for part in recording.snapshots.batches(["step_id", "request_id", "computed_tokens"])
    )
    first = recording.lifecycles.frame(["journey", "cached_prompt_tokens"]).with_columns(pl.lit(False).alias("resumed"))
    joined = rows.join(
        shown.unique(["journey", "start_step"], keep="first"), on=["journey", "start_step"], how="left"
    ).join(first, on=["journey", "resumed"], how="left")
    hit = pl.coalesce("computed_tokens", "cached_prompt_tokens")
    return joined.sort("admission").select(
        *rows.columns,
        (pl.col("known_tokens") - hit).alias("work_tokens"),
        pl.when(hit.is_not_null()).then(pl.lit(SNAPSHOT)).cast(_SOURCE).alias("hit_source"),
    )


def _left_by_step(recording: Recording, rows: pl.DataFrame, chunks: ChunkSteps, counts: pl.DataFrame) -> pl.DataFrame:
    """``step_id``, ``had_tokens``, ``left``: recorded prefill tokens of requests without a token yet, and with some.

    Of the sampled steps whose requests are those of the journeys, and where no such prefill has several chunks.
    """
    several = np.bincount(chunks.admission, minlength=len(rows))[chunks.admission] > 1
    chunked = pl.DataFrame(
        {
            "step_id": chunks.step_id[several],
            "had_tokens": rows["output_tokens"].to_numpy()[chunks.admission[several]] > 0,
        }
    )
    complete = (
        one_a_step(recording.steps.frame(["step_id", *_STEP_COUNTS]))
        .join(counts, on="step_id")
        .filter(
            pl.col("running_depth") == pl.col("running"),
            pl.col("prefill_requests") == pl.col("fresh") + pl.col("lagging"),
            pl.col("decode_requests") == pl.col("again") + pl.col("decodes") - pl.col("lagging"),
            pl.col("doubtful") == 0,
        )
    )
    fresh = pl.col("prefill_tokens") - pl.col("lagging")
    again = pl.col("decode_tokens") - pl.col("decodes") + pl.col("lagging")
    left = pl.concat(
        complete.select("step_id", pl.lit(had).alias("had_tokens"), tokens.alias("left"))
        for had, tokens in ((False, fresh), (True, again))
    )
    return left.drop_nulls().join(chunked, on=["step_id", "had_tokens"], how="anti")


def _solved(known: pl.DataFrame, left: pl.DataFrame) -> pl.DataFrame:
    """With the work that the recorded tokens of a step leave for those of its admissions whose hit is not known."""
    step, number = _step_and_kind(known["start_step"], known["output_tokens"] > 0), len(known)
    groups, group = np.unique(step, return_inverse=True)
    tokens, unknown = known["known_tokens"].to_numpy(), known["work_tokens"].is_null().to_numpy()
    open_tokens = np.where(unknown, tokens, 0)
    asked, unknowns, worked = (
        _sums(group, values, len(groups))[group]
        for values in (open_tokens, unknown, known["work_tokens"].fill_null(0).to_numpy())
    )
    has_left, total = _looked_up(groups, _step_and_kind(left["step_id"], left["had_tokens"]), left["left"].to_numpy())
    rest = total[group] - worked
    possible = unknown & has_left[group] & (rest >= unknowns) & (rest <= asked)
    # Dealt out as differences of a rounded sum, so that the shares add up to it.
    upto, all_ = _sums_so_far(group, open_tokens), np.maximum(asked, 1)
    share = rest * upto // all_ - rest * (upto - tokens) // all_
    solved = pl.DataFrame({"possible": possible, "share": share, "alone": unknowns == 1}, height=number)
    source = pl.when("alone").then(pl.lit(STEP_TOTALS)).otherwise(pl.lit(DEALT_OUT)).cast(_SOURCE)
    return pl.concat([known, solved], how="horizontal").with_columns(
        pl.when("possible").then("share").otherwise("work_tokens").alias("work_tokens"),
        pl.when("possible").then(source).otherwise("hit_source").alias("hit_source"),
    )


def _step_and_kind(step_id: pl.Series, had_tokens: pl.Series) -> Int64s:
    """int64[n]: a step, and whether of requests that had tokens, as one number."""
    return np.asarray(2 * step_id.to_numpy() + had_tokens.to_numpy(), np.int64)


def _sums(group: Int64s, values: NDArray[Any], groups: int) -> Int64s:
    # As doubles: of the tokens of a step nothing is lost in them.
    return np.asarray(np.bincount(group, values, groups), np.int64)


def _sums_so_far(group: Int64s, values: Int64s) -> Int64s:
    """int64[n]: in each group the sum up to and with each value."""
    order = np.argsort(group, kind="stable")
    sums, sorted_group = np.cumsum(values[order]), group[order]
    first = np.searchsorted(sorted_group, sorted_group)
    so_far = np.empty_like(sums)
    so_far[order] = sums - (sums - values[order])[first]
    return so_far


def _looked_up(keys: Int64s, known: Int64s, values: Int64s) -> tuple[Bools, Int64s]:
    """Whether each key is known, and its value, else 0."""
    order = np.argsort(known)
    place = np.minimum(np.searchsorted(known[order], keys), max(len(known) - 1, 0))
    if not len(known):
        return np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
    is_known = known[order][place] == keys
    return is_known, np.where(is_known, values[order][place], 0)


def _assumed(rows: pl.DataFrame) -> pl.DataFrame:
    """The rest with the mean hit of those on record, first and later admissions apart; without any, with none."""
    known = pl.col("work_tokens").is_not_null()
    work, reach = (pl.col(name).filter(known).sum().over("resumed") for name in ("work_tokens", "known_tokens"))
    # Null where none is on record: whole-number division by 0.
    assumed = pl.col("known_tokens") - pl.col("known_tokens") * (reach - work) // reach
    return rows.with_columns(
        pl.coalesce("work_tokens", assumed, "known_tokens").alias("work_tokens"),
        pl.col("hit_source").fill_null(ASSUMED),
    )
