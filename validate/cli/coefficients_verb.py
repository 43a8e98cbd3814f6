"""``blis-replay coefficients``."""

from __future__ import annotations

import click

from blis_replay.validate.cli.options import json_option, print_json


@click.group("coefficients")
def command() -> None:
    """List and show coefficient releases.

    \b
    Examples:
      blis-replay coefficients list
      blis-replay coefficients show stepml-direct
    """


@command.command("list")
@json_option
def list_releases(as_json: bool) -> None:
    """List the releases that ship with the package."""
    from blis_replay.blis.release import bundled_releases, parse_release
    from blis_replay.validate.terminal import table, wrap

    releases = [parse_release(text, name) for name, text in bundled_releases().items()]
    if as_json:
        rows = [
            {
                "name": r.name,
                "status": r.status,
                "summary": r.summary,
                "models": [e.model for e in r.models],
                "sha256": r.sha256,
            }
            for r in releases
        ]
        print_json({"releases": rows})
        return
    click.echo(
        table(["release", "status", "models"], [[r.name, r.status, str(len(r.models))] for r in releases], left=2)
    )
    for release in releases:
        click.echo("\n" + wrap(f"{release.name}: {release.summary}"))


@command.command("show")
@click.argument("release")
@json_option
def show(release: str, as_json: bool) -> None:
    """Show a release: its models, coefficients with units, origin and scores.

    RELEASE is a name from `coefficients list`, or a YAML file.
    """
    import yaml

    from blis_replay.blis.errors import ReleaseError
    from blis_replay.blis.release_text import format_release
    from blis_replay.replay.release_file import load_release

    loaded = load_release(release)
    text = format_release(loaded)
    if as_json:
        print_json({**yaml.safe_load(text), "sha256": loaded.sha256})
        return
    click.echo(text, nl=False)
    try:
        loaded.refuse_if_invalid()
    except ReleaseError as error:
        click.echo(f"# {error}")
