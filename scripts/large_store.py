"""A ground-truth store of any size for measurements: recordings that the embedded engine served.

    python scripts/large_store.py FILE [EXPERIMENTS [REQUESTS]]    # by default 100 of 15,000 requests each

Models, engines and coefficients are those of the bundled release, so that `validate --all` judges every one; loads
differ.  Every third recording has journeys and sampled steps, every twentieth a stamp for each token.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from blis_replay.blis.releases.release import ModelEntry
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, LIFECYCLE_SCHEMA, STEP_SCHEMA, SharedPrefix, Stage
from blis_replay.ingest.rows import no_rows
from blis_replay.ingest.store import Store, open_store
from blis_replay.replay.release_file import load_release
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay_labs.planted.experiment import SyntheticExperiment
from blis_replay_labs.planted.frames import recording_of
from blis_replay_labs.planted.generate import generate

EXPERIMENTS, REQUESTS = 100, 15_000
_TRACED_EVERY, _TOKENS_EVERY = 3, 20
_OUTPUT_TOKENS = 248


def write_store(path: Path, experiments: int = EXPERIMENTS, requests: int = REQUESTS) -> None:
    """Make a store of so many recordings of so many requests each; one at a time is in memory."""
    models = load_release(DEFAULT_RELEASE).models
    with tempfile.TemporaryDirectory() as folder:
        for number in range(experiments):
            with open_store(path) as store:
                _add(store, number, _spec(number, models[number % len(models)], requests), Path(folder) / "tokens")


def _add(store: Store, number: int, spec: SyntheticExperiment, token_file: Path) -> None:
    recording = recording_of(generate(spec), token_file if number % _TOKENS_EVERY == 0 else None)
    if number % _TRACED_EVERY:
        schemas = {"steps": STEP_SCHEMA, "lifecycles": LIFECYCLE_SCHEMA, "journey_events": JOURNEY_EVENT_SCHEMA}
        recording = replace(recording, **{name: no_rows(kind) for name, kind in schemas.items()})
    ingest_recording(store, recording)


def _spec(number: int, entry: ModelEntry, requests: int) -> SyntheticExperiment:
    slow, fast = 4.0 + number % 5, 9.0 + number % 3
    half_us = requests / 2 * 1e6
    return replace(
        SyntheticExperiment(),
        slug=f"20260401-{number:06d}-{entry.model.split('/')[-1].lower()}-tp{entry.tensor_parallelism}-load{number:03d}",
        model=entry.model,
        tensor_parallelism=entry.tensor_parallelism,
        stages=(Stage(0, slow, round(half_us / slow)), Stage(1, fast, round(half_us / fast))),
        shared_prefix=SharedPrefix(10, 10, 100, 475, _OUTPUT_TOKENS),
        latency=entry.latency,
        lifecycle=entry.lifecycle,
        engine=replace(SyntheticExperiment().engine, num_gpu_blocks=26_602),
        step_sample_rate=0.1,
        cache="simulated",
        seed=number,
    )


if __name__ == "__main__":
    write_store(Path(sys.argv[1]), *map(int, sys.argv[2:]))
