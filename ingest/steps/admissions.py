"""From journey events to admissions: the steps in which a request was in prefill and in decode.

A request is admitted once, and again after each preemption.  It computes its known tokens (prompt, and what
it had generated), which yields one token, and then one token in each step (trace-formats 2.5,
vllm-scheduler-semantics 5, 7 and 9):

* Prefill from the step of ``SCHEDULED`` to that of ``FIRST_TOKEN``.  An admission of a request with tokens lacks that
  event.  Of its ``n`` steps that gave ``t`` tokens, ``n - t + 1`` were prefill.
* Decode up to the step of ``FINISHED``, or to the step before that of ``PREEMPTED``.
* With asynchronous scheduling a request stays in the running list for one more step.  If it stopped by itself (end of
  sequence), one more decode was computed, because the next step had begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.scratch import whole_groups
from blis_replay.ingest.steps.records import is_asynchronous

ADMISSION_SCHEMA: dict[str, type[pl.DataType]] = {
    "journey": pl.Int64,
    "start_step": pl.Int64,
    "prefill_end_step": pl.Int64,  # that of its last chunk; null if it left before
    "last_step": pl.Int64,  # the last in which it ran
    "held_until_step": pl.Int64,  # the last whose running list has it
    "known_tokens": pl.Int64,  # prompt and generated: what its prefill has to reach
}

_CORE = {f"journey.{name}": name for name in ("SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "FINISHED")}
_COLUMNS = ("journey", "event", "step_id", "output_tokens", "finish_status")
# Order of events that carry one step.
_TURN = ("journey.PREEMPTED", "journey.SCHEDULED", "journey.FIRST_TOKEN", "journey.FINISHED")


@dataclass(frozen=True)
class Admissions:
    """``frame``: ``ADMISSION_SCHEMA`` by journey and step.  ``journeys``: how many had an event of the engine.

    ``several_tokens``: how many journeys are left out because they got more tokens than they ran steps.  Those that
    contradict themselves, or have no prompt length, are left out too.
    """

    frame: pl.DataFrame
    journeys: int
    several_tokens: int


def admissions_of(recording: Recording) -> Admissions:
    """The admissions of all journeys."""
    parts = list(_parts(recording))
    return Admissions(
        pl.concat(part.frame for part in parts),
        sum(part.journeys for part in parts),
        sum(part.several_tokens for part in parts),
    )


def _parts(recording: Recording) -> Iterator[Admissions]:
    """The admissions of some journeys after the others."""
    asynchronous = is_asynchronous(recording)
    for part in whole_groups(recording.journey_events.batches(_COLUMNS), "journey"):
        events = part.filter(pl.col("event").is_in(_TURN), pl.col("step_id").is_not_null())
        bounded = _with_known_tokens(recording, _bounded(_grouped(events), asynchronous))
        several, impossible = _several_tokens().fill_null(False), _impossible()
        usable = bounded.drop_nulls(["start_step", "known_tokens"]).filter(~several, ~impossible)
        columns = usable.with_columns(*_last_steps(asynchronous)).select(
            pl.col(name).cast(kind) for name, kind in ADMISSION_SCHEMA.items()
        )
        drafted = bounded.drop_nulls("known_tokens").filter(several, ~impossible)["journey"].n_unique()
        yield Admissions(columns, events["journey"].n_unique(), drafted)


def _with_known_tokens(recording: Recording, grouped: pl.DataFrame) -> pl.DataFrame:
    # Journeys are numbered through: those of the part, and the ones between them.
    first, last = grouped.select(first=pl.col("journey").min(), last=pl.col("journey").max()).row(0)
    lifecycles = recording.lifecycles.between("journey", first, last)
    known = lifecycles.frame(["journey", "prompt_tokens", "max_tokens"])
    return grouped.join(known, on="journey", how="left", maintain_order="left").with_columns(
        (pl.col("prompt_tokens") + pl.col("output_tokens")).alias("known_tokens")
    )


def _grouped(events: pl.DataFrame) -> pl.DataFrame:
    """One row an admission; those before the first recorded ``SCHEDULED`` have no ``scheduled_step``."""
    ordered = events.sort("journey", "step_id", pl.col("event").cast(pl.Enum(_TURN)), maintain_order=True)
    of = {name: pl.col("event") == event for event, name in _CORE.items()}
    by_event = {
        **{f"{name.lower()}_step": pl.when(chosen).then("step_id") for name, chosen in of.items()},
        "output_tokens": pl.when(of["SCHEDULED"]).then("output_tokens"),
        "final_tokens": pl.when(of["FINISHED"]).then("output_tokens"),
        "first_tokens": pl.when(of["FIRST_TOKEN"]).then("output_tokens"),
    }
    # Of each kind an admission has one event; of several the first counts, which are by step.
    grouped = (
        ordered.select("journey", "step_id", "finish_status", of["SCHEDULED"].cum_sum().alias("admission"), **by_event)
        .group_by("journey", "admission", maintain_order=True)
        .agg(
            *(pl.col(name).min() for name in by_event),
            pl.col("finish_status").drop_nulls().first(),
            pl.col("step_id").max().alias("seen_step"),
        )
        .with_columns(pl.col("output_tokens").fill_null(0))
    )
    following = pl.when(pl.col("journey") == pl.col("journey").shift(-1)).then(pl.col("output_tokens").shift(-1))
    after = pl.coalesce(following, "final_tokens")
    return grouped.with_columns((after - pl.col("output_tokens")).alias("given_tokens"))


def _bounded(grouped: pl.DataFrame, asynchronous: bool) -> pl.DataFrame:
    """With the steps in which an admission began to run, ended its prefill, and ran last."""
    ended = pl.min_horizontal(pl.col("preempted_step") - 1, "finished_step")
    running = pl.col("preempted_step").is_null()
    aborted = (pl.col("finish_status") == "aborted").fill_null(False) & running
    # The output of the last step of an aborted request is not waited for.  It may have ended its prefill.
    unprocessed = aborted.cast(pl.Int64) if asynchronous else pl.lit(0, pl.Int64)
    last = pl.coalesce(ended, "seen_step")
    given = pl.col("given_tokens")
    counted = pl.when(given >= 1).then(last - unprocessed - given + 1).when(aborted & (unprocessed == 1)).then(last)
    started = pl.col("scheduled_step").is_not_null()
    return grouped.with_columns(
        pl.coalesce("scheduled_step", "first_token_step").alias("start_step"),
        pl.coalesce("first_token_step", pl.when(started).then(counted)).alias("prefill_end_step"),
        last.alias("last_step"),
        aborted.alias("aborted"),
        ended.is_null().alias("open"),
    )


def _several_tokens() -> pl.Expr:
    """Whether an admission has more tokens than steps: speculative decoding."""
    decodes, given = pl.col("last_step") - pl.col("prefill_end_step"), pl.col("given_tokens") - 1
    complete = ~pl.col("aborted") & ~pl.col("open") & pl.col("prefill_end_step").is_not_null()
    many = complete & ((given > decodes) | (pl.col("prefill_end_step") < pl.col("start_step")))
    return (pl.col("first_tokens") > 1) | many


def _impossible() -> pl.Expr:
    """Whether the steps of an admission contradict each other."""
    decodes = pl.col("last_step") - pl.col("prefill_end_step")
    longer = pl.coalesce("prefill_end_step", "last_step") - pl.col("start_step") >= pl.col("known_tokens")
    went_on = (pl.col("finished_step") >= pl.col("preempted_step")) & (pl.col("finish_status") != "aborted")
    backwards = (pl.col("last_step") < pl.col("start_step")) | (pl.col("start_step") < 1) | (decodes < 0)
    return went_on.fill_null(False) | longer.fill_null(False) | backwards.fill_null(False)


def _last_steps(asynchronous: bool) -> tuple[pl.Expr, pl.Expr]:
    """``last_step`` and ``held_until_step``."""
    last, aborted = pl.col("last_step"), pl.col("aborted")
    # Given up with its last token on the way, it had no more to do.
    most = pl.col("prefill_end_step") + pl.col("max_tokens") - pl.col("output_tokens") - 1
    ran = pl.when(aborted).then(pl.min_horizontal(last, most)).otherwise(last)
    if not asynchronous:
        return ran, last.alias("held_until_step")
    left_alone = pl.col("preempted_step").is_null() & ~pl.col("open") & ~aborted
    stopped = left_alone & (pl.col("finish_status") == "stopped") & (pl.col("final_tokens") < pl.col("max_tokens"))
    return ran + stopped.fill_null(False).cast(pl.Int64), (last + left_alone.cast(pl.Int64)).alias("held_until_step")


_FEW = 0.01  # share of journeys with more tokens than steps; up to it they are mistakes in the recording


def open_at(first: Int64s, last: Int64s, steps: Int64s, weight: Int64s | None = None) -> Int64s:
    """int64[steps]: how many spans from ``first`` to ``last`` hold each step, or the sum of their weights."""

    def before(at: Int64s, side: Literal["left", "right"]) -> Int64s:
        if weight is None:
            return np.searchsorted(np.sort(at, kind="stable"), steps, side)
        order = np.argsort(at, kind="stable")
        sums = np.concatenate([[0], np.cumsum(weight[order])])
        return np.asarray(sums[np.searchsorted(at[order], steps, side)])

    return np.asarray(before(first, "right") - before(last, "left"), np.int64)


@dataclass(frozen=True)
class Decodes:
    """The decodes of admissions, one token per step from ``first`` to ``last``; one element per admission with any.

    ``context_less_step``: KV tokens that a decode attends to, its own included, less the step.
    """

    first: Int64s
    last: Int64s
    context_less_step: Int64s

    def at(self, steps: Int64s) -> Int64s:
        """int64[steps]: requests that decode."""
        return open_at(self.first, self.last, steps)

    def context_at(self, steps: Int64s) -> Int64s:
        """int64[steps]: KV tokens that they attend to."""
        return open_at(self.first, self.last, steps, self.context_less_step) + steps * self.at(steps)

    def beyond(self, tokens: int) -> Decodes:
        """Those that attend to more than ``tokens`` KV tokens, while they do, and what they attend to beyond these."""
        less = self.context_less_step - tokens
        first = np.maximum(self.first, 1 - less)
        kept = first <= self.last
        return Decodes(first[kept], self.last[kept], less[kept])


def decodes_of(admissions: Admissions) -> Decodes:
    """The decodes of admissions; a step that recomputes what a preempted request had is not one of them.

    Raises ``ReconstructionError`` without journeys, and where requests got several tokens per step (speculative
    decoding).
    """
    if not admissions.journeys:
        raise ReconstructionError("no journeys were recorded")
    if admissions.several_tokens > _FEW * admissions.journeys:
        raise ReconstructionError(
            f"{admissions.several_tokens} of {admissions.journeys} requests got more tokens than they ran steps: with "
            "speculative decoding journeys do not tell which step gave which token"
        )
    decoding = admissions.frame.filter(pl.col("prefill_end_step") < pl.col("last_step"))
    end, last, known = (
        decoding[name].to_numpy().astype(np.int64) for name in ("prefill_end_step", "last_step", "known_tokens")
    )
    return Decodes(end + 1, last, known - end)
