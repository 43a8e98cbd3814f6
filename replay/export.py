"""Writing the requests of a recording for other simulators: whole files or none, and what got lost said."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from blis_replay.ingest.recording import RECORDED, REQUEST_SCHEMA, Recording
from blis_replay.replay import export_legacy_csv, export_mooncake, export_parquet, export_tracev2
from blis_replay.replay.errors import FileExistsAlreadyError, ReplayError

# Which place a request has is told by the order of the rows.
_TOLD_BY_ORDER = ("request_index",)


@dataclass(frozen=True)
class ExportTarget:
    """A format to export to.

    ``suffix``: of the file, or of the folder if there are several ``files``.  ``write(recording,
    folder)``: writes ``files`` into ``folder``; returns what was lost beside whole columns.
    ``columns``: those of ``REQUEST_SCHEMA`` that it carries.  ``lengths``: where its reader has
    to take output lengths from (``OUTPUT_LENGTH_SOURCES``), for want of a column.  ``engine``:
    the engine arguments that it carries.
    """

    suffix: str
    files: tuple[str, ...]
    write: Callable[[Recording, Path], list[str]]
    columns: tuple[str, ...]
    lengths: str = "server usage"
    engine: tuple[str, ...] = ()


TARGETS: dict[str, ExportTarget] = {
    "tracev2": ExportTarget(
        "-tracev2",
        export_tracev2.FILES,
        export_tracev2.write,
        export_tracev2.COLUMNS,
        lengths="re-tokenised",
        engine=export_tracev2.ENGINE,
    ),
    "legacy-csv": ExportTarget(".csv", ("requests.csv",), export_legacy_csv.write, export_legacy_csv.COLUMNS),
    "mooncake": ExportTarget(".jsonl", ("requests.jsonl",), export_mooncake.write, export_mooncake.COLUMNS),
    "parquet": ExportTarget(".parquet", ("requests.parquet",), export_parquet.write, tuple(REQUEST_SCHEMA)),
}


@dataclass(frozen=True)
class Exported:
    """What an export wrote; ``not_carried``: what the recording has and the format does not, in words."""

    files: tuple[Path, ...]
    requests: int
    not_carried: tuple[str, ...]


def export(recording: Recording, target: str, out: Path | None = None, force: bool = False) -> Exported:
    """Write the requests of a recording as ``target`` (one of ``TARGETS``) to a file or folder ``out``.

    Without ``out`` it is called like the alias, in the current folder.  Files appear whole, by
    renaming.  Raises ``FileExistsAlreadyError`` unless ``force``, ``ReplayError`` if the recording
    has no requests or does not say how long they were, ``OSError`` if the folder cannot be written.
    """
    if recording.requests.height == 0:
        raise ReplayError(f"{recording.slug}: the recording has no requests to export; ingest its per-request records")
    form = TARGETS[target]
    out = out or Path(recording.alias + form.suffix)
    final = [out / name for name in form.files] if len(form.files) > 1 else [out]
    for path in final:
        if os.path.lexists(path) and not force:
            raise FileExistsAlreadyError(f"{path}: is there already; give --force to replace it, or another --out")
    folder = final[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that the last step is a renaming.
    with TemporaryDirectory(dir=folder, prefix=".blis-replay-") as scratch:
        lost = form.write(recording, Path(scratch))
        for name, path in zip(form.files, final, strict=True):
            (Path(scratch) / name).replace(path)
    return Exported(tuple(final), recording.requests.height, (*lost, *_not_carried(recording, form)))


def _not_carried(recording: Recording, form: ExportTarget) -> list[str]:
    """Columns that say something which the reader of the export cannot find out, and what is no request."""
    requests = recording.requests.with_columns(
        # These are what a reader takes for granted.
        pl.col("status").replace("ok", None),
        pl.col("output_tokens_source").replace(form.lengths, None),
        pl.when(pl.col("output_tokens_reported").ne_missing(pl.col("output_tokens"))).then("output_tokens_reported"),
    )
    known = [name for name in REQUEST_SCHEMA if requests[name].count()]
    lost = [name for name in known if name not in (*form.columns, *_TOLD_BY_ORDER)]
    given = {name for name, setting in recording.engine.items() if setting.source != "default"}
    beside = {
        "token times": recording.ground_truth == RECORDED and "token times" not in recording.missing,
        "step records": recording.steps.height > 0,
        "load stages": len(recording.stages) > 0,
        f"engine arguments {', '.join(sorted(given - set(form.engine)))}": not given <= set(form.engine),
    }
    return [*lost, *(name for name, there in beside.items() if there)]
