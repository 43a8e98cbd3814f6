"""The check whether more was asked of a server than it could serve, as ``ingest.overload`` defines it."""

from __future__ import annotations

from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.overload import failed_share, overloaded, queue_counts
from blis_replay.ingest.recording import OVERLOAD_CHECK as CHECK
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.tables import Table, columns_named

MEASURES = "whether the server was offered more than it could serve"
RULE = (
    "more than 10 % of requests fail while they wait; or the requests that wait for a first token grow through a load "
    "stage by more than 2.5 standard errors, or are most of a burst; half of those that wait at its end wait for 1 s "
    "more, and longer than a request is served; published aggregates: a median TTFT above 1 s"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """One finding for an overloaded experiment, none for others."""
    is_overloaded, reason = overloaded(recording)
    if not is_overloaded:
        return []
    message = f"overloaded: {reason}; judged by what was served"
    return [Finding(CHECK, "note", "", message, {"failed_share": failed_share(recording)}, RULE)]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """How many requests wait for a first token along each load stage, and how many came and were started."""
    rows: list[tuple[str | float, ...]] = []
    for stage, counts in queue_counts(recording):
        named = "the run" if stage is None else f"stage {stage}"
        for i, at_us in enumerate(counts.at_us[1:]):
            numbers = (counts.came[i], counts.started[i], counts.waiting[i + 1])
            rows.append((named, round(int(at_us) / 1e6, 1), *map(int, numbers)))
    columns = ("part", "until s", "came", "started", "waiting")
    return (Table("the queue through the load stages", columns_named(*columns), tuple(rows), bars="waiting"),)
