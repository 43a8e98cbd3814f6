"""What a configuration of a study can be: each measurement reads its settings and says what it measures.

A new one is a line here; studies of any kind share reading, judging and printing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blis_replay.blis.release_fields import Fields
from blis_replay.validate.mixed_batches import study_run as sweep_run
from blis_replay.validate.studies import cluster_run, queue_run
from blis_replay.validate.studies.study import Run
from blis_replay.validate.trees import study_run as steps_run


@dataclass(frozen=True)
class Measurement:
    """``read``: settings to a run, refusing what it does not know; ``measures``: the names that a run gives.

    ``of_recordings``: a run is of a recording, and has no seed; ``library``: an optional one that it takes.
    """

    read: Callable[[Fields], Run]
    measures: tuple[str, ...]
    needs_system: bool = True
    of_recordings: bool = False
    library: str = ""


MEASUREMENTS = {
    "cluster": Measurement(cluster_run.read, cluster_run.MEASURES),
    "single queue": Measurement(queue_run.read, queue_run.MEASURES),
    "load sweep": Measurement(sweep_run.read, sweep_run.MEASURES, needs_system=False, of_recordings=True),
    "steps left out": Measurement(
        steps_run.read, steps_run.MEASURES, needs_system=False, of_recordings=True, library="lightgbm"
    ),
}
