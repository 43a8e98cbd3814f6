"""``blis-replay ingest``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blis_replay.ingest.errors import printable
from blis_replay.validate.cli.options import asked_form, form_options, print_answer, store_option
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.cli.verb import verb
from blis_replay.validate.text.answer import Answer

if TYPE_CHECKING:
    from blis_replay.ingest.ingest import IngestOutcome

# Where a format of recordings is kept that was named as the form of the answer.
_FORMER_FORMAT = "blis_replay.input_format"


class _Form(click.Choice[str]):
    """The form of the answer, or, as ``--format`` once meant, a format of the files; its note says how it is now."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """One of the forms; None for a format of recordings, which is then kept for the verb."""
        from blis_replay.ingest.readers.discovery import FORMATS

        if ctx is None or value in self.choices or value not in FORMATS:
            return super().convert(value, param, ctx)
        click.echo(f"note: `--format {value}` is now `--input-format {value}`", err=True)
        ctx.meta[_FORMER_FORMAT] = value
        return None


@verb("ingest")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--name", default="", help="Name of the experiment.  [default: that of its directory]")
@click.option(
    "--input-format", "file_format", default="", metavar="FORMAT", help="Format of the files named, if not found out."
)
@click.option(
    "--columns",
    multiple=True,
    metavar="FIELD=COLUMN:UNIT,...",
    help="What the columns of a table are, where their names do not say it.  [default: as at the last ingest]",
)
@click.option(
    "--model", metavar="NAME", help="What was served, where no file says it.  [default: as at the last ingest]"
)
@click.option(
    "--engine",
    "engine_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML of engine arguments, e.g. `num_gpu_blocks: 26603`; kept for later ingests of the experiment.",
)
@click.option(
    "--replace", "even_worse", is_flag=True, help="Store also what has fewer requests or steps than what is stored."
)
@store_option
@form_options
def command(
    paths: tuple[str, ...],
    name: str,
    file_format: str,
    columns: tuple[str, ...],
    model: str | None,
    engine_file: Path | None,
    even_worse: bool,
    store_path: Path,
    form: str | None,
) -> int:
    """Read experiments, as load generators and vLLM leave them, into the store.

    A directory is one experiment, or holds several with an exp-config.yaml each; files of
    one folder are one, called like the folder.
    Formats are found out by content. Each experiment is read in one transaction; reading
    the same content again changes nothing; a copy that was cut off replaces the whole one
    only with --replace. Instrument checks run at once; see `blis-replay inspect`. One that
    cannot be read is reported, the others are read all the same; the exit code is then 3.

    \b
    Examples:
      blis-replay ingest runs/20260218-150304-codellama-34b-tp2-general
      blis-replay ingest runs/* --engine engine.yaml
      blis-replay ingest bench/benchmarks.json 'bench/traces*.json' --name my-run
      blis-replay ingest requests.csv --columns ttft=first_token_after:ms,arrival=sent:s
    """
    from blis_replay.fixtures.catalogue import profile_of
    from blis_replay.ingest.errors import RecordingError
    from blis_replay.ingest.ingest import ingest_source, outcomes_table
    from blis_replay.ingest.readers.discovery import FORMATS, sources_of
    from blis_replay.ingest.readers.tables.columns import given_columns

    file_format, form = file_format or click.get_current_context().meta.get(_FORMER_FORMAT, ""), form or asked_form()
    if file_format and file_format not in FORMATS:
        raise click.BadParameter(
            f"{printable(file_format)} is not one of {', '.join(FORMATS)}", param_hint="--input-format"
        )
    outcomes, refused = [], []
    said = ",".join(columns) if columns else None
    try:
        given_columns(said or "")
    except RecordingError as error:
        raise click.BadParameter(f"{error.problem}; {error.mend}", param_hint=str(error.path)) from error
    for source in sources_of(paths, slug=name, form=file_format, columns=said, model=model):
        try:
            with progress_line(source.slug, "B") as progress:
                outcome = ingest_source(
                    store_path,
                    source,
                    profile=profile_of(source.slug),
                    engine_file=engine_file,
                    even_worse=even_worse,
                    progress=None if progress is None else lambda name, done, total: progress(done, total, name),
                )
        except RecordingError as error:
            refused.append({"source": str(source.root), "error": str(error)})
            click.echo(f"error: {error}", err=True)
            continue
        outcomes.append(outcome)
        if form is None:
            click.echo(_line(outcome))
    if form is not None:
        document = {"ingested": [vars(outcome) for outcome in outcomes], "refused": refused}
        print_answer(form, Answer([], document, outcomes_table(outcomes)))
    return 3 if refused else 0


_FORM = next(param for param in command.params if param.name == "form")
_FORM.type = _Form(["text", "json", "csv", "markdown"])


def _line(outcome: IngestOutcome) -> str:
    iterations = f"{outcome.iterations:,} iterations, " if outcome.iterations else ""
    rejected = f", {outcome.rejected:,} records rejected" if outcome.rejected else ""
    unread = f"; not read: {printable(outcome.not_read)}" if outcome.not_read else ""
    again = (
        f"\n  engine arguments given before, used again: {outcome.engine_given_before}"
        if outcome.engine_given_before
        else ""
    )
    return (
        f"{outcome.alias} ({outcome.slug}): {outcome.outcome}; {outcome.requests:,} requests, {outcome.steps:,} steps, "
        f"{iterations}{outcome.findings:,} findings{rejected}{unread}; {outcome.seconds:.1f} s{again}"
    )
