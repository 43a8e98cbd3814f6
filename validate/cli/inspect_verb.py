"""``blis-replay inspect``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from blis_replay.validate.cli.options import form_options, print_answer, store_option


@click.command("inspect")
@click.option("--experiment", "name", default=None, metavar="NAME", help="Slug or alias of a recording.")
@click.option("--check", "check", default=None, metavar="NAME", help="The evidence of one instrument check.")
@click.option("--checks", "list_checks", is_flag=True, help="List the instrument checks.")
@store_option
@form_options
def command(name: str | None, check: str | None, list_checks: bool, store_path: Path, form: str | None) -> None:
    """Show what a recording holds and what its instrument checks found.

    Engine arguments are listed with their source; what the recording lacks is named.
    With --check: what was measured, the thresholds and why, what was corrected, and the
    numbers behind it.

    \b
    Examples:
      blis-replay inspect --experiment 34b-general
      blis-replay inspect --experiment 34b-general --json
      blis-replay inspect --experiment 34b-general --check token_events
      blis-replay inspect --checks
    """
    from blis_replay.ingest.check_evidence import check_evidence, check_names, named_check
    from blis_replay.ingest.store import kv_event_counts, open_store, read_findings, read_stored
    from blis_replay.validate.check_text import evidence_frame, evidence_json, evidence_text, names_frame, names_text
    from blis_replay.validate.experiment import find_experiment
    from blis_replay.validate.inspection import findings_frame, inspection_json, inspection_text

    if list_checks:
        known = check_names()
        print_answer(form, text=lambda: names_text(known), document=lambda: known, frame=lambda: names_frame(known))
        return
    if name is None:
        raise click.UsageError("name an experiment with --experiment, or list the checks with --checks")
    chosen = None if check is None else named_check(check)
    # A store that nobody may write can still be looked at; a bundled experiment would be brought into it.
    read_only = store_path.exists() and not os.access(store_path, os.W_OK)
    with open_store(store_path, read_only=read_only) as store:
        slug = find_experiment(store, name)
        if chosen is not None:
            evidence = check_evidence(store, slug, chosen)
            print_answer(
                form,
                text=lambda: evidence_text(evidence),
                document=lambda: evidence_json(evidence),
                frame=lambda: evidence_frame(evidence),
            )
            return
        recording, findings = read_stored(store, slug), read_findings(store, slug)
        cache = kv_event_counts(store, slug)
    print_answer(
        form,
        text=lambda: inspection_text(recording, findings, cache),
        document=lambda: inspection_json(recording, findings, cache),
        frame=lambda: findings_frame(findings),
    )
