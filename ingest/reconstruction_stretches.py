"""A recording's batches reconstructed some steps after the others, so that memory holds a stretch of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from blis_replay.ingest.admissions import (
    ADMISSION_SCHEMA,
    UNORDERED_SCHEMA,
    Admissions,
    admission_parts,
    in_order,
    of_journeys,
    totals,
)
from blis_replay.ingest.reconstruction import Reconstruction, reconstruction_of, refuse
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.row_parts import PartWriter, RowParts, by_ranges

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


def reconstruct_by_stretches(recording: Recording, admissions: int = ADMISSIONS_A_STRETCH) -> Iterator[Stretch]:
    """:func:`reconstruct`, some steps after the others, as far as there are admissions; the same errors.

    A stretch has about so many ``admissions``, and ends where no prefill goes on: nothing is otherwise than if all
    were reconstructed at once, but that hits in the prefix cache that nothing tells are assumed as in the
    stretch.  Where prefills follow each other without a break, it ends all the same after some times as many.
    """
    with TemporaryDirectory(prefix="blis-replay-") as folder:
        writer, counted = PartWriter(UNORDERED_SCHEMA, Path(folder), "admissions", admissions), []
        for part in admission_parts(recording):
            writer.add(part.frame)
            counted.append(replace(part, frame=part.frame.clear()))
        journeys, remarks = totals(counted)
        refuse(journeys, remarks)
        for frame, first, last in _stretches(writer.done(), admissions):
            built = reconstruction_of(
                _with_records_of(recording, frame, first, last), Admissions(frame, journeys, remarks)
            )
            yield Stretch(built, first, last)


def _with_records_of(recording: Recording, admissions: pl.DataFrame, first_step: int, last_step: int) -> Recording:
    of_stretch = pl.col("step_id").is_between(first_step, last_step)
    return replace(
        recording,
        steps=recording.steps.where(of_stretch),
        snapshots=recording.snapshots.where(of_stretch),
        lifecycles=recording.lifecycles.where(of_journeys(admissions)),
    )


def _stretches(admissions: RowParts, rows: int) -> Iterator[tuple[pl.DataFrame, int, int]]:
    """The admissions that ran in a stretch (``ADMISSION_SCHEMA``), its first and its last step."""
    before = begun = pl.DataFrame(schema=ADMISSION_SCHEMA)
    for part in by_ranges(admissions, lambda frame: frame["start_step"], ["start_step"], rows):
        latest = in_order(part).select(ADMISSION_SCHEMA.keys())
        begun = pl.concat([begun, latest])
        cut = _last_break(begun)
        if not cut and begun.height >= _MOST_TIMES * rows:
            cut = begun.height - latest.height
        if cut:
            first, following = int(begun["start_step"][0]), int(begun["start_step"][cut])
            ran = pl.concat([before, begun.head(cut)])
            yield ran, first, following - 1
            before, begun = ran.filter(_ended_step() >= following), begun.slice(cut)
    ran = pl.concat([before, begun])
    if begun.is_empty():
        yield ran, 1, 0
    else:
        yield ran, int(begun["start_step"][0]), int(ran["last_step"].max())  # type: ignore[arg-type]


def _last_break(begun: pl.DataFrame) -> int:
    """How many of the admissions, which are in order, had ended their prefill before the others began; 0: there is
    no such place."""
    # What a prefill that never ended left of the budget went to the next step.
    end = begun.select(pl.coalesce("prefill_end_step", pl.col("last_step") + 1)).to_series().to_numpy()
    breaks = np.flatnonzero(begun["start_step"].to_numpy()[1:] > np.maximum.accumulate(end)[:-1])
    return int(breaks[-1]) + 1 if len(breaks) else 0


def _ended_step() -> pl.Expr:
    return pl.max_horizontal("last_step", "held_until_step")
