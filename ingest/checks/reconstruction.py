"""Batches reconstructed from journeys against the sampled records of the same steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.checks.evidence import Context, Measured, not_checked
from blis_replay.ingest.recording import Finding, Recording, Severity
from blis_replay.ingest.rows import Rows, Scratch, whole_groups
from blis_replay.ingest.steps.admissions import (
    ADMISSION_SCHEMA,
    UNORDERED_SCHEMA,
    Admissions,
    admission_parts,
    in_order,
    of_journeys,
    totals,
)
from blis_replay.ingest.steps.prefill import DEALT_OUT, STEP_TOTALS
from blis_replay.ingest.steps.reconstruction import (
    TOTALS_SCHEMA,
    Reconstruction,
    reconstruct,
    reconstructed_steps,
    reconstruction_of,
    refuse,
)
from blis_replay.ingest.steps.records import steps_by_id
from blis_replay.ingest.tables import Table, columns_named

# An admission takes some 2 kB on the way.
ADMISSIONS_A_STRETCH = 25_000
_MOST_TIMES = 4


@dataclass(frozen=True)
class Stretch:
    """The batches of the steps from ``first_step`` to ``last_step``, both included.

    ``built``: of the admissions that ran in them; ``journeys`` and ``remarks`` of its admissions are those of all.
    """

    built: Reconstruction
    first_step: int
    last_step: int


def reconstruct_by_stretches(
    recording: Recording, admissions: int = ADMISSIONS_A_STRETCH, wanted: tuple[int, int] | None = None
) -> Iterator[Stretch]:
    """:func:`reconstruct`, one stretch of steps at a time, with the same errors.

    A stretch has about ``admissions`` admissions and ends where no prefill is under way.  The result is that of
    ``reconstruct``, except that prefix-cache hits without a record are assumed from the stretch alone.  Where prefills
    follow each other without a break, a stretch ends after ``_MOST_TIMES`` as many admissions.
    ``wanted``: only stretches with a step in this range, both ends included.
    """
    writer, counted = Scratch(share=4).writer(UNORDERED_SCHEMA), []
    for part in admission_parts(recording):
        writer.add(part.frame)
        counted.append(replace(part, frame=part.frame.clear()))
    journeys, remarks = totals(counted)
    refuse(journeys, remarks)
    for frame, first, last in _stretches(writer.done(), admissions):
        if wanted is not None and (last < wanted[0] or first > wanted[1]):
            continue
        built = reconstruction_of(_with_records_of(recording, frame, first, last), Admissions(frame, journeys, remarks))
        yield Stretch(built, first, last)


def totals_of_steps(recording: Recording, step_ids: Int64s) -> pl.DataFrame:
    """``TOTALS_SCHEMA`` of these steps, ascending, as far as a request ran; the errors of :func:`reconstruct`.

    Of many journeys only the stretches that have them are reconstructed.
    """
    if recording.lifecycles.height <= ADMISSIONS_A_STRETCH:
        return reconstructed_steps(reconstruct(recording), step_ids)
    wanted = int(step_ids.min(initial=np.iinfo(np.int64).max)), int(step_ids.max(initial=0))
    totals_of_stretches = [pl.DataFrame(schema=TOTALS_SCHEMA)]
    for stretch in reconstruct_by_stretches(recording, ADMISSIONS_A_STRETCH, wanted):
        inside = (step_ids >= stretch.first_step) & (step_ids <= stretch.last_step)
        totals_of_stretches.append(reconstructed_steps(stretch.built, step_ids[inside]))
    return pl.concat(totals_of_stretches)


def _with_records_of(recording: Recording, admissions: pl.DataFrame, first_step: int, last_step: int) -> Recording:
    return replace(
        recording,
        steps=_of_steps(recording.steps, first_step, last_step),
        snapshots=_of_steps(recording.snapshots, first_step, last_step),
        lifecycles=of_journeys(recording.lifecycles, admissions),
    )


def _of_steps(rows: Rows, first_step: int, last_step: int) -> Rows:
    return rows.between("step_id", first_step, last_step)


def _stretches(admissions: Rows, rows: int) -> Iterator[tuple[pl.DataFrame, int, int]]:
    """The admissions that ran in a stretch (``ADMISSION_SCHEMA``), its first and its last step."""
    before = begun = pl.DataFrame(schema=ADMISSION_SCHEMA)
    for part in whole_groups(admissions.ordered("start_step").batches(rows=rows), "start_step"):
        latest = in_order(part).select(ADMISSION_SCHEMA.keys())
        begun = pl.concat([begun, latest])
        cut = _last_break(begun)
        if not cut and begun.height >= _MOST_TIMES * rows:
            cut = begun.height - latest.height
        if cut:
            first, following = int(begun["start_step"][0]), int(begun["start_step"][cut])
            ran = pl.concat([before, begun.head(cut)])
            yield ran, first, following - 1
            before, begun = ran.filter(pl.max_horizontal("last_step", "held_until_step") >= following), begun.slice(cut)
    ran = pl.concat([before, begun])
    if begun.is_empty():
        yield ran, 1, 0
    else:
        yield ran, int(begun["start_step"][0]), int(ran["last_step"].max())  # type: ignore[arg-type]


def _last_break(begun: pl.DataFrame) -> int:
    """How many of the ordered admissions ended their prefill before the others began; 0: not any."""
    # What a prefill that never ended left of the budget went to the next step.
    end = begun.select(pl.coalesce("prefill_end_step", pl.col("last_step") + 1)).to_series().to_numpy()
    breaks = np.flatnonzero(begun["start_step"].to_numpy()[1:] > np.maximum.accumulate(end)[:-1])
    return int(breaks[-1]) + 1 if len(breaks) else 0


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


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
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
        Table("steps in which no request is missing", columns_named("quantity", "equal", "steps"), rows),
        Table(
            "steps that disagree",
            columns_named("step", "recorded", "reconstructed"),
            disagree,
            note=note,
        ),
        Table(
            "prefix-cache hits of admissions",
            columns_named("known from", "admissions"),
            tuple(compared.sources.most_common()),
        ),
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
    """The sampled steps of a stretch: ``recorded_*``, ``TOTALS_SCHEMA``, and flags.

    ``missing``: the record has requests without a journey; ``equal``; ``corrected``: the true split is another;
    ``assumed``: it depends on an assumed prefix-cache hit.
    """
    built = stretch.built
    of_stretch = _of_steps(recording.steps, stretch.first_step, stretch.last_step)
    recorded = steps_by_id(of_stretch, *_SAME).frame().rename(_RECORDED)
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
    severity: Severity = "unusable" if unexplained > _WRONG * steps else "corrected" if corrected else "note"
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
