"""What the recorder inside a server says of itself: whether all was written, and what it cost the engine."""

from __future__ import annotations

from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.tables import Table

CHECK = "recorder"
MEASURES = "whether the step log of the recorder is whole, and what recording cost the engine"
RULE = (
    "steps, arrivals, ends and scheduled tokens as many as its own counters say, no step number left out, nothing "
    "dropped. Each request that ended in good order: tokens found in the prefix cache plus tokens scheduled since its"
    " last admission are prompt and output less one (one more where a second batch was in flight). The cost is the "
    "time in the wrappers around the scheduler, which the engine waits for, and that of the thread that writes"
)
_COUNTS = ("steps", "arrivals", "finished", "scheduled_tokens")


def check(recording: Recording, context: Context) -> list[Finding]:
    """One finding where there is a step log, none where there is not."""
    log = recording.recorder
    if log is None:
        return []
    amiss = []
    if not log["counted_to_the_end"]:
        amiss.append("it breaks off behind its last counters, up to half a second is lost")
    else:
        amiss += [f"{log[name]:,} {name} of {log[f'counted_{name}']:,}" for name in _COUNTS if _differs(log, name)]
    for name, what in (("dropped", "records dropped by the recorder"), ("steps_missing", "steps left out")):
        if log[name]:
            amiss.append(f"{log[name]:,} {what}")
    if log["requests_not_conserved"]:
        amiss.append(f"the tokens of {log['requests_not_conserved']:,} requests do not add up")
    whole = f"{log['steps']:,} steps and the tokens of {log['requests_conserved']:,} requests add up"
    message = f"the step log is not whole: {'; '.join(amiss)}" if amiss else f"the step log is whole: {whole}"
    if log["wrapper_us_per_step"]:
        message += f"; it cost the engine {log['wrapper_us_per_step']:.1f} us a step"
    return [Finding(CHECK, "note", "", message, dict(log), RULE)]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """None: the numbers are those of the finding."""
    return ()


def _differs(log: dict[str, float | int | str | None], name: str) -> bool:
    return log[name] != log[f"counted_{name}"]
