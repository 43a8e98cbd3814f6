"""``blis-replay coefficients``."""

from __future__ import annotations

import click

from blis_replay.validate.cli.coefficients_exchange import export_defaults, import_defaults, import_stepml
from blis_replay.validate.cli.coefficients_made import for_model, roofline, trees
from blis_replay.validate.cli.options import form_options, print_answer


@click.group("coefficients")
def command() -> None:
    """List, show, import, export and scale coefficient releases.

    \b
    Examples:
      blis-replay coefficients list
      blis-replay coefficients show stepml-direct
      blis-replay coefficients import-stepml FILE --model NAME --tensor-parallelism 2 --out OUT
      blis-replay coefficients import-defaults defaults.yaml --gpu H100 --out OUT
      blis-replay coefficients export-defaults RELEASE --out defaults.yaml
      blis-replay coefficients for-model config.json --model NAME --out OUT
      blis-replay coefficients roofline config.json --model NAME --out OUT
      blis-replay coefficients trees --train 34b-general --out OUT
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


for made in (import_stepml, import_defaults, export_defaults, for_model, roofline, trees):
    command.add_command(made)
