"""Recordings of one load on one server, which show how far the server differs from itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.base.errors import NothingToJudgeError
from blis_replay.ingest.identity import shared_requests
from blis_replay.ingest.overload import client_limits
from blis_replay.ingest.recording import RECORDED, Recording
from blis_replay.ingest.store import Store, read_stored
from blis_replay.validate.comparison.sides import recording_side
from blis_replay.validate.experiment import select_experiments
from blis_replay.validate.metrics.latency import MetricStatistic, values_of
from blis_replay.validate.metrics.observed import observed_requests, pooled_gaps, samples_of
from blis_replay.validate.metrics.skill import SCORED
from blis_replay.validate.run_mark import run_mark, same_run

# Two loads are one if counts and lengths differ by less than this, and the time they take by less than that.
_LOAD, _SPAN = 0.01, 0.05
# Share of requests that are those of another recording, one by one.  Of two runs of equal requests on a calm server
# (standard deviation of TTFT 0.3 ms) it is a fifth.
_COPIED = 0.9
# Between two instruments of one run an E2E varies by this share, or by this time: chosen, not measured.
_JITTER, _JITTER_US = 0.002, 1_000
# Gaps between sends vary by their standard deviation over their mean: 1 for a Poisson process, 0 for a steady rate.
# Two processes lie apart by this factor, and one varies by more than that; 20 Poisson gaps vary by 0.6 to 1.5.
_OTHER_PROCESS, _VARY = 2.0, 0.8


@dataclass(frozen=True)
class Repeats:
    """Recordings of one load on one server.

    ``recordings``: aliases (slugs, where they share one), the judged one first.  ``numbers_us``: by metric and
    statistic, what each observed, in that order; absent where a recording lacks the number.  ``apart_us``: by metric,
    how far the latencies of a request lie apart in two of them, the mean over the requests; absent where these have
    other lengths.
    """

    recordings: tuple[str, ...]
    numbers_us: Mapping[MetricStatistic, tuple[float, ...]]
    apart_us: Mapping[str, float]

    @property
    def apart(self) -> dict[MetricStatistic, float]:
        """The largest difference of two of them over the value of the judged one."""
        return {cell: (max(us) - min(us)) / us[0] for cell, us in self.numbers_us.items()}


def repeats_of(
    store: Store, slugs: Sequence[str], repeats: Sequence[str], alike: Sequence[Recording] = ()
) -> dict[str, Repeats]:
    """By slug, the repeats of its load, where it has any.

    ``repeats``: as ``select_experiments``; each belongs to the experiments whose load it has.  ``alike``: of ``slugs``,
    those that are repeats of each other where they have one load.  Raises ``NothingToJudgeError`` for one of
    ``repeats`` that repeats none of them, ``UnknownExperimentError`` for an unknown name.
    """
    if not repeats and len(alike) < 2:
        return {}
    others = [read_stored(store, slug) for slug in (select_experiments(store, repeats) if repeats else ())]
    of_slug, used, among = {}, set(), {one.slug for one in alike}
    for slug in slugs:
        recording = read_stored(store, slug)
        beside = [*others, *(one for one in alike if slug in among and one.slug not in {o.slug for o in others})]
        same = [other for other in beside if other.slug != slug and not _differs(recording, other)]
        used |= {other.slug for other in same} | {slug}
        if same:
            of_slug[slug] = _repeats(store, [recording, *same])
        for i, one in enumerate([recording, *same]):
            refuse_copies(one, [recording, *same][:i])
    for other in others:
        if other.slug not in used:
            why = "; ".join(f"{slug}: {_differs(read_stored(store, slug), other)}" for slug in slugs)
            raise NothingToJudgeError(
                f"{other.slug} is not a repeat of an experiment that is judged ({why}); "
                "record the same load on the same server again"
            )
    return of_slug


def refuse_copies(recording: Recording, others: Sequence[Recording]) -> None:
    """Raise ``NothingToJudgeError`` for a recording of the same run as one of the others."""
    for other in others:
        if why := copy_of(recording, other):
            raise NothingToJudgeError(
                f"{recording.slug} is no other run: {why}; record the same load on the same server again"
            )


def copy_of(recording: Recording, other: Recording) -> str:
    """Why a recording is the run of another, in words: its requests, or when it was; empty if it is not.

    The log of a server that stayed up is that of all runs on it, so it tells nothing here.
    """
    if (share := shared_requests(other, recording)) > _COPIED:
        return f"{100 * share:.0f} % of its requests are those of {other.slug}"
    marks = [run_mark(one) for one in (other, recording)]
    at_once = None not in [mark.sent_us for mark in marks] and same_run(*marks)
    return f"it is {other.slug}, as another instrument saw it" if at_once and _moves_with(recording, other) else ""


def _moves_with(recording: Recording, other: Recording) -> bool:
    """Whether each E2E is that of the same request in the other one, but for a delay that all have.

    Servers side by side differ from request to request, though they serve one load at one time.
    """
    sides = [one.requests["e2e_us"].drop_nulls().to_numpy().astype(np.float64) for one in (recording, other)]
    if not len(sides[0]) or len(sides[0]) != len(sides[1]):
        return False
    later_us = sides[0] - sides[1]
    apart_us = np.abs(later_us - np.median(later_us))
    return bool((apart_us <= np.maximum(_JITTER * sides[1], _JITTER_US)).mean() > _COPIED)


def other_process(one: Recording, other: Recording) -> str:
    """How the gaps between the sends of two loads vary differently, in words; empty where they vary alike."""
    varies = []
    for recording in (one, other):
        gaps_us = np.diff(np.sort(recording.requests["arrival_us"].drop_nulls().to_numpy()))
        varies.append(float(gaps_us.std() / max(gaps_us.mean(), 1.0)) if len(gaps_us) > 1 else 0.0)
    apart = max(varies) > max(_OTHER_PROCESS * min(varies), _VARY)
    return f"gaps between sends that vary by {varies[1]:.1f} of their mean, not {varies[0]:.1f}" if apart else ""


def _repeats(store: Store, recordings: Sequence[Recording]) -> Repeats:
    numbers = [recording_side(recording, pooled_gaps(store, recording.slug)).numbers_us for recording in recordings]
    known = {cell: tuple(of[cell] for of in numbers) for cell in numbers[0] if all(cell in of for of in numbers)}
    aliases = [recording.alias for recording in recordings]
    named = [r.alias if aliases.count(r.alias) == 1 else r.slug for r in recordings]
    return Repeats(tuple(named), known, _apart_us(recordings))


def _apart_us(recordings: Sequence[Recording]) -> dict[str, float]:
    lengths = ["prompt_tokens", "output_tokens"]
    judged = recordings[0].requests.frame(lengths)
    same = [other for other in recordings[1:] if other.requests.frame(lengths).equals(judged)]
    apart: dict[str, list[float]] = {metric: [] for metric in SCORED}
    for other in same:
        both = observed_requests(recordings[0]) & observed_requests(other)
        sides = [samples_of(recording, both) for recording in (recordings[0], other)]
        for metric, found in apart.items():
            one, again = (values_of(side, metric) for side in sides)
            found += [float(np.abs(one - again).mean())] if both.any() else []
    return {metric: sum(found) / len(found) for metric, found in apart.items() if found}


def _differs(one: Recording, other: Recording) -> str:
    """What makes two recordings those of different loads or servers; empty if nothing does."""
    for what in ("model", "hardware", "tensor_parallelism"):
        sides = [getattr(recording, what) for recording in (one, other)]
        if None not in sides and sides[0] != sides[1]:
            return f"{what.replace('_', ' ')} {sides[1]}, not {sides[0]}"
    if RECORDED not in (one.ground_truth, other.ground_truth) or one.ground_truth != other.ground_truth:
        return "its requests were not recorded"
    for name in one.engine.keys() & other.engine.keys():
        values = [recording.engine[name].value for recording in (one, other)]
        if not _alike(*values):
            return f"{name} {values[1]}, not {values[0]}"
    loads = [_load(recording) for recording in (one, other)]
    for name, value in loads[0].items():
        if abs(loads[1][name] - value) > (_SPAN if name == "seconds of arrivals" else _LOAD) * max(value, 1e-9):
            return f"{loads[1][name]:,.6g} {name}, not {value:,.6g}"
    held = [max((limit.in_flight for limit in client_limits(recording)), default=0) for recording in (one, other)]
    if held[0] != held[1]:
        return f"{held[1] or 'no limit of'} requests in flight, not {held[0] or 'no limit'}"
    return "" if held[0] else other_process(one, other)


def _alike(one: object, other: object) -> bool:
    """Equal, or numbers that differ by less than 1 %: a server measures its memory anew each time."""
    if isinstance(one, bool) or not isinstance(one, int | float) or not isinstance(other, int | float):
        return one == other
    return abs(one - other) <= _LOAD * abs(one)


def _load(recording: Recording) -> dict[str, float]:
    totals = recording.requests.aggregate(
        prompt="sum(prompt_tokens)", output="sum(output_tokens)", span="max(arrival_us)"
    )
    return {
        "requests": float(recording.requests.height),
        "prompt tokens": float(totals["prompt"] or 0),
        "output tokens": float(totals["output"] or 0),
        "seconds of arrivals": float(totals["span"] or 0) / 1e6,
    }
