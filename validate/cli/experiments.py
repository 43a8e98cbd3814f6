"""``blis-replay experiments``."""

from __future__ import annotations

from pathlib import Path

from blis_replay.validate.cli.options import form_options, print_answer, store_option
from blis_replay.validate.cli.verb import verb


@verb("experiments")
@store_option
@form_options
def command(store_path: Path, form: str | None) -> None:
    """List the experiments of the store and those that ship with the package.

    \b
    Examples:
      blis-replay list
      blis-replay list --csv
      blis-replay list -f markdown -o experiments.md
    """
    from blis_replay.validate.inspection import experiments_answer

    print_answer(form, experiments_answer(store_path))
