"""From journey events to admissions: the steps in which a request was in prefill and in decode.

A request is admitted once, and again after each preemption.  It computes its known tokens (prompt, and what
it had generated), which yields one token, and then one token in each step (trace-formats 2.5,
vllm-scheduler-semantics 5, 7 and 9):

* prefill from the step of ``SCHEDULED`` to that of ``FIRST_TOKEN``.  An admission of a request with tokens lacks that
  event.  Of its ``n`` steps that gave ``t`` tokens, ``n - t + 1`` were prefill.
* Decode up to the step of ``FINISHED``, or to the step before that of ``PREEMPTED``.
* With asynchronous scheduling a request stays in the running list for one more step.  If it stopped by itself (end of
  sequence), one more decode was computed, because the next step had begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import whole_groups
from blis_replay.ingest.steps.records import is_asynchronous

ADMISSION_SCHEMA: dict[str, type[pl.DataType]] = {
    "journey": pl.Int64,
    "start_step": pl.Int64,
    "prefill_end_step": pl.Int64,  # that of its last chunk; null if it left before
    "last_step": pl.Int64,  # the last in which it ran
    "held_until_step": pl.Int64,  # the last whose running list has it
    "resumed": pl.Boolean,  # after a preemption; null if SCHEDULED is not recorded
    "output_tokens": pl.Int64,  # generated before
    "known_tokens": pl.Int64,  # prompt and generated: what its prefill has to reach
    "certain": pl.Boolean,  # the steps follow from the events
}

# With what orders admissions of one step.
_UNORDERED_SCHEMA = {**ADMISSION_SCHEMA, "scheduled_us": pl.Int64, "scheduled_at": pl.Int64}

_CORE = {f"journey.{name}": name for name in ("SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "FINISHED")}
_COLUMNS = (
    *("journey", "event", "time_us", "step_id", "schedule_kind", "output_tokens", "preemptions", "finish_status"),
)
# Order of events that carry one step.
_TURN = ("journey.PREEMPTED", "journey.SCHEDULED", "journey.FIRST_TOKEN", "journey.FINISHED")

NO_PROMPT = "the prompt length is not recorded"
NOT_ADMITTED = "the first journey.SCHEDULED is not recorded: they count from their first token on"
NO_END = "they have no end: they count to their last recorded step"
PASSED_OVER = "they were or may have been passed over in some of their steps, in which is not known"
GIVEN_UP = "they were given up in prefill: whether it had ended is not known"
IMPOSSIBLE = "their steps contradict each other"
SEVERAL_TOKENS = "several tokens a step"


@dataclass(frozen=True)
class Admissions:
    """``frame``: ``ADMISSION_SCHEMA`` in order of admission.  ``journeys``: how many had an event of the engine.

    ``remarks``: number of uncertain or impossible journeys by reason.
    """

    frame: pl.DataFrame
    journeys: int
    remarks: dict[str, int]


def admissions_of(recording: Recording) -> Admissions:
    """The admissions of all journeys; those that contradict themselves are left out and counted."""
    parts = list(_parts(recording))
    remarks = Counter[str]()
    for part in parts:
        remarks.update(part.remarks)
    # A chunk that does not end its prefill takes all that is left: it was the last to be admitted in its step.
    chunked = pl.col("prefill_end_step").is_null() | (pl.col("prefill_end_step") > pl.col("start_step"))
    unordered = pl.concat(part.frame for part in parts)
    ordered = unordered.sort("start_step", chunked, "scheduled_us", "scheduled_at").select(ADMISSION_SCHEMA.keys())
    return Admissions(ordered, sum(part.journeys for part in parts), dict(sorted(remarks.items())))


def _parts(recording: Recording) -> Iterator[Admissions]:
    """The admissions of some journeys after the others: ``frame`` is of ``_UNORDERED_SCHEMA``."""
    asynchronous, policy = is_asynchronous(recording), recording.engine.get("scheduling_policy")
    first_come, before = policy is None or policy.value == "fcfs", 0
    for part in whole_groups(recording.journey_events.batches(_COLUMNS), "journey"):
        events = part.filter(pl.col("event").is_in(_TURN), pl.col("step_id").is_not_null())
        grouped = _bounded(_grouped(events, before), asynchronous)
        yield _judged(_with_known_tokens(recording, grouped), first_come, asynchronous, events["journey"].n_unique())
        before += events.height


def _with_known_tokens(recording: Recording, grouped: pl.DataFrame) -> pl.DataFrame:
    # Journeys are numbered through: those of the part, and the ones between them.
    first, last = grouped.select(first=pl.col("journey").min(), last=pl.col("journey").max()).row(0)
    lifecycles = recording.lifecycles.between("journey", first, last)
    known = lifecycles.frame(["journey", "prompt_tokens", "max_tokens"])
    return grouped.join(known, on="journey", how="left").with_columns(
        (pl.col("prompt_tokens") + pl.col("output_tokens")).alias("known_tokens")
    )


def _judged(admissions: pl.DataFrame, first_come: bool, asynchronous: bool, journeys: int) -> Admissions:
    judged = admissions.with_columns(_problem(first_come).alias("problem"))
    remarks = judged.drop_nulls("problem").group_by("problem").agg(pl.col("journey").n_unique())
    unusable = pl.col("problem").is_in([NO_PROMPT, IMPOSSIBLE, SEVERAL_TOKENS])
    usable = (
        judged.drop_nulls("start_step")
        .filter(~unusable.fill_null(False))
        .with_columns(pl.col("problem").is_null().alias("certain"), *_last_steps(asynchronous))
    )
    return Admissions(
        usable.select(pl.col(name).cast(kind) for name, kind in _UNORDERED_SCHEMA.items()),
        journeys,
        dict(remarks.iter_rows()),
    )


def _grouped(events: pl.DataFrame, before: int) -> pl.DataFrame:
    """One row an admission; those before the first recorded ``SCHEDULED`` have no ``scheduled_step``.

    ``before``: how many events stand before these.
    """
    ordered = (
        events.rename({"time_us": "scheduled_us"})
        .with_row_index("scheduled_at", before)
        .sort("journey", "step_id", pl.col("event").cast(pl.Enum(_TURN)), "scheduled_at")
    )
    of = {name: pl.col("event") == event for event, name in _CORE.items()}
    by_event = {
        **{f"{name.lower()}_step": pl.when(chosen).then("step_id") for name, chosen in of.items()},
        **{name: pl.when(of["SCHEDULED"]).then(name) for name in ("scheduled_at", "scheduled_us", "output_tokens")},
        "resumed": pl.when(of["SCHEDULED"]).then(_resumed()),
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


def _resumed() -> pl.Expr:
    return (pl.col("schedule_kind") == "RESUME").fill_null(pl.col("preemptions") > 0)


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
        (aborted & (unprocessed == 1) & (given < 1) & pl.col("first_token_step").is_null()).alias("in_prefill"),
    )


def _problem(first_come: bool) -> pl.Expr:
    """Why an admission is left out or not certain, null if it is neither."""
    decodes, given = pl.col("last_step") - pl.col("prefill_end_step"), pl.col("given_tokens") - 1
    complete = ~pl.col("aborted") & ~pl.col("open") & pl.col("prefill_end_step").is_not_null()
    many = (pl.col("first_tokens") > 1) | (
        complete & ((given > decodes) | (pl.col("prefill_end_step") < pl.col("start_step")))
    )
    longer = pl.coalesce("prefill_end_step", "last_step") - pl.col("start_step") >= pl.col("known_tokens")
    went_on = (pl.col("finished_step") >= pl.col("preempted_step")) & (pl.col("finish_status") != "aborted")
    backwards = (pl.col("last_step") < pl.col("start_step")) | (pl.col("start_step") < 1) | (decodes < 0)
    # With priorities a request may be passed over, so that steps without a token need not be prefill.
    chunked = pl.coalesce("prefill_end_step", "last_step") > pl.col("start_step")
    unsure = pl.lit(not first_come) & (chunked | pl.col("aborted"))
    given_up_waiting = pl.col("aborted") & pl.col("first_token_step").is_null()
    reasons = {
        NO_PROMPT: pl.col("known_tokens").is_null(),
        IMPOSSIBLE: went_on.fill_null(False) | longer.fill_null(False) | backwards.fill_null(False),
        SEVERAL_TOKENS: many,
        NOT_ADMITTED: pl.col("scheduled_step").is_null() & ~given_up_waiting,
        NO_END: pl.col("open"),
        GIVEN_UP: pl.col("in_prefill"),
        PASSED_OVER: (complete & (given < decodes)).fill_null(False) | unsure,
    }
    return pl.coalesce(pl.when(flag.fill_null(False)).then(pl.lit(reason)) for reason, flag in reasons.items())


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


def decodes_of(admissions: Admissions) -> Decodes:
    """The decodes of admissions; a step that recomputes what a preempted request had is none of them.

    Raises ``ReconstructionError`` without journeys, and where requests got several tokens per step (speculative
    decoding).
    """
    if not admissions.journeys:
        raise ReconstructionError("no journeys were recorded")
    several = admissions.remarks.get(SEVERAL_TOKENS, 0)
    if several > _FEW * admissions.journeys:
        raise ReconstructionError(
            f"{several} of {admissions.journeys} requests got more tokens than they ran steps: with speculative "
            "decoding journeys do not tell which step gave which token"
        )
    decoding = admissions.frame.filter(pl.col("prefill_end_step") < pl.col("last_step"))
    end, last, known = (
        decoding[name].to_numpy().astype(np.int64) for name in ("prefill_end_step", "last_step", "known_tokens")
    )
    return Decodes(end + 1, last, known - end)
