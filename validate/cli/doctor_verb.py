"""``blis-replay doctor``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import json_option, print_json, store_option


@click.command("doctor")
@store_option
@json_option
def command(store_path: Path, as_json: bool) -> int:
    """Say what is installed, where things are kept, and what stands in the way.

    Versions, the store, the compiled code (and whether it is warm), optional parts with how to get
    them, and the settings of the environment.  Nothing is made or compiled.

    \b
    Examples:
      blis-replay doctor
      blis-replay doctor --store shared.duckdb --json

    Exit codes: 0 nothing stands in the way, 3 something does.
    """
    from blis_replay.validate.doctor import diagnose, doctor_json, doctor_text

    found = diagnose(store_path)
    if as_json:
        print_json(doctor_json(found))
    else:
        click.echo(doctor_text(found))
    return 3 if any(one.state == "problem" for one in found) else 0
