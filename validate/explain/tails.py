"""Errors that a mean hides: a tail that is off while the mean is not, and load stages that cancel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.latency import Values
from blis_replay.validate.metrics.observed import samples_of, simulated_samples
from blis_replay.validate.text.cells import predicted

MIN_REQUESTS = {"p99": 500, "p90": 100}  # a quantile of fewer requests is that of a handful
MIN_TAIL_ERROR = 0.1  # a quantile that is off by less is not worth a sentence ...
MIN_OVER_MEAN = 2.0  # ... nor one that is off by less than this many times the mean
MIN_VARIANCE = 0.2  # groups explain a tail if they explain this share of the variance of the differences ...
MIN_GROUP = 0.02  # ... and have this share of the requests
MIN_STAGE_ERROR = 0.02  # load stages cancel if one is off by this share up, and one down
MIN_OF_STAGE = 20  # requests
WINDOWS = 8  # stretches of time that requests are divided into
QUARTERS = 4  # groups by length or wait
# A first token is late on its own if it lags those sent around it (NEIGHBOURS on either side) by this many standard
# deviations of all and this share of the median TTFT.
LATE_DEVIATIONS = 4.0
LATE_SHARE = 0.25
NEIGHBOURS = 3
MIN_LATE = 10  # requests for a sentence ...
MAX_LATE = 0.05  # ... if no more than this share are late
NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class _Group:
    """Requests that have something in common: ``of``: bool[requests]; ``words``: which they are."""

    words: str
    of: Bools


def hidden_errors(run: ReplayRun, chosen: Bools, forbidden: set[str]) -> list[str]:
    """Sentences about the requests ``chosen`` (bool[n]); ``forbidden``: metrics that must not be used."""
    if not chosen.any():
        return []
    recording = run.recording
    observed, simulated = samples_of(recording, chosen), simulated_samples(run, chosen)
    sides = {"e2e": (observed.e2e_us, simulated.e2e_us), "ttft": (observed.ttft_us, simulated.ttft_us)}
    stage = recording.requests["stage"].fill_null(-1).to_numpy()[chosen]
    sent_us = recording.requests["arrival_us"].to_numpy()[chosen]
    said, no_request = [], np.zeros(len(sent_us), bool)
    for metric, (seen_us, made_us) in sides.items():
        if metric in forbidden or seen_us.mean() <= 0:
            continue
        alone = late_alone(seen_us - made_us, sent_us, float(np.median(seen_us))) if metric == "ttft" else no_request
        said.append(_tail(metric, seen_us, made_us, _groups(run, recording, chosen), alone))
        said.append(stages_that_cancel(metric, seen_us, made_us, stage, recording.alias))
    return [sentence for sentence in said if sentence]


def _tail(metric: str, seen_us: Values, made_us: Values, groups: list[list[_Group]], alone: Bools) -> str:
    """What is off at the far end, and which requests that are: those that share a length, a time or a queue.

    Or those ``alone`` (bool[requests]), if little is off without them.
    """
    mean = made_us.mean() / seen_us.mean() - 1
    for name, fewest in MIN_REQUESTS.items():
        if len(seen_us) < fewest:
            continue
        seen, made = _at(name, seen_us, made_us)
        if seen <= 0 or abs(made / seen - 1) < max(MIN_TAIL_ERROR, MIN_OVER_MEAN * abs(mean)):
            continue
        off = f"{metric.upper()} {name} is {predicted(made / seen - 1)}, the mean {predicted(mean)}"
        if MIN_LATE <= alone.sum() <= MAX_LATE * len(alone):
            seen_else, made_else = _at(name, seen_us[~alone], made_us[~alone])
            without = made_else / seen_else - 1
            if abs(without) <= abs(made / seen - 1) / 2:
                late_ms = float(np.median((seen_us - made_us)[alone])) / 1000
                return (
                    f"{off}: {int(alone.sum()):,} requests ({100 * alone.mean():.1f} %) get their first token late on "
                    f"their own, by {late_ms:.0f} ms (median), while those sent around them get it in time. Without "
                    f"them {name} is {predicted(without)}. Look at the network, the client, the tokeniser, and prompts "
                    "that missed the prefix cache"
                )
        group = _which(made_us - seen_us, groups)
        if group is None:
            return f"{off}: no length, time or queue tells these requests from the others"
        rest = _error(seen_us, made_us, ~group.of)
        share = 100 * group.of.mean()
        its = predicted(_error(seen_us, made_us, group.of))
        return f"{off}: {group.words} ({share:.0f} %) are {its}, the others {predicted(rest)}"
    return ""


def _at(name: str, *sides: Values) -> tuple[float, ...]:
    """``p99`` of each side."""
    return tuple(float(np.quantile(values, int(name[1:]) / 100)) for values in sides)


def late_alone(late_us: Values, sent_us: Int64s, usual_us: float) -> Bools:
    """bool[requests]: whose first token is far later than simulated while those sent around them come in time.

    ``late_us``: observed less simulated; ``usual_us``: a usual TTFT.  In a queue, or behind a long step, neighbours
    are late together, so something else holds up a request that is late alone.
    """
    alone = np.zeros(len(late_us), bool)
    if len(late_us) <= 2 * NEIGHBOURS:
        return alone
    order = np.argsort(sent_us, kind="stable")
    late, middle = late_us[order].astype(np.float64), float(np.median(late_us))
    beside = np.concatenate([np.arange(-NEIGHBOURS, 0), np.arange(1, NEIGHBOURS + 1)])
    places = np.clip(np.arange(len(late))[:, None] + beside, 0, len(late) - 1)
    around = np.median(late[places], axis=1)
    bar = max(LATE_DEVIATIONS * NORMAL * float(np.median(np.abs(late - middle))), LATE_SHARE * usual_us)
    alone[order] = (late - around > bar) & (np.abs(around - middle) < bar / 2)
    return alone


def stages_that_cancel(metric: str, seen_us: Values, made_us: Values, stage: Int64s, alias: str) -> str:
    """Load stages whose errors cancel in the mean of all."""
    found = {
        int(one): _error(seen_us, made_us, stage == one)
        for one in np.unique(stage)
        if (stage == one).sum() >= MIN_OF_STAGE
    }
    if len(found) < 2:
        return ""
    most, least = max(found, key=lambda one: found[one]), min(found, key=lambda one: found[one])
    whole = made_us.mean() / seen_us.mean() - 1
    cancel = found[most] >= MIN_STAGE_ERROR and found[least] <= -MIN_STAGE_ERROR
    if not cancel or abs(whole) > max(found[most], -found[least]) / 2:
        return ""
    return (
        f"{metric.upper()} mean is {predicted(whole)} because load stages cancel: stage {most} is "
        f"{predicted(found[most])}, stage {least} {predicted(found[least])}; blis-replay validate {alias} --by-stage "
        "shows each"
    )


def _error(seen_us: Values, made_us: Values, of: Bools) -> float:
    return float(made_us[of].mean() / seen_us[of].mean() - 1) if of.any() and seen_us[of].mean() > 0 else 0.0


def _which(difference_us: Values, groups: list[list[_Group]]) -> _Group | None:
    """The group that is off most, of the division of the requests that makes out most of how differences vary."""
    spread = float(((difference_us - difference_us.mean()) ** 2).sum())
    divisions = [
        (_explained_share(difference_us, division, spread), division) for division in groups if len(division) > 1
    ]
    most, division = max(divisions, key=lambda pair: pair[0], default=(0.0, []))
    if most < MIN_VARIANCE:
        return None
    large = [group for group in division if group.of.mean() >= MIN_GROUP]
    middle = float(np.median(difference_us))
    return max(large, key=lambda group: abs(float(difference_us[group.of].mean()) - middle), default=None)


def _explained_share(difference_us: Values, division: list[_Group], spread: float) -> float:
    between = sum(
        int(group.of.sum()) * (float(difference_us[group.of].mean()) - float(difference_us.mean())) ** 2
        for group in division
    )
    return between / spread if spread else 0.0


def _groups(run: ReplayRun, recording: Recording, chosen: Bools) -> list[list[_Group]]:
    """The requests divided by time of send, by length of prompt and of output, and by whether they had to wait."""
    rows = recording.requests
    sent_us = rows["arrival_us"].to_numpy()[chosen]
    edges = np.linspace(sent_us.min(), sent_us.max() + 1, WINDOWS + 1)
    window = np.searchsorted(edges, sent_us, side="right") - 1
    times = [
        _Group(f"requests sent from {edges[i] / 1e6:.0f} to {edges[i + 1] / 1e6:.0f} s", window == i)
        for i in np.unique(window)
    ]
    lengths = {"prompts": rows["prompt_tokens"], "outputs": rows["output_tokens"]}
    by_length = [
        list(_by_size(what, values.fill_null(0).to_numpy()[chosen].astype(np.float64), "tokens"))
        for what, values in lengths.items()
    ]
    queues = []
    if run.simulated.engine is not None:
        result = run.simulated.engine
        wait_us = (result.scheduled_us - result.arrival_us)[chosen].astype(np.float64)
        queues = [list(_by_size("simulated waits", wait_us / 1000, "ms"))]
    return [times, *by_length, *queues]


def _by_size(what: str, values: Floats, unit: str) -> Iterator[_Group]:
    edges = np.unique(np.quantile(values, np.linspace(0, 1, QUARTERS + 1)))
    place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
    for i in np.unique(place):
        high = edges[min(i + 1, len(edges) - 1)]
        yield _Group(f"requests with {what} of {edges[i]:,.0f} to {high:,.0f} {unit}", place == i)
