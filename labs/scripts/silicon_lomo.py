"""Leave one model out with operator times: the five coefficients fitted to the other models, mean E2E of what is left.

    python labs/scripts/silicon_lomo.py STORE sil-7b.yaml sil-34b.yaml sil-70b.yaml sil-mixtral.yaml

Each file is a release of ``coefficients silicon`` for one model.  A row of the fit is a load stage of codegen or
general: its mean batch and the mean gap between tokens.  Priors are those of ``calibrate --operators``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import lsq_linear

from blis_replay.base.arrays import Floats
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store.file import open_store
from blis_replay.ingest.store.recordings import read_stored
from blis_replay.replay.driver import replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.experiment import find_experiment
from blis_replay_labs.silicon.operators import OperatorCoefficients, OperatorModel, batch_times_us

RUNS = {
    "Llama-2-7b-hf": ("7b-codegen", "7b-general", "7b-roleplay"),
    "CodeLlama-34b-Instruct-hf": ("34b-codegen", "34b-general", "34b-roleplay"),
    "Llama-2-70b-hf": ("70b-hf-codegen", "70b-general", "70b-roleplay"),
    "Mixtral-8x7B-v0.1": ("mixtral-codegen", "mixtral-general", "mixtral-roleplay"),
}
# Settled parts of the two load stages, s; prompt tokens that a request does not find in the cache.
STAGES, UNCACHED = ((20.0, 590.0), (630.0, 1190.0)), 13.5
PRIOR, WIDTH = np.array([1.0, 1, 1, 0, 0]), np.array([0.1, 0.4, 0.5, 1_000, 20])
# A row is taken to be right within this share; those of one model weigh as four.
_ROW_ERROR = 0.015


@dataclass(frozen=True)
class Fold:
    """A model: its release, its recordings, and its rows: costs at 1 (float64[rows, 5]) over the observed cycle."""

    release: CoefficientRelease
    recordings: tuple[Recording, ...]
    rows: Floats


def rows_of(latency: OperatorModel, recording: Recording) -> Floats:
    """float64[stages, 5]: what the mean batch costs for each coefficient at 1, over the observed cycle."""
    known = recording.requests.frame(["arrival_us", "ttft_us", "e2e_us", "output_tokens", "prompt_tokens"])
    arrival, ttft, e2e, output, prompt = known.to_numpy().astype(np.float64).T
    batches, cycles_us = [], []
    for begin, end in STAGES:
        of = (arrival > begin * 1e6) & (arrival < end * 1e6)
        cycle_us, per_us = ((e2e - ttft)[of] / (output[of] - 1)).mean(), of.sum() / (end - begin) / 1e6
        context = prompt[of].mean() + output[of].mean() / 2
        # Each step takes up so many requests, hardly two at once.
        taken_up = per_us * cycle_us
        batches.append((taken_up * UNCACHED, per_us * (e2e - ttft)[of].mean(), context, min(taken_up, 1.0)))
        cycles_us.append(cycle_us)
    prefill, decode, context, mixed = np.array(batches).T
    return batch_times_us(latency, prefill, decode, context, mixed, prompt.mean()) / np.array(cycles_us)[:, None]


def fitted(folds: list[Fold]) -> Floats:
    """float64[5]: the coefficients of the least squared relative errors, with the priors; none is negative."""
    weighed = [fold.rows / (_ROW_ERROR * np.sqrt(len(fold.rows)) / 2) for fold in folds]
    ones = [np.full(len(fold.rows), 1 / (_ROW_ERROR * np.sqrt(len(fold.rows)) / 2)) for fold in folds]
    matrix = np.vstack([*weighed, np.diag(1 / WIDTH)])
    return np.array(lsq_linear(matrix, np.concatenate([*ones, PRIOR / WIDTH]), bounds=(0, np.inf)).x)


def errors(fold: Fold, coefficients: Floats) -> list[float]:
    """Signed errors of mean E2E, percent."""
    entry = fold.release.models[0]
    latency = replace(entry.latency, coefficients=OperatorCoefficients(*map(float, coefficients)))
    release = replace(fold.release, models=(replace(entry, latency=latency),))
    compared = (compare_replay(replay(recording, release)) for recording in fold.recordings)
    return [100 * (one.metrics["e2e"]["mean"].error or 0.0) for one in compared]


def main(store: str, *files: str) -> None:
    """Print a row a model: errors with the coefficients of the others, and as measured."""
    folds = {}
    with open_store(Path(store), read_only=True) as opened:
        for file in files:
            release = load_release(file)
            name, latency = release.models[0].model.rsplit("/", 1)[-1], release.models[0].latency
            if not isinstance(latency, OperatorModel):
                raise SystemExit(f"{file}: no release of operator times")
            runs = tuple(read_stored(opened, find_experiment(opened, run)) for run in RUNS[name])
            folds[name] = Fold(release, runs, np.vstack([rows_of(latency, run) for run in runs[:2]]))
    for left, fold in folds.items():
        others = fitted([other for name, other in folds.items() if name != left])
        found, measured = errors(fold, others), errors(fold, PRIOR)
        cells = [*(f"{error:+.1f}" for error in found), *(f"{np.abs(of).mean():.1f}" for of in (found, measured))]
        print(f"| {left} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
