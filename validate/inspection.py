"""What a recording holds and what its instrument checks found, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blis_replay.base.errors import BAD_DATA, UnknownExperimentError, counted
from blis_replay.fixtures.catalogue import bundled_aliases, bundled_row
from blis_replay.ingest.checks.evidence import CheckEvidence
from blis_replay.ingest.checks.ledger import ledger_table
from blis_replay.ingest.recording import (
    PUBLISHED,
    SCHEDULE_DELAY,
    UNKNOWN,
    Finding,
    Recording,
    SharedPrefix,
)
from blis_replay.ingest.served import published
from blis_replay.ingest.store import list_experiments, open_for_reading, open_store, read_stored
from blis_replay.ingest.store.file import writable
from blis_replay.ingest.store.recordings import experiments_named, read_findings, resolve
from blis_replay.ingest.store.writing import remove_recordings
from blis_replay.ingest.tables import Cell, Column, Table, Toned, Value, columns_named, table_of
from blis_replay.validate.experiment import find_experiment
from blis_replay.validate.text.answer import Answer, Block, Line, Part, finding_line, severity_mark

if TYPE_CHECKING:
    from blis_replay.fixtures.pack import Pack

_SHORT_HASH = 12


def _document(recording: Recording, findings: Sequence[Finding]) -> dict[str, object]:
    """The recording's identity, engine arguments with sources, files, gaps and findings."""
    prefix = recording.prefix
    return {
        "slug": recording.slug,
        "alias": recording.alias,
        "model": recording.model,
        "hardware": recording.hardware,
        "tensor_parallelism": recording.tensor_parallelism,
        "workload": recording.workload,
        "ground_truth": recording.ground_truth,
        "content_hash": recording.content_hash,
        "requests": recording.requests.height,
        "steps": recording.steps.height,
        "iterations": recording.iterations.height,
        "engine": {name: dict(zip(_SETTING, row, strict=True)) for name, *row in _arguments(recording)},
        "stages": [vars(stage) for stage in recording.stages],
        "shared_prefix": recording.shared_prefix and vars(recording.shared_prefix),
        "load_profile": recording.load_profile and asdict(recording.load_profile),
        "clocks": [vars(clock) for clock in recording.clocks],
        "files": [vars(file) for file in recording.files],
        "missing": list(recording.missing),
        "prefix_identity": prefix
        and {"source": prefix.source, "requests": prefix.requests.height, "prompts": prefix.prompts.height},
        "ledger": ledger_table(recording).records(),
        "findings": [vars(finding) for finding in findings],
    }


def inspected(store_path: Path, name: str) -> Answer:
    """The answer for a stored or bundled experiment; raises ``UnknownExperimentError``."""
    with open_for_reading(store_path) as store:
        slug = find_experiment(store, name)
        return inspection_answer(read_stored(store, slug), read_findings(store, slug))


def inspection_answer(recording: Recording, findings: Sequence[Finding]) -> Answer:
    """What a recording holds, in what it is incomplete, and what its instrument checks found."""
    severities = ("unusable", "corrected", "note")
    ordered = sorted((f for f in findings if f.is_checked), key=lambda f: severities.index(f.severity))
    lines = [*dict.fromkeys(map(finding_line, ordered))]  # a finding of two metrics is one line
    unchecked = [f for f in findings if not f.is_checked]
    without = ", ".join(dict.fromkeys(f.check for f in unchecked))
    folded = [f"- nothing to check for {without} (-v says why)"] if without else []
    files: list[list[Cell]] = [
        [f.name, f.kind, f.bytes, f.records, f.rejected_count, f.sha256[:_SHORT_HASH]] for f in recording.files
    ]
    engine: list[list[Cell]] = [
        [name, "" if value is None else str(value), *why] for name, value, *why in _arguments(recording)
    ]
    head: list[Part] = [
        Block(_identity(recording)),
        Table("", _ENGINE_COLUMNS, engine, cut=True),
        Table("", _FILE_COLUMNS, files, cut=True),
        *([ledger] if (ledger := ledger_table(recording)).rows else []),
        Block([f"- {line}" for line in recording.missing], "not in the recording"),
    ]
    page = [*head, Block([*lines, *map(finding_line, unchecked)], "instrument checks")]
    brief = [*head, Block([*lines, *folded], "instrument checks")]
    names = ("check", "severity", "metric", "message", "threshold")
    rows = table_of([vars(finding) for finding in findings], columns_named(*names, kind="data"))
    return Answer(page, _document(recording, findings), rows, brief=brief)


_SETTING = ("value", "source", "detail")


def _arguments(recording: Recording) -> list[tuple[str, int | float | bool | str | None, str, str]]:
    """Name, value, source and detail of every engine argument; those without a default have no value where unknown."""
    known = [(name, s.value, s.source, s.detail) for name, s in recording.engine.items()]
    needed = [name for name in ("max_model_len", "num_gpu_blocks") if name not in recording.engine]
    return sorted([*known, *((name, None, UNKNOWN, "nothing says it, and it has no default") for name in needed)])


def _identity(recording: Recording) -> list[Line]:
    statuses = recording.requests["status"].value_counts(sort=True).iter_rows()
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses)
    lines = [
        f"  model: {recording.model or 'not recorded'}",
        f"  tensor parallelism: {recording.tensor_parallelism or 'not recorded'}",
        f"  hardware: {recording.hardware or 'not recorded'}",
        f"  ground truth: {recording.ground_truth}",
        f"  requests: {recording.requests.height:,} ({counts or 'none'})",
        f"  step records: {recording.steps.height:,}",
    ]
    if not recording.iterations.is_empty():
        lines.append(f"  iterations in the server's log: {recording.iterations.height:,}")
    if recording.prefix is not None:
        lines.append(f"  prefix identity: {recording.prefix.prompts.height:,} prompts ({recording.prefix.source})")
    lines += [f"  stage {s.stage}: {s.rate_per_s:g} requests/s for {s.duration_us / 1e6:g} s" for s in recording.stages]
    title = Line(f"{recording.alias}  ({recording.slug})", mark=Toned(recording.alias, "heading"))
    late = [published(recording.aggregates, -1, SCHEDULE_DELAY, name) for name in ("p50", "p99", "max")]
    if None not in late:
        p50, p99, most = ((us or 0.0) / 1e6 for us in late)
        lines.append(f"  sends behind their schedule: p50 {p50:,.3f} s, p99 {p99:,.3f} s, max {most:,.3f} s")
    return [title, *(Line(line, "    ") for line in [*lines, *_load(recording)])]


def _load(recording: Recording) -> list[str]:
    """The prompts that ran, and the load as it was declared."""
    lines, declared = [], recording.load_profile
    if recording.shared_prefix is not None:
        lines.append(f"  shared prefixes: {_prompts(recording.shared_prefix)}")
    if declared is not None:
        said = [f"{declared.arrivals} arrivals"] if declared.arrivals else []
        said += [_prompts(declared.shared_prefix)] if declared.shared_prefix else []
        said += ["conversations of several turns"] if declared.multi_turn else []
        lines.append(f"  declared in {declared.source}: {'; '.join(said) or 'load stages'}")
    return lines


def _prompts(workload: SharedPrefix) -> str:
    return (
        f"{workload.num_groups} groups of {workload.num_prompts_per_group} prompts, "
        f"{workload.system_prompt_tokens} + {workload.question_tokens} tokens"
    )


_ENGINE_COLUMNS = (*columns_named("engine argument", "value", "source", "", kind="text"),)
_FILE_COLUMNS = (
    *columns_named("file", "kind", kind="text"),
    *columns_named("bytes", "records", "rejected", kind="count"),
    Column("sha256", "word", wide=1),
)


_EXPERIMENT_COLUMNS = (
    *(Column("alias", "text"), Column("model", "text", spare=1)),
    *columns_named("tp", "requests", "failed", kind="count"),
    *(Column("ground truth", "word"), Column("load", "word", wide=4)),
    Column("workload", "text", wide=2),
    Column("findings", "count", wide=3),
    Column("slug", "text", wide=1),
)
# The table that each column is in where one line cannot hold all.
_EXPERIMENT_PARTS = {"alias": 0, "load": 2, "workload": 2, "findings": 2, "slug": 3}


def experiments_answer(store_path: Path) -> Answer:
    """The stored and the bundled experiments, sorted by slug; nothing is stored by looking."""
    stored: list[dict[str, Any]] = []
    if store_path.exists():
        with open_store(store_path, read_only=True) as store:
            stored = [{**vars(row), "stored": True} for row in list_experiments(store)]
    slugs = {row["slug"] for row in stored}
    # Requests reconstructed from aggregates all succeed; how many failed is published.
    known = {slug: bundled_row(alias, slug).failed for alias, slug in bundled_aliases().items() if slug in slugs}
    for row in stored:
        if row["ground_truth"] == PUBLISHED:
            row["failed"] = known.get(str(row["slug"]), row["failed"])
    # The checks run when it is first used.
    unread = {"overloaded": None, "unusable": None, "findings": None, "stored": False}
    bundled = [vars(bundled_row(*named)) | unread for named in bundled_aliases().items() if named[1] not in slugs]
    taken = {str(row["alias"]) for row in stored}
    for row in bundled:
        row["alias"] = row["slug"] if row["alias"] in taken else row["alias"]
    rows = sorted([*stored, *bundled], key=lambda row: str(row["slug"]))
    cells = [*map(_cells, rows)]
    every = tuple(Column(one.name, one.kind, part=_EXPERIMENT_PARTS.get(one.name, 1)) for one in _EXPERIMENT_COLUMNS)
    named = {name: ", ".join(str(row["alias"]) for row in rows if row[name]) for name in ("overloaded", "unusable")}
    below = [f"{name}: {aliases}" for name, aliases in named.items() if aliases]
    brief: list[Part] = [Table("", _EXPERIMENT_COLUMNS, cells), *below]
    return Answer([Table("", every, cells), *below], {"experiments": rows}, table_of(rows), brief=brief)


def removed(store_path: Path, names: Sequence[str]) -> None:
    """Take experiments out of the store, all of them or none.

    Raises ``UnknownExperimentError`` for a name that is not stored.
    """
    ships = bundled_aliases()
    with open_store(store_path, read_only=True) as opened:
        stored = experiments_named(opened)
        for name in names:
            if name in ships and not {name, ships[name]} & {*stored, *stored.values()}:
                raise UnknownExperimentError(f"{name} ships with the package and is not in the store; leave it out")
        slugs = [resolve(stored, name) for name in names]
        with writable(opened) as store:
            remove_recordings(store, slugs)


_PACK_COLUMNS = (
    *(Column("file", "text"), Column("bytes", "count"), Column("sha256", "text")),
    *(Column("", "word"), Column("licence", "text", below=True), Column("source", "text", below=True)),
)


def pack_answer(pack: Pack) -> Answer:
    """Version and files of a pack, and what is not as its manifest says."""
    wrong = [file for file in pack.files if file.state != "ok"]
    intact = "as listed" if pack.intact else f"{len(wrong) + len(pack.unlisted)} not as listed"
    verdict = Toned(intact, "good" if pack.intact else "bad")
    head = Line(f"pack {pack.version}: {counted(len(pack.files), 'file')}, {intact}", mark=verdict)
    off = [f"{file.state}: {file.path}" for file in wrong] + [f"not listed: {path}" for path in pack.unlisted]
    cells: list[list[Cell]] = [
        [f.path, f.bytes, f.sha256[:_SHORT_HASH], f.state, f.license, f.source] for f in pack.files
    ]
    licences = Counter(file.license for file in pack.files)
    brief = Block([head, *(f"{licence}: {counted(count, 'file')}" for licence, count in licences.most_common()), *off])
    records = [vars(file) for file in pack.files]
    document = {"version": pack.version, "intact": pack.intact, "files": records, "unlisted": pack.unlisted}
    page: list[Part] = [head, Table("", _PACK_COLUMNS, cells), Block(off)]
    return Answer(page, document, table_of(records), exit_code=0 if pack.intact else BAD_DATA, brief=[brief])


def experiment_names(store_path: Path) -> list[str]:
    """What stored and bundled experiments can be called: aliases, and slugs where two share an alias."""
    return [str(row["alias"]) for row in experiments_answer(store_path).document["experiments"]]


def _cells(row: dict[str, Any]) -> list[Cell]:
    return [
        row["alias"],
        str(row["model"] or "not recorded").split("/")[-1],
        row["tensor_parallelism"],
        row["requests"],
        row["failed"],
        str(row["ground_truth"]).split()[0],  # recorded, published, arrival
        Toned("overloaded", "heading") if row["overloaded"] else "",
        row["workload"],
        row["findings"],
        row["slug"],
    ]


def checks_answer(names: Mapping[str, str]) -> Answer:
    """The instrument checks with what they measure."""
    lines = [f"{name}: {measures}" for name, measures in names.items()]
    rows = table_of({"check": name, "measures": measures} for name, measures in names.items())
    return Answer([Block(lines)], {"checks": names}, rows)


def evidence_answer(evidence: CheckEvidence) -> Answer:
    """The check, its rule, findings and tables; the rows are one per number or word of a finding or a table."""
    check = evidence.check
    page: list[Part] = [
        Line(f"{check.name}: {evidence.alias}  ({evidence.slug})", mark=Toned(check.name, "heading")),
        f"measures: {check.measures}",
        f"thresholds: {check.rule}",
        *(_finding_part(finding) for finding in evidence.findings),
        *([] if evidence.findings else ["no finding"]),
        *evidence.tables,
    ]
    document = {
        "slug": evidence.slug,
        "alias": evidence.alias,
        "check": check.name,
        "measures": check.measures,
        "rule": check.rule,
        "findings": [vars(finding) for finding in evidence.findings],
        "tables": [{"title": shown.title, "note": shown.note, "rows": shown.records()} for shown in evidence.tables],
    }
    return Answer(page, document, _evidence_rows(evidence))


def _evidence_rows(evidence: CheckEvidence) -> Table:
    """``table``: the title of a table, or ``finding``; ``row`` counts from 0; ``column`` names the cell."""
    findings: list[Mapping[str, Value]] = [
        {"severity": finding.severity, "message": finding.message, **finding.measured} for finding in evidence.findings
    ]
    tables: list[tuple[str, Sequence[Mapping[str, Value]]]] = [("finding", findings)]
    tables += [(shown.title, shown.records()) for shown in evidence.tables]
    rows = [
        [title, i, name, None if value is None else str(value)]
        for title, records in tables
        for i, record in enumerate(records)
        for name, value in record.items()
    ]
    return Table("", columns_named("table", "row", "column", "value", kind="data"), rows)


def _finding_part(finding: Finding) -> Block:
    of = f" of {finding.metric}" if finding.metric else ""
    line = Line(f"{finding.severity}{of}: {finding.message}", mark=severity_mark(finding.severity, finding))
    measured = Table("", columns_named("measured", ""), list(finding.measured.items()))
    return Block([line, measured] if finding.measured else [line])
