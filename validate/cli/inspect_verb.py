"""``blis-replay inspect``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from blis_replay.validate.cli.options import json_option, print_json, store_option


@click.command("inspect")
@click.option("--experiment", "name", required=True, help="Slug or alias.")
@store_option
@json_option
def command(name: str, store_path: Path, as_json: bool) -> None:
    """Show what a recording holds and what its instrument checks found.

    Engine arguments are listed with their source; what the recording lacks is named.

    \b
    Examples:
      blis-replay inspect --experiment 34b-general
      blis-replay inspect --experiment 34b-general --json
    """
    from blis_replay.ingest.store import kv_event_counts, open_store, read_findings, read_stored
    from blis_replay.validate.experiment import find_experiment
    from blis_replay.validate.inspection import inspection_json, inspection_text

    # A store that nobody may write can still be looked at; a bundled experiment would be brought into it.
    read_only = store_path.exists() and not os.access(store_path, os.W_OK)
    with open_store(store_path, read_only=read_only) as store:
        slug = find_experiment(store, name)
        recording, findings = read_stored(store, slug), read_findings(store, slug)
        cache = kv_event_counts(store, slug)
    if as_json:
        print_json(inspection_json(recording, findings, cache))
    else:
        click.echo(inspection_text(recording, findings, cache))
