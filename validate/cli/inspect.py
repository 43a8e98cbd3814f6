"""``blis-replay inspect``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from blis_replay.validate.cli.options import complete_checks, form_options, one_experiment, print_answer, store_option
from blis_replay.validate.cli.verb import verb


@verb("inspect")
@one_experiment(required=False)
@click.option(
    "--check",
    "check",
    default=None,
    metavar="NAME",
    help="The evidence of one instrument check.",
    shell_complete=complete_checks,
)
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
      blis-replay inspect 34b-general
      blis-replay inspect 34b-general --json
      blis-replay inspect 34b-general -f csv -o findings.csv
      blis-replay inspect 34b-general --check token_events
      blis-replay inspect --checks
    """
    from blis_replay.ingest.checks.registry import check_evidence, check_names, named_check
    from blis_replay.ingest.store import kv_event_counts, open_for_reading, read_findings, read_stored
    from blis_replay.validate.experiment import find_experiment
    from blis_replay.validate.inspection import inspection_answer
    from blis_replay.validate.schedule import SCHEDULE_CHECK, schedule_evidence
    from blis_replay.validate.text.checks import checks_answer, evidence_answer

    if list_checks:
        print_answer(form, checks_answer(check_names() | {SCHEDULE_CHECK.name: SCHEDULE_CHECK.measures}))
        return
    if name is None:
        raise click.UsageError("name an experiment, or list the checks with --checks")
    chosen = None if check is None else named_check(check, SCHEDULE_CHECK)
    with open_for_reading(store_path) as store:
        slug = find_experiment(store, name)
        if chosen is None:
            recording, findings, cache = (
                read_stored(store, slug),
                read_findings(store, slug),
                kv_event_counts(store, slug),
            )
            answer = inspection_answer(recording, findings, cache)
        else:
            evidence = schedule_evidence if chosen is SCHEDULE_CHECK else partial(check_evidence, check=chosen)
            answer = evidence_answer(evidence(store, slug))
    print_answer(form, answer)
