"""The verb ``blis-replay export``, and the verbs of ``coefficients`` that read and write releases of others."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from blis_replay.base.files import write_whole
from blis_replay.ingest.errors import counted
from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.options import FILE, OUT_FILE, PlacePath, experiment_option, store_option, verb
from blis_replay.validate.text.answer import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blis_replay.blis.releases.release import CoefficientRelease

# As in exchange.export.TARGETS, whose import would make help slow; a test compares the two.
TARGETS = ("tracev2", "legacy-csv", "mooncake", "parquet")


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


_out_option = click.option("--out", "-o", type=OUT_FILE, required=True, help="The release to write.")


def _write(out: Path, release: CoefficientRelease, said: str, known: Mapping[str, object]) -> None:
    """Write the release and say so: ``said`` follows the file's name, ``known`` is for programs."""
    from blis_replay.blis.releases.release import format_release

    write_whole(out, format_release(release))
    said += f"; look at it: blis-replay coefficients show {quote(str(out))}"
    print_answer(one_line(f"wrote {out}{said}", {"release": str(out), **known, "sha256": release.sha256}))


@verb("import-defaults", short_help="Turn a BLIS defaults.yaml into a release.")
@click.argument("defaults", type=FILE)
@click.option("--gpu", metavar="NAME", help="As the file calls it, e.g. H100; needed where it has several.")
@click.option("--vllm-version", help="Needed where the file has several of one model.")
@_out_option
@form_options
def import_defaults(defaults: Path, gpu: str | None, vllm_version: str | None, out: Path) -> None:
    """Turn a BLIS defaults.yaml (of a build with blackbox models) into a release.

    Alphas and betas are kept, to whole ns; KV blocks, losses and workload presets are not
    of a release.

    \b
    Example:
      blis-replay coefficients import-defaults defaults.yaml --gpu H100 --out blis-h100.yaml
    """
    from blis_replay_labs.exchange.defaults import release_of_defaults

    release = release_of_defaults(defaults, out.stem, gpu, vllm_version)
    models = [f"{entry.model} tp {entry.tensor_parallelism}" for entry in release.models]
    known = {"models": models, "hardware": release.hardware}
    _write(out, release, f" ({len(models)} models)", known)


@verb("export-defaults", short_help="Write a release as the defaults.yaml of BLIS.")
@click.argument("release")
@click.option("--vllm-version", default="not stated", show_default=True, help="By which BLIS looks up its rows.")
@click.option(
    "--context-tokens",
    type=click.FloatRange(min=0),
    default=0.0,
    help="KV tokens of a mean decode: BLIS has no cost per context token, so that of so many goes into each decode.",
)
@click.option("--out", "-o", type=OUT_FILE, required=True, help="The file to write.")
@form_options
def export_defaults(release: str, vllm_version: str, context_tokens: float, out: Path) -> None:
    """Write a release as the defaults.yaml of BLIS (of a build with blackbox models).

    Parts that BLIS does not have, and models without a line, are named on standard error.

    \b
    Example:
      blis-replay coefficients export-defaults mine.yaml --context-tokens 700 --out defaults.yaml
    """
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.text.terminal import wrap
    from blis_replay_labs.exchange.defaults import format_defaults

    loaded = load_release(release)
    loaded.refuse_if_invalid()
    defaults = format_defaults(loaded, vllm_version, context_tokens)
    write_whole(out, defaults.text)
    for sentence in defaults.not_carried:
        click.echo(wrap(f"not carried: {sentence}"), err=True)
    print_answer(
        one_line(
            f"wrote {out}; BLIS takes it with --defaults-filepath {out}",
            {"defaults": str(out), "release": loaded.name, "not_carried": list(defaults.not_carried)},
        )
    )
