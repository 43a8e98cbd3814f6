"""A synthetic experiment in the forms of other tools, beside or in place of the lab's own files."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import writers_clients as clients
from framings import FRAMINGS, traces_in

from blis_replay_labs.planted import files as own
from blis_replay_labs.planted.experiment import SyntheticTruth

OTHER_FORMS: dict[str, own.Writer] = {
    **{name: partial(traces_in, name=name) for name in FRAMINGS},
    "benchmarks.json": clients.benchmarks,
    "vllm-bench.json": clients.appended_runs,
    "profile_export.jsonl": clients.profile_export,
}


def write_experiment(truth: SyntheticTruth, directory: Path, *, files: Collection[str]) -> None:
    """As ``blis_replay_labs.planted.files``; ``files`` may name ``OTHER_FORMS`` too."""
    own.write_experiment(truth, directory, files=files, forms=OTHER_FORMS)
