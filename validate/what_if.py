"""The same requests on the same simulator with other engine arguments, or another load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from shlex import quote
from typing import Unpack

import numpy as np

from blis_replay.base.errors import ExperimentError, NothingToJudgeError, UnknownNameError, counted, faults_named
from blis_replay.blis.closed_loop import ClosedLoop
from blis_replay.blis.releases.fit import FitRecord
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import UNKNOWN, Recording
from blis_replay.ingest.store import Store
from blis_replay.ingest.tables import Column, Table, Toned, columns_named, table_of
from blis_replay.replay.driver import EXTRAPOLATED, ReplayRun, replay
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.mode import (
    EngineOverrides,
    EngineValue,
    ReplayMode,
    override_text,
    parse_engine_value,
)
from blis_replay.replay.prefix_estimate import hits_known
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.held_out import use_of
from blis_replay.validate.comparison.pages import judgement_json
from blis_replay.validate.comparison.saturation import simulated_queue
from blis_replay.validate.comparison.spread import drawn_runs, missed_by, prediction_interval, unsure_of
from blis_replay.validate.comparison.validated import compare_experiment
from blis_replay.validate.comparison.verdict_text import basis_text, verdict_line
from blis_replay.validate.judgement import FITTED
from blis_replay.validate.metrics.latency import MetricStatistic, latency_statistics, relative_error
from blis_replay.validate.metrics.objectives import (
    Attainment,
    Objectives,
    observed_attainment,
    simulated_attainment,
)
from blis_replay.validate.metrics.observed import Gaps, overloaded, simulated_samples
from blis_replay.validate.text.answer import Answer, Block, Line, Part, Verbatim
from blis_replay.validate.text.cells import cell_text, percent
from blis_replay.validate.text.messages import attainment_line


@dataclass(frozen=True)
class WhatIfPoint:
    """A replay with some engine arguments, or another load.

    ``overrides``: in the place of the recorded arguments, those of ``LOAD`` among them.  ``values``: simulated numbers
    by name (``simulated_values``), None with the ``reason`` if the engine cannot run, or not serve a request.
    ``attained``: what came of the objectives that were given.  ``drawn``: the values with each draw of coefficients,
    none where they are without uncertainty; ``unsure``: what steps beyond the fit add; ``fit``: their record.
    ``basis``: where its inputs come from, and which of its steps are extrapolated.  ``was_overloaded``: the server was,
    with these arguments.
    """

    overrides: EngineOverrides
    values: dict[str, float | None] | None
    reason: str | None = None
    attained: Attainment | None = None
    drawn: tuple[dict[str, float | None], ...] = ()
    unsure: float = 0.0
    fit: FitRecord | None = None
    not_simulated: tuple[str, ...] = ()
    basis: Mapping[str, str] = field(default_factory=dict)
    was_overloaded: bool = False

    @property
    def is_overloaded(self) -> bool:
        """Whether its queue grows to the end, simulated or recorded."""
        return self.was_overloaded or (self.values is not None and self.values["saturated_from_s"] is not None)

    @property
    def intervals(self) -> dict[str, tuple[float, float] | None]:
        """95 % of each simulated mean, p99 and rate, by coefficients and what lies beyond the fit; None where unknown.

        Nor of latencies of an overloaded run, which its length decides.
        """
        values, found = self.values or {}, {}
        for name, cell in _DRAWN.items():
            drawn, missed = [one[name] or 0.0 for one in self.drawn], missed_by(self.fit, cell) if cell else 0.0
            between = prediction_interval(values.get(name) or 0.0, drawn, self.unsure, missed)
            found[name] = None if self.is_overloaded and name in _WAITED else between
        return found


@dataclass(frozen=True)
class WhatIf:
    """Replays of one recording; ``recorded`` is that with its own engine arguments.

    ``observed``: what came of the objectives at the recorded clients, as far as it is known; None if nothing is.
    """

    recording: Recording
    release: CoefficientRelease
    recorded: WhatIfPoint
    points: tuple[WhatIfPoint, ...]
    observed: Attainment | None = None


def what_if(
    recording: Recording,
    release: CoefficientRelease,
    changes: Sequence[EngineOverrides],
    *,
    objectives: Objectives = (),
    token_gaps: Gaps | None = None,
    **pool: Unpack[Pool],
) -> WhatIf:
    """Replay a recording with its own engine arguments and with each of the changes.

    ``token_gaps``: pooled gaps between the recorded output tokens, for quantiles of the ITL of the server.

    Raises what ``replay`` does with the recorded arguments, ``ReplayError`` as ``map_jobs``, and
    ``NothingToJudgeError`` if the engine cannot serve the requests with any of the changes.
    """
    as_recorded = replay(recording, release)
    work = partial(simulated_point, recording, release, objectives)
    points = map_jobs(work, changes, **pool)
    if changes and all(point.values is None for point in points):
        raise NothingToJudgeError(f"{recording.alias}: nothing could be simulated: {points[0].reason}")
    recorded = replace(_point((), as_recorded, objectives), was_overloaded=overloaded(recording.findings))
    observed = observed_attainment(recording, objectives, token_gaps) if objectives else None
    return WhatIf(recording, release, recorded, tuple(points), observed)


# Parts of the load that change like an engine argument, each with a value as it is written: a factor on the arrival
# rate, or clients that wait for their answers.
LOAD = {"rate": "1.5", "concurrency": "16", "ramp_s": "10", "think_time_ms": "100", "sessions": "prompts"}
_MOST_S = 1e6


def parse_value(name: str, text: str) -> EngineValue:
    """The value of an engine argument or of the load; raises ``UnknownNameError`` as ``parse_engine_value``."""
    if name not in LOAD:
        return parse_engine_value(name, text)
    if name == "sessions":
        if text != "prompts":
            raise UnknownNameError(f"sessions={text} is not possible; give sessions=prompts")
        return text
    try:
        value = int(text) if name == "concurrency" or text.isdigit() else float(text)
    except ValueError:
        value = -1
    if not (0 if name in ("ramp_s", "think_time_ms") else 1e-6) <= value <= _MOST_S:
        raise UnknownNameError(f"{name}={text} is not possible; give a number such as {name}={LOAD[name]}")
    return value


def mode_with(overrides: EngineOverrides) -> ReplayMode:
    """The replay with these engine arguments and this load; raises ``UnknownNameError`` for half a closed loop."""
    load: dict[str, EngineValue] = {name: value for name, value in overrides if name in LOAD}
    mode = ReplayMode(engine=tuple((name, value) for name, value in overrides if name not in LOAD))
    if "concurrency" not in load:
        if {"ramp_s", "think_time_ms", "sessions"} & load.keys():
            raise UnknownNameError(
                "ramp_s, think_time_ms and sessions are of a closed loop; say how many clients: concurrency=16"
            )
        return replace(mode, rate=float(load.get("rate") or 1))
    if "rate" in load:
        raise UnknownNameError("a closed loop has no rate: each client waits for its answer; give rate or concurrency")
    ramp_us, think_us = round(1e6 * float(load.get("ramp_s") or 0)), round(1e3 * float(load.get("think_time_ms") or 0))
    loop = ClosedLoop(int(load["concurrency"] or 1), ramp_us, think_us)
    return replace(mode, loop=loop, sessions="prompts" if "sessions" in load else "none")


def grid(fixed: EngineOverrides, sweeps: Mapping[str, Sequence[EngineValue]]) -> list[EngineOverrides]:
    """Every combination of the sweeps, the last one running fastest, each with the fixed overrides."""
    combinations = product(*(tuple((name, value) for value in values) for name, values in sweeps.items()))
    return [(*fixed, *combination) for combination in combinations]


def simulated_values(run: ReplayRun) -> dict[str, float | None]:
    """Latencies (ms), throughput and use of the engine in a replay, over the requests that it completed.

    Rates, and the means of ``running`` and ``waiting`` (requests, by time), are from the first arrival to the last
    token at a client.  ``kv_peak``: largest share of KV blocks in use at once, None where memory has no bound.
    ``cut_short``: requests whose output ended at ``max_model_len``.  ``saturated_from_s``: start of a queue that grows
    to the end, None without one.
    """
    result, done, queue = run.result, run.simulated.completed, simulated_queue(run)
    latencies = latency_statistics(simulated_samples(run, done), result.inter_token_gaps(done))
    duration_us = float((result.arrival_us + run.e2e_us)[done].max(initial=0) - result.arrival_us[0])
    per_s = 1e6 / duration_us if duration_us else 0.0
    steps, blocks = result.steps, run.plan.engine.num_gpu_blocks
    lasted_us = steps["end_us"] - steps["start_us"]
    in_batch_us = float((steps["running_depth"] * lasted_us).sum())
    until_us = np.where(result.scheduled_us >= 0, result.scheduled_us, run.plan.trace.abort_us)
    tokens = run.simulated.output_tokens
    # Clients that wait make no queue that grows.
    since_us = queue.from_us if run.mode.loop is None and queue.stands_at_the_end else None
    values: dict[str, float | None] = {
        f"{metric}_{name}_ms": us / 1000 if (us := latencies[metric].get(name)) is not None else None
        for metric, name in _CELLS
    }
    return values | {
        "requests_per_s": int(done.sum()) * per_s,
        "output_tokens_per_s": int(tokens[done].sum()) * per_s,
        "running": in_batch_us * per_s / 1e6,
        "waiting": float((until_us - result.queued_us)[done].sum()) * per_s / 1e6,
        "preemptions": int(result.preemptions.sum()),
        "kv_peak": None if blocks is None else 1 - float(steps["free_blocks"].min(initial=blocks - 1)) / (blocks - 1),
        "completed": int(done.sum()),
        "cut_short": int((tokens < run.plan.trace.output_tokens)[done].sum()),
        "saturated_from_s": None if since_us is None else since_us / 1e6,
    }


_CACHING = "enable_prefix_caching"
# Arguments by which prompts are computed otherwise: what that costs is not known where some may have been cached.
_OF_PROMPTS = {_CACHING, "max_num_batched_tokens", "long_prefill_token_threshold", "enable_chunked_prefill"}
_UNSTATED = {_CACHING: True}  # vLLM's default
_HITS_UNKNOWN = (
    "nothing recorded says how many prompt tokens a cache holds; ingest the log or `/metrics` of a server that caches, "
    "or prompts by their identities"
)


def simulated_point(
    recording: Recording,
    release: CoefficientRelease,
    objectives: Objectives,
    overrides: EngineOverrides,
    *,
    draws: bool = True,
) -> WhatIfPoint:
    """One replay; what cannot be simulated is a point with its reason, wrong use an ``UnknownNameError``.

    ``draws``: replay it with other coefficients too, for intervals.
    """
    changed = {name for name, value in overrides if recording.argument(name, _UNSTATED.get(name)) != value}
    of_cached = changed & _OF_PROMPTS if recording.argument(_CACHING, True) else changed & {_CACHING}
    unknown = bool(of_cached) and not hits_known(recording)
    if unknown and _CACHING in changed:
        return WhatIfPoint(overrides, None, _HITS_UNKNOWN)
    try:
        with faults_named(recording.alias):
            run = replay(recording, release, mode_with(overrides))
    except UnknownNameError:
        raise
    except ExperimentError as error:
        return WhatIfPoint(overrides, None, str(error).removeprefix(f"{recording.alias}: "))
    point = _point(overrides, run, objectives, draws=draws and not unknown)
    return point if not unknown else replace(point, basis={**point.basis, "intervals": f"none: {_HITS_UNKNOWN}"})


def _point(overrides: EngineOverrides, run: ReplayRun, objectives: Objectives, *, draws: bool = True) -> WhatIfPoint:
    return WhatIfPoint(
        overrides,
        simulated_values(run),
        attained=simulated_attainment(run, objectives) if objectives else None,
        drawn=tuple(map(simulated_values, drawn_runs(run))) if draws else (),
        unsure=unsure_of(run),
        fit=None if run.entry is None else run.entry.fit,
        not_simulated=run.not_simulated,
        basis=run.basis,
    )


# name -> heading, and the part of a wide table that it stands in.
_CELLS = tuple((metric, name) for metric in ("ttft", "itl", "e2e") for name in ("mean", "p99"))
_LATENCIES = tuple(f"{metric}_{name}_ms" for metric, name in _CELLS)
_VALUES = {
    **{f"{m}_{name}_ms": Column(f"{m.upper()} {name} ms", "magnitude", part=1) for m, name in _CELLS},
    "requests_per_s": Column("requests/s", "magnitude", part=2),
    "output_tokens_per_s": Column("output tokens/s", "magnitude", part=2),
    "running": Column("running", "magnitude", part=2),
    "waiting": Column("waiting", "magnitude", part=2),
    "preemptions": Column("preemptions", "count", part=2),
    "kv_peak": Column("KV peak", "share", part=2),
}
_RATES = ("requests_per_s", "output_tokens_per_s")
# What has an interval, with its cell among the errors of the fit.
_DRAWN: Mapping[str, MetricStatistic | None] = {**dict(zip(_LATENCIES, _CELLS, strict=True)), **dict.fromkeys(_RATES)}
# What depends on the length of a run whose queue grows to its end.  Its rates are those of as many requests.
_WAITED = {name for name in _LATENCIES if not name.startswith("itl")}
_OF_A_QUEUE = {*_WAITED, "running", "waiting", "preemptions"}
_CHANGED = {f"{m}_mean_ms": Column(m.upper(), "word") for m in ("ttft", "itl", "e2e")}
WITHOUT_UNCERTAINTY = "this release does not keep how the errors of its coefficients are correlated"
INTERVALS = (
    "intervals: 95 %, of the coefficients and of steps beyond the fit; another machine, or a busier hour of this one, "
    "is not in them. A change compares one server at one pace; if two recordings have another pace, that comes on top, "
    "and `compare A B --explain` measures it"
)


def whatif_answer(whatif: WhatIf, repeat_options: str = "", as_recorded: Comparison | None = None) -> Answer:
    """One change beside the recorded arguments, or the tables of a grid; and what they rest on.

    ``repeat_options``: of the command line, for the command that is printed.  ``as_recorded``: ``judged_as_recorded``.
    ``change`` are the values of a point over those with the recorded arguments, less one.  The rows are one per
    point, the recorded arguments first.
    """
    absent, common, alias = dict.fromkeys(whatif.recorded.values or ()), _common(whatif), whatif.recording.alias
    rows = [
        {"overrides": _written(p.overrides), **(p.values or absent), "reason": p.reason}
        for p in (whatif.recorded, *whatif.points)
    ]
    several, changed = len(whatif.points) > 1, f" with {_written(common)}" if common else ""
    of = ", simulated" + (changed and f"; all but the first row{changed}") if several else f"{changed}, simulated"
    head = Line(f"{alias}  ({whatif.recording.slug}){of}", mark=Toned(alias, "heading"))
    page = _grid(whatif) if several else [_beside(whatif.recorded, whatif.points[0])]
    parts: list[Part] = [_overloads(whatif), _basis(whatif, as_recorded), head, *page, _remarks(whatif)]
    document = _document(whatif) | {"use": use_of(whatif.release, whatif.recording)}
    document |= {} if as_recorded is None else {"judgement": judgement_json(as_recorded.judgement, repeat_options)}
    return Answer([*parts, _provenance(whatif, repeat_options)], document, table_of(rows))


def judged_as_recorded(store: Store, slug: str, release: CoefficientRelease) -> Comparison | None:
    """The replay of what was recorded, which says how far to believe one of something else; None without latencies."""
    try:
        return compare_experiment(store, slug, release, ReplayMode())
    except NothingToJudgeError:
        return None


def _basis(whatif: WhatIf, as_recorded: Comparison | None) -> Block:
    """How far to believe the rest: the verdict on the unchanged replay, or what its coefficients were fitted on."""
    if as_recorded is not None:
        return Block([verdict_line(as_recorded.judgement, " as recorded"), basis_text(as_recorded)])
    use = use_of(whatif.release, whatif.recording)
    mark = Toned(use, "heading") if use in FITTED else None
    return Block([Line(f"coefficients: {whatif.release.name}, {use}", mark=mark)])


def _document(whatif: WhatIf) -> dict[str, object]:
    return {
        "slug": whatif.recording.slug,
        "alias": whatif.recording.alias,
        "recorded": {
            "engine": _recorded_arguments(whatif),
            "assumed": _assumed(whatif),
            **_point_json(whatif.recorded),
        },
        **({} if whatif.observed is None else {"observed": {"slo": whatif.observed.document}}),
        "points": [
            {
                "overrides": dict(point.overrides),
                "change": _changes(whatif.recorded, point),
                "change_intervals": _change_intervals(whatif.recorded, point),
                "reason": point.reason,
                **_point_json(point),
            }
            for point in whatif.points
        ],
        "observed_with": "the recorded arguments only",
        "provenance": {
            "blis_replay": version("blis-replay"),
            "recording_hash": whatif.recording.content_hash,
            "coefficients": whatif.release.name,
            "coefficients_hash": whatif.release.sha256,
            "uncertainty": "drawn" if whatif.recorded.drawn else WITHOUT_UNCERTAINTY,
            "basis": dict(whatif.recorded.basis),
        },
    }


def _point_json(point: WhatIfPoint) -> dict[str, object]:
    return {
        "values": point.values,
        "intervals": point.intervals,
        "not_simulated": list(point.not_simulated),
        "extrapolated": point.basis.get(EXTRAPOLATED),
        **({} if point.attained is None else {"slo": point.attained.document}),
    }


def _beside(recorded: WhatIfPoint, changed: WhatIfPoint) -> Table:
    """The values below each other, each written as its own column would be."""
    changes, between = _changes(recorded, changed) or {}, _change_intervals(recorded, changed) or {}
    rows = [
        [
            column.name,
            *(cell_text((point.values or {}).get(name), column.kind) for point in (recorded, changed)),
            _between(changed.intervals.get(name)),
            changes.get(name),
            _of_change(between.get(name)),
        ]
        for name, column in _VALUES.items()
    ]
    change = Column("change", "error", part=2), Column("95 %", "word", part=2)
    return Table("", (*columns_named("", "unchanged", "changed"), Column("95 % interval", "word"), *change), rows)


def _changed(recorded: WhatIfPoint, point: WhatIfPoint, name: str) -> str:
    """A change with its interval: ``-9.8 % (-18 .. -2 %)``."""
    change, between = (_changes(recorded, point) or {})[name], (_change_intervals(recorded, point) or {})[name]
    return percent(change) + ("" if between is None else f" ({_of_change(between)})")


def _of_change(interval: tuple[float, float] | None) -> str | None:
    """Tenths of a percent only where the change may be less than ten."""
    if interval is None:
        return None
    digits = 1 if max(map(abs, interval)) < 0.1 else 0
    return " .. ".join(f"{100 * end:+.{digits}f}" for end in interval) + " %"


def _between(interval: tuple[float, float] | None) -> str | None:
    return None if interval is None else " .. ".join(cell_text(end, "magnitude") for end in interval)


def _grid(whatif: WhatIf) -> list[Table]:
    """The points by number, and their values: latencies and load beside each other where there is room."""
    points = [whatif.recorded, *whatif.points]
    rows = [["0", "as recorded"], *([str(i), _name(whatif, p)] for i, p in enumerate(whatif.points, 1))]
    values = [[str(i), *(p.values[name] for name in _VALUES)] for i, p in enumerate(points) if p.values is not None]
    columns = [Column(_VALUES[name].name, "word", part=1 + i // 2) for i, name in enumerate(_DRAWN)]
    changed = [
        [str(i), *(_changed(whatif.recorded, p, name) for name in _CHANGED)]
        for i, p in enumerate(whatif.points, 1)
        if p.values is not None
    ]
    sure = [[str(i), *map(_between, p.intervals.values())] for i, p in enumerate(points) if p.values is not None]
    return [
        Table("", columns_named("", "engine arguments", kind="text"), rows),
        Table("", (Column(""), *_VALUES.values()), values),
        *([Table("95 % intervals", (Column(""), *columns), sure)] if any(point.drawn for point in points) else []),
        Table("change of the mean", (Column(""), *_CHANGED.values()), changed),
    ]


def _named_points(whatif: WhatIf) -> list[tuple[str, WhatIfPoint]]:
    return [("as recorded", whatif.recorded), *((_name(whatif, point), point) for point in whatif.points)]


def _overloads(whatif: WhatIf) -> Block:
    """Points that cannot keep up with the requests, so that lower latencies there mean less work."""
    why = "TTFT and E2E depend on the length of the run, and are given no change"
    lines = []
    for name, point in _named_points(whatif):
        since_s = None if point.values is None else point.values["saturated_from_s"]
        how = "the server's queue grew" if since_s is None else f"from {since_s:,.1f} s on its queue grows"
        if point.is_overloaded:
            lines.append(Line(f"OVERLOADED  {name}: {how} to the end: {why}", mark=Toned("OVERLOADED", "bad")))
    return Block(lines)


def _remarks(whatif: WhatIf) -> Block:
    """What was promised and what came of it, what was not served, and what is not the same work."""
    simulated = _named_points(whatif)
    slo = [("the server itself", whatif.observed), *((name, point.attained) for name, point in simulated)]
    lines = [f"{name}: {attainment_line(one.document)}" for name, one in slo if one is not None]
    known = zip(whatif.observed.objectives, whatif.observed.values_us, strict=True) if whatif.observed else ()
    if any(value is None and o.metric == "itl" and o.statistic != "mean" for o, value in known):
        lines.insert(1, "the server itself: no usable times of single tokens were recorded, so its ITL is not known")
    lines += [f"{name}: not simulated: {what}" for name, point in simulated for what in point.not_simulated]
    before = {one: how for one, how in whatif.recorded.basis.items() if one != EXTRAPOLATED}
    lines += [
        f"{name}: {one}: {how}"
        for name, point in simulated
        for one, how in point.basis.items()
        if before.get(one) != how
    ]
    for point in whatif.points:
        name, values = _name(whatif, point), point.values
        if values is None:
            lines.append(f"cannot be served with {name}: {point.reason}")
        elif values["cut_short"]:
            lines.append(f"{name}: {cut_short_text(int(values['cut_short']))}")
    return Block(lines)


def cut_short_text(count: int) -> str:
    """A sentence for outputs that ended before their requested length."""
    return f"{counted(count, 'output')} cut short at max_model_len, so less is served than was asked for"


def known_error(recording: Recording, repeat_options: str) -> Verbatim:
    """How to see the error of the simulator under the recorded load; ``repeat_options``: of the command line."""
    # A command that is wrapped cannot be typed as it stands.
    command = f"blis-replay validate {quote(recording.alias)}{repeat_options}"
    return Verbatim(f"more on the error with the recorded arguments and load:\n  {command}")


def _provenance(whatif: WhatIf, repeat_options: str) -> Block:
    assumed = _assumed(whatif)
    engine = ", ".join(
        f"{name} not recorded"
        if value is None
        else f"{override_text(name, value)}{' assumed' if name in assumed else ''}"
        for name, value in _recorded_arguments(whatif).items()
    )
    known = f"arguments only ({engine})" if engine else "arguments and load only"
    return Block(
        [
            f"coefficients: {whatif.release.name}; all numbers are simulated. The server was observed with its own "
            f"{known}; nothing says how far the simulator is from it elsewhere.",
            INTERVALS if whatif.recorded.drawn else f"no intervals: {WITHOUT_UNCERTAINTY}",
            *(f"{what}: {how}" for what, how in whatif.recorded.basis.items() if what != EXTRAPOLATED),
            known_error(whatif.recording, repeat_options),
        ]
    )


def _recorded_arguments(whatif: WhatIf) -> dict[str, EngineValue]:
    """Of the arguments that a point changes, those of the recording."""
    names = sorted({name for point in whatif.points for name, _ in point.overrides if name not in LOAD})
    values = {name: setting.value for name, setting in whatif.recording.engine.items()}
    return {name: int(value) if isinstance(value := values.get(name), float) else value for name in names}


def _assumed(whatif: WhatIf) -> list[str]:
    """Of those, the ones that nobody recorded: what the replay has is an assumption."""
    engine = whatif.recording.engine
    return [name for name in _recorded_arguments(whatif) if name in engine and engine[name].source == UNKNOWN]


def _common(whatif: WhatIf) -> EngineOverrides:
    """What all points change alike."""
    return tuple(o for o in whatif.points[0].overrides if all(o in point.overrides for point in whatif.points))


def _name(whatif: WhatIf, point: WhatIfPoint) -> str:
    """What tells a point from the others; of the only one, all that it changes."""
    common = _common(whatif)
    return _written(tuple(o for o in point.overrides if o not in common) or point.overrides)


def _written(overrides: EngineOverrides) -> str:
    return " ".join(override_text(*override) for override in overrides)


def _changes(recorded: WhatIfPoint, changed: WhatIfPoint) -> dict[str, float | None] | None:
    """What each value changes by; None where it depends on the length of an overloaded run."""
    if recorded.values is None or changed.values is None:
        return None
    either = recorded.is_overloaded or changed.is_overloaded
    return {
        name: None if either and name in _OF_A_QUEUE else relative_error(recorded.values[name], changed.values[name])
        for name in _VALUES
    }


def _change_intervals(recorded: WhatIfPoint, changed: WhatIfPoint) -> dict[str, tuple[float, float] | None] | None:
    """95 % of each change, draw by draw: what both sides share cancels."""
    if (changes := _changes(recorded, changed)) is None:
        return None
    found: dict[str, tuple[float, float] | None] = dict.fromkeys(_LATENCIES)
    for name in (name for name in _LATENCIES if changes[name] is not None):
        both = zip(changed.drawn, recorded.drawn, strict=True) if changed.drawn else ()
        pairs = [(one[name], other[name]) for one, other in both]
        drawn = [above / below if above and below else 0.0 for above, below in pairs]
        ratio = 1 + (changes[name] or 0.0)
        between = prediction_interval(ratio, drawn, abs(changed.unsure - recorded.unsure), 0.0)
        found[name] = None if between is None else (between[0] - 1, between[1] - 1)
    return found
