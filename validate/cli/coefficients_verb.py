"""``blis-replay coefficients``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import OUT_FILE, form_options, print_answer


@click.group("coefficients")
def command() -> None:
    """List, show, import and scale coefficient releases.

    \b
    Examples:
      blis-replay coefficients list
      blis-replay coefficients show stepml-direct
      blis-replay coefficients import-stepml FILE --model NAME --tensor-parallelism 2 --out OUT
      blis-replay coefficients for-model config.json --model NAME --out OUT
    """


@command.command("list")
@form_options
def list_releases(form: str | None) -> None:
    """List the releases that ship with the package.

    \b
    Examples:
      blis-replay coefficients list
      blis-replay coefficients list --markdown
    """
    from blis_replay.validate.releases import bundled, releases_frame, releases_json, releases_text

    releases = bundled()
    print_answer(
        form,
        text=lambda: releases_text(releases),
        document=lambda: {"releases": releases_json(releases)},
        frame=lambda: releases_frame(releases),
    )


@command.command("show", short_help="Show the coefficients of a release, their origin and scores.")
@click.argument("release")
@form_options
def show(release: str, form: str | None) -> None:
    """Show a release: its models, coefficients with units, origin and scores.

    RELEASE is a name from `coefficients list`, or a YAML file.

    \b
    Examples:
      blis-replay coefficients show h100-vllm-0.15.1
      blis-replay coefficients show mine.yaml --csv
    """
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.releases import coefficients_frame, release_json, release_text

    loaded = load_release(release)
    print_answer(
        form,
        text=lambda: release_text(loaded),
        document=lambda: release_json(loaded),
        frame=lambda: coefficients_frame(loaded),
    )


@command.command("import-stepml", short_help="Turn a StepML artifact into a release.")
@click.argument("artifact", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", required=True, metavar="NAME", help="The model that these coefficients are of.")
@click.option("--tensor-parallelism", type=click.IntRange(min=1), required=True, help="And its GPUs.")
@click.option("--hardware", default="not stated", help="And their kind, e.g. H100.")
@click.option("--out", type=OUT_FILE, required=True, help="The release to write.")
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
      blis-replay validate --experiment 34b-general --coefficients mine.yaml
    """
    from blis_replay.blis.release_text import format_release
    from blis_replay.replay.release_file import release_of_stepml

    release = release_of_stepml(artifact, out.stem, model, tensor_parallelism, hardware)
    out.write_text(format_release(release), "utf-8")
    print_answer(
        form,
        text=lambda: f"wrote {out}; look at it: blis-replay coefficients show {out}",
        document=lambda: {"release": str(out), "model": model, "sha256": release.sha256},
    )


@command.command("for-model", short_help="Make a release for a model that nobody recorded.")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", required=True, metavar="NAME", help="The model's name, as recordings have it.")
@click.option("--tensor-parallelism", type=click.IntRange(min=1), default=1, show_default=True, help="Its GPUs.")
@click.option("--hardware", default="H100-SXM", show_default=True, help="And their kind.")
@click.option(
    "--shared",
    metavar="RELEASE",
    default="h100-physical",
    show_default=True,
    help="The physical release whose coefficients to take.",
)
@click.option("--out", type=OUT_FILE, required=True, help="The release to write.")
@form_options
def for_model(
    config: Path, model: str, tensor_parallelism: int, hardware: str, shared: str, out: Path, form: str | None
) -> None:
    """Make a release for a model that nobody recorded, from its CONFIG (config.json).

    Step times follow from its architecture, the GPU's datasheet and coefficients that were
    fitted to other models; `blis-replay generalize --lomo` says how far off that is.

    \b
    Example:
      blis-replay coefficients for-model config.json --model org/new-13b \\
          --tensor-parallelism 2 --out new-13b.yaml
      blis-replay simulate --requests load.csv --engine engine.yaml \\
          --coefficients new-13b.yaml --out run
    """
    from blis_replay.blis.release_text import format_release
    from blis_replay.replay.release_file import architecture_of_file, load_release, release_for_model

    architecture = architecture_of_file(config)
    release = release_for_model(load_release(shared), out.stem, model, tensor_parallelism, hardware, architecture)
    out.write_text(format_release(release), "utf-8")
    print_answer(
        form,
        text=lambda: (
            f"wrote {out} for {model} ({architecture.parameters / 1e9:.2f} billion parameters); "
            f"look at it: blis-replay coefficients show {out}"
        ),
        document=lambda: {
            "release": str(out),
            "model": model,
            "parameters": architecture.parameters,
            "sha256": release.sha256,
        },
    )
