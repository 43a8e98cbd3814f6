"""``blis-replay doctor``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import form_options, print_answer, store_option


@click.command("doctor")
@store_option
@form_options
def command(store_path: Path, form: str | None) -> int:
    """Say what is installed, where things are kept, and what stands in the way.

    Versions, the store, the compiled code (and whether it is warm), optional parts with how to get
    them, and the settings of the environment.  Nothing is made or compiled.

    \b
    Examples:
      blis-replay doctor
      blis-replay doctor --store shared.duckdb --json

    Exit codes: 0 nothing stands in the way, 3 something does.
    """
    from blis_replay.validate.doctor import diagnose, doctor_frame, doctor_json, doctor_text

    found = diagnose(store_path)
    print_answer(
        form,
        text=lambda: doctor_text(found),
        document=lambda: doctor_json(found),
        frame=lambda: doctor_frame(found),
    )
    return 3 if any(one.state == "problem" for one in found) else 0
