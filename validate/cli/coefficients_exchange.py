"""``blis-replay coefficients import-stepml``, ``import-defaults`` and ``export-defaults``: releases in other forms."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.compiled.files import write_whole
from blis_replay.validate.cli.options import OUT_FILE, form_options, print_answer
from blis_replay.validate.cli.verb import verb
from blis_replay.validate.text.answer import one_line


@verb("import-stepml", short_help="Turn a StepML artifact into a release.")
@click.argument("artifact", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", required=True, metavar="NAME", help="The model that these coefficients are of.")
@click.option("--tensor-parallelism", type=click.IntRange(min=1), required=True, help="And its GPUs.")
@click.option("--hardware", default="not stated", help="And their kind, e.g. H100.")
@click.option("--out", "-o", type=OUT_FILE, required=True, help="The release to write.")
@form_options
def import_stepml(
    artifact: Path, model: str, tensor_parallelism: int, hardware: str, out: Path, form: str | None
) -> None:
    """Turn a StepML artifact (JSON) into a release that every verb takes.

    Regimes, `expm1`, floor with cap, and the five delays are kept. An artifact does not say
    what model it is of, so you do.

    \b
    Example:
      blis-replay coefficients import-stepml artifact.json \\
          --model codellama/CodeLlama-34b-Instruct-hf --tensor-parallelism 2 --out mine.yaml
      blis-replay validate 34b-general --coefficients mine.yaml
    """
    from blis_replay.blis.releases.release import format_release
    from blis_replay.replay.release_file import release_of_stepml

    release = release_of_stepml(artifact, out.stem, model, tensor_parallelism, hardware)
    write_whole(out, format_release(release))
    print_answer(
        form,
        one_line(
            f"wrote {out}; look at it: blis-replay coefficients show {out}",
            {"release": str(out), "model": model, "sha256": release.sha256},
        ),
    )


@verb("import-defaults", short_help="Turn a BLIS defaults.yaml into a release.")
@click.argument("defaults", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--gpu", default=None, metavar="NAME", help="As the file calls it, e.g. H100; needed where it has several."
)
@click.option("--vllm-version", default=None, help="Needed where the file has several of one model.")
@click.option("--out", "-o", type=OUT_FILE, required=True, help="The release to write.")
@form_options
def import_defaults(defaults: Path, gpu: str | None, vllm_version: str | None, out: Path, form: str | None) -> None:
    """Turn a BLIS defaults.yaml (of a build with blackbox models) into a release.

    Alphas and betas are kept, to whole ns; KV blocks, losses and workload presets are not
    of a release.

    \b
    Example:
      blis-replay coefficients import-defaults defaults.yaml --gpu H100 --out blis-h100.yaml
    """
    from blis_replay.blis.releases.release import format_release
    from blis_replay.replay.release_file import release_of_defaults

    release = release_of_defaults(defaults, out.stem, gpu, vllm_version)
    write_whole(out, format_release(release))
    models = [f"{entry.model} tp {entry.tensor_parallelism}" for entry in release.models]
    print_answer(
        form,
        one_line(
            f"wrote {out} ({len(models)} models); look at it: blis-replay coefficients show {out}",
            {
                "release": str(out),
                "models": models,
                "hardware": release.hardware,
                "sha256": release.sha256,
            },
        ),
    )


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
def export_defaults(release: str, vllm_version: str, context_tokens: float, out: Path, form: str | None) -> None:
    """Write a release as the defaults.yaml of BLIS (of a build with blackbox models).

    What BLIS does not have, and models that are no line, are named on standard error.

    \b
    Example:
      blis-replay coefficients export-defaults mine.yaml --context-tokens 700 --out defaults.yaml
    """
    from blis_replay.blis.releases.exchange import format_defaults
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.text.terminal import wrap

    loaded = load_release(release)
    loaded.refuse_if_invalid()
    defaults = format_defaults(loaded, vllm_version, context_tokens)
    write_whole(out, defaults.text)
    for sentence in defaults.not_carried:
        click.echo(wrap(f"not carried: {sentence}"), err=True)
    print_answer(
        form,
        one_line(
            f"wrote {out}; BLIS takes it with --defaults-filepath {out}",
            {"defaults": str(out), "release": loaded.name, "not_carried": list(defaults.not_carried)},
        ),
    )
