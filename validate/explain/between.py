"""Why two recordings differ: the load, engine arguments, the prefix cache, the scheduling, or the pace of the steps.

The hypotheses are those on an error, tested against the change from one server to the other.  Each replaces what A
recorded with what B did, in replays with one set of coefficients.  Its share of the change is its Shapley value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.base.engine_packs import shown_argument
from blis_replay.base.errors import NothingToJudgeError
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.tables import Toned
from blis_replay.replay.driver import replay
from blis_replay.replay.engine import with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.pace import at_pace, recorded_pace
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.explain.attribute import WORTH_NAMING, all_subsets, shapley_weights
from blis_replay.validate.explain.inputs import ARGUMENTS
from blis_replay.validate.explain.parts import PACE_OF_STEPS, PREFIX_CACHE
from blis_replay.validate.explain.rule import explains
from blis_replay.validate.metrics.latency import MetricStatistic, number
from blis_replay.validate.metrics.observed import simulated_samples
from blis_replay.validate.text.answer import Answer, Block, Line
from blis_replay.validate.text.cells import percent

LOAD, OTHERS = "load", "engine arguments"
# Arguments with a hypothesis of their own, by its name.
_APART = {one.name: one.label for one in ARGUMENTS if one.label and one.mode}
# Numbers that differ by less are equal: a server measures its memory anew each time.
_ALIKE = 0.01
_COUNTED = "cached_prompt_tokens"


@dataclass(frozen=True)
class Between:
    """What makes B's number another than A's.

    ``change``: observed, B over A less one; ``shares``: what each hypothesis adds to it, by name, as a fraction of A's
    number; ``left``: what none explains.  ``cause``: the largest of them, None where they do not explain the change.
    """

    cell: MetricStatistic
    change: float
    shares: Mapping[str, float]
    left: float
    cause: str | None


@dataclass(frozen=True)
class Why:
    """``found``: by number.  ``what``: each hypothesis in words.  ``unknown``: what the recordings do not carry."""

    found: tuple[Between, ...]
    what: Mapping[str, str]
    unknown: tuple[str, ...]


def why_different(
    a: Recording, b: Recording, release: CoefficientRelease, changes: Mapping[MetricStatistic, float]
) -> Why:
    """What the changes come from, observed B over A less one by number.

    ``release``: coefficients for both servers; only ratios are used.  Raises ``NothingToJudgeError`` for two
    models, and what ``replay`` raises.
    """
    for name in ("model", "tensor_parallelism"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            raise NothingToJudgeError(f"{name.replace('_', ' ')} {one} and {other}: no coefficients are of both")
    arguments, what = _arguments(a, b)
    paces, unknown = _paces((a, b), release), []
    if paces is None:
        unknown.append(f"{PACE_OF_STEPS} (record the steps of both)")
    else:
        what[PACE_OF_STEPS] = f"{paces[1] / paces[0]:.3f} times as long at equal batches"
    if _same_lengths(a, b):
        hits = [one.requests[_COUNTED] for one in (a, b)]
        if any(one.null_count() for one in hits):
            unknown.append(f"{PREFIX_CACHE} (have both servers count cached tokens)")
        elif PREFIX_CACHE not in arguments:
            arguments[PREFIX_CACHE] = {}
            what[PREFIX_CACHE] = " and ".join(f"{int(one.sum()):,}" for one in hits) + " prompt tokens cached"
    what[LOAD] = "when requests come, and their lengths"
    names = (LOAD, *arguments, *([PACE_OF_STEPS] if paces else ()))
    subsets = all_subsets(len(names))
    values_us = [
        _numbers(a, b, release, {names[i] for i in subset}, arguments, paces, [*changes]) for subset in subsets
    ]
    relative = np.stack(values_us) / values_us[0]
    shares = shapley_weights(len(names)) @ relative
    found = []
    for i, (cell, change) in enumerate(changes.items()):
        of = dict(zip(names, map(float, shares[:, i]), strict=True))
        left = change - float(relative[-1, i] - 1)
        largest = max(of, key=lambda name: of[name] * np.sign(change))
        found.append(Between(cell, change, of, left, largest if explains(abs(change), abs(left)) else None))
    return Why(tuple(found), what, tuple(unknown))


def _arguments(a: Recording, b: Recording) -> tuple[dict[str, dict[str, int | bool | str]], dict[str, str]]:
    """By hypothesis, B's engine arguments that A has otherwise; and the same in words."""
    found: dict[str, dict[str, int | bool | str]] = {}
    for name in sorted(a.engine.keys() & b.engine.keys()):
        one, other = a.engine[name].value, b.engine[name].value
        numbers = not isinstance(one, bool | str) and not isinstance(other, bool | str)
        if one != other and not (numbers and abs(float(one) - float(other)) <= _ALIKE * abs(float(one))):
            found.setdefault(_APART.get(name, OTHERS), {})[name] = other  # type: ignore[assignment]
    said = {
        title: ", ".join(
            f"{name} {shown_argument(a.engine[name].value)} and {shown_argument(value)}" for name, value in of.items()
        )
        for title, of in found.items()
    }
    return found, said


def _paces(sides: Sequence[Recording], release: CoefficientRelease) -> list[float] | None:
    """Recorded over modelled step time of each at its own batches; None if one does not show it."""
    found = []
    for recording in sides:
        entry = entry_of(release, recording, extrapolate=True)
        plan = plan_replay(recording, ReplayMode(), entry)
        pace = recorded_pace(recording, plan.trace, plan.engine, entry)
        if pace is None:
            return None
        found.append(pace.factor)
    return found


def _numbers(
    a: Recording,
    b: Recording,
    release: CoefficientRelease,
    of_b: set[str],
    arguments: Mapping[str, Mapping[str, int | bool | str]],
    paces: Sequence[float] | None,
    cells: Sequence[MetricStatistic],
) -> Floats:
    """float64[cells] us: a replay of A with what ``of_b`` names as B has it."""
    recording = b if LOAD in of_b else a
    changed: dict[str, int | float | bool | str] = {}
    for title, values in arguments.items():
        side = b if title in of_b else a
        changed |= {name: side.engine[name].value for name in values}
        if title == PREFIX_CACHE and _same_lengths(a, b) and not side.requests[_COUNTED].null_count():
            frame = recording.requests.frame().with_columns(side.requests[_COUNTED].alias(_COUNTED))
            recording = replace(recording, requests=rows_of(frame))
    recording = with_engine(recording, changed, "recorded") if changed else recording
    entry = entry_of(release, recording, extrapolate=True)
    if paces is not None:
        entry = replace(entry, latency=at_pace(entry.latency, paces[PACE_OF_STEPS in of_b]))
    run = replay(recording, replace(release, models=(entry,)))
    samples = simulated_samples(run, run.simulated.completed)
    return np.array([number(samples, cell) for cell in cells])


def _same_lengths(a: Recording, b: Recording) -> bool:
    """Whether both are of the same requests, one by one."""
    names = ("prompt_tokens", "output_tokens")
    pairs = [[one.requests[name].fill_null(-1).to_numpy() for one in (a, b)] for name in names]
    return all(np.array_equal(one, other) for one, other in pairs)


def with_why(answer: Answer, why: Why, names: Mapping[MetricStatistic, str]) -> Answer:
    """An answer about two recordings with what their difference comes from, behind its first part."""
    lines = [
        Line(
            f"{names[one.cell]} {percent(one.change)}: {_shares(one)}",
            mark=None if one.cause is None else Toned(one.cause, "heading"),
        )
        for one in why.found
    ]
    said = [f"{name}: {text}" for name, text in why.what.items() if name != LOAD]
    said += [f"not known: {text}" for text in why.unknown]
    document = {
        "why": [
            {"metric": one.cell[0], "statistic": one.cell[1], "change": one.change, "shares": dict(one.shares)}
            | {"unexplained": one.left, "cause": one.cause}
            for one in why.found
        ],
        "why_not_known": list(why.unknown),
    }
    first, *rest = answer.page
    return replace(
        answer,
        page=[first, Block([*lines, *said], "why B differs from A"), *rest],
        document={**answer.document, **document},
    )


def _shares(one: Between) -> str:
    ordered = sorted(one.shares.items(), key=lambda share: -abs(share[1]))
    parts = [f"{name} {percent(share)}" for name, share in ordered if abs(share) >= WORTH_NAMING / 10]
    cause = one.cause or "cause not identified"
    return f"{cause}; {', '.join([*parts, f'unexplained {percent(one.left)}'])}"
