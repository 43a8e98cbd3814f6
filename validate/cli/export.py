"""``blis-replay export``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import experiment_option, form_options, print_answer, store_option
from blis_replay.validate.cli.verb import verb
from blis_replay.validate.text.answer import one_line

# As in replay.export.TARGETS, whose import would make help slow; a test compares the two.
TARGETS = ("tracev2", "legacy-csv", "mooncake", "parquet")


@verb("export")
@experiment_option
@click.option("--to", "target", type=click.Choice(TARGETS), required=True, help="The format to write.")
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=None,
    help="File, or folder for tracev2.  [default: called like the alias]",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
@store_option
@form_options
def command(name: str, target: str, out: Path | None, force: bool, store_path: Path, form: str | None) -> None:
    """Write the requests of an experiment so that other simulators can replay them.

    tracev2 is BLIS's format (a folder with trace.yaml and trace.csv), legacy-csv the one
    before it; mooncake is JSON lines with ids of 512-token blocks, which AIPerf and
    Dynamo read too; parquet has every column. `blis-replay ingest` reads all of them, and
    finds the same requests. What a format cannot carry is named on standard error.

    \b
    Examples:
      blis-replay export 34b-general --to tracev2
      blis-replay export mooncake --to legacy-csv --out load.csv --force
      blis-replay export 34b-general --to parquet --json
    """
    from blis_replay.replay.export import export
    from blis_replay.validate.experiment import stored_experiment

    recording = stored_experiment(store_path, name)
    done = export(recording, target, out, force)
    if done.not_carried:
        click.echo(f"not carried by {target}: {', '.join(done.not_carried)}", err=True)
    print_answer(
        form,
        one_line(
            f"{recording.alias}: {done.requests:,} requests in {', '.join(map(str, done.files))}",
            {
                "slug": recording.slug,
                "alias": recording.alias,
                "to": target,
                "requests": done.requests,
                "files": [str(path) for path in done.files],
                "not_carried": list(done.not_carried),
            },
        ),
    )
