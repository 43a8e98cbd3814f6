"""What of a replay can be replaced by what was recorded, one component at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blis_replay.blis.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import engine_config
from blis_replay.replay.teacher_forcing import recorded_components

STEP_TIME, PRE_QUEUE, OUTPUT = "step time", "delay before the queue", "output processing"


@dataclass(frozen=True)
class Component:
    """One replaceable part of a replay.

    ``basis``: in words, what takes its place.  ``why``: half a sentence that explains an error that
    it makes.  ``mend``: what to do about it.  ``mode``: fields of the replay mode to change.
    ``from_reference``: whether coefficients of the reference release take the place of its own.
    """

    name: str
    basis: str
    why: str
    mend: str
    mode: Mapping[str, Any] = field(default_factory=dict)
    from_reference: bool = False


def components_of(
    recording: Recording, mode: ReplayMode, reference: CoefficientRelease | None
) -> tuple[list[Component], dict[str, str]]:
    """The components in which this replay differs from the recording, and why others cannot be replaced.

    ``reference``: a release whose coefficients stand in for what was not recorded; None: nothing does.
    """
    inputs = _inputs(recording, mode)
    forced, unable = _modelled(recording, mode, reference)
    return [*inputs, *forced], unable


def substituted(
    components: Iterable[Component], mode: ReplayMode, entry: ModelEntry, reference: ModelEntry | None
) -> tuple[ReplayMode, ModelEntry]:
    """The replay mode and coefficients with these components replaced."""
    for component in components:
        mode = replace(mode, **component.mode)
        if component.from_reference and reference is not None:
            entry = _with_coefficients_of(reference, entry, component.name)
    return mode, entry


def _with_coefficients_of(reference: ModelEntry, entry: ModelEntry, name: str) -> ModelEntry:
    if name == STEP_TIME:
        return replace(entry, latency=reference.latency)
    fields = ("pre_queue_us", "pre_queue_per_prompt_token_us") if name == PRE_QUEUE else _AFTER_ENGINE
    changes = {field: getattr(reference.lifecycle, field) for field in fields}
    return replace(entry, lifecycle=replace(entry.lifecycle, **changes))


_AFTER_ENGINE = ("post_token_us", "post_request_us")


def _inputs(recording: Recording, mode: ReplayMode) -> list[Component]:
    """What the replay was given otherwise than it was recorded."""
    found = []
    if mode.arrivals != "recorded":
        why = "its requests do not come when they were sent"
        found.append(_input("arrivals", "the recorded arrivals", why, arrivals="recorded"))
    if mode.lengths != "true":
        why = "its requests do not decode as many tokens as the server did"
        found.append(_input("output lengths", "the true decode lengths", why, lengths="true"))
    if mode.prefix != "recorded":
        why = "it prefills prompts that the server had in its prefix cache"
        found.append(_input("prefix cache", "prompts cached as far as the recording tells", why, prefix="recorded"))
    if mode.surplus_steps:
        why = "it reports every request one step longer than it took"
        found.append(_input("surplus step", "requests end with their last token", why, surplus_steps=0))
    asynchronous = engine_config(recording, replace(mode, scheduling="recorded")).async_scheduling
    if engine_config(recording, mode).async_scheduling != asynchronous:
        lacks = "it lacks one cycle of asynchronous scheduling"
        why = lacks if asynchronous else "it has one cycle of asynchronous scheduling that the server has not"
        basis = f"{'asynchronous' if asynchronous else 'synchronous'} scheduling, as recorded"
        found.append(_input("scheduling mode", basis, why, scheduling="recorded"))
    return found


def _input(name: str, basis: str, why: str, **change: Any) -> Component:
    ((key, value),) = change.items()
    return Component(name, basis, why, f"replay it as recorded: --replay {key}={value}", change)


def _modelled(
    recording: Recording, mode: ReplayMode, reference: CoefficientRelease | None
) -> tuple[list[Component], dict[str, str]]:
    able, unable = recorded_components(recording)
    calibrate = f"calibrate: blis-replay calibrate --train {recording.alias} --out mine.yaml"
    look = f"see what is waited for: blis-replay segments --experiment {recording.alias}"
    known = {
        "pre_queue": (PRE_QUEUE, "its delay before the queue is not the server's", calibrate),
        "schedule": ("scheduling decisions", "it admits requests that the server passed over", look),
        "step_time": (STEP_TIME, "its steps do not take as long as the server's", calibrate),
        "output_processing": (OUTPUT, "its delays after the engine are not the server's", calibrate),
    }
    components, left = [], {}
    for key, (name, why, mend) in known.items():
        if getattr(mode, key) == "recorded":
            continue
        if key in able:
            components.append(Component(name, able[key], why, mend, {key: "recorded"}))
        elif reference is not None and key != "schedule":
            basis = f"not recorded; as coefficients {reference.name} have it"
            components.append(Component(name, basis, why, mend, from_reference=True))
        else:
            left[name] = unable[key]
    return components, left
