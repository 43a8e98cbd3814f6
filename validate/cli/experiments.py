"""``blis-replay experiments``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import form_options, print_answer, store_option


@click.command("experiments")
@store_option
@form_options
def command(store_path: Path, form: str | None) -> None:
    """List the experiments of the store and those that ship with the package.

    \b
    Examples:
      blis-replay experiments
      blis-replay experiments --csv
    """
    from blis_replay.validate.inspection import experiments_answer

    print_answer(form, experiments_answer(store_path))
