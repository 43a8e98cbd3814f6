"""How many tokens each admission had to compute: its known tokens less what it found in the prefix cache.

The hit is recorded of some admissions only: by a snapshot of the step of the admission, by any snapshot (of the
first admission), or as what the recorded tokens of a step leave for the only admission in
it whose hit is not known.  Where they leave it to several, it is dealt out in proportion.  All others are
assumed to have found the share that those on record found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.prefill_chunks import ChunkSteps
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.step_records import one_a_step

Int64s = NDArray[np.int64]

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
    journeys = recording.lifecycles.whole(["journey", "core_request_id"]).rename({"core_request_id": "request_id"})
    # Only those of the steps in which admissions began: there can be many more snapshots.
    begun = rows.select("journey", "start_step").unique()
    shown = pl.concat(
        part.join(journeys, on="request_id")
        .select("journey", pl.col("step_id").alias("start_step"), "computed_tokens")
        .join(begun, on=["journey", "start_step"], how="semi")
        for part in recording.snapshots.frames(["step_id", "request_id", "computed_tokens"])
    )
    first = recording.lifecycles.whole(["journey", "cached_prompt_tokens"]).with_columns(pl.lit(False).alias("resumed"))
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
        one_a_step(recording.steps.whole(["step_id", *_STEP_COUNTS]))
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
    told, total = _looked_up(groups, _step_and_kind(left["step_id"], left["had_tokens"]), left["left"].to_numpy())
    rest = total[group] - worked
    possible = unknown & told[group] & (rest >= unknowns) & (rest <= asked)
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


def _looked_up(keys: Int64s, known: Int64s, values: Int64s) -> tuple[NDArray[np.bool_], Int64s]:
    """Whether each key is known, and its value, else 0."""
    order = np.argsort(known)
    place = np.minimum(np.searchsorted(known[order], keys), max(len(known) - 1, 0))
    if not len(known):
        return np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
    told = known[order][place] == keys
    return told, np.where(told, values[order][place], 0)


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
