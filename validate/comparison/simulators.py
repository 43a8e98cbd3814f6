"""The simulators that a user can choose, and the two floors that each must beat.

A floor is a constant, or a straight line in the lengths of a request.  It knows of no queues, batches or memory.  It is
fitted to the same recordings as the coefficients beside it, so a comparison says what a model of the engine adds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from blis_replay.blis.releases.release import CoefficientRelease, FittedOn, ModelEntry
from blis_replay.compiled.arrays import Floats
from blis_replay.ingest.errors import UnknownExperimentError
from blis_replay.ingest.identity import requests_hash
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import Store, open_for_reading, read_stored
from blis_replay.replay.adapters import ADAPTERS
from blis_replay.replay.blis_binary import (
    DEFAULT_TIMEOUT_S,
    OWN,
    BlisBinary,
    find_build,
    own_release,
    restarted_outputs_elsewhere,
)
from blis_replay.replay.command import PREFIX, adapter_simulator, command_simulator
from blis_replay.replay.errors import ReplayError, UnknownNameError
from blis_replay.replay.plan import ReplayPlan
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine, Simulated, Simulator, model_of
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.experiment import find_experiment
from blis_replay.validate.metrics.observed import numbers_from_aggregates, observed_requests, samples_of

FLOOR = "floor:"
FLOORS = ("floor:constant", "floor:line")
_LACKS = "a floor models neither queues nor batches nor memory"


def chosen_simulators(
    store: Path, choice: str, release: CoefficientRelease, binary: str, timeout_s: float, own_model: str
) -> tuple[Simulator, ...]:
    """The simulators of ``embedded``, ``blis``, ``both``, a floor or ``cmd:PATH ARGS``, in the order they are shown.

    ``store``: the file in which a floor finds its recordings.  ``binary`` is looked at only where it is needed.
    ``own_model``: a latency model of BLIS's build that it runs in place of the release, ``""`` for none.
    ``blis-MODEL`` names it too.  Raises ``BlisError`` if there is no such binary or model, or it is no BLIS.
    """
    if choice == "embedded":
        return (EmbeddedEngine(release),)
    if choice.startswith(PREFIX):
        return (command_simulator(choice, release, timeout_s),)
    if _is_of_others(choice):
        return (adapter_simulator(choice, release, timeout_s),)
    if choice.startswith(FLOOR):
        with open_for_reading(store) as opened:
            return (floor_simulator(opened, choice, release),)
    build, model = find_build(binary), choice.partition("-")[2] or own_model
    name = choice if _is_blis(choice) else "blis"
    blis = BlisBinary(build, own_release(build, model) if model else release, model, timeout_s, name)
    return (blis,) if _is_blis(choice) else (EmbeddedEngine(release), blis)


def _is_blis(name: str) -> bool:
    """Whether a name is that of BLIS, with one of its latency models or without."""
    return name.partition("-")[0] == "blis"


def _is_of_others(name: str) -> bool:
    """Whether a name is that of an adapter, with a variant and a path or without."""
    return name.split(":")[0].split("-")[0] in ADAPTERS


def simulator_named(store: Path, name: str, coefficients: str | None, default: str, binary: str | None) -> Simulator:
    """``embedded`` or ``blis`` with a release (``default`` if None; then BLIS runs its own model).

    Raises ``UnknownNameError`` for ``blis`` without a binary, and as ``chosen_simulators`` does.
    """
    if _is_blis(name) and binary is None:
        raise UnknownNameError(f"no BLIS binary is named for {name}; give --blis-binary PATH")
    release, own_model = load_release(coefficients or default), "" if coefficients else OWN
    (simulator,) = chosen_simulators(store, name, release, binary or "", DEFAULT_TIMEOUT_S, own_model)
    return simulator


def informed(blis: Comparison, embedded: Comparison) -> Comparison:
    """BLIS's comparison; where its build does not count preemptions, with what the embedded engine saw.

    Both were given the same requests and as many blocks.
    """
    simulated, seen = blis.run.simulated, embedded.run.simulated.preemptions
    if simulated.preemptions is not None or not seen:
        return blis
    differences = (*simulated.differences, restarted_outputs_elsewhere(seen))
    simulated = replace(simulated, differences=differences)
    return replace(blis, replay=replace(blis.run, simulated=simulated))


# Those of ``all``: ours fitted and with the datasheet alone, the floors, and others where they are installed.
EVERYONE = (
    *("embedded", "embedded@h100-datasheet", "floor:constant", "floor:line"),
    *("dynamo", "dynamo-fitted", "aiconfigurator", "vidur-fitted", "blis"),
)
_NEXT = re.compile(rf",(?=all\b|embedded|floor:|cmd:|blis\b|{'|'.join(ADAPTERS)})")


def contestants(
    store: Path, asked: Sequence[str], release: CoefficientRelease, binary: str | None, timeout_s: float
) -> tuple[dict[str, Simulator], dict[str, str]]:
    """Simulators by the name that was asked for, and of ``all`` those that there are not, with the reason.

    ``asked``: names as of ``chosen_simulators``, ``embedded@RELEASE``, ``all``, or several with commas between them.
    Raises what ``chosen_simulators`` raises for a simulator that was named.
    """
    found: dict[str, Simulator] = {}
    absent: dict[str, str] = {}
    for name in [name for text in asked for name in _NEXT.split(text)]:
        for one in EVERYONE if name == "all" else (name,):
            try:
                simulator = _contestant(store, one, release, binary, timeout_s)
                found[simulator.name if _is_of_others(one) else one] = simulator
            except ReplayError as error:
                if name != "all":
                    raise
                absent[one] = str(error)
    return found, absent


def _contestant(store: Path, name: str, release: CoefficientRelease, binary: str | None, timeout_s: float) -> Simulator:
    kind, _, chosen = name.partition("@")
    if kind == "embedded" and chosen:
        release = load_release(chosen)
        release.refuse_if_invalid()
        return EmbeddedEngine(release)
    if _is_blis(kind) and binary is None:
        raise UnknownNameError(f"no BLIS binary is named for {name}; give --blis-binary PATH")
    if kind != "embedded" and not _is_blis(kind) and not name.startswith((FLOOR, PREFIX)) and not _is_of_others(name):
        wrong = name.rpartition(",")[2]  # what does not begin like a simulator is not split off
        close = get_close_matches(wrong, EVERYONE, 1)
        known = f"did you mean {close[0]}?" if close else f"there are all, {', '.join(EVERYONE)} and 'cmd:PATH ARGS'"
        raise UnknownNameError(f"{wrong}: no such simulator; {known}")
    (simulator,) = chosen_simulators(store, name, release, binary or "", timeout_s, OWN)
    return simulator


@dataclass(frozen=True)
class FloorLine:
    """TTFT = ``first_us`` + ``prompt_us`` a prompt token; E2E = TTFT + ``rest_us`` + ``gap_us`` a further token."""

    first_us: float
    prompt_us: float
    rest_us: float
    gap_us: float


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

    def serve(self, recording: Recording, plan: ReplayPlan) -> Simulated:
        """The line at the lengths of each request; raises ``ReplayError`` if it was fitted to no such server."""
        line = self.lines.get(_server(recording))
        if line is None:
            known = ", ".join(sorted({f"{model} tp {tp}" for model, tp in self.lines}))
            raise ReplayError(
                f"{self.name}: fitted to no recording of {model_of(recording)} tp {recording.tensor_parallelism} "
                f"(it has {known}); name one: --simulator {self.name.partition('@')[0]}@EXPERIMENT"
            )
        trace = plan.trace
        ttft_us = np.rint(line.first_us + line.prompt_us * trace.prompt_tokens).astype(np.int64)
        rest_us = np.rint(line.rest_us + line.gap_us * (trace.output_tokens - 1)).astype(np.int64)
        completed = np.ones(len(trace), np.bool_)
        return Simulated(completed, ttft_us, ttft_us + rest_us, trace.output_tokens, differences=(_LACKS,))


def floor_simulator(store: Store, text: str, release: CoefficientRelease) -> Floor:
    """The floor of ``floor:constant`` or ``floor:line``, fitted to what the release was fitted on.

    ``floor:line@NAME,NAME``: fitted to these recordings instead.  Raises ``ReplayError`` if there is nothing to fit it
    to, ``UnknownExperimentError`` for a recording that does not exist.
    """
    name, _, chosen = text.partition("@")
    if name not in FLOORS:
        raise ReplayError(f"{text}: no such floor; there are {', '.join(FLOORS)}")
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
    """float64[k, 5]: prompt tokens, gaps between output tokens, TTFT and E2E in us, and how many requests they are of.

    A row a request where single requests were recorded, else one of the published means; None without latencies.
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
    """Least squares over all requests; a slope below zero, or that nothing determines, is none."""
    rows = np.concatenate([points for r in recordings if (points := _points(r)) is not None])
    prompt, gaps, first_us, whole_us, weight = rows.T
    mean_first, mean_whole = (float(np.average(us, weights=weight)) for us in (first_us, whole_us))
    if name == FLOORS[0]:
        return FloorLine(mean_first, 0.0, mean_whole - mean_first, 0.0)
    mean_prompt = float(np.average(prompt, weights=weight))
    spread = float((weight * (prompt - mean_prompt) ** 2).sum())
    slope = float((weight * (prompt - mean_prompt) * (first_us - mean_first)).sum()) / spread if spread > 0 else 0.0
    slope = min(max(slope, 0.0), mean_first / mean_prompt if mean_prompt else 0.0)
    decoding_us = float((weight * (whole_us - first_us)).sum()) / max(float((weight * gaps).sum()), 1.0)
    return FloorLine(mean_first - slope * mean_prompt, slope, 0.0, decoding_us)


def _release_of_floor(
    name: str, lines: dict[tuple[str, int | None], FloorLine], recordings: Sequence[Recording]
) -> CoefficientRelease:
    """What the floor stands on, in the place of a release, so that what it was fitted on is told like any other's."""
    digest = hashlib.sha256(repr(sorted(lines.items(), key=repr)).encode()).hexdigest()
    fitted_on = tuple(FittedOn(r.slug, r.content_hash, "latencies", requests_hash(r)) for r in recordings)
    hardware = ", ".join(dict.fromkeys(r.hardware for r in recordings if r.hardware))
    return CoefficientRelease("least-squares", "valid", _LACKS, name, hardware, digest, fitted_on=fitted_on)
