"""From an experiment directory, or a recording made elsewhere, into the store."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from blis_replay.base.addons import addons
from blis_replay.base.errors import RecordingError, counted
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import PUBLISHED, GroundTruth, Recording
from blis_replay.ingest.store.file import Store, first_row, open_store
from blis_replay.ingest.store.recordings import read_engine
from blis_replay.ingest.store.writing import WriteOutcome, limit_writing, write_recording
from blis_replay.ingest.stream import TokenLayout
from blis_replay.ingest.tables import Table, columns_named, table_of

if TYPE_CHECKING:
    from blis_replay.ingest.readers.discovery import Source
    from blis_replay.ingest.readers.files import Progress
    from blis_replay.ingest.readers.server.engine_settings import GivenArguments


@dataclass(frozen=True)
class IngestOutcome:
    """What an ingest did, in numbers.

    ``unusable``: names of the checks by which a part of the recording, or all of it, must not be used.
    ``rejected``: records that could not be used; ``bytes``: of all files.  ``engine_given_before``: file and names of
    engine arguments of an earlier ingest.  ``left_out``: what lies beside this experiment and belongs to none.
    ``not_used``: files with requests, or named by the user, that are not read, with the reason.  ``before``: what the
    experiment had that was replaced.
    """

    slug: str
    alias: str
    outcome: WriteOutcome
    requests: int
    steps: int
    iterations: int
    findings: int
    rejected: int
    bytes: int
    seconds: float
    unusable: str = ""
    engine_given_before: str = ""
    left_out: str = ""
    not_used: str = ""
    before: str = ""


def outcomes_table(outcomes: Sequence[IngestOutcome]) -> Table:
    """A row per ingest."""
    columns = columns_named(*(field.name for field in fields(IngestOutcome)), kind="data")
    return table_of((asdict(outcome) for outcome in outcomes), columns)


def ingest_source(
    store_path: Path | str,
    source: Source | Path | str,
    *,
    profile: Mapping[str, object] | None = None,
    engine_file: Path | None = None,
    even_worse: bool = False,
    progress: Progress | None = None,
) -> IngestOutcome:
    """Read an experiment directory, or files of one experiment, check them, and store them in one transaction.

    ``source``, ``profile``, ``progress``: as in ``assemble.read_recording``; ``engine_file``: YAML of engine arguments
    that overrule all others.  What an earlier ingest was given holds until something else is given.  Bytes that this
    program has stored already are hashed, not parsed.  ``even_worse``: store also a copy that has fewer requests or
    steps, or more rejected records.  Raises ``RecordingError`` or ``StoreError``; the store is then as it was.
    """
    from blis_replay.ingest.assemble import read_recording
    from blis_replay.ingest.readers.discovery import Source, only_source
    from blis_replay.ingest.readers.server.engine_settings import given_arguments

    begin = time.perf_counter()
    if not isinstance(source, Source):
        source = only_source(source)
    left_out = ", ".join(source.left_out)
    given, reused, unchanged = given_arguments(engine_file) if engine_file else None, "", None
    if Path(store_path).exists():
        with open_store(store_path, read_only=True) as store:
            source = source.as_before(stored_files(store, source.slug))
            if engine_file is None and (given := _given_before(store, source.slug)):
                reused = f"{given.name} ({', '.join(given.arguments)})"
            unchanged = _unchanged(store, source, profile or {}, given, progress)
            files = stored_files(store, source.slug)
    if unchanged:
        unchanged = replace(unchanged, not_used=_not_used(files, source), left_out=left_out)
        return replace(unchanged, engine_given_before=reused, seconds=time.perf_counter() - begin)
    with read_recording(source, profile=profile, given=given, progress=progress) as recording:
        checked, layout = _checked(recording)
        with open_store(store_path) as store:
            if not even_worse:
                _refuse_worse(store, checked, source)
            limit_writing(store)
            had = stored_counts(store, checked.slug)
            outcome = write_recording(store, checked, layout, _reader_hash(source.form))
        unused = _not_used([(file.name, file.kind) for file in checked.files], source)
    ingested = _outcome(checked, outcome, time.perf_counter() - begin)
    before = ""
    if had is not None and outcome == "replaced":
        before = f"{counted(had.requests, 'request')}, {counted(had.steps, 'step')}"
    return replace(ingested, engine_given_before=reused, left_out=left_out, not_used=unused, before=before)


# Files of a directory that are likely to have requests.
_TABLES = re.compile(r".*\.(csv|tsv|jsonl|parquet)(\.gz|\.zst)?", re.IGNORECASE)
_NOT_USED = re.compile(r".*\(not used: (.*)\)")


def _not_used(files: Sequence[tuple[str, str]], source: Source) -> str:
    """Files that the user may expect to be used and that were not, with the reason."""
    from blis_replay.ingest.readers.tables.columns import EXAMPLE

    unused = [(name, match[1]) for name, kind in files if (match := _NOT_USED.fullmatch(kind))]
    named, why = source.paths is not None, f"its format is not known; if it has requests, say {EXAMPLE}"
    unused += [(name, why) for name, kind in files if kind == "unknown" and (named or _TABLES.fullmatch(name))]
    names: dict[str, list[str]] = {}
    for name, why in unused:
        names.setdefault(why, []).append(name)
    several = {
        why: [*of[:_MOST_NAMES], *([f"{len(of) - _MOST_NAMES} more"] if of[_MOST_NAMES:] else [])]
        for why, of in names.items()
    }
    return ", ".join(f"{', '.join(of)} ({why})" for why, of in several.items())


_NOT_WORSE = ("requests", "steps", "iterations", "rejected")


def _refuse_worse(store: Store, recording: Recording, source: Source) -> None:
    """A copy that was cut off, or another file of one folder, must not take the place of what is stored."""
    from blis_replay.ingest.readers.discovery import GIVEN_KIND

    stored = stored_counts(store, recording.slug)
    if stored is None or stored.ground_truth == PUBLISHED or stored.content_hash == recording.content_hash:
        return
    kinds = dict(stored_files(store, recording.slug)), {file.name: file.kind for file in recording.files}
    before, now = ([name for name, kind in of.items() if not kind.startswith(GIVEN_KIND)] for of in kinds)
    if source.paths is not None and not {*now} & {*before}:
        named = f"{', '.join(before[:3])}{', ...' if len(before) > 3 else ''}"
        problem = f"{recording.slug} is stored from {named}, and these are other files"
        raise RecordingError(source.root, "", problem, "give --name NAME for an experiment of its own, or --replace")
    # What options say counts as bytes too.
    given = sum(len(kind) - len(GIVEN_KIND) for kind in kinds[0].values() if kind.startswith(GIVEN_KIND))
    same = stored.bytes - given == sum(file.bytes for file in recording.files if not file.kind.startswith(GIVEN_KIND))
    if same and before == now and kinds[0].get("--columns") != kinds[1].get("--columns"):
        return  # the user says more of the same files
    has = _outcome(recording, "replaced", 0.0)
    worse = [
        f"{getattr(has, name):,} {what} where the stored one has {getattr(stored, name):,}"
        for name, what in zip(_NOT_WORSE, (*_NOT_WORSE[:-1], "rejected records"), strict=True)
        if (getattr(has, name) - getattr(stored, name)) * (1 if name == "rejected" else -1) > 0
    ]
    if worse:
        problem = f"it has {', '.join(worse)}; {recording.slug} stays as it is stored"
        raise RecordingError(source.root, "", problem, "copy it again, or give --replace if it is another run")


def _given_before(store: Store, slug: str) -> GivenArguments | None:
    """The engine arguments that an earlier ingest of the experiment was given."""
    from blis_replay.ingest.readers.server.engine_settings import GivenArguments

    settings = {name: setting for name, setting in read_engine(store, slug).items() if setting.source == "file"}
    if not settings:
        return None
    names = ", ".join(dict.fromkeys(setting.detail for setting in settings.values()))
    return GivenArguments({name: setting.value for name, setting in settings.items()}, names)


def _unchanged(
    store: Store,
    source: Source,
    profile: Mapping[str, object],
    given: GivenArguments | None,
    progress: Progress | None,
) -> IngestOutcome | None:
    """What is stored of a source, if this program read the same bytes before; its files are hashed, not parsed."""
    from blis_replay.ingest.assemble import content_hash_of

    counts = stored_counts(store, source.slug)
    if counts is None or counts.read_by != _reader_hash(source.form):
        return None
    if counts.content_hash != content_hash_of(source, profile, given, progress):
        return None
    kept = {name: value for name, value in asdict(counts).items() if name in _KEPT_COUNTS}
    return IngestOutcome(source.slug, outcome="unchanged", seconds=0.0, **kept)


_KEPT_COUNTS = ("alias", "requests", "steps", "iterations", "findings", "unusable", "rejected", "bytes")
_MOST_NAMES = 12


@cache
def _reader_hash(form: str) -> str:
    """SHA-256 over the program that reads, and the format that its files are said to have.

    The program: this room's files, and the modules of formats that other distributions plug in.
    """
    digest, room = hashlib.sha256(form.encode()), Path(__file__).parent
    for path in sorted(path for path in room.rglob("*") if path.suffix in (".py", ".sql", ".yaml")):
        digest.update(path.relative_to(room).as_posix().encode() + path.read_bytes())
    for name, point in addons("format").items():
        found = find_spec(point.module)
        digest.update(name.encode() + (Path(found.origin).read_bytes() if found and found.origin else b""))
    return digest.hexdigest()


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
        iterations=recording.iterations.height,
        findings=len(recording.findings),
        unusable=", ".join(sorted({one.check for one in recording.findings if one.severity == "unusable"})),
        rejected=sum(file.rejected_count for file in recording.files),
        bytes=sum(file.bytes for file in recording.files),
        seconds=seconds,
    )


def stored_files(store: Store, slug: str) -> list[tuple[str, str]]:
    """Names and kinds of the files of an experiment; none if it is not stored."""
    rows = store.connection.execute("SELECT name, kind FROM source_files WHERE slug = ? ORDER BY position", [slug])
    return [(str(name), str(kind)) for name, kind in rows.fetchall()]


@dataclass(frozen=True)
class StoredCounts:
    """What an experiment that was ingested before has.

    ``unusable``: names of checks.  ``rejected``: records, ``bytes``: of all its files; ``read_by``: hash of the program
    that read its files, None if it has none.
    """

    alias: str
    requests: int
    steps: int
    iterations: int
    findings: int
    unusable: str
    rejected: int
    bytes: int
    ground_truth: GroundTruth
    content_hash: str
    read_by: str | None


_STORED_COUNTS = """
SELECT alias, (SELECT count(*) FROM requests r WHERE r.slug = e.slug),
       (SELECT count(*) FROM steps s WHERE s.slug = e.slug),
       (SELECT count(*) FROM iterations i WHERE i.slug = e.slug),
       (SELECT count(*) FROM findings f WHERE f.slug = e.slug),
       (SELECT coalesce(string_agg(DISTINCT check_name, ', ' ORDER BY check_name), '') FROM findings f
        WHERE f.slug = e.slug AND severity = 'unusable'),
       (SELECT coalesce(sum(rejected_count), 0)::BIGINT FROM source_files f WHERE f.slug = e.slug),
       (SELECT coalesce(sum(bytes), 0)::BIGINT FROM source_files f WHERE f.slug = e.slug),
       ground_truth, content_hash, read_by
FROM experiments e WHERE slug = ?
"""


def stored_counts(store: Store, slug: str) -> StoredCounts | None:
    """What is stored of a slug; ``None`` if nothing is."""
    row = first_row(store.connection, _STORED_COUNTS, [slug])
    return None if row is None else StoredCounts(*row)
