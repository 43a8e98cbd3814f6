"""What ``blis-replay simulate --to`` answers, and the verb ``coefficients convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.base.errors import counted
from blis_replay.validate.cli.coefficients import release_file_option, show_hint, write_release
from blis_replay.validate.cli.options import FILE, verb
from blis_replay.validate.text.answer import one_line

if TYPE_CHECKING:
    from blis_replay.ingest.recording import Recording
    from blis_replay.validate.text.answer import Answer


def exported(recording: Recording, target: str, out: Path | None, *, force: bool) -> Answer:
    """What ``blis-replay simulate --to`` answers; what the format cannot carry goes to standard error."""
    from blis_replay_labs.exchange.export import export

    done = export(recording, target, out, force)
    if done.not_carried:
        click.echo(f"not carried by {target}: {', '.join(done.not_carried)}", err=True)
    return one_line(
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


@verb("convert", short_help="Turn a BLIS defaults.yaml into a release.")
@click.argument("defaults", type=FILE)
@click.option("--gpu", metavar="NAME", help="As the file calls it, e.g. H100; needed where it has several.")
@click.option("--vllm-version", help="Needed where the file has several of one model.")
@release_file_option
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
