"""Many reconstructions of a run of which only aggregates were published.

When each request came, and which prompt was sent when, was not published.  A reconstruction draws it, and near the
limit of a server the mean TTFT hangs on what was drawn.  So several are replayed, and a verdict is only given where
all of them agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.compiled.arrays import Floats
from blis_replay.fixtures.bundled import RECONSTRUCTIONS, redrawn
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import Simulator
from blis_replay.validate.comparison.sides import simulated_samples
from blis_replay.validate.metrics.resampling import Cell, cell_values, resamplable

Decision = Literal["pass", "fail", "not decided"]


@dataclass(frozen=True)
class Draws:
    """Signed errors (float64[reconstructions]) by metric and statistic; of ITL only those of the mean."""

    errors: Mapping[Cell, Floats]

    @property
    def count(self) -> int:
        """How many reconstructions were replayed."""
        return max((len(errors) for errors in self.errors.values()), default=0)

    def range_of(self, cell: Cell) -> tuple[float, float, float]:
        """The smallest, the median and the largest error."""
        errors = self.errors[cell]
        return float(errors.min()), float(np.median(errors)), float(errors.max())

    def decide(self, cell: Cell, limit: float) -> Decision:
        """``pass`` if all errors are within the limit, ``fail`` if none is."""
        within = np.abs(self.errors[cell]) <= limit
        return "pass" if within.all() else "not decided" if within.any() else "fail"


def draw_errors(
    recording: Recording,
    release: CoefficientRelease,
    mode: ReplayMode,
    simulator: Simulator,
    published_us: Mapping[Cell, float | None],
) -> Draws | None:
    """Replay all reconstructions of a bundled experiment; None for a recording that is not reconstructed.

    ``published_us``: what each number is held against.  A simulator that reports no steps is started once only, so
    there is nothing to compare either.  Raises as ``replay`` does.
    """
    if not simulator.reports_steps or redrawn(recording, 1) is None:
        return None
    known = {cell: us for cell, us in published_us.items() if us and resamplable(cell)}
    cells = list(known)
    rows = [_numbers(redrawn(recording, draw), release, mode, simulator, cells) for draw in RECONSTRUCTIONS]
    errors = np.array(rows) / np.array([known[cell] for cell in cells]) - 1
    return Draws({cell: errors[:, i] for i, cell in enumerate(cells) if not np.isnan(errors[:, i]).any()})


def _numbers(
    recording: Recording | None,
    release: CoefficientRelease,
    mode: ReplayMode,
    simulator: Simulator,
    cells: Sequence[Cell],
) -> Floats:
    if recording is None:
        raise ValueError("this recording is not reconstructed")
    run = replay(recording, release, mode, simulator)
    return cell_values(simulated_samples(run, run.simulated.completed), cells)
