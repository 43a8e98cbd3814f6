"""What a recording or a run rests on, named so that two of them can be told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.releases.latency import format_latency
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.ingest.recording import PUBLISHED, Recording
from blis_replay.ingest.store import RunRecord
from blis_replay.replay.driver import ReplayRun

Inputs = dict[str, str]


def inputs_of_recording(recording: Recording) -> Inputs:
    """Identity, engine arguments, arrivals, lengths, as recorded."""
    requests = recording.requests
    made = "reconstructed from published rates" if recording.ground_truth == PUBLISHED else "as recorded"
    span_s = float(requests["arrival_us"].max() or 0) / 1e6  # type: ignore[arg-type]
    return {
        "experiment": recording.slug,
        "recording": recording.content_hash[:12],
        "model": recording.model or "not recorded",
        "hardware": recording.hardware or "not recorded",
        "tensor parallelism": str(recording.tensor_parallelism or "not recorded"),
        **{f"engine {name}": str(setting.value) for name, setting in sorted(recording.engine.items())},
        "arrivals": f"{requests.height:,} requests in {span_s:,.1f} s, {made}",
        "output tokens": _mean(requests["output_tokens"].mean()),
        "prompt tokens": _mean(requests["prompt_tokens"].mean()),
    }


def inputs_of_run(run: ReplayRun) -> Inputs:
    """Those of its recording as the plan changed them; simulator, release and each of its coefficients."""
    trace, basis = run.plan.trace, run.plan.basis
    span_s = float(trace.arrival_us[-1]) / 1e6
    return {
        **inputs_of_recording(run.recording),
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


def inputs_of_stored_run(recording: Recording, run: RunRecord) -> Inputs:
    """What was stored with the run; its recording is named as it was then."""
    said = run.provenance
    basis, engine = said.get("basis"), said.get("engine")
    inputs = {
        **inputs_of_recording(recording),
        "recording": run.content_hash[:12],
        "simulator": run.simulator,
        "replay": run.replay_mode,
        "coefficients": f"{run.release} {run.release_hash[:12]}",
    }
    if isinstance(basis, Mapping):
        inputs["output tokens from"] = str(basis.get("output tokens"))
    if isinstance(engine, Mapping):
        inputs |= {f"engine {name}": str(s.get("value")) for name, s in engine.items() if isinstance(s, Mapping)}
    return inputs


def changed_inputs(one: Inputs, other: Inputs) -> list[tuple[str, str, str]]:
    """``(what, one, other)`` of each input that both have and that differs, in the order of the first."""
    return [(name, value, other[name]) for name, value in one.items() if other.get(name, value) != value]


def only_on_one_side(one: Inputs, other: Inputs) -> list[str]:
    """The inputs that one of the two has and the other does not say."""
    return [name for name in {**one, **other} if (name in one) != (name in other)]


def _coefficients(entry: ModelEntry) -> Inputs:
    try:
        latency = format_latency(entry.latency)
    except ReleaseError:  # observed cycles are no coefficients
        latency = {"kind": "observed cycles"}
    delays = {f"delay {name.removesuffix('_us')}": f"{value:g} us" for name, value in vars(entry.lifecycle).items()}
    return {**{f"step time {name}": str(value) for name, value in latency.items()}, **delays}


def _mean(value: object) -> str:
    return f"mean {float(value):,.1f}" if isinstance(value, int | float) else "not recorded"
