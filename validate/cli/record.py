"""The verbs of new recordings: ``blis-replay record``, ``collect`` and ``ingest``."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from blis_replay.compiled.errors import require_extra
from blis_replay.ingest.errors import counted, printable
from blis_replay.validate.cli.answers import ask_form, asked_form, form_options, has_out_file, print_answer, quiet
from blis_replay.validate.cli.options import (
    FILE,
    FOLDER,
    PlacePath,
    store_option,
    verb,
)
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.text.answer import Answer, Block, part_text

if TYPE_CHECKING:
    from blis_replay.ingest.collector.batches import Counts
    from blis_replay.ingest.collector.collector import CollectorSettings, Listening
    from blis_replay.ingest.ingest import IngestOutcome
    from blis_replay.validate.server_recording import ServerRecording


@verb("record", context_settings={"ignore_unknown_options": True})
@click.option(
    "--out",
    "-o",
    "directory",
    type=FOLDER,
    help="The experiment's directory; its name becomes the experiment's.  [default: one in runs/, by date and model]",
)
@click.option(
    "--spans/--no-spans", default=True, show_default=True, help="Receive the server's request spans (OTLP) as well."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was recorded as JSON; the server's output on stderr.")
@click.argument("command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def record_verb(directory: Path | None, spans: bool, as_json: bool, command_line: tuple[str, ...]) -> int:
    """Run a vLLM server, and record every engine step and every arrival from inside of it.

    Nothing is installed where the server runs: vLLM loads the recorder as a plugin, from a
    folder that PYTHONPATH names. The server's output goes on to the terminal, and into
    vllm.log; its /metrics are fetched when it is up, and before its end. Ctrl-C and SIGTERM
    are passed on; the exit code is the server's. Then put the load generator's result into
    the directory, and `blis-replay ingest` reads it.

    \b
    Examples:
      blis-replay record -- vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64
      blis-replay record --out runs/my-server --no-spans -- vllm serve MODEL
    """
    from blis_replay.validate.server_recording import new_directory, record_server

    chosen = new_directory(command_line) if directory is None else directory
    say = lambda line: click.echo(line, err=True)  # noqa: E731
    output = getattr(sys.stderr if as_json else sys.stdout, "buffer", None)
    made = asyncio.run(record_server(command_line, chosen, spans=spans, say=say, output=output))
    if as_json:
        click.echo(json.dumps({"recorded": _document(made)}))
    else:
        _say_what_was_recorded(made)
    return made.exit_code


def _document(made: ServerRecording) -> dict[str, object]:
    from blis_replay.validate.server_recording import step_counts

    return {
        "directory": str(made.directory),
        "exit_code": made.exit_code,
        "step_logs": {path.name: step_counts(path) for path in made.step_logs},
        "spans": made.spans,
        "metrics": list(made.metrics),
        "not_recorded": made.notes,
    }


def _say_what_was_recorded(made: ServerRecording) -> None:
    from blis_replay.validate.server_recording import step_counts

    click.echo(f"recorded in {made.directory}: the server ended with {made.exit_code}", err=True)
    for path in made.step_logs:
        click.echo(f"  {path.name}: {step_counts(path)}", err=True)
    if not made.step_logs:
        click.echo("  no engine steps: no vLLM v1 engine loaded the plugin (see vllm.log)", err=True)
    if made.spans:
        click.echo(f"  {counted(made.spans, 'span')}", err=True)
    for note in made.notes:
        click.echo(f"  not recorded: {note}", err=True)
    if made.step_logs or made.spans or made.metrics:
        folder = quote(str(made.directory))
        click.echo(f"next: put the load generator's result there, then `blis-replay ingest {folder}`", err=True)
    else:
        log = quote(str(made.directory / "vllm.log"))
        click.echo(f"next: see why in {log}, and record again into another directory", err=True)


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
    type=FILE,
    help="YAML of engine arguments, e.g. `num_gpu_blocks: 26603`; kept for later ingests of the experiment.",
)
@click.option(
    "--replace", "even_worse", is_flag=True, help="Store also what has fewer requests or steps than what is stored."
)
@store_option
@form_options
def ingest_verb(
    paths: tuple[str, ...],
    name: str,
    file_format: str,
    columns: tuple[str, ...],
    model: str | None,
    engine_file: Path | None,
    even_worse: bool,
    store_path: Path,
) -> int:
    """Read experiments, as load generators and vLLM leave them, into the store.

    A directory is one experiment, or holds several with an exp-config.yaml or a result each; files of
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

    file_format, form = file_format or click.get_current_context().meta.get(_FORMER_FORMAT, ""), asked_form()
    if file_format and file_format not in FORMATS:
        raise click.BadParameter(
            f"{printable(file_format)} is not one of {', '.join(FORMATS)}", param_hint="--input-format"
        )
    outcomes, refused = [], []
    at_once = form is None and not quiet() and not has_out_file()
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
        if at_once:
            click.echo(part_text(Block(outcome_lines(outcome))))
    if not at_once:
        document = {"ingested": [vars(outcome) for outcome in outcomes], "refused": refused}
        lines = [line for outcome in outcomes for line in outcome_lines(outcome)]
        print_answer(Answer([Block(lines)], document, outcomes_table(outcomes)))
    return 3 if refused else 0


_FORM = next(param for param in ingest_verb.params if param.name == "form")
_FORM.type = _Form(["text", "json", "csv", "markdown"])


def outcome_lines(outcome: IngestOutcome) -> list[str]:
    """What an ingest did, and below it what it took from earlier ones or left out."""
    iterations = f"{counted(outcome.iterations, 'iteration')}, " if outcome.iterations else ""
    rejected = f", {counted(outcome.rejected, 'record')} rejected" if outcome.rejected else ""
    unread = f"; not read: {printable(outcome.not_read)}" if outcome.not_read else ""
    lines = [
        f"{outcome.alias} ({outcome.slug}): {outcome.outcome}; {counted(outcome.requests, 'request')}, "
        f"{counted(outcome.steps, 'step')}, {iterations}{counted(outcome.findings, 'finding')}{rejected}{unread}; "
        f"{outcome.seconds:.1f} s"
    ]
    if outcome.engine_given_before:
        lines.append(f"  engine arguments given before, used again: {outcome.engine_given_before}")
    if outcome.left_out:
        lines.append(f"  left out, as no exp-config.yaml is there: {outcome.left_out}; add one, or ingest it by itself")
    if outcome.not_used:
        lines.append(f"  files not used: {printable(outcome.not_used)}")
    return lines


class AddressType(click.ParamType[tuple[str, int]]):
    """Where to listen, written ``127.0.0.1:4317`` or ``[::1]:4317``."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """``(IP address, port)``; a name would need a name server to say what it stands for."""
        if isinstance(value, tuple):
            return value
        host, _, port = str(value).rpartition(":")
        try:
            host = str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
        except ValueError:
            self.fail(f"{value!r} is not an address; write e.g. 127.0.0.1:4317", param, ctx)
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            self.fail(f"{value!r} has no port from 0 to 65535; write e.g. 127.0.0.1:4317", param, ctx)
        return host, int(port)


ADDRESS = AddressType()
_FILE = PlacePath(dir_okay=False, exists=True)


@verb("collect")
@click.option(
    "--out",
    "-o",
    "directory",
    type=FOLDER,
    required=True,
    help="The experiment's directory; its name becomes the experiment's.",
)
@click.option("--listen", "grpc", type=ADDRESS, default="127.0.0.1:4317", show_default=True, help="For OTLP over gRPC.")
@click.option("--http", type=ADDRESS, default="127.0.0.1:4318", show_default=True, help="For OTLP over HTTP.")
@click.option(
    "--ingest/--no-ingest", default=True, show_default=True, help="Read the directory into the store at the end."
)
@click.option(
    "--tls", "tls", nargs=2, type=_FILE, metavar="CERTIFICATE KEY", help="PEM files: what arrives is encrypted."
)
@click.option(
    "--token-file", type=_FILE, help="Its first line is what exporters send as `authorization: Bearer TOKEN`."
)
@click.option(
    "--max-message",
    "message_mb",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    metavar="MB",
    help="Larger messages are refused and counted; 64 of them can be in memory at once.",
)
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON documents, a line each, instead of text.")
@click.pass_context
def collect_verb(
    ctx: click.Context,
    directory: Path,
    grpc: tuple[str, int],
    http: tuple[str, int],
    ingest: bool,
    tls: tuple[Path, Path] | None,
    token_file: Path | None,
    message_mb: int,
    store_path: Path,
    as_json: bool,
) -> int:
    """Receive the traces of a running vLLM server, and keep them as a recording.

    A batch is acknowledged when it is on disk: a killed collector loses nothing that it
    acknowledged, and goes on in the same directory when it is started again. Ctrl-C or
    SIGTERM ends it: what has arrived is written, the counts are printed, and the directory
    is read into the store. Put the load generator's results and exp-config.yaml into the
    same directory, before the end or later (`blis-replay ingest` reads it again).

    \b
    Examples:
      blis-replay collect --out runs/20260218-150304-codellama-34b-tp2-general
      vllm serve MODEL --otlp-traces-endpoint http://127.0.0.1:4317
      OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf \\
        vllm serve MODEL --otlp-traces-endpoint http://127.0.0.1:4318/v1/traces
    """
    # What gRPC has to say on standard error is said here, in one line; it reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    require_extra("collect", "`collect`", "grpc", "google.rpc")
    from blis_replay.ingest.collector.collector import Address, CollectorSettings
    from blis_replay.ingest.collector.limits import Access
    from blis_replay.ingest.collector.segments import segments
    from blis_replay.ingest.readers.discovery import refuse_unnamable, sources_of

    (source,) = sources_of([directory])
    refuse_unnamable(source)
    certificate, key = tls or (None, None)
    access = Access(certificate, key, "" if token_file is None else _token(token_file))
    settings = CollectorSettings(
        source.root, Address(*grpc), Address(*http), message_bytes=message_mb << 20, access=access
    )
    missing = [
        what for what, there in (("encryption (--tls)", tls), ("password (--token-file)", token_file)) if not there
    ]
    for host in {grpc[0], http[0]}:
        if missing and not ipaddress.ip_address(host).is_loopback:
            click.echo(f"warning: {host} is open to other machines, without {' or '.join(missing)}", err=True)
    counts = asyncio.run(_until_signalled(settings, as_json))
    answer = _answer(counts)
    click.echo(json.dumps({"collected": answer.document}) if as_json else str(answer))
    if not ingest or not segments(settings.directory):
        return 0
    ask_form(ctx, "json" if as_json else None)
    code: int = ctx.invoke(ingest_verb, paths=(str(settings.directory),), store_path=store_path)
    return code


_TOKEN_BYTES = 8_000  # as long as a header may be


def _token(path: Path) -> str:
    with path.open("rb") as file:
        line = file.readline(_TOKEN_BYTES + 1)
    token = line.decode("utf-8", "replace").strip() if len(line) <= _TOKEN_BYTES else ""
    if not (token and token.isascii() and token.isprintable()):
        raise click.BadParameter(
            f"{path}: its first line is to be a token of ASCII characters", param_hint="--token-file"
        )
    return token


async def _until_signalled(settings: CollectorSettings, as_json: bool) -> Counts:
    from blis_replay.ingest.collector.collector import collect

    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one ends at once
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)

    def listening(where: Listening) -> None:
        if as_json:
            click.echo(json.dumps({"listening": {"grpc": str(where.grpc), "http": str(where.http)}}))
        else:
            click.echo(f"listening on {where.grpc} (gRPC) and {where.http} (HTTP); writing to {settings.directory}")
        for damage in where.damaged:
            at = f"{damage.bytes} bytes at {damage.offset} are not a whole batch: " if damage.bytes else ""
            click.echo(f"note: {damage.name}: {at}{damage.done}", err=True)

    return await collect(settings, stop, listening, lambda line: click.echo(line, err=True))


def _answer(counts: Counts) -> Answer:
    from blis_replay.ingest.tables import Column, Table, columns_named
    from blis_replay.validate.text.answer import Verbatim

    lines = [
        f"{counted(counts.spans, 'span')} in {counted(counts.requests, 'request')}, {counts.bytes:,} bytes written",
        f"rejected: {counts.rejected_spans:,} malformed spans, {counts.malformed_requests:,} requests that "
        f"could not be read; {counts.refused_requests:,} requests answered with retry (back-pressure)",
    ]
    services = {name: asdict(of_service) for name, of_service in counts.services.items()}
    lost = columns_named("spans", "dropped events", "dropped attributes", "dropped links", kind="count")
    table = Table("", (Column("service"), *lost), [[name, *numbers.values()] for name, numbers in services.items()])
    document = {
        "requests": counts.requests,
        "spans": counts.spans,
        "bytes": counts.bytes,
        "rejected_spans": counts.rejected_spans,
        "malformed_requests": counts.malformed_requests,
        "refused_requests": counts.refused_requests,
        "services": services,
    }
    page = [Block([Verbatim(line) for line in lines])]
    return Answer([*page, table, "dropped: by the exporting SDK, as its spans say"] if services else page, document)
