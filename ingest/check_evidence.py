"""What one instrument check saw in a stored experiment, with the numbers behind its findings."""

from __future__ import annotations

from dataclasses import dataclass

from blis_replay.ingest.checks.evidence import Context, stage_windows
from blis_replay.ingest.checks.pictures import Table
from blis_replay.ingest.checks.registry import CHECKS, InstrumentCheck
from blis_replay.ingest.errors import UnknownCheckError
from blis_replay.ingest.recording import Finding
from blis_replay.ingest.store_file import Store
from blis_replay.ingest.store_recordings import read_stored, read_token_layout
from blis_replay.ingest.store_tokens import stamp_gaps


@dataclass(frozen=True)
class CheckEvidence:
    """A check with its findings in one stored experiment, and tables of what it looked at; none is empty."""

    slug: str
    alias: str
    check: InstrumentCheck
    findings: tuple[Finding, ...]
    tables: tuple[Table, ...]


def check_names() -> dict[str, str]:
    """Every instrument check by name, with what it measures."""
    return {check.name: check.measures for check in CHECKS}


def named_check(name: str) -> InstrumentCheck:
    """The check of that name; ``UnknownCheckError`` names those there are."""
    for check in CHECKS:
        if check.name == name:
            return check
    raise UnknownCheckError(f"no instrument check is called {name}; there are {', '.join(check_names())}")


def check_evidence(store: Store, slug: str, check: InstrumentCheck) -> CheckEvidence:
    """The evidence of one check; ``UnknownExperimentError`` for a slug that is not stored."""
    recording = read_stored(store, slug)
    context = Context(read_token_layout(store, slug), None, stage_windows(recording), stamp_gaps(store, slug))
    found = tuple(finding for finding in recording.findings if finding.check == check.name)
    tables = tuple(table for table in check.pictures(recording, context) if table.rows)
    return CheckEvidence(slug, recording.alias, check, found, tables)
