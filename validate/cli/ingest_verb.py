"""``blis-replay ingest``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.ingest.printable import printable
from blis_replay.validate.cli.options import json_option, print_json, store_option

if TYPE_CHECKING:
    from blis_replay.ingest.ingest import IngestOutcome


_SHOWN_EVERY_S = 0.2


@click.command("ingest")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--name", default="", help="Name of the experiment (default: that of its directory).")
@click.option("--format", "form", default="", metavar="FORMAT", help="Format of the files named, if not found out.")
@click.option(
    "--engine",
    "engine_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML of engine arguments that the recording lacks, e.g. `num_gpu_blocks: 26603`.",
)
@store_option
@json_option
def command(
    paths: tuple[str, ...], name: str, form: str, engine_file: Path | None, store_path: Path, as_json: bool
) -> int:
    """Read experiments, as load generators and vLLM leave them, into the store.

    A directory is one experiment, or holds several with an exp-config.yaml each; files of
    one folder are one, called like the folder.
    Formats are found out by content. Each experiment is read in one transaction; reading
    the same content again changes nothing. Instrument checks run at once; see
    `blis-replay inspect`. One that cannot be read is reported, the others are read all the
    same; the exit code is then 3.

    \b
    Examples:
      blis-replay ingest runs/20260218-150304-codellama-34b-tp2-general
      blis-replay ingest runs/* --engine engine.yaml
      blis-replay ingest bench/benchmarks.json 'bench/traces*.json' --name my-run
    """
    from blis_replay.fixtures.catalogue import profile_of
    from blis_replay.ingest.errors import RecordingError
    from blis_replay.ingest.ingest import ingest_source
    from blis_replay.ingest.readers.discovery import FORMATS, sources_of

    if form and form not in FORMATS:
        raise click.BadParameter(f"{printable(form)} is none of {', '.join(FORMATS)}", param_hint="--format")
    outcomes, refused = [], []
    for source in sources_of(paths, slug=name, form=form):
        progress = _Progress(printable(source.slug)) if sys.stderr.isatty() and not as_json else None
        try:
            outcome = ingest_source(
                store_path, source, profile=profile_of(source.slug), engine_file=engine_file, progress=progress
            )
        except RecordingError as error:
            refused.append({"source": str(source.root), "error": str(error)})
            click.echo(f"error: {error}", err=True)
            continue
        outcomes.append(outcome)
        if not as_json:
            click.echo(_line(outcome))
    if as_json:
        print_json({"ingested": [vars(outcome) for outcome in outcomes], "refused": refused})
    return 3 if refused else 0


class _Progress:
    """A line on the terminal that says how far the reading of a file is, how fast, and how long it will take."""

    def __init__(self, name: str) -> None:
        self.name, self.file_name, self.begin, self.shown = name, "", 0.0, 0.0

    def __call__(self, file_name: str, bytes_done: int, bytes_total: int) -> None:
        """Called by the readers with the bytes of the file read so far."""
        now = time.monotonic()
        if file_name != self.file_name:
            self.file_name, self.begin, self.shown = file_name, now, 0.0
        ended = bytes_done == bytes_total
        if ended or now - self.shown >= _SHOWN_EVERY_S:
            self.shown = now
            text = progress_text(bytes_done, bytes_total, now - self.begin)
            click.echo(f"\r{self.name}: {file_name} {text}\x1b[K", err=True, nl=ended)


def progress_text(bytes_done: int, bytes_total: int, seconds: float) -> str:
    """Share, rate and remaining time of a file of which so much was read in so many seconds."""
    share = 100 if bytes_total == 0 else 100 * bytes_done // bytes_total
    if seconds < _SHOWN_EVERY_S or bytes_done == 0:
        return f"{share:3d} %"
    rate = bytes_done / seconds
    left = "" if bytes_done == bytes_total else f", {(bytes_total - bytes_done) / rate:.0f} s left"
    return f"{share:3d} %, {rate / 1e6:.0f} MB/s{left}"


def _line(outcome: IngestOutcome) -> str:
    rejected = f", {outcome.rejected:,} records rejected" if outcome.rejected else ""
    return (
        f"{outcome.alias} ({outcome.slug}): {outcome.outcome}; {outcome.requests:,} requests, "
        f"{outcome.steps:,} steps, {outcome.findings:,} findings{rejected}; {outcome.seconds:.1f} s"
    )
