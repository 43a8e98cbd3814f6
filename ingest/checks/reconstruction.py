"""Batches reconstructed from journeys against the sampled records of the same steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import polars as pl

from blis_replay.ingest.checks.evidence import Context, Measured, not_checked
from blis_replay.ingest.checks.pictures import Table
from blis_replay.ingest.errors import ReconstructionError
from blis_replay.ingest.prefill_work import DEALT_OUT, STEP_TOTALS
from blis_replay.ingest.reconstruction import reconstructed_steps
from blis_replay.ingest.reconstruction_stretches import Stretch, reconstruct_by_stretches
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.step_records import one_a_step

CHECK = "reconstruction"
MEASURES = "batches reconstructed from journeys against the records of the steps that were sampled"
_METRIC = "batch_composition"
# Journeys that hold less of the recorded running requests were sampled.
LOWER_BOUND = 0.9
_WRONG = 0.1
_EXAMPLES = 5
RULE = (
    "step records label a request prefill until one of its tokens was processed, and decode while it is recomputed: "
    "the split is corrected to what ran.  Journeys that hold less than 90 % of the recorded running requests "
    "were sampled: their totals are a lower bound and are not compared.  More than 10 % of steps that disagree "
    "though nothing in them had to be assumed: journeys and steps are not of one run, or the "
    "engine arguments (async_scheduling, max_num_batched_tokens) are not those of the server"
)
# Column of a step record -> of a reconstructed step.
_SAME = {
    "running_depth": "running",
    "prefill_requests": "labelled_prefill_requests",
    "decode_requests": "labelled_decode_requests",
    "prefill_tokens": "labelled_prefill_tokens",
    "decode_tokens": "labelled_decode_tokens",
}
_RECORDED = {name: f"recorded_{name}" for name in _SAME}


def check(recording: Recording, context: Context) -> list[Finding]:
    """One finding: steps compared, equal, corrected, and examples of those that disagree."""
    if recording.journey_events.is_empty():
        return [not_checked(CHECK, _METRIC, "no journeys")]
    try:
        compared = _compared(recording, _EXAMPLES)
    except ReconstructionError as error:
        return [Finding(CHECK, "unusable", _METRIC, f"not reconstructed: {error}", {}, RULE)]
    if not compared.counts["steps"]:
        return [not_checked(CHECK, _METRIC, f"no records of the steps of {compared.journeys} journeys")]
    return [_finding(compared)]


def pictures(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Equal steps by quantity, steps that disagree, where the prefix-cache hits come from."""
    try:
        compared = _compared(recording, 20)
    except ReconstructionError:
        return ()
    whole = compared.counts["whole"]
    rows = tuple((name, compared.counts[f"equal_{name}"], whole) for name in _SAME)
    disagree = tuple((step, f"{recorded}", f"{made}") for step, recorded, made in compared.examples)
    note = "running, prefill and decode requests, prefill and decode tokens, as labelled"
    return (
        Table("steps in which no request is missing", ("quantity", "equal", "steps"), rows),
        Table("steps that disagree", ("step", "recorded", "reconstructed"), disagree, note=note),
        Table("prefix-cache hits of admissions", ("known from", "admissions"), tuple(compared.sources.most_common())),
    )


Example = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Compared:
    """Sampled steps beside the reconstructed ones.

    ``counts``: steps by what is so of them (``_COUNTED``); ``sources``: admissions by where their hit is known from;
    ``examples``: ``(step, recorded, reconstructed)`` of steps that disagree, those in which nothing was assumed first.
    """

    journeys: int
    remarks: dict[str, int]
    counts: Counter[str]
    sources: Counter[str]
    examples: list[Example]


_COUNTED = {
    "steps": pl.len(),
    "held": pl.col("running").sum(),
    "had": pl.col(_RECORDED["running_depth"]).sum(),
    "whole": (~pl.col("missing")).sum(),
    "equal": (~pl.col("missing") & pl.col("equal")).sum(),
    "unexplained": (~pl.col("missing") & ~pl.col("equal") & ~pl.col("assumed")).sum(),
    "corrected": pl.col("corrected").sum(),
    **{
        f"equal_{name}": (~pl.col("missing") & (pl.col(_RECORDED[name]) == pl.col(same))).sum()
        for name, same in _SAME.items()
    },
}


def _compared(recording: Recording, examples: int) -> _Compared:
    """All stretches of a recording; raises ``ReconstructionError``."""
    counts, sources, wrong = Counter[str](), Counter[str](), []
    for stretch in reconstruct_by_stretches(recording):
        steps = _steps(recording, stretch)
        counts.update(
            steps.select(count.cast(pl.Int64).alias(name) for name, count in _COUNTED.items()).row(0, named=True)
        )
        began = stretch.built.admissions.frame["start_step"] >= stretch.first_step
        sources.update(dict(stretch.built.hit_sources.filter(began).value_counts().iter_rows()))
        disagree = steps.filter(~pl.col("equal") & ~pl.col("missing"))
        wrong.append(disagree.sort("assumed", "step_id").head(examples))
        journeys, remarks = stretch.built.admissions.journeys, stretch.built.admissions.remarks
    chosen = pl.concat(wrong).sort("assumed", "step_id").head(examples)
    recorded, made = (chosen.select(names).rows() for names in ([*_RECORDED.values()], [*_SAME.values()]))
    return _Compared(
        journeys, remarks, counts, sources, list(zip(chosen["step_id"].to_list(), recorded, made, strict=True))
    )


def _steps(recording: Recording, stretch: Stretch) -> pl.DataFrame:
    """The sampled steps of a stretch: ``recorded_*``, ``TOTALS_SCHEMA``, and ``missing`` (requests are in the record
    that are in no journey), ``equal``, ``corrected`` (the true split is another), ``assumed`` (a hit that is not
    known has a part in it)."""
    built = stretch.built
    of_stretch = pl.col("step_id").is_between(stretch.first_step, stretch.last_step)
    records = recording.steps.only(["step_id", *_SAME]).where(of_stretch).whole()
    recorded = one_a_step(records.drop_nulls()).rename(_RECORDED)
    totals = reconstructed_steps(built, recorded["step_id"].to_numpy())
    equal = pl.all_horizontal(pl.col(_RECORDED[name]) == pl.col(same) for name, same in _SAME.items())
    assumed = pl.Series(built.chunks.steps.step_id[~built.chunks.certain]).unique().implode()
    split = ("prefill_requests", "decode_requests", "prefill_tokens", "decode_tokens")
    return recorded.join(totals, on="step_id", maintain_order="left").with_columns(
        (pl.col(_RECORDED["running_depth"]) > pl.col("running")).alias("missing"),
        equal.alias("equal"),
        (pl.col("step_id").is_in(assumed) | ~pl.col("certain")).alias("assumed"),
        pl.any_horizontal(pl.col(name) != pl.col(f"labelled_{name}") for name in split).alias("corrected"),
    )


def _finding(compared: _Compared) -> Finding:
    counts, sources = compared.counts, compared.sources
    steps, whole, held, had = (counts[name] for name in ("steps", "whole", "held", "had"))
    measured: Measured = {
        "journeys": compared.journeys,
        "admissions": sources.total(),
        "steps_compared": steps,
        "running_requests_in_journeys": held / had if had else 1.0,
        "hits_from_tokens_of_the_step": sources[STEP_TOTALS] + sources[DEALT_OUT],
        **compared.remarks,
    }
    if had and held < LOWER_BOUND * had:
        message = (
            f"{compared.journeys:,} journeys hold {100 * held / had:.1f} % of the recorded running requests: "
            "reconstructed batches are a lower bound, their totals are not compared"
        )
        return Finding(CHECK, "note", _METRIC, message, measured, RULE)
    wrong, unexplained, corrected = whole - counts["equal"], counts["unexplained"], counts["corrected"]
    measured |= {
        "steps_with_requests_of_no_journey": steps - whole,
        "equal": counts["equal"],
        "disagree_with_an_assumed_hit": wrong - unexplained,
        "disagree": unexplained,
        "split_corrected": corrected,
        "share_corrected": corrected / steps,
        **{
            f"example_{i}": f"step {step}: recorded {recorded}, reconstructed {made}"
            for i, (step, recorded, made) in enumerate(compared.examples, 1)
        },
    }
    severity = "unusable" if unexplained > _WRONG * steps else "corrected" if corrected else "note"
    return Finding(CHECK, severity, _METRIC, _sentence(measured), measured, RULE)


def _sentence(measured: Measured) -> str:
    parts = [
        f"{measured['equal']:,} of {measured['steps_compared']:,} recorded steps are reconstructed from "
        f"{measured['journeys']:,} journeys as recorded"
    ]
    if corrected := measured["split_corrected"]:
        share = 100 * float(measured["share_corrected"] or 0)
        parts.append(f"the recorded split of {corrected:,} ({share:.1f} %) into prefill and decode is not what ran")
    for name, words in {
        "steps_with_requests_of_no_journey": "hold requests of no journey",
        "disagree_with_an_assumed_hit": "disagree where a prefix-cache hit had to be assumed",
        "disagree": "disagree",
    }.items():
        if count := measured[name]:
            parts.append(f"{count:,} {words}")
    if "example_1" in measured:
        parts.append(f"for example {measured['example_1']}")
    return "; ".join(parts)
