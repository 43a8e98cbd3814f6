"""The engine arguments: which sources contradict each other, and what could not be read."""

from __future__ import annotations

from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.recording import ENGINE_CHECK, Finding, Recording
from blis_replay.ingest.tables import Table, columns_named

CHECK = ENGINE_CHECK
MEASURES = "whether the sources of the engine arguments agree"
RULE = (
    "a file given at ingest goes before what the server says of itself, that before what was written down, and that "
    "before what is derived"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """What the readers of log, configuration and arguments found."""
    return [finding for finding in recording.findings if finding.check == CHECK]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Every engine argument with its source."""
    rows = [(name, str(s.value), s.source, s.detail) for name, s in sorted(recording.engine.items())]
    return (Table("engine arguments", columns_named("argument", "value", "source", "", kind="text"), rows, cut=True),)
