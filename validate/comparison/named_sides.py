"""The sides that names stand for, such as a release, and what each side rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from blis_replay.base.errors import NothingToJudgeError, ReleaseError, UnknownExperimentError, UnknownNameError
from blis_replay.blis.releases.latency import format_latency
from blis_replay.blis.releases.release import DELAYS, ModelEntry, bundled_releases
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import Store, read_stored
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.plan import sent_as
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine, Simulator
from blis_replay.replay.simulators import SimulatorInputs, simulator_named
from blis_replay.validate.comparison.sides import Side, recording_side, replay_side
from blis_replay.validate.experiment import (
    WILDCARDS,
    find_experiment,
    release_that_ships,
    select_experiments,
)
from blis_replay.validate.metrics.observed import pooled_gaps

# The inputs of a side by name, to distinguish two sides.
Inputs = dict[str, str]

SIMULATORS = ("embedded", "blis")


@dataclass(frozen=True)
class Choice:
    """What a name alone does not say.

    ``experiment``: of a release or a simulator.  ``coefficients``: of a simulator; None: those that ship for the
    experiment, and BLIS runs its build's own model.  ``blis_binary``: its path.
    """

    experiment: str | None
    coefficients: str | None = None
    blis_binary: str | None = None

    def simulator(self, name: str, store: Path) -> Simulator:
        """The simulator of a name; raises as ``simulator_named`` and ``load_release`` do."""
        ships = release_that_ships([self.experiment] if self.experiment else [])
        release, model = load_release(self.coefficients or ships), "release" if self.coefficients else "own"
        inputs = SimulatorInputs(release, store, blis_binary=self.blis_binary, blis_model=model)
        return simulator_named(name, inputs)


def side_of(store: Store, name: str, choice: Choice) -> Side:
    """The side that a name stands for.

    A simulator (``embedded``, ``blis``), ``EXPERIMENT@RELEASE``, a release (by name or ``.yaml`` file), or an
    experiment.  Raises ``UnknownNameError`` for any other name or a missing experiment, and what ``replay`` and
    ``load_release`` raise.
    """
    if name in SIMULATORS:
        experiment = _experiment(choice, f"the simulator {name}")
        return _replayed(store, name, experiment, choice.simulator(name, store.path))
    if "@" in name:
        experiment, _, release = name.partition("@")
        return _replayed(store, name, experiment, EmbeddedEngine(load_release(release)))
    if name in bundled_releases() or name.endswith((".yaml", ".yml")) or Path(name).is_file():
        experiment = _experiment(choice, f"the release {name}")
        return _replayed(store, name, experiment, EmbeddedEngine(load_release(name)))
    try:
        slug = find_experiment(store, name)
    except UnknownExperimentError as error:
        raise UnknownNameError(
            f"{name} is not a simulator ({', '.join(SIMULATORS)}), EXPERIMENT@RELEASE or a release; {error}"
        ) from None
    side = recording_side(read_stored(store, slug), pooled_gaps(store, slug), name)
    if side.requests is None and not side.recording.is_summed_up:
        raise NothingToJudgeError(f"{side.recording.alias}: the recording has no latencies to compare")
    return side


def sides_of(store: Store, name: str, choice: Choice) -> list[Side]:
    """The side that a name stands for; of several recordings (``old-1,old-2`` or ``old-*``) each.

    Raises as ``side_of`` and ``select_experiments`` do.
    """
    if "," not in name and not set(name) & WILDCARDS:
        return [side_of(store, name, choice)]
    return [side_of(store, slug, choice) for slug in select_experiments(store, name.split(","))]


def _experiment(choice: Choice, what: str) -> str:
    if choice.experiment is None:
        raise UnknownNameError(f"{what} alone is nothing to compare; name an experiment with --experiment")
    return choice.experiment


def _replayed(store: Store, name: str, experiment: str, simulator: Simulator) -> Side:
    recording = read_stored(store, find_experiment(store, experiment))
    return replay_side(replay(recording, simulator.release, simulator=simulator), name)


# -- What a side rests on -----------------------------------------------------------------


def inputs_of(side: Side) -> Inputs:
    """What a side rests on."""
    return _inputs_of_recording(side.recording) if side.run is None else _inputs_of_run(side.run)


def _inputs_of_recording(recording: Recording) -> Inputs:
    """Identity, engine arguments, arrivals, lengths, as recorded."""
    requests = recording.requests
    span_s = float(requests["arrival_us"].max() or 0) / 1e6  # type: ignore[arg-type]
    return {
        "experiment": recording.slug,
        "recording": recording.content_hash[:12],
        "model": recording.model or "not recorded",
        "hardware": recording.hardware or "not recorded",
        "tensor parallelism": str(recording.tensor_parallelism or "not recorded"),
        **{f"engine {name}": str(setting.value) for name, setting in sorted(recording.engine.items())},
        "arrivals": f"{requests.height:,} requests in {span_s:,.1f} s, {sent_as(recording)}",
        "output tokens": _mean(requests["output_tokens"].mean()),
        "prompt tokens": _mean(requests["prompt_tokens"].mean()),
    }


def _inputs_of_run(run: ReplayRun) -> Inputs:
    """Those of its recording as the plan changed them; simulator, release and each of its coefficients."""
    trace, basis = run.plan.trace, run.basis
    span_s = float(trace.arrival_us[-1]) / 1e6
    return {
        **_inputs_of_recording(run.recording),
        **{f"engine {name}": str(value) for name, value in asdict(run.plan.engine).items()},
        "arrivals": f"{len(trace):,} requests in {span_s:,.1f} s, {basis['arrivals']}",
        "output tokens": _mean(trace.output_tokens.mean()),
        "output tokens from": basis["output tokens"],
        "prefix cache": f"{_mean(trace.prefill_tokens.mean())} prompt tokens to prefill; {basis['prefix cache']}",
        "simulator": run.simulator,
        "replay": run.mode.name,
        "coefficients": f"{run.release.name} {run.release.sha256[:12]}",
        **({} if run.entry is None else _coefficients(run.entry)),
    }


def changed_inputs(one: Inputs, other: Inputs) -> list[tuple[str, str, str]]:
    """``(what, one, other)`` of each input that both have and that differs, in the order of the first."""
    return [(name, value, other[name]) for name, value in one.items() if other.get(name, value) != value]


def only_on_one_side(one: Inputs, other: Inputs) -> list[str]:
    """The inputs that one of the two has and the other does not say."""
    return [name for name in {**one, **other} if (name in one) != (name in other)]


def _coefficients(entry: ModelEntry) -> Inputs:
    try:
        latency = format_latency(entry.latency)
    except ReleaseError:  # observed cycles have no coefficients
        latency = {"kind": "observed cycles"}
    delays = {f"delay {name}": f"{getattr(entry.lifecycle, f'{name}_us'):g} us" for name in DELAYS}
    return {**{f"step time {name}": str(value) for name, value in latency.items()}, **delays}


def _mean(value: object) -> str:
    return f"mean {float(value):,.1f}" if isinstance(value, int | float) else "not recorded"
