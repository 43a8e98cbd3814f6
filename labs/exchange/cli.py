"""The verbs ``blis-replay export`` and ``coefficients convert``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.base.errors import counted
from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.coefficients import release_file_option, show_hint, write_release
from blis_replay.validate.cli.options import FILE, PlacePath, experiment_option, store_option, verb
from blis_replay.validate.text.answer import one_line

# As in exchange.export.TARGETS, whose import would make help slow; a test compares the two.
TARGETS = ("tracev2", "mooncake")


@verb("export")
@experiment_option
@click.option("--to", "target", type=click.Choice(TARGETS), required=True, help="The format to write.")
@click.option(
    "--out",
    "-o",
    type=PlacePath(),
    help="File, or folder for tracev2.  [default: called like the alias]",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
@store_option
@form_options
def export_verb(name: str, target: str, out: Path | None, force: bool, store_path: Path) -> None:
    """Write the requests of an experiment so that other simulators can replay them.

    tracev2 is BLIS's format (a folder with trace.yaml and trace.csv); mooncake is JSON
    lines with ids of 512-token blocks, which AIPerf and Dynamo read too. `blis-replay
    ingest` reads both and finds the same requests. Standard error names what a format
    cannot carry.

    \b
    Examples:
      blis-replay export 34b-general --to tracev2
      blis-replay export 34b-general --to mooncake --out load.jsonl --force
    """
    from blis_replay.validate.experiment import stored_experiment
    from blis_replay_labs.exchange.export import export

    recording = stored_experiment(store_path, name)
    done = export(recording, target, out, force)
    if done.not_carried:
        click.echo(f"not carried by {target}: {', '.join(done.not_carried)}", err=True)
    print_answer(
        one_line(
            f"{recording.alias}: {counted(done.requests, 'request')} in {', '.join(map(str, done.files))}",
            {
                "slug": recording.slug,
                "alias": recording.alias,
                "to": target,
                "requests": done.requests,
                "files": [str(path) for path in done.files],
                "not_carried": list(done.not_carried),
            },
        )
    )


@verb("convert", short_help="Turn a BLIS defaults.yaml into a release.")
@click.argument("defaults", type=FILE)
@click.option("--gpu", metavar="NAME", help="As the file calls it, e.g. H100; needed where it has several.")
@click.option("--vllm-version", help="Needed where the file has several of one model.")
@release_file_option
@form_options
def convert_verb(defaults: Path, gpu: str | None, vllm_version: str | None, out: Path) -> None:
    """Turn a BLIS defaults.yaml (of a build with blackbox models) into a release.

    Alphas and betas are kept, to whole ns. KV blocks, losses and workload presets are left
    out: a release has none.

    \b
    Example:
      blis-replay coefficients convert defaults.yaml --gpu H100 -o blis.yaml
    """
    from blis_replay_labs.exchange.defaults import release_of_defaults

    release = release_of_defaults(defaults, out.stem, gpu, vllm_version)
    models = [f"{entry.model} tp {entry.tensor_parallelism}" for entry in release.models]
    fields = {"models": models, "hardware": release.hardware}
    write_release(out, release, f" ({len(models)} models){show_hint(out)}", fields)
