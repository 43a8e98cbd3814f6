"""The recorded schedule against the engine's: what ``inspect --check schedule`` shows, and a line of ``validate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from blis_replay.base.errors import ReplayError
from blis_replay.blis.trace import EngineConfig
from blis_replay.ingest.checks.evidence import CheckEvidence, Context, InstrumentCheck
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.store import Store, read_stored
from blis_replay.ingest.store.recordings import read_token_layout
from blis_replay.ingest.tables import Table, Toned, Value, columns_named
from blis_replay.replay.engine import left_out, replayed_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.schedule.checksum import Divergence, ScheduleCheck, check_schedule
from blis_replay.replay.schedule.recorded import COUNTS, NOT_KNOWN_US, recorded_schedule
from blis_replay.validate.explain.schedule import Meaning, blocks_that_fit, has_every_step, meaning_of

NAME = "schedule"
MEASURES = "requests and tokens of every recorded step against those that the engine schedules for the same queue"
RULE = (
    "every request is in the engine's queue from the step on that could first admit it, so each step decides over the"
    " recorded queue. The first step with other counts, or with a KV usage that no sharing of prefixes explains, has "
    "a cause: an argument, a release, a prefix hit or a request that is not as assumed. The cause is named if "
    "replacing it makes the steps equal"
)
_AROUND = 3
_WORDS = {
    "prefill_requests": "requests in prefill",
    "prefill_tokens": "prefill tokens",
    "decode_requests": "requests in decode",
    "decode_tokens": "decode tokens",
    "kv_usage": "KV usage",
}


@dataclass(frozen=True)
class ScheduleVerdict:
    """``sentence``: one line; ``document``: the same as JSON has it."""

    sentence: str
    document: Mapping[str, object]


def schedule_verdict(recording: Recording, engine: EngineConfig) -> ScheduleVerdict | None:
    """What the checksum says of a replay with these engine arguments; None where not every step was recorded."""
    if not has_every_step(recording):
        return None
    if engine.data_parallel_size > 1:
        reason = f"the steps of {engine.data_parallel_size} ranks are not told apart"
        return ScheduleVerdict(f"not compared: {reason}", {"compared": False, "reason": reason})
    try:
        check = check_schedule(recorded_schedule(recording), engine)
    except ReplayError as error:
        return ScheduleVerdict(f"not compared: {error}", {"compared": False, "reason": str(error)})
    meaning = meaning_of(recording, check)
    missing = left_out(recording, engine)
    return ScheduleVerdict(sentence(check, meaning, missing), _document(check, meaning) | {"not_simulated": missing})


def sentence(check: ScheduleCheck, meaning: Meaning | None, missing: tuple[str, ...] = ()) -> str:
    """How far the schedules are equal, where they differ first, and what that means; ``missing``: not simulated."""
    before = check.schedule.begin
    unknown = f"; {before:,} steps before them served requests that no file records" if before else ""
    if "left out" in check.schedule.basis:
        unknown += f"; not compared: {check.schedule.basis['left out']}"
    unknown += f"; not simulated: {'; '.join(missing)}" if missing else ""
    if meaning is None:
        told = check.kv_equal + check.kv_open
        usage = f", KV usage in {told:,}" if told else ", KV usage not compared"
        blocks = None if told else blocks_that_fit(check)
        fits = f" (it fits {blocks:,} blocks of {check.engine.block_size} tokens)" if blocks else ""
        return f"equal to the recorded one in all {check.steps:,} steps{usage}{fits}{unknown}"
    return f"equal to the recorded one in {check.reached:,} steps, {_first(check)}; {meaning.sentence}{unknown}"


def _first(check: ScheduleCheck) -> str:
    found = check.first
    if found is None:
        return f"and the requests do not explain step {check.schedule.step[check.schedule.end]:,}"
    at = "" if found.start_us is None else f" ({found.start_us / 1e6:.3f} s)"
    differences = ", ".join(
        f"{_number(name, found.expected[name])} {_WORDS[name]} where {_number(name, seen)} were recorded"
        for name, seen in found.seen.items()
    )
    return f"then step {found.step:,}{at} has {differences}"


def _number(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if name == "kv_usage" else f"{value:,}"


def _counts(check: ScheduleCheck) -> dict[str, int]:
    kv = {"kv_equal": check.kv_equal, "kv_open": check.kv_open}
    return {"steps": check.steps, "equal": check.reached, "not_compared": check.not_compared, **kv}


def _document(check: ScheduleCheck, meaning: Meaning | None) -> dict[str, object]:
    return {
        "compared": True,
        "source": check.schedule.source,
        **_counts(check),
        "first": None if check.first is None else _divergence(check.first),
        "meaning": None if meaning is None else meaning.document,
        "basis": check.schedule.basis,
    }


def _divergence(found: Divergence) -> dict[str, object]:
    return {
        "step": found.step,
        "start_ms": None if found.start_us is None else found.start_us / 1e3,
        "expected": found.expected,
        "seen": found.seen,
        "requests": list(found.requests),
    }


def _checked(recording: Recording) -> tuple[ScheduleCheck, Meaning | None]:
    check = check_schedule(recorded_schedule(recording), replayed_engine(recording, ReplayMode()).config)
    return check, meaning_of(recording, check)


def _findings(recording: Recording, context: Context) -> list[Finding]:
    try:
        check, meaning = _checked(recording)
    except ReplayError as error:
        return [Finding(NAME, "note", "", f"not checked: {error}")]
    measured: dict[str, float | int | str | None] = {**_counts(check)}
    if check.first is not None:
        measured |= {"first step": check.first.step, "requests in question": ", ".join(check.first.requests) or "none"}
    if meaning is not None:
        measured |= {"cause": meaning.cause, "equal with it": meaning.reached, "of": meaning.steps}
    basis = "; ".join(f"{what}: {words}" for what, words in check.schedule.basis.items())
    said = f"the engine's schedule is {sentence(check, meaning, left_out(recording, check.engine))}"
    return [Finding(NAME, "note", "", said, measured, RULE), Finding(NAME, "note", "", basis)]


def _tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """The steps about the first that differs, or about the first that the requests do not explain."""
    try:
        check, _meaning = _checked(recording)
    except ReplayError:
        return ()
    if check.whole or check.simulated is None:
        return ()
    row = check.first.row if check.first is not None else check.schedule.end
    schedule, simulated = check.schedule, check.simulated
    rows = []
    for at in range(max(row - _AROUND, 0), min(row + _AROUND + 1, schedule.end + 1, len(schedule.step))):
        start_us = int(schedule.start_us[at])
        counts = [(int(simulated.counts[name][at]), int(schedule.counts[name][at])) for name in COUNTS[:3]]
        usage = (_percent(simulated.kv_usage[at]), _percent(schedule.kv_usage[at]))
        pairs: list[tuple[Value, Value]] = [*counts, usage]
        time_s = None if start_us == NOT_KNOWN_US else round(start_us / 1e6, 3)
        cells = [Toned(f"{a} / {b}", "bad") if a != b and at >= row else f"{a} / {b}" for a, b in pairs]
        rows.append([int(schedule.step[at]), time_s, *cells])
    columns = columns_named("step", "s", "prefill requests", "prefill tokens", "decodes", "KV %")
    return (Table("steps, the engine's / recorded", columns, rows, note="the first that differs is in the middle"),)


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.1f}"


# Beside the checks of ``ingest``, which know no engine; nothing of it is stored.
SCHEDULE_CHECK = InstrumentCheck(NAME, MEASURES, RULE, _findings, _tables)


def schedule_evidence(store: Store, slug: str) -> CheckEvidence:
    """The evidence of the check on a stored experiment; ``UnknownExperimentError`` for a slug that is not stored."""
    recording = read_stored(store, slug)
    context = Context(read_token_layout(store, slug), None, ())
    findings, tables = _findings(recording, context), _tables(recording, context)
    return CheckEvidence(slug, recording.alias, SCHEDULE_CHECK, tuple(findings), tables)
