"""The verb ``blis-replay collect``."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blis_replay.base.errors import require_extra
from blis_replay.ingest.errors import counted
from blis_replay.ingest.tables import Column, Table, columns_named
from blis_replay.validate.cli.answers import ask_form
from blis_replay.validate.cli.options import FOLDER, PlacePath, store_option, verb
from blis_replay.validate.cli.record import ingest_verb
from blis_replay.validate.text.answer import Answer, Block, Verbatim

if TYPE_CHECKING:
    from blis_replay_labs.collector.batches import Counts
    from blis_replay_labs.collector.collector import CollectorSettings, Listening


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
    require_extra("record", "`collect`", "grpc")
    from blis_replay.ingest.readers.discovery import refuse_unnamable, sources_of
    from blis_replay_labs.collector.collector import Address, CollectorSettings
    from blis_replay_labs.collector.limits import Access
    from blis_replay_labs.collector.segments import segments

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
    from blis_replay_labs.collector.collector import collect

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
