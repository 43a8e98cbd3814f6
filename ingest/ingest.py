"""From an experiment directory, or a recording made elsewhere, into the store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store_file import Store, limit_writing, open_store
from blis_replay.ingest.store_recordings import WriteOutcome, write_recording
from blis_replay.ingest.token_layout import TokenLayout

if TYPE_CHECKING:
    from blis_replay.ingest.readers.discovery import Source
    from blis_replay.ingest.readers.files import Progress


@dataclass(frozen=True)
class IngestOutcome:
    """What an ingest did, in numbers.  ``rejected``: records that could not be used; ``bytes``: of all files read."""

    slug: str
    alias: str
    outcome: WriteOutcome
    requests: int
    steps: int
    findings: int
    rejected: int
    bytes: int
    seconds: float


_OUTCOME_COLUMNS = {
    **dict.fromkeys(("slug", "alias", "outcome"), pl.String),
    **dict.fromkeys(("requests", "steps", "findings", "rejected", "bytes"), pl.Int64),
    "seconds": pl.Float64,
}


def outcomes_frame(outcomes: Sequence[IngestOutcome]) -> pl.DataFrame:
    """A row an ingest."""
    return pl.DataFrame([asdict(outcome) for outcome in outcomes], schema=_OUTCOME_COLUMNS)


def ingest_source(
    store_path: Path | str,
    source: Source | Path | str,
    *,
    profile: Mapping[str, object] | None = None,
    engine_file: Path | None = None,
    progress: Progress | None = None,
) -> IngestOutcome:
    """Read an experiment directory, or files of one experiment, check them, and store them in one transaction.

    ``source``, ``profile``, ``engine_file`` and ``progress`` as in ``assemble.read_recording``.  Raises
    ``RecordingError`` (nothing to judge, unreadable file) or ``StoreError``; the store is
    then as it was.
    """
    from blis_replay.ingest.assemble import read_recording

    begin = time.perf_counter()
    source = Path(source) if isinstance(source, str) else source
    with read_recording(source, profile=profile, engine_file=engine_file, progress=progress) as recording:
        checked, layout = _checked(recording)
        with open_store(store_path) as store:
            limit_writing(store)
            outcome = write_recording(store, checked, layout)
    return _outcome(checked, outcome, time.perf_counter() - begin)


def ingest_recording(store: Store, recording: Recording) -> IngestOutcome:
    """Check and store a recording made elsewhere (a bundled experiment); ``StoreError`` as in ``write_recording``.

    Published aggregates never replace a recorded experiment of the same slug.
    """
    begin = time.perf_counter()
    checked, layout = _checked(recording)
    outcome = write_recording(store, checked, layout)
    return _outcome(checked, outcome, time.perf_counter() - begin)


def _checked(recording: Recording) -> tuple[Recording, TokenLayout]:
    findings, layout = run_checks(recording)
    return replace(recording, findings=findings), layout


def _outcome(recording: Recording, outcome: WriteOutcome, seconds: float) -> IngestOutcome:
    return IngestOutcome(
        slug=recording.slug,
        alias=recording.alias,
        outcome=outcome,
        requests=recording.requests.height,
        steps=recording.steps.height,
        findings=len(recording.findings),
        rejected=sum(file.rejected_count for file in recording.files),
        bytes=sum(file.bytes for file in recording.files),
        seconds=seconds,
    )
