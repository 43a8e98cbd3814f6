"""``blis-replay record``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.validate.cli.verb import verb

if TYPE_CHECKING:
    from blis_replay.validate.server_recording import ServerRecording


@verb("record", context_settings={"ignore_unknown_options": True})
@click.option(
    "--out",
    "-o",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="The experiment's directory; its name becomes the experiment's.  [default: one in runs/, by date and model]",
)
@click.option(
    "--spans/--no-spans", default=True, show_default=True, help="Receive the server's request spans (OTLP) as well."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was recorded as JSON; the server's output on stderr.")
@click.argument("command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(directory: Path | None, spans: bool, as_json: bool, command_line: tuple[str, ...]) -> int:
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
        click.echo(f"  {made.spans:,} spans", err=True)
    for note in made.notes:
        click.echo(f"  not recorded: {note}", err=True)
    click.echo(f"next: put the load generator's result there, then `blis-replay ingest {made.directory}`", err=True)
