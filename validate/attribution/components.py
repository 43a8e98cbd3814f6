"""What of a replay can be replaced by what was recorded, one component at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from shlex import quote
from typing import Any

import numpy as np

from blis_replay.blis.errors import TraceError
from blis_replay.blis.latency.models import CorrectedModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording, Setting
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.steps.records import detected_async
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.engine import engine_config
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.observed import recorded_delays
from blis_replay.replay.profile import of_aggregates
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.attribution.fitted import Fitted, Target, Through, misfit, target_of, through_of
from blis_replay.validate.attribution.recorded_cycles import corrected_model
from blis_replay.validate.attribution.tried import Tried, best_alternative, with_warm_cache
from blis_replay.validate.comparison.first_screen import of_store

STEP_TIME, PRE_QUEUE, OUTPUT = "step time", "delay before the queue", "output processing"
# The step time, where all that a step costs is wrong by one factor.
PACE_OF_STEPS = "pace of steps"


@dataclass(frozen=True)
class Component:
    """One replaceable part of a replay.

    ``basis``: in words, what takes its place.  ``why``: half a sentence that explains an error that
    it makes; ``less``: the same where it makes times shorter, if that is another one.  ``mend``: what to do
    about it.  ``mode``: fields of the replay mode to change; ``engine``: engine arguments to change.
    ``from_reference``: whether coefficients of the reference release take the place of its own.  ``latency``: a
    step-time model that does; ``lifecycle``: delays that do.  ``also``: other inputs that explain the error as well.
    ``warm``: whether the prefix cache has all prompts before the first request.
    """

    name: str
    basis: str
    why: str
    mend: str
    mode: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, int | bool] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    less: str = ""
    from_reference: bool = False
    latency: CorrectedModel | None = None
    lifecycle: Mapping[str, float] = field(default_factory=dict)
    warm: bool = False

    @property
    def is_input(self) -> bool:
        """Whether it is a thing that the simulator is told, rather than one that it models."""
        return self.warm or bool(self.engine) or bool(self.mode.keys() - {"pre_queue", "schedule", "output_processing"})


@dataclass(frozen=True)
class Replayed:
    """What a replay is made of: the recording's requests and engine, the mode, the coefficients.

    ``release``: where the coefficients ``entry`` are from.  ``options``: of the command line that made it, for the
    commands that are printed to go on with.
    """

    recording: Recording
    mode: ReplayMode
    entry: ModelEntry
    release: CoefficientRelease
    options: str = ""

    @cached_property
    def through(self) -> Through | None:
        """As ``through_of``."""
        return through_of(self.recording, self.mode, self.entry)

    def run(self) -> ReplayRun:
        """Replay it.  Raises what ``replay`` raises."""
        return replay(self.recording, replace(self.release, models=(self.entry,)), self.mode)


def components_of(replayed: Replayed, reference: CoefficientRelease | None) -> tuple[list[Component], dict[str, str]]:
    """The components in which this replay differs from the recording, and why others cannot be replaced.

    ``reference``: a release whose coefficients stand in for what was not recorded; None: nothing does.
    """
    recording, mode = replayed.recording, replayed.mode
    inputs = _inputs(recording, mode)
    lost = any(finding.severity == "unusable" and not finding.metric for finding in recording.findings)
    server = substituted(inputs, replayed, None)
    for _ in range(0 if lost else _MOST_TRIED):
        found = None if server.through is None else best_alternative(server.through, may_be_warm=True)
        if found is None:
            break
        inputs.append(_tried(found))
        server = substituted(inputs, replayed, None)
    fitted = _fitted(server)
    if fitted is not None:
        as_it_is = "the latencies of the requests do not ask for another"
        unable = {name: as_it_is for name, *_ in _COSTS if name not in {component.name for component in fitted}}
        return [*inputs, *fitted], unable | {"scheduling decisions": "journeys of requests were not recorded"}
    forced, unable = _modelled(replayed, reference)
    if any(component.engine for component in inputs):
        # Whom the scheduler passed over follows from its arguments: forced as well, it would share their blame.
        forced = [component for component in forced if "schedule" not in component.mode]
        unable["scheduling decisions"] = "they follow from the engine arguments that are replaced"
    if mode.step_time == "modelled":
        step_time = _step_time(substituted([*inputs, *forced], replayed, None), reference)
        if isinstance(step_time, Component):
            forced.append(step_time)
        else:
            unable[STEP_TIME] = step_time
    return [*inputs, *forced], {name: why.removeprefix(f"{recording.alias}: ") for name, why in unable.items()}


# Inputs that are wrong at once; a third is hardly told from chance.
_MOST_TRIED = 2


def _tried(found: Tried) -> Component:
    """The component of an alternative; not recorded, but nothing else explains what the requests had."""
    best, also = found.best, tuple(other.name for other in found.equal)
    what = "what no step time and no delay explains" if found.beside_a_fit else "the mean difference of requests"
    left = f"{what} falls from {100 * found.before:.1f} to {100 * found.left:.1f} %"
    equal = f"; {' and '.join(also)} explain it as well" if also else ""
    return Component(
        best.name,
        f"not recorded; tried: {left}{equal}",
        best.why,
        f"to be sure record {best.decides}; {best.mend}" if also else best.mend,
        mode=best.mode,
        engine=best.engine,
        also=also,
        warm=best.warm,
    )


def substituted(components: Iterable[Component], replayed: Replayed, reference: ModelEntry | None) -> Replayed:
    """The same replay with these components replaced."""
    recording, mode, entry = replayed.recording, replayed.mode, replayed.entry
    for component in components:
        mode = replace(mode, **component.mode)
        observed = {name: Setting(value, "recorded", component.basis) for name, value in component.engine.items()}
        recording = replace(recording, engine=recording.engine | observed)
        recording = with_warm_cache(recording) if component.warm else recording
        if component.from_reference and reference is not None:
            entry = _with_coefficients_of(reference, entry, component.name)
        if component.latency is not None:
            entry = replace(entry, latency=component.latency)
        if component.lifecycle:
            entry = replace(entry, lifecycle=replace(entry.lifecycle, **component.lifecycle))
    return replace(replayed, recording=recording, mode=mode, entry=entry)


def _with_coefficients_of(reference: ModelEntry, entry: ModelEntry, name: str) -> ModelEntry:
    if name == STEP_TIME:
        return replace(entry, latency=reference.latency)
    fields = ("pre_queue_us", "pre_queue_per_prompt_token_us") if name == PRE_QUEUE else _AFTER_ENGINE
    changes = {field: getattr(reference.lifecycle, field) for field in fields}
    return replace(entry, lifecycle=replace(entry.lifecycle, **changes))


_AFTER_ENGINE = ("post_token_us", "post_request_us", "first_token_per_decode_us")


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
    if mode.engine:
        arguments = ", ".join(f"{name}={value}" for name, value in mode.engine)
        why = f"it runs with {arguments}, which the server did not"
        mend = f"replay it as recorded, without {arguments}"
        found.append(Component("engine arguments", "the recorded arguments", why, mend, {"engine": ()}))
    found += _counted(recording, mode)
    made = of_aggregates(recording)
    asynchronous = engine_config(made, replace(mode, scheduling="recorded")).async_scheduling
    if engine_config(made, mode).async_scheduling != asynchronous:
        lacks = "it lacks one cycle of asynchronous scheduling"
        why = lacks if asynchronous else "it has one cycle of asynchronous scheduling that the server has not"
        basis = f"{'asynchronous' if asynchronous else 'synchronous'} scheduling, as recorded"
        found.append(_input("scheduling mode", basis, why, scheduling="recorded"))
    return found


def _counted(recording: Recording, mode: ReplayMode) -> list[Component]:
    """Engine arguments that the server's own records contradict: what they count cannot be, as it is told."""
    seen = recording.steps.aggregate(
        depth="max(running_depth)", tokens="max(prefill_tokens + decode_tokens)", blocks="max(kv_blocks_total)"
    )
    found = []
    for name, most, what in (
        ("max_num_seqs", seen["depth"], "requests run at once"),
        ("max_num_batched_tokens", seen["tokens"], "tokens in a step"),
    ):
        told = recording.engine.get(name)
        if most is not None and told is not None and int(most) > int(told.value):
            why = f"it has {name} {int(told.value):,}, and the server had {int(most):,} {what}"
            found.append(_as_counted(name, f"the most {what} that step records count", why, int(most)))
        elif most is not None and told is not None and int(most) < int(told.value):
            bound = _bound(recording.steps, name, int(most))
            if bound:
                why = f"it has {name} {int(told.value):,}, and the server {int(most):,}: {bound}"
                found.append(_as_counted(name, f"the bound of {what} that step records show", why, int(most)))
    told, blocks = recording.engine.get("num_gpu_blocks"), seen["blocks"]
    if blocks is not None and (told is None or int(blocks) + 1 != told.value):  # the null block is not counted
        has = "unlimited KV memory" if told is None else f"{int(told.value):,} KV blocks"
        why = f"it has {has} and the server had {int(blocks) + 1:,} blocks"
        basis = "the blocks that step records count"
        found.append(replace(_as_counted("num_gpu_blocks", basis, why, int(blocks) + 1), name="KV blocks"))
    told, cached = recording.engine.get("enable_prefix_caching"), "cached_prompt_tokens"
    if mode.prefix == "recorded" and told is not None and not told.value:
        hits = max(recording.requests[cached].fill_null(0).sum(), recording.lifecycles[cached].fill_null(0).sum())
        if hits:
            why = f"it computes prompts whole, of which the server had {int(hits):,} tokens in its prefix cache"
            basis = "a prefix cache, as the server counts hits"
            found.append(replace(_as_counted("enable_prefix_caching", basis, why, True), name="prefix cache"))
    told = recording.engine.get("async_scheduling")
    running = detected_async(recording.steps, recording.journey_events) if mode.scheduling == "recorded" else None
    if told is not None and running is not None and running != told.value:
        other = "asynchronous" if running else "synchronous"
        why = f"it schedules {'synchronously' if running else 'asynchronously'}, and the server {other}ly"
        basis = f"{other} scheduling, as the server's stamps of steps and tokens have it"
        found.append(replace(_as_counted("async_scheduling", basis, why, running), name="scheduling mode"))
    return found


# A bound is reached again and again: so many steps of as many tokens with so many numbers of decodes among them; so
# many steps in which requests wait, all but this share of them with as many running, and KV blocks to spare.
_FULL_STEPS, _MIXES, _WAITING_STEPS, _OTHER_STEPS, _TO_SPARE = 10, 4, 50, 0.02, 0.1


def _bound(steps: Rows, name: str, most: int) -> str:
    """In words, why the most that steps have is a bound of the server; empty if it may be what came."""
    if name == "max_num_batched_tokens":
        full = steps.where(f"prefill_tokens + decode_tokens = {most}")
        seen = full.aggregate(steps="count(*)", mixes="count(DISTINCT decode_tokens)")
        several = seen["steps"] >= _FULL_STEPS and seen["mixes"] >= _MIXES
        return f"{seen['steps']:,} of its steps have exactly that many tokens, and none more" if several else ""
    seen = steps.where("waiting_depth > 0").aggregate(
        steps="count(*)",
        below=f"count(*) FILTER (running_depth < {most})",
        free="min(1.0 * kv_blocks_free / nullif(kv_blocks_total, 0))",
    )
    if seen["steps"] < _WAITING_STEPS or seen["below"] > _OTHER_STEPS * seen["steps"]:
        return ""
    spare = seen["free"] is not None and float(seen["free"]) >= _TO_SPARE
    return f"as many run in {seen['steps']:,} steps in which others wait, and KV blocks are free" if spare else ""


def _as_counted(name: str, basis: str, why: str, value: int | bool) -> Component:
    mend = f"tell it: {name}: {str(value).lower()} in a file for blis-replay ingest --engine"
    return Component(name, basis, why, mend, engine={name: value})


def _input(name: str, basis: str, why: str, **change: Any) -> Component:
    ((key, value),) = change.items()
    return Component(name, basis, why, f"replay it as recorded: --replay {key}={value}", change)


def _modelled(replayed: Replayed, reference: CoefficientRelease | None) -> tuple[list[Component], dict[str, str]]:
    recording = replayed.recording
    able, unable = recorded_delays(recording)
    calibrate = _calibrate(replayed, "segments")
    look = f"see what is waited for: blis-replay segments --experiment {recording.alias}{replayed.options}"
    known = {
        "pre_queue": (PRE_QUEUE, "its delay before the queue is {} than the server's", calibrate),
        "schedule": ("scheduling decisions", "it admits requests that the server passed over", look),
        "output_processing": (OUTPUT, "its delays after the engine are {} than the server's", calibrate),
    }
    components, left = [], {}
    for key, (name, why, mend) in known.items():
        if getattr(replayed.mode, key) == "recorded":
            continue
        if key in able:
            longer, shorter = why.format("longer"), why.format("shorter")
            components.append(Component(name, able[key], longer, mend, {key: "recorded"}, less=shorter))
        elif reference is None or key == "schedule":
            left[name] = unable[key]
        else:
            stand_in = _stand_in(replayed, reference, name, why, mend)
            if stand_in is None:
                left[name] = f"{unable[key]}; and coefficients {reference.name} have the same"
            else:
                components.append(stand_in)
    return components, left


def _calibrate(replayed: Replayed, verb: str) -> str:
    """What to do about coefficients: fit them; where that is done, let ``verb`` show what is left."""
    alias, fit = quote(replayed.recording.alias), replayed.entry.fit
    if fit is not None and any(score.experiment == replayed.recording.slug for score in fit.scores):
        again = f"blis-replay {verb} --experiment {alias}{replayed.options}"
        return f"the coefficients are fitted to this recording; see what is left: {again}"
    return f"calibrate: blis-replay calibrate --train {alias}{of_store(replayed.options)} --out mine.yaml"


def _fitted(server: Replayed) -> list[Component] | None:
    """Step time and delays where only the client recorded anything; None where that explains nothing, or is not so.

    ``server``: the replay with all else replaced.
    """
    recording, mode = server.recording, server.mode
    forced = {mode.pre_queue, mode.schedule, mode.output_processing} != {"modelled"} or mode.step_time != "modelled"
    if forced or not recording.steps.is_empty() or not recording.lifecycles.is_empty():
        return None
    through = server.through
    if through is None or np.isnan(through.target.observed_us[0]).all():
        return None  # E2E alone does not tell steps from delays
    fit = through.fit()
    if fit.left > _EXPLAINS * fit.before:
        return None
    changed = fit.entry(server.entry)
    left = f"their mean difference falls from {100 * fit.before:.1f} to {100 * fit.left:.1f} %"
    basis = f"not recorded; fitted to the latencies of {through.target.observed_us.shape[1]:,} requests: {left}"
    components = []
    for name, costs, words, fields in _COSTS:
        lifecycle = {key: getattr(changed.lifecycle, key) for key in fields}
        same = all(value == getattr(server.entry.lifecycle, key) for key, value in lifecycle.items())
        if same and not (name == STEP_TIME and any(fit.line_ns)):
            continue
        longer, shorter = (words.format(word) for word in _WORDS[name])
        latency = changed.latency if name == STEP_TIME and isinstance(changed.latency, CorrectedModel) else None
        also = _as_well(fit, costs)
        mend = ("to be sure record journeys; " if also else "") + _calibrate(server, "segments")
        if name == STEP_TIME and (unlike := _unlike_a_step(recording, through, fit)):
            also, mend = (*also, unlike), f"to be sure record {_DECIDES[unlike]}; {_calibrate(server, 'segments')}"
        components.append(
            Component(name, basis, longer, mend, latency=latency, lifecycle=lifecycle, also=also, less=shorter)
        )
    return components


# A fit must leave at most this share of what differs: what else differs no step time and no delay explains.
_EXPLAINS = 0.6
# Recorded cycles with which single requests are off by at most this factor more may be better in the mean.
_NO_WORSE = 1.1
# Components of what a fit changes: places of the costs, a sentence, fields of the delays.
_OUTPUT_DELAYS = ("post_token_us", "post_request_us", "stamp_us")
_COSTS = (
    (STEP_TIME, range(4), "its steps take {} than the server's", ()),
    (PRE_QUEUE, range(4, 5), "its delay before the queue is {} than the server's", ("pre_queue_us",)),
    (OUTPUT, range(5, 8), "its delays after the engine are {} than the server's", _OUTPUT_DELAYS),
)
_WORDS = {STEP_TIME: ("longer", "less time"), PRE_QUEUE: ("longer", "shorter"), OUTPUT: ("longer", "shorter")}


# A server whose requests take so much less than simulated, and differ one by one by such a share of that whatever its
# steps take, may have given several tokens a step.
_SPED_UP, _SCATTER = 0.5, 0.15
_DECIDES = {
    "prompt lengths": "the usage that the server sends",
    "speculative decoding": "the server's start-up log (speculative_config)",
}


def _unlike_a_step(recording: Recording, through: Through, fit: Fitted) -> str:
    """What a client cannot tell from another step time; empty where it can."""
    if fit.equal and fit.equal[0] == (_PREFILL_COST, frozenset({_PREFILL_COST})) and fit.before < _COUNTED_OFF:
        return "prompt lengths"
    sped_up = float(np.nanmean(through.as_it_is[1])) > _SPED_UP and fit.left > _SCATTER * fit.before
    drafts = "speculative_config" in recording.engine
    return "speculative decoding" if sped_up and not drafts else ""


# Its place among the costs of a fit; and prompts that are counted wrong do not make requests so many times longer.
_PREFILL_COST, _COUNTED_OFF = 1, 1.0


def _as_well(fit: Fitted, costs: range) -> tuple[str, ...]:
    """Components that explain as well what these costs of a fit do: all that was fitted of them.

    A client sees a delay before the queue and one of the first token alike, and so it does its own late stamps.
    """
    equal = set.intersection(*(set(as_well) for cost, as_well in fit.equal if cost in costs))
    also = [name for name, other, _, _ in _COSTS if equal & set(other) and other != costs]
    return tuple(dict.fromkeys([*also, *((OUTPUT, "send stamps") if costs == range(4, 5) else ())]))


def _step_time(server: Replayed, reference: CoefficientRelease | None) -> Component | str:
    """The step time of the server; ``server``: the replay with all else replaced.  Else why it is not known."""
    why, mend = (
        "its steps take {} than the server's",
        _calibrate(server, "segments" if server.recording.steps.is_empty() else "coefficients steps"),
    )
    try:
        latency, basis, nature = corrected_model(server.recording, server.mode, server.entry)
    except (ReplayError, TraceError) as error:
        stand_in = _stand_in(server, reference, STEP_TIME, why, mend) if reference else None
        return stand_in or str(error)
    longer, shorter = why.format("longer"), why.format("less time")
    name = STEP_TIME
    if nature is not None and nature.is_held_up:
        shorter = f"{shorter}: {nature.words}"
    elif nature is not None and nature.is_pace:
        name, longer = PACE_OF_STEPS, f"the server's steps {nature.words}, whatever is in them"
        shorter, mend = (
            longer,
            f"compare clocks, temperature, kind and number of the GPUs with those of the fit; {mend}",
        )
    elif nature is not None and nature.is_off:
        why = f"most of it by {nature.cost}" if nature.cost else "by their pace or by one cost, which is not told"
        longer, shorter = (f"{words}, {why}: the server's {nature.words}" for words in (longer, shorter))
    component = Component(name, basis, longer, mend, latency=latency, less=shorter)
    return _unless_it_misses(component, server) or component


def _unless_it_misses(step_time: Component, server: Replayed) -> str:
    """Why recorded cycles are not put in the place of the model's: with them requests are further off than without.

    Latencies alone tell cycles roughly, so there they have to explain clearly more than they miss.
    """
    target = target_of(server.recording)
    if target is None:
        return ""
    two = (_left(replayed, target) for replayed in (server, substituted([step_time], server, None)))
    (before, off_before), (after, off_after) = two
    only_latencies = server.recording.steps.is_empty() and server.recording.lifecycles.is_empty()
    if after <= (_EXPLAINS if only_latencies else 1.0) * before:
        return ""
    # Where requests differ one by one whatever the steps take, their means tell.
    if not only_latencies and after <= _NO_WORSE * before and off_after <= _EXPLAINS * off_before:
        return ""
    theirs = "inferred from latencies" if only_latencies else "as recorded"
    off = (
        f"TTFT and E2E per request are off by {100 * before:.1f} % with the simulator's step times, and by "
        f"{100 * after:.1f} % with step times {theirs}"
    )
    return f"{off}; record steps, and all that the server served" if only_latencies else off


def _left(replayed: Replayed, target: Target) -> tuple[float, float]:
    """How far TTFT and E2E of a replay are from what was observed: request by request, and in the mean."""
    run = replayed.run()
    simulated_us = np.stack([run.ttft_us, run.e2e_us])[:, : len(target.chosen)][:, target.chosen]
    known = ~np.isnan(target.observed_us[:2]).all(axis=1)
    difference = ((simulated_us - target.observed_us[:2]) / target.scale_us[:2, None])[known]
    return misfit(difference), float(np.abs(np.nanmean(difference, axis=1)).mean())


def _stand_in(replayed: Replayed, reference: CoefficientRelease, name: str, why: str, mend: str) -> Component | None:
    """A component with the coefficients of the reference, None if they are the same."""
    if _with_coefficients_of(entry_of(reference, replayed.recording), replayed.entry, name) == replayed.entry:
        return None
    shorter = "less time" if name == STEP_TIME else "shorter"
    basis, than = f"not recorded; as coefficients {reference.name} have it", why.format
    return Component(name, basis, than("longer"), mend, from_reference=True, less=than(shorter))
