"""The two floors that every simulator must beat: a constant, and a straight line in the lengths of a request.

A floor has no queues, batches or memory.  It is fitted to the same recordings as the coefficients beside it, so a
comparison shows what a model of the engine adds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import ReplayError, UnknownExperimentError, UnknownNameError
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import Store, open_for_reading, read_stored
from blis_replay.replay.plan import ReplayPlan
from blis_replay.replay.simulator import Simulated, model_of
from blis_replay.replay.simulators import SimulatorInputs
from blis_replay.validate.experiment import find_experiment
from blis_replay.validate.fit.calibrate import stated_fits
from blis_replay.validate.metrics.observed import numbers_from_aggregates, observed_requests, samples_of
from blis_replay.validate.metrics.skill import FloorLine, line_through

FLOORS = ("floor:constant", "floor:line")
_LACKS = "a floor models neither queues nor batches nor memory"


@dataclass(frozen=True)
class Floor:
    """A floor as a simulator.

    ``lines``: by model and tensor parallelism (None: not recorded).  ``release``: names what it was fitted on.
    """

    name: str
    lines: dict[tuple[str, int | None], FloorLine]
    release: CoefficientRelease
    reports_steps: bool = False

    def entry_for(self, recording: Recording) -> ModelEntry | None:
        """None: a floor has no coefficients of a release."""
        del recording
        return None

    def serve(self, plan: ReplayPlan) -> Simulated:
        """The line at the lengths of each request; raises ``ReplayError`` if it was not fitted to this server."""
        recording = plan.recording
        line = self.lines.get(_server(recording))
        if line is None:
            known = ", ".join(sorted({f"{model} tp {tp}" for model, tp in self.lines}))
            raise ReplayError(
                f"{self.name}: fitted to no recording of {model_of(recording)} tp {recording.tensor_parallelism} "
                f"(it has {known}); name one: --simulator {self.name.partition('@')[0]}@EXPERIMENT"
            )
        trace = plan.trace
        ttft_us, e2e_us = line.ttft_e2e_us(trace.prompt_tokens, trace.output_tokens - 1)
        completed = np.ones(len(trace), np.bool_)
        return Simulated(completed, ttft_us, e2e_us, trace.output_tokens, differences=(_LACKS,))


def floor(name: str, inputs: SimulatorInputs) -> Floor:
    """As ``floor_simulator``, of the stored experiments."""
    with open_for_reading(inputs.store) as store:
        return floor_simulator(store, name, inputs.release)


def floor_simulator(store: Store, text: str, release: CoefficientRelease) -> Floor:
    """The floor of ``floor:constant`` or ``floor:line``, fitted to what the release was fitted on.

    ``floor:line@NAME,NAME``: fitted to these recordings instead.  Raises ``ReplayError`` if there is nothing to fit it
    to, ``UnknownExperimentError`` for a recording that does not exist.
    """
    name, _, chosen = text.partition("@")
    if name not in FLOORS:
        raise UnknownNameError(f"{text}: no such floor; there are {', '.join(FLOORS)}")
    if chosen:
        slugs = [find_experiment(store, one) for one in chosen.split(",")]
    else:
        slugs = _stored_of(store, [fit.experiment for fit in release.fitted_on or ()])
    recordings = [recording for slug in slugs if _points(recording := read_stored(store, slug)) is not None]
    if not recordings:
        raise ReplayError(
            f"{text}: no recording that release {release.name} was fitted on is known here; name one: {name}@EXPERIMENT"
        )
    lines = {
        server: _fitted(name, [r for r in recordings if _server(r) == server])
        for server in dict.fromkeys(map(_server, recordings))
    }
    return Floor(text, lines, _release_of_floor(text, lines, recordings))


def _server(recording: Recording) -> tuple[str, int | None]:
    return model_of(recording).lower(), recording.tensor_parallelism


def _stored_of(store: Store, names: Sequence[str]) -> list[str]:
    """The slugs of those that are stored or ship."""
    slugs: list[str] = []
    for name in dict.fromkeys(names):
        try:
            slugs.append(find_experiment(store, name))
        except UnknownExperimentError:
            continue
    return slugs


def _points(recording: Recording) -> Floats | None:
    """float64[k, 5]: prompt tokens, gaps between output tokens, TTFT and E2E in us, and the number of requests.

    One row per request where requests were recorded, else one row of published means; None without latencies.
    """
    chosen = observed_requests(recording)
    tokens = recording.requests["prompt_tokens"].fill_null(0).to_numpy().astype(np.float64)
    if chosen.any():
        samples = samples_of(recording, chosen)
        return np.column_stack([tokens[chosen], samples.gaps, samples.ttft_us, samples.e2e_us, np.ones(chosen.sum())])
    if not recording.is_summed_up:
        return None
    numbers = numbers_from_aggregates(recording, None)
    first_us, whole_us = numbers["ttft"]["mean"].value_us, numbers["e2e"]["mean"].value_us
    if first_us is None or whole_us is None:
        return None
    gaps = recording.requests["output_tokens"].fill_null(1).to_numpy().astype(np.float64) - 1
    return np.array([[tokens.mean(), gaps.mean(), first_us, whole_us, len(tokens)]])


def _fitted(name: str, recordings: Sequence[Recording]) -> FloorLine:
    """Least squares over all requests; a slope that is negative or not determined is set to 0."""
    rows = np.concatenate([points for r in recordings if (points := _points(r)) is not None])
    prompt, gaps, first_us, whole_us, weight = rows.T
    if name == FLOORS[0]:
        mean_first, mean_whole = (float(np.average(us, weights=weight)) for us in (first_us, whole_us))
        return FloorLine(mean_first, 0.0, mean_whole - mean_first, 0.0)
    return line_through(prompt, gaps, first_us, whole_us, weight)


def _release_of_floor(
    name: str, lines: dict[tuple[str, int | None], FloorLine], recordings: Sequence[Recording]
) -> CoefficientRelease:
    """A release that states what the floor was fitted on, as any coefficients do."""
    digest = hashlib.sha256(repr(sorted(lines.items(), key=repr)).encode()).hexdigest()
    fitted_on = tuple(stated_fits((recording, "latencies") for recording in recordings))
    hardware = ", ".join(dict.fromkeys(r.hardware for r in recordings if r.hardware))
    return CoefficientRelease("least-squares", "valid", _LACKS, name, hardware, digest, fitted_on=fitted_on)
