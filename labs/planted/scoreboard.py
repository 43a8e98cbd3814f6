"""The scoreboard of planted faults: what this tool says of each, and whether that is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import isnan
from typing import Literal

from blis_replay.base.errors import ExperimentError
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.tables import Cell, Column, Table, Tone, Toned, table_of
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.executors import Progress, map_jobs
from blis_replay.replay.mode import parse_mode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.explain.attribute import (
    WORTH_NAMING,
    Attribution,
    Blame,
    Cause,
    attribute,
    blames,
    part_of,
)
from blis_replay.validate.fit.calibrate import Options, calibrate
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay.validate.judgement import exit_code
from blis_replay.validate.metrics.latency import THRESHOLDS, relative_error
from blis_replay.validate.text.answer import Answer, Block, Line
from blis_replay_labs.planted.causes import PACE, STEP_TIME
from blis_replay_labs.planted.fault_list import FAULTS
from blis_replay_labs.planted.faults import (
    LOADS,
    NOTHING,
    REFUSED,
    Case,
    Depth,
    Fault,
    mean_latencies,
    planted_case,
    planted_in,
)
from blis_replay_labs.planted.live_faults import LIVE_CONTROLS, LIVE_FAULTS, is_there, read_live

Grade = Literal["right", "half", "not identified", "wrong"]
GRADES: tuple[Grade, ...] = ("right", "half", "not identified", "wrong")
# A size is found if the share that the blamed component explains is within this of 1.
_SIZE_WITHIN = 0.2
# Of a real server: a part is new if it exceeds what was blamed before by this share of the largest part.
_NEW = 0.25
ALL_FAULTS = (*FAULTS, *LIVE_FAULTS)


@dataclass(frozen=True)
class FaultRow:
    """What was said of a fault.

    ``found_by``: the instrument check that names it, or ``attribute``.  ``blamed``: components in the order in which
    they are named.  ``planted_error``: the largest error of a gated mean, relative to the truth, that the fault makes
    in the recording or in the simulator.  ``explained``: the share of the error that the right components explain.
    """

    group: str
    fault: str
    size: str
    depth: str
    found_by: str
    blamed: tuple[str, ...]
    planted_error: float
    explained: float | None
    verdict: str
    exit_code: int
    grade: Grade

    @property
    def let_pass(self) -> bool:
        """Whether it ends with 0 although the planted error exceeds a threshold."""
        return self.exit_code == 0 and self.planted_error > 1


def judged(fault: Fault) -> FaultRow:
    """Plant a fault in a synthetic server, ask the tool as a user would, and grade the answer."""
    return _judged(fault, planted_case(fault), _Before(_objections_without(fault.depth, fault.load)))


@dataclass(frozen=True)
class _Before:
    """What was said before a fault was planted: objections of checks, and of a real server, which causes.

    ``simulated_us``: means that a simulator had of it without the fault, by metric; None: the true ones.
    """

    objections: frozenset[tuple[str, str, str]]
    attribution: Attribution | None = None
    simulated_us: Mapping[str, float] | None = None


def judged_in(load: str, faults: Sequence[Fault]) -> list[FaultRow | ControlRow]:
    """The same of faults in a recording of a real server, whose coefficients are fitted to its own steps.

    What is said of it before anything is planted is not held against the answer: a real server is not an engine.
    Without a group it is a control.
    """
    with read_live(load) as read:
        recording = checked(read)
        release, _fits = calibrate([recording], "own", Options(load_release(DEFAULT_PRIOR), split=(1.0, 1.0)))
        rows, before = list[FaultRow | ControlRow](), dict[Depth, _Before]()
        for fault in faults:
            if not fault.group:
                rows.append(
                    _control(f"{load} {fault.size}".strip(), fault.depth, 0, planted_in(fault, recording, release))
                )
                continue
            if fault.depth not in before:
                sound = planted_in(Fault("", (), fault.depth, load), recording, release)
                seen = checked(sound.recording)
                blamed, run = attribute(seen, release), replay(seen, release)
                before[fault.depth] = _Before(_objections(seen.findings), blamed, _simulated_us(run))
            with read_live(load, fault.causes) if fault.in_files else nullcontext(recording) as planted:
                rows.append(_judged(fault, planted_in(fault, planted, release, recording), before[fault.depth]))
        return rows


def _judged(fault: Fault, case: Case, before: _Before) -> FaultRow:
    recording = checked(case.recording)
    planted_error = _planted_error(case, before.simulated_us or case.true_us)
    found = _checks_that_found(fault, recording.findings, before, harmless=planted_error < 1)
    row = partial(FaultRow, fault.group, fault.name, fault.size, fault.depth)
    try:
        mode = parse_mode(case.replay)
        comparison = compare_replay(replay(recording, case.release, mode), case.token_gaps, queues=True)
        attribution = attribute(recording, case.release, mode, token_gaps=case.token_gaps)
    except ExperimentError as error:
        refused = any(REFUSED in cause.blamed for cause in fault.causes)
        grade: Grade = "right" if found or refused else "not identified"
        words = (str(error).partition(":")[0],) if not found else ()
        return row(found or "refused", words, planted_error, None, "NOT JUDGED", exit_code([]), grade)
    named = _since(before.attribution, attribution)
    alone = (STEP_TIME,) if attribution.steps_off else ()
    grade, explained = _graded(fault, found, named, alone)
    verdict = comparison.verdict
    blamed = tuple(dict.fromkeys([*(name for one in named for name in (*one.names, *one.beside_names)), *alone]))
    by = found or ("attribute" if named else "-")
    return row(by, blamed or (NOTHING,), planted_error, explained, verdict, exit_code([verdict]), grade)


def _since(before: Attribution | None, now: Attribution) -> list[Blame]:
    """What is blamed now as far as it was not before; what is explained then is of what came since.

    As shares of what is observed now: a fault may change what is observed, and no share of that is an error.
    """
    if before is None:
        return blames(now)
    found = []
    for blame in blames(now):
        i = blame.quantity
        earlier_us = before.error[i].value_us
        error = blame.error - (0.0 if isnan(earlier_us) else earlier_us / now.observed_us[i])
        if abs(error) < WORTH_NAMING:
            continue
        was = {_plain(cause): part_of(cause, i) / now.observed_us[i] for cause in before.causes}
        causes = [cause for cause in (blame.cause, *blame.beside) if cause is not None]
        parts = {_plain(cause): part_of(cause, i) / now.observed_us[i] for cause in causes}
        since = {name: part - was.get(name, 0.0) for name, part in parts.items()}
        least = max(_NEW * max(map(abs, parts.values()), default=0.0), WORTH_NAMING)
        new = [cause for cause in causes if _more(parts[_plain(cause)], was.get(_plain(cause), 0.0)) >= least]
        if not new and blame.cause is not None:
            continue
        first = new[0] if new else None
        explained = None if first is None else since[_plain(first)] / error
        found.append(replace(blame, error=error, cause=first, explained=explained, beside=tuple(new[1:])))
    return found


def _plain(cause: Cause) -> str:
    """The component; a pace of steps is a step time."""
    return cause.component.name.replace(PACE, STEP_TIME)


def _more(part: float, was: float) -> float:
    """By how much a part grew: what was blamed before, and is blamed less now, is not new."""
    return abs(part) - abs(was) if part * was > 0 else abs(part)


def checked(recording: Recording) -> Recording:
    """The recording with the findings that an ingest would store."""
    return replace(recording, findings=run_checks(recording)[0])


def _checks_that_found(fault: Fault, findings: Sequence[Finding], before: _Before, *, harmless: bool) -> str:
    """The first check that objects, did not before, and may have found a cause.

    ``harmless``: a fault that moves no mean over its limit: then one that corrects what it found objects as well.
    """
    may = {check for cause in fault.causes for check in cause.checks}
    new = _objections(findings, corrected=harmless) - before.objections
    return next((f.check for f in findings if f.check in may and (f.check, f.metric, f.severity) in new), "")


def _objections(findings: Sequence[Finding], *, corrected: bool = True) -> frozenset[tuple[str, str, str]]:
    return frozenset(
        (f.check, f.metric, f.severity)
        for f in findings
        if f.severity == "unusable" or (corrected and f.severity == "corrected")
    )


@cache
def _objections_without(depth: Depth, load: str) -> frozenset[tuple[str, str, str]]:
    """What the checks object to in the same load of a synthetic server without a fault."""
    return _objections(checked(planted_case(Fault("", (), depth, load)).recording).findings)


def _planted_error(case: Case, before_us: Mapping[str, float]) -> float:
    """The largest of the planted errors of gated means, over its threshold: above 1 nothing may pass.

    Of the recording as it was made, against what really happened, and of the simulator, against what it had before
    (``before_us``): what a fit to a real server is off by was not planted.
    """
    true_us, seen_us = case.true_us, mean_latencies(case.recording)
    errors = [abs(relative_error(true_us[m], seen_us[m]) or 0.0) / THRESHOLDS[m] for m in THRESHOLDS]
    try:
        run = replay(case.recording, case.release, parse_mode(case.replay))
    except ExperimentError:
        return max(errors)
    errors += [abs(us - before_us[m]) / true_us[m] / THRESHOLDS[m] for m, us in _simulated_us(run).items()]
    return max(errors)


def _simulated_us(run: ReplayRun) -> dict[str, float]:
    return {"e2e": float(run.e2e_us.mean()), "ttft": float(run.ttft_us.mean())}


def _graded(fault: Fault, found: str, named: Sequence[Blame], alone: tuple[str, ...]) -> tuple[Grade, float | None]:
    """The grade, and the share of the error that the right components explain where one is named.

    Right: all causes are named and nothing else, and the size is found; or an instrument check names the cause
    and nothing else is blamed.  Where the recording cannot tell, the cause must be among the alternatives.
    ``alone``: what is blamed apart from any mean.
    """
    right = {name for cause in fault.causes for name in cause.blamed}
    if NOTHING in right and not named and not alone:
        return "right", None
    hit = [one for one in named if set(one.names) & right]
    explained = hit[0].explained if hit else None
    wrong = [one for one in named if one.names and not set(one.names) & right]
    if not set(alone) <= right or (wrong and (not hit or named.index(wrong[0]) < named.index(hit[0]))):
        return ("half" if found else "wrong"), explained
    if not fault.decidable:
        open_ended = all(len(one.names) != 1 for one in named)
        return ("right" if open_ended else "half"), explained
    said = {*alone, *(name for one in named for name in (*one.names, *one.beside_names))}
    missed = [cause for cause in fault.causes if not set(cause.blamed) & said and not (found and cause.checks)]
    if len(missed) == len(fault.causes):
        return "not identified", explained
    only = all(len(one.names) == 1 and set(one.beside_names) <= right for one in named if one.names)
    sized = found or len(fault.causes) > 1 or explained is None or abs(explained - 1) <= _SIZE_WITHIN
    return ("right" if not missed and not wrong and only and sized else "half"), explained


@dataclass(frozen=True)
class ControlRow:
    """A load in which nothing is wrong; ``alarm``: what was said nevertheless, empty if nothing."""

    load: str
    depth: str
    seed: int
    verdict: str
    alarm: str


def control(load: str, depth: Depth, seed: int) -> ControlRow:
    """Replay a faultless recording with a faultless simulator, and see what is blamed."""
    return _control(load, depth, seed, planted_case(Fault("", (), depth, load), seed))


def _control(load: str, depth: Depth, seed: int, case: Case) -> ControlRow:
    """Of a real server (``token_gaps``: None) only a wrong input is an alarm: its steps and delays vary by themselves.

    Where it stood still, that is named, and what a simulator lacks of it is an error.
    """
    recording = checked(case.recording)
    comparison: Comparison = compare_replay(replay(recording, case.release), case.token_gaps, queues=True)
    found = blames(attribute(recording, case.release, token_gaps=case.token_gaps))
    objected = [f"{f.check}: {f.message}" for f in recording.findings if f.severity == "unusable"]
    verdict: str = comparison.verdict
    if case.token_gaps is None:
        causes = [cause.component for one in found for cause in (one.cause, *one.beside) if cause is not None]
        stood_still = next((one.name for one in causes if one.stalls is not None), "")
        verdict = f"{verdict}: {stood_still}" if stood_still else verdict
        alarms = [one.name for one in causes if one.is_input and one.stalls is None]
    else:
        alarms = [" or ".join(one.names) or "no component" for one in found]
    return ControlRow(load, depth, seed, verdict, "; ".join([*alarms, *objected]))


_DEPTHS: tuple[Depth, ...] = ("full", "steps", "client")
CONTROLS = tuple((load, depth, seed) for load in LOADS for depth in _DEPTHS for seed in (3, 4))


@dataclass(frozen=True)
class Scoreboard:
    """All faults and all controls."""

    faults: tuple[FaultRow, ...]
    controls: tuple[ControlRow, ...]

    @property
    def counts(self) -> dict[Grade, int]:
        """How many faults have which grade."""
        counted = Counter(row.grade for row in self.faults)
        return {grade: counted[grade] for grade in GRADES}

    @property
    def false_alarms(self) -> tuple[ControlRow, ...]:
        """Controls in which something was blamed, or that fail or cannot be judged."""
        return tuple(row for row in self.controls if row.alarm or row.verdict in ("FAIL", "NOT JUDGED"))


def scoreboard(quick: bool = False, progress: Progress | None = None) -> Scoreboard:
    """Judge all faults and controls; ``quick``: every eighth of them."""
    every = 8 if quick else 1
    places = [place for place, fault in enumerate(FAULTS) if not fault.is_live]
    live = list(dict.fromkeys(fault.load for fault in _live_faults()))
    jobs: list[str | int | tuple[str, Depth, int]] = [
        *live[: 1 if quick else None],
        *places[::every],
        *CONTROLS[::every],
    ]
    rows = [row for answer in map_jobs(_job, jobs, progress=progress) for row in answer]
    order = {group: place for place, group in enumerate(dict.fromkeys(fault.group for fault in ALL_FAULTS))}
    faults = sorted((row for row in rows if isinstance(row, FaultRow)), key=lambda row: order[row.group])
    return Scoreboard(tuple(faults), tuple(row for row in rows if isinstance(row, ControlRow)))


def _live_faults() -> list[Fault]:
    """Faults and controls of the real servers whose recordings are there."""
    return [fault for fault in (*ALL_FAULTS, *LIVE_CONTROLS) if fault.is_live and is_there(fault.load)]


def _job(job: str | int | tuple[str, Depth, int]) -> Sequence[FaultRow | ControlRow]:
    """All faults of a live recording, or one by its place in the list: what plants it cannot be sent elsewhere."""
    if isinstance(job, str):
        return judged_in(job, [fault for fault in _live_faults() if fault.load == job])
    return [judged(FAULTS[job]) if isinstance(job, int) else control(*job)]


_COLUMNS = (
    Column("fault", "text"),
    Column("recorded", "text"),
    Column("found by", "text"),
    Column("explained", "share"),
    Column("verdict", "text"),
    Column("exit", "count"),
    Column("", "text"),
    Column("planted", "text", below=True),
    Column("blamed", "text", below=True),
)
_TONES: dict[Grade, Tone] = {"right": "good", "half": "caution", "not identified": "caution", "wrong": "bad"}


def scoreboard_answer(board: Scoreboard) -> Answer:
    """A row a fault, in groups; then the counts, and the controls."""
    tables = [
        Table(group, _COLUMNS, [_cells(row) for row in board.faults if row.group == group])
        for group in dict.fromkeys(row.group for row in board.faults)
    ]
    counts, let_pass = board.counts, [row for row in board.faults if row.let_pass]
    counted = ", ".join(f"{count} {grade}" for grade, count in counts.items())
    alarms = [
        Line(f"- {row.load}, {row.depth}, seed {row.seed}: {row.verdict}; {row.alarm or 'nothing blamed'}")
        for row in board.false_alarms
    ]
    passed = f"exit code 0 although the planted error exceeds a threshold: {len(let_pass)}"
    listed = [f"- {row.fault} ({row.size}; {row.depth})" for row in let_pass]
    clean = len(board.controls) - len(alarms)
    without = f"{clean} of {len(board.controls)} recordings without a fault do not fail, with nothing blamed"
    return Answer(
        [
            *tables,
            Block([f"{len(board.faults)} faults: {counted}"]),
            Block([passed, *listed]),
            Block([without, *alarms]),
        ],
        {
            "counts": counts,
            "faults": [{**asdict(row), "blamed": list(row.blamed)} for row in board.faults],
            "controls": [asdict(row) for row in board.controls],
        },
        table_of([{**asdict(row), "blamed": " | ".join(row.blamed)} for row in board.faults]),
        exit_code=1 if counts["wrong"] or let_pass or alarms else 0,
    )


def _cells(row: FaultRow) -> list[Cell]:
    grade = Toned(row.grade, _TONES[row.grade])
    return [
        *(row.fault, row.depth, row.found_by, row.explained, row.verdict, row.exit_code, grade),
        row.size,
        ", ".join(row.blamed),
    ]
