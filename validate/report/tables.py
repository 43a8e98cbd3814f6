"""The tables of a page: latencies with intervals, load stages, and what the numbers depend on."""

from __future__ import annotations

from collections.abc import Mapping

from blis_replay.ingest.checks.pictures import Cell, Table
from blis_replay.replay.store import provenance_of
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.comparison.comparison_text import observed_text
from blis_replay.validate.metrics import METRICS, STATISTICS
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.overview import COLUMNS, header
from blis_replay.validate.terminal import milliseconds, percent

_MOST_FILES = 200


def metric_table(evidence: Evidence) -> Table:
    """Every number observed and simulated, with its error and that error's interval."""
    rows = []
    for metric, statistic in ((m, s) for m in METRICS for s in STATISTICS):
        cell = evidence.comparison.metrics[metric][statistic]
        simulated = "" if cell.unusable else milliseconds(cell.simulated_us)
        within = evidence.intervals.get((metric, statistic))
        rows.append(
            (f"{metric.upper()} {statistic}", observed_text(cell), simulated, percent(cell.error), _interval(within))
        )
    title = f"Latencies of {evidence.comparison.requests:,} requests"
    note = "error: simulated over observed, less one; interval: 95 % over resampled requests"
    return Table(title, ("", "observed ms", "simulated ms", "error", "interval"), tuple(rows), note=note)


def _interval(within: tuple[float, float] | None) -> str:
    return "-" if within is None else f"{percent(within[0])} .. {percent(within[1])}"


def stage_table(evidence: Evidence) -> Table | None:
    """Errors by load stage; None of a run with one stage."""
    if not evidence.stages:
        return None
    rows = tuple((f"stage {c.selection.stage}", f"{c.requests:,}", *_errors(c)) for c in evidence.stages)
    return Table("Errors by load stage", ("", "requests", *header()), rows)


def _errors(comparison: Comparison) -> list[str]:
    return [percent(comparison.metrics[metric][statistic].error) for (metric, statistic), _ in COLUMNS]


def provenance_tables(evidence: Evidence, command: str) -> list[Table]:
    """What the numbers depend on: command, versions and hashes, engine arguments, files."""
    provenance = provenance_of(evidence.run)
    facts: list[tuple[Cell, ...]] = [("command", command)]
    facts += [(name, value) for name, value in provenance.items() if isinstance(value, str)]
    facts += _words("replayed", provenance["basis"]) + _words("delay", provenance["delays"])
    recording = evidence.run.recording
    facts += [("model", recording.model), ("hardware", recording.hardware)]
    facts.append(("tensor parallelism", recording.tensor_parallelism))
    settings = sorted(evidence.run.recording.engine.items())
    engine = tuple((name, str(s.value), s.source, s.detail) for name, s in settings)
    shown = recording.files[:_MOST_FILES]
    files = tuple((f.name, f.kind, f"{f.bytes:,}", f"{f.records:,}", f"{f.rejected_count:,}", f.sha256) for f in shown)
    left = len(recording.files) - len(shown)
    tables = [
        Table("Provenance", ("", "value"), tuple(facts)),
        Table("Engine arguments of the recording", ("argument", "value", "source", "from"), engine),
        Table(
            "Files of the recording",
            ("file", "kind", "bytes", "records", "rejected", "SHA-256"),
            files,
            note=f"and {left:,} more" if left else "",
        ),
    ]
    return [table for table in tables if table.rows]


def _words(kind: str, named: object) -> list[tuple[Cell, ...]]:
    return [(f"{kind}: {name}", str(text)) for name, text in named.items()] if isinstance(named, Mapping) else []
