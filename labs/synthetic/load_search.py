"""The highest load within limits: the rate of requests, or the number of clients, at which an SLO is just met."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Literal, Unpack

from blis_replay.base.errors import NothingToJudgeError
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.tables import Column, Table, columns_named, table_of
from blis_replay.replay.driver import replay
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.mode import EngineOverrides, override_text
from blis_replay.validate.comparison.spread import drawn_runs, missed_by, prediction_interval
from blis_replay.validate.metrics.objectives import Objectives, simulated_attainment, written
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.messages import missed_text
from blis_replay.validate.what_if import (
    WITHOUT_UNCERTAINTY,
    WhatIfPoint,
    known_error,
    mode_with,
    simulated_point,
)

Load = Literal["rate", "concurrency"]

# A search doubles and halves from 1 time the recorded rate, or from 8 clients, within these, and then halves what is
# left until it is this close.
_FIRST: dict[Load, float] = {"rate": 1.0, "concurrency": 8.0}
_LEAST: dict[Load, float] = {"rate": 1 / 64, "concurrency": 1.0}
_MOST: dict[Load, float] = {"rate": 64.0, "concurrency": 8192.0}
_CLOSE, _FAR = 1.02, 2.0


@dataclass(frozen=True)
class MostLoad:
    """What a search found for some engine arguments.

    ``most``: the highest tried load within the limits, or None.  ``beyond``: the lowest tried load that misses them, or
    None.  ``between``: its 95 % interval, None where the release does not keep how sure its coefficients are.
    ``tried``: each load and whether it met the limits, by load.  ``reason``: why nothing was found.
    """

    overrides: EngineOverrides
    most: WhatIfPoint | None
    beyond: WhatIfPoint | None
    between: tuple[float, float] | None
    tried: tuple[tuple[float, bool], ...]
    reason: str | None = None


def find_most(
    recording: Recording,
    release: CoefficientRelease,
    load: Load,
    objectives: Objectives,
    changes: Sequence[EngineOverrides],
    **pool: Unpack[Pool],
) -> tuple[MostLoad, ...]:
    """The highest load with the recorded arguments and with each change; all recorded requests are sent.

    Assumes that a load misses the limits if a lower one does.  Raises ``NothingToJudgeError`` if nothing can be
    simulated, ``ReplayError`` as ``map_jobs``.
    """
    work = partial(_found, recording, release, load, objectives)
    found = map_jobs(work, [(), *changes], **pool)
    if all(not one.tried for one in found):
        raise NothingToJudgeError(f"{recording.alias}: nothing could be simulated: {found[0].reason}")
    return tuple(found)


def _found(
    recording: Recording,
    release: CoefficientRelease,
    load: Load,
    objectives: Objectives,
    overrides: EngineOverrides,
) -> MostLoad:
    points: dict[float, WhatIfPoint] = {}

    def met(value: float) -> bool:
        change = _changed(overrides, load, value)
        points[value] = simulated_point(recording, release, objectives, change, draws=False)
        attained = points[value].attained
        return attained is not None and attained.met

    most, beyond = highest(met, load)
    tried = {value: point for value, point in sorted(points.items()) if point.attained is not None}
    reason = None
    if most is None:
        refused = next((point.reason for point in points.values() if point.reason), None)
        reason = refused or f"missed even with {load}={_LEAST[load]:g}"
    return MostLoad(
        overrides,
        None if most is None else points[most],
        None if beyond is None else points[beyond],
        None if beyond is None or most is None else _between(recording, release, load, objectives, points[most]),
        tuple((value, bool(point.attained and point.attained.met)) for value, point in tried.items()),
        reason,
    )


def _changed(overrides: EngineOverrides, load: Load, value: float) -> EngineOverrides:
    return (*overrides, (load, int(value) if load == "concurrency" else value))


def _between(
    recording: Recording, release: CoefficientRelease, load: Load, objectives: Objectives, most: WhatIfPoint
) -> tuple[float, float] | None:
    """The 95 % interval of the highest load: each draw of the coefficients has a highest load of its own.

    Near a limit of the server its load is nearly inverse to the time of a step.  So what the fit misses of the ITL, and
    steps beyond the fit, widen the interval by as much.
    """
    if "intervals" in most.basis:  # it says why no interval can be given
        return None
    found = _load(most, load) or 0.0
    met_by_draws: dict[float, list[bool]] = {}

    def draws_met(value: float) -> list[bool]:
        if value not in met_by_draws:
            run = replay(recording, release, mode_with(_changed(most.overrides[:-1], load, value)))
            attained = (simulated_attainment(drawn, objectives) for drawn in drawn_runs(run))
            met_by_draws[value] = [bool(one and one.met) for one in attained]
        return met_by_draws[value]

    of_draws = [
        highest(lambda value, place=place: draws_met(value)[place], load, found)[0]  # type: ignore[misc]
        for place in range(len(draws_met(found)))
    ]
    missed = missed_by(most.fit, ("itl", "mean"))
    between = prediction_interval(found, [of or 0.0 for of in of_draws], most.unsure, missed)
    if between is None:
        return None
    low, high = between[0], between[1] * _CLOSE  # a load is found from below, to this
    return (float(math.floor(low)), float(math.ceil(high))) if load == "concurrency" else (low, high)


def highest(met: Callable[[float], bool], load: Load, first: float | None = None) -> tuple[float | None, float | None]:
    """The highest load that meets the limits and the lowest that misses them; None where none was tried.

    ``first``: a load near to it, around which steps are small at first.
    """
    value, most, beyond = first or _FIRST[load], None, None
    factor = _FAR if first is None else _CLOSE**2
    while most is None or beyond is None or beyond > _next(most, load):
        if met(value):
            most = value
        else:
            beyond = value
        if (most is None and value <= _LEAST[load]) or (beyond is None and value >= _MOST[load]):
            break
        if most is None or beyond is None:
            value = value / factor if most is None else max(value * factor, _next(value, load))
            value = float(max(int(value), 1)) if load == "concurrency" else value
            factor = min(factor**2, _FAR)
        else:
            value = math.sqrt(most * beyond)
            value = float(round(value)) if load == "concurrency" else float(f"{value:.3g}")
            if value in (most, beyond):
                break
    return most, beyond


def _next(most: float, load: Load) -> float:
    """The lowest load above ``most`` that is worth a try."""
    return max(most * _CLOSE, most + 1) if load == "concurrency" else most * _CLOSE


_INTERVALS = (
    "95 %: of the coefficients and of steps beyond the fit; another machine, or a busier hour of this one, is not in it"
)
_COLUMNS = (
    *(Column("engine arguments", "text"), Column("", "text"), Column("95 %", "word")),
    *columns_named("requests/s", "output tokens/s", kind="magnitude"),
    Column("goodput", "share"),
)


def searched(
    recording: Recording,
    release: CoefficientRelease,
    load: Load,
    objectives: Objectives,
    changes: Sequence[EngineOverrides],
    again: str,
    **pool: Unpack[Pool],
) -> Answer:
    """What ``blis-replay simulate --find`` answers: ``find_most`` as ``load_answer``."""
    found = find_most(recording, release, load, objectives, changes, **pool)
    return load_answer(recording, release, load, objectives, found, again)


def load_answer(
    recording: Recording,
    release: CoefficientRelease,
    load: Load,
    objectives: Objectives,
    found: Sequence[MostLoad],
    again: str = "",
) -> Answer:
    """One row per engine, the recorded one first: its highest load within the limits, and what a higher one misses.

    ``again``: options of the command line, which the command that is printed repeats.
    """
    columns = (_COLUMNS[0], Column(f"most {load}", "text"), *_COLUMNS[2:])
    records = [_record(one, load) for one in found]
    rows = [
        [record["overrides"], _most(one, load), _span(one), *(record[name] for name in _RATES)]
        for one, record in zip(found, records, strict=True)
    ]
    what = "times the recorded arrivals" if load == "rate" else "clients that each wait for an answer"
    lines: list[Part] = [
        f"{load}: {what}, to {_CLOSE - 1:.0%}; all recorded requests are sent, and the limits are for all of them",
        f"coefficients: {release.name}; all numbers are simulated",
        *([_INTERVALS] if any(one.between for one in found) else []),
        *_no_interval(found),
        known_error(recording, again),
    ]
    answers = [Line(f"{_name(one.overrides)}: {_answer(one, load, objectives)}") for one in found]
    head = Line(f"{recording.alias}  ({recording.slug}), the most {load} within {written(objectives)}, simulated")
    document = {
        "slug": recording.slug,
        "alias": recording.alias,
        "find": load,
        "slo": written(objectives),
        "points": [_json(one, load) for one in found],
        "provenance": {
            "blis_replay": version("blis-replay"),
            "recording_hash": recording.content_hash,
            "coefficients": release.name,
            "coefficients_hash": release.sha256,
        },
    }
    return Answer([Block(answers), head, Table("", columns, rows), Block(lines)], document, table_of(records))


_RATES = ("requests_per_s", "output_tokens_per_s", "goodput")


def _record(one: MostLoad, load: Load) -> dict[str, str | float | None]:
    values = (one.most.values if one.most else None) or {}
    return {
        "overrides": _name(one.overrides),
        load: _load(one.most, load),
        "low": None if one.between is None else one.between[0],
        "high": None if one.between is None else one.between[1],
        **{name: values.get(name) for name in _RATES},
        "goodput": one.most.attained.goodput if one.most and one.most.attained else None,
        "missed_from": _load(one.beyond, load),
        "reason": one.reason,
    }


def _most(one: MostLoad, load: Load) -> str | None:
    most = _load(one.most, load)
    return None if most is None else f"{'' if one.beyond is not None else 'at least '}{most:g}"


def _no_interval(found: Sequence[MostLoad]) -> list[str]:
    """Why a load has no interval, where nothing else says it."""
    why = [
        one.most.basis.get("intervals", f"none: {WITHOUT_UNCERTAINTY}" if one.most.fit is None else "")
        for one in found
        if one.most is not None and one.beyond is not None and one.between is None
    ]
    return [f"intervals: {reason}" for reason in dict.fromkeys(why) if reason]


def _span(one: MostLoad) -> str | None:
    return None if one.between is None else f"{one.between[0]:.3g} .. {one.between[1]:.3g}"


def _answer(one: MostLoad, load: Load, objectives: Objectives) -> str:
    """The highest load, and why it cannot be higher."""
    if one.reason is not None:
        return one.reason
    if one.beyond is None:
        return "within the limits at all that was tried"
    what = "times the recorded rate" if load == "rate" else "clients"
    known = "" if one.between is None else f" (95 %: {_span(one)})"
    missed = one.beyond.reason if one.beyond.attained is None else missed_text(one.beyond.attained.document)
    return f"{_most(one, load)} {what}{known} is the most within {written(objectives)}; more would miss {missed}"


def _json(one: MostLoad, load: Load) -> dict[str, object]:
    return {
        "overrides": dict(one.overrides),
        "most": _point_json(one.most, load),
        "between": one.between,
        "beyond": _point_json(one.beyond, load),
        "tried": [{load: value, "met": met} for value, met in one.tried],
        "reason": one.reason,
    }


def _point_json(point: WhatIfPoint | None, load: Load) -> dict[str, object] | None:
    if point is None:
        return None
    slo = None if point.attained is None else point.attained.document
    return {load: _load(point, load), "values": point.values, "slo": slo, "reason": point.reason}


def _load(point: WhatIfPoint | None, load: Load) -> float | None:
    return None if point is None else float(dict(point.overrides)[load] or 0)


def _name(overrides: EngineOverrides) -> str:
    return " ".join(override_text(*override) for override in overrides) or "as recorded"
