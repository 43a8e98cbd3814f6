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
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.mode import EngineOverrides, override_text
from blis_replay.validate.metrics.objectives import Objectives, written
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.messages import missed_text
from blis_replay.validate.what_if import WhatIfPoint, known_error, simulated_point

Load = Literal["rate", "concurrency"]

# A search doubles and halves from 1 time the recorded rate, or from 8 clients, within these, and then halves what is
# left until it is this close.
_FIRST: dict[Load, float] = {"rate": 1.0, "concurrency": 8.0}
_LEAST: dict[Load, float] = {"rate": 1 / 64, "concurrency": 1.0}
_MOST: dict[Load, float] = {"rate": 64.0, "concurrency": 8192.0}
_CLOSE = 1.02


@dataclass(frozen=True)
class MostLoad:
    """What a search found for some engine arguments.

    ``most``: the highest tried load within the limits, or None.  ``beyond``: the lowest tried load that misses them, or
    None.  ``tried``: each load and whether it met the limits, by load.
    ``reason``: why nothing was found.
    """

    overrides: EngineOverrides
    most: WhatIfPoint | None
    beyond: WhatIfPoint | None
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
        change = (*overrides, (load, int(value) if load == "concurrency" else value))
        points[value] = simulated_point(recording, release, objectives, change)
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
        tuple((value, bool(point.attained and point.attained.met)) for value, point in tried.items()),
        reason,
    )


def highest(met: Callable[[float], bool], load: Load) -> tuple[float | None, float | None]:
    """The highest load that meets the limits and the lowest that misses them; None where none was tried."""
    value, most, beyond = _FIRST[load], None, None
    while most is None or beyond is None or beyond > _next(most, load):
        if met(value):
            most = value
        else:
            beyond = value
        if (most is None and value <= _LEAST[load]) or (beyond is None and value >= _MOST[load]):
            break
        if most is None or beyond is None:
            value = value / 2 if most is None else value * 2
        else:
            value = math.sqrt(most * beyond)
            value = round(value) if load == "concurrency" else float(f"{value:.3g}")
            if value in (most, beyond):
                break
    return most, beyond


def _next(most: float, load: Load) -> float:
    """The lowest load above ``most`` that is worth a try."""
    return max(most * _CLOSE, most + 1) if load == "concurrency" else most * _CLOSE


_COLUMNS = (
    *(Column("engine arguments", "text"), Column("", "text")),
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
        [record["overrides"], _most(one, load), *(record[name] for name in _RATES)]
        for one, record in zip(found, records, strict=True)
    ]
    what = "times the recorded arrivals" if load == "rate" else "clients that each wait for an answer"
    lines: list[Part] = [
        *(_beyond(one) for one in found),
        f"{load}: {what}, to {_CLOSE - 1:.0%}; all recorded requests are sent, and the limits are for all of them",
        f"coefficients: {release.name}; all numbers are simulated; nothing says how far the simulator is from the "
        "server under more than the recorded load",
        known_error(recording, again),
    ]
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
    return Answer([head, Table("", columns, rows), Block(lines)], document, table_of(records))


_RATES = ("requests_per_s", "output_tokens_per_s", "goodput")


def _record(one: MostLoad, load: Load) -> dict[str, str | float | None]:
    values = (one.most.values if one.most else None) or {}
    return {
        "overrides": _name(one.overrides),
        load: _load(one.most, load),
        **{name: values.get(name) for name in _RATES},
        "goodput": one.most.attained.goodput if one.most and one.most.attained else None,
        "missed_from": _load(one.beyond, load),
        "reason": one.reason,
    }


def _most(one: MostLoad, load: Load) -> str | None:
    most = _load(one.most, load)
    return None if most is None else f"{'' if one.beyond is not None else 'at least '}{most:g}"


def _beyond(one: MostLoad) -> str:
    """Why the load cannot be higher, in words."""
    if one.reason is not None:
        return f"{_name(one.overrides)}: {one.reason}"
    if one.beyond is None:
        return f"{_name(one.overrides)}: within the limits at all that was tried"
    missed = one.beyond.reason if one.beyond.attained is None else missed_text(one.beyond.attained.document)
    return f"{_name(one.overrides)}: more would miss {missed}"


def _json(one: MostLoad, load: Load) -> dict[str, object]:
    return {
        "overrides": dict(one.overrides),
        "most": _point_json(one.most, load),
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
