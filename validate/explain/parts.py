"""Hypotheses on what the simulator models: step time, delays around the engine, scheduling decisions.

Each is an entry of ``PARTS``.  It is replaced by what was recorded; where only the client recorded anything, by what
fits the latencies of single requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from blis_replay.base.errors import ReplayError, TraceError, counted
from blis_replay.ingest.checks.stationarity import STALL_US
from blis_replay.ingest.recording import Recording
from blis_replay.replay.observed import (
    observed_cycles,
    observed_delivery,
    observed_pre_queue,
    recorded_delays,
    server_stamps,
)
from blis_replay.replay.prefix import prefix_identity
from blis_replay.validate.explain.cycles import recorded_nature
from blis_replay.validate.explain.hypothesis import OPEN, PROVED_RIGHT, Hypothesis, Replayed, Standing, stalled
from blis_replay.validate.explain.inputs import LENGTHS
from blis_replay.validate.explain.rule import MAX_LEFT, MIN_GAIN, explains, worsens
from blis_replay.validate.explain.trial import (
    OUTPUT_COSTS,
    PRE_QUEUE_COST,
    PREFILL_COST,
    STEP_COSTS,
    Fit,
    Trial,
    trial_of,
    with_costs,
)

STEP_TIME, PRE_QUEUE, OUTPUT, DECISIONS = (
    "step time",
    "delay before the queue",
    "output processing",
    "scheduling decisions",
)
PACE_OF_STEPS = "pace of steps"  # the step time, where one factor is wrong in all that a step costs
PREFIX_CACHE, PROMPTS, SPECULATION = "prefix cache", "prompt lengths", "speculative decoding"
# A client cannot tell several tokens per step from shorter steps: named where requests are over-predicted by half ...
SPED_UP = 0.5
SCATTER = 0.15  # ... and this share of the error is left, as the number of tokens per step varies
MIN_HIT_RATE = 0.05  # of prompt tokens: fewer hits in all make no step time seem wrong
MAX_HELD_UP = 0.2  # share of requests; where more wait, the delay belongs to all
MAX_MISCOUNT = 1.0  # prompts that are counted wrong do not double the latencies


def _part(
    name: str, key: str, longer: str, shorter: str = "", decides: str = "journeys of every request"
) -> Hypothesis:
    return Hypothesis(name, longer, "", decides=decides, less=shorter, mode={key: "recorded"})


_BEFORE, _AFTER = "the simulator's delay before the queue is", "the simulator's delays after the engine are"
_STEPS = "the simulator's steps take"
# Each with the mode that replaces it by its recording.
PARTS = (
    _part(PRE_QUEUE, "pre_queue", f"{_BEFORE} longer than the server's", f"{_BEFORE} shorter than the server's"),
    _part(DECISIONS, "schedule", "the simulator admits requests that the server passed over"),
    _part(OUTPUT, "output_processing", f"{_AFTER} longer than the server's", f"{_AFTER} shorter than the server's"),
    _part(
        STEP_TIME,
        "step_time",
        f"{_STEPS} longer than the server's",
        f"{_STEPS} less time than the server's",
        "step records",
    ),
)
_BY_NAME = {part.name: part for part in PARTS}
# Where they are in a point of a fit, and their delays in the coefficients.
_COSTS = {STEP_TIME: STEP_COSTS, PRE_QUEUE: PRE_QUEUE_COST, OUTPUT: OUTPUT_COSTS}
_DELAYS = {
    STEP_TIME: (),
    PRE_QUEUE: ("pre_queue_us", "pre_queue_per_prompt_token_us"),
    OUTPUT: ("post_token_us", "post_request_us", "first_token_per_decode_us", "stamp_us"),
}


def parts_of(server: Replayed, proved: Mapping[str, str]) -> tuple[list[Hypothesis], list[Standing]]:
    """The modelled parts that can be replaced, and why others cannot.

    ``server``: the replay with all inputs put right.  ``proved``: what is proved right, by name, with the proof: it is
    not blamed.
    """
    recording = server.recording
    fitted = _fitted(server, proved) if recording.steps.is_empty() and recording.lifecycles.is_empty() else None
    if fitted is not None:
        also = {name for one in fitted for name in one.also}
        alike, no_other = "another one would explain the latencies as well", "the latencies do not ask for another"
        unable = {name: alike if name in also else no_other for name in _COSTS}
        unable[DECISIONS] = "journeys of requests were not recorded"
        return fitted, _open(unable, fitted, server)
    found, unable = _delays(server)
    found = [one for one in found if one.name not in proved]
    if server.mode.step_time == "modelled":
        step_time = _step_time(server.put_right(found))
        if isinstance(step_time, Hypothesis):
            found.append(step_time)
        else:
            unable[STEP_TIME] = step_time
    if not found and recording.lifecycles.is_empty():
        # Steps are not the cause by their records; a delay may be, and that the client saw.
        delays = _fitted(server, proved)
        if delays and all(one.name != STEP_TIME for one in delays):
            return delays, _open(unable, delays, server)
    others = [one for one in found if one.name != DECISIONS]
    if others == found or not others or not _follow(server, others, found):
        return found, _open(unable, found, server)
    why = "they follow from the other components; with those replaced they explain no further error"
    return others, [Standing(DECISIONS, PROVED_RIGHT, why), *_open(unable, found, server)]


def _follow(server: Replayed, others: list[Hypothesis], found: list[Hypothesis]) -> bool:
    """Whether scheduling decisions, which are ``found`` as well, follow from the other parts.

    Whom a scheduler passes over follows from its queue, and that from how long steps and delays are.  With both as they
    are, forcing it makes half of an error good that has another cause; with all others replaced it changes nothing.
    """
    trial = trial_of(server)
    if trial is None:
        return False
    without, having = (Trial(server.put_right(parts), trial.target).left for parts in (others, found))
    return without - having < MIN_GAIN


def _open(unable: Mapping[str, str], found: Sequence[Hypothesis], server: Replayed) -> list[Standing]:
    """Why the other parts than those ``found`` are not replaced."""
    alias, names = f"{server.recording.alias}: ", {one.name for one in found}
    left = {name: why.removeprefix(alias) for name, why in unable.items() if name not in names}
    return [Standing(name, OPEN, why, _BY_NAME[name].decides) for name, why in left.items()]


def _delays(server: Replayed) -> tuple[list[Hypothesis], dict[str, str]]:
    """Delays and decisions as recorded, and why others cannot be replaced."""
    able, unable = recorded_delays(server.recording)
    found, left = [], {}
    for part in PARTS:
        (key,) = part.mode
        if key in able and getattr(server.mode, key) != "recorded":
            of_decisions = ("see what is waited for", server.segments)
            remedy, command = of_decisions if part.name == DECISIONS else server.calibrate()
            if waits := _standing_still(server.recording, key):
                remedy, command = "record a run in which nothing stands still", ""
                part = replace(part, less=f"{part.less}: {waits}")
            found.append(replace(part, remedy=remedy, command=command, basis=able[key], recorded=True))
        elif key in unable and getattr(server.mode, key) != "recorded":
            left[part.name] = unable[key]
    return found, left


def _standing_still(recording: Recording, key: str) -> str:
    """What a few requests waited while something stood still; empty where a delay is that of all requests."""
    if key == "schedule":
        return ""
    stamps = server_stamps(recording)
    if key == "pre_queue":
        delay_us = observed_pre_queue(recording, stamps, observed_cycles(recording)[0])[0]
    else:
        delay_us = np.maximum(*observed_delivery(recording, stamps)[:2])
    beyond_us = np.maximum(delay_us - np.median(delay_us), 0.0)
    late = beyond_us > STALL_US
    if not late.any() or late.mean() > MAX_HELD_UP or beyond_us[late].sum() < beyond_us.sum() / 2:
        return ""
    first_s = recording.requests["arrival_us"].to_numpy()[late].min() / 1e6
    longest = f"up to {beyond_us.max() / 1e6:.1f} s, the first sent at second {first_s:.1f}"
    return f"{counted(int(late.sum()), 'request')} waited {longest}, as if client, network or server stood still"


def _fitted(server: Replayed, proved: Mapping[str, str]) -> list[Hypothesis] | None:
    """Step time and delays by the latencies of the requests; None if they explain nothing."""
    recording, entry = server.recording, server.entry
    replaced = any(getattr(server.mode, key) != "modelled" for part in PARTS for key in part.mode)
    trial = None if replaced else trial_of(server)
    if trial is None or np.isnan(trial.target.observed_us[0]).all():
        return None  # E2E alone does not tell steps from delays
    fit = trial.fit()
    if fit.left > MAX_LEFT * trial.left:
        return None
    changed = with_costs(entry, fit.at)
    left = f"their mean difference falls from {100 * trial.left:.1f} to {100 * fit.left:.1f} %"
    basis = f"not recorded; fitted to the latencies of {trial.target.observed_us.shape[1]:,} requests: {left}"
    if not {LENGTHS, PROMPTS} <= proved.keys():
        basis += "; wrong token counts can look the same, so compare them with the server's usage or /metrics"
    found = []
    for name, costs in _COSTS.items():
        lifecycle = {delay: getattr(changed.lifecycle, delay) for delay in _DELAYS[name]}
        steps = name == STEP_TIME and bool(np.rint(fit.at[costs]).any())
        if not steps and replace(entry.lifecycle, **lifecycle) == entry.lifecycle:
            continue
        also, (remedy, command) = _as_well(fit, name), server.calibrate()
        unlike = _unlike_a_step(recording, trial, fit) if steps else ""
        if unlike and unlike not in proved:
            if unlike == PREFIX_CACHE:  # a fit to it would make prefill too cheap
                remedy, command = "of what was recorded see", server.segments
            also, remedy = (*also, unlike), f"to be sure record {_DECIDES[unlike]}; {remedy}"
        elif also:
            remedy = f"to be sure record journeys; {remedy}"
        one = replace(_BY_NAME[name], mode={}, lifecycle=lifecycle, latency=changed.latency if steps else None)
        found.append(replace(one, remedy=remedy, command=command, basis=basis, also=also))
    return found


_DECIDES = {
    PREFIX_CACHE: "cached tokens in the server's usage, or restart the server before",
    PROMPTS: "the usage that the server sends",
    SPECULATION: "the server's start-up log (speculative_config)",
}


def _unlike_a_step(recording: Recording, trial: Trial, fit: Fit) -> str:
    """What a client cannot tell from another step time; empty where it can."""
    caching = recording.engine.get("enable_prefix_caching")
    unknown = recording.requests["cached_prompt_tokens"].null_count() and prefix_identity(recording) is None
    # Cheap prefills are hits only if the server did not count how few it had.
    unknown = unknown and (recording.prefix_hit_rate is None or recording.prefix_hit_rate > MIN_HIT_RATE)
    if np.rint(fit.at[PREFILL_COST]) < 0 and unknown and (caching is None or caching.value):
        return PREFIX_CACHE
    if fit.equal and fit.equal[0] == (PREFILL_COST, frozenset({PREFILL_COST})) and trial.left < MAX_MISCOUNT:
        return PROMPTS
    sped_up = float(np.nanmean(trial.difference_as_is[1])) > SPED_UP and fit.left > SCATTER * trial.left
    return SPECULATION if sped_up and "speculative_config" not in recording.engine else ""


def _as_well(fit: Fit, name: str) -> tuple[str, ...]:
    """Parts that explain as well all that was fitted of this one.

    A client sees a delay before the queue and one of the first token alike, and its own late stamps too.
    """
    equal = set.intersection(*(set(as_well) for cost, as_well in fit.equal if cost in _COSTS[name]))
    also = [other for other, costs in _COSTS.items() if equal & set(costs) and other != name]
    return tuple(dict.fromkeys([*also, *((OUTPUT, "send stamps") if name == PRE_QUEUE else ())]))


def _step_time(server: Replayed) -> Hypothesis | str:
    """The step time of the server, or why it is not known; ``server``: the replay with all else put right."""
    recorded = not server.recording.steps.is_empty()
    remedy, command = server.calibrate("coefficients test" if recorded else "")
    try:
        cycles, basis = observed_cycles(server.recording)
        nature = recorded_nature(server, cycles) if recorded else None
    except (ReplayError, TraceError) as error:
        return str(error)
    if recorded and server.stalls is not None:  # a standstill is a cause of its own
        cycles = stalled(cycles, server.stalls, -1)
    found = replace(_BY_NAME[STEP_TIME], remedy=remedy, command=command, basis=basis)
    found = replace(found, latency=cycles, mode={"pace": "modelled"}, recorded=recorded)
    if nature is not None and nature.is_held_up:
        found = replace(found, less=f"{found.less}: {nature.words}")
    elif nature is not None and nature.is_pace:
        if nature.stretch is not None:  # a fit would have it
            remedy, command = "record this load again, as something else slowed the server for a part of it", ""
        why = f"the server's steps {nature.words}, whatever is in them; steps that were held up do not count"
        remedy = f"compare the machine with that of the fit (kind, clocks, temperature, what else ran on it); {remedy}"
        found = replace(found, name=PACE_OF_STEPS, why=why, less=why, remedy=remedy, command=command)
    elif nature is not None and nature.is_off:
        by = f"mostly in the cost of {nature.cost}" if nature.cost else "in all costs or in one (not identifiable)"
        more = f", {by}: the server's steps {nature.words}"
        # Of a part of the run, or of one metric, the error may have the other sign.
        found = replace(found, less=found.less + more) if nature.factor > 1 else replace(found, why=found.why + more)
    return _why_not(found, server) or found


def _why_not(step_time: Hypothesis, server: Replayed) -> str:
    """Why recorded cycles do not replace the model's: requests are further off with them.

    Cycles that are inferred from latencies have to explain their error.
    """
    trial = trial_of(server)
    if trial is None:
        return ""
    before, left = trial.left, Trial(server.put_right([step_time]), trial.target).left
    inferred = server.recording.steps.is_empty() and server.recording.lifecycles.is_empty()
    if explains(before, left) if inferred else not worsens(before, left):
        return ""
    theirs = "inferred from latencies" if inferred else "as recorded"
    times = f"{100 * before:.1f} % with the simulator's step times, and by {100 * left:.1f} % with step times {theirs}"
    return f"requests are off by {times}" + ("; record steps, and all that the server served" if inferred else "")
