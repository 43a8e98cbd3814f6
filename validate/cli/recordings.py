"""The verbs of stored recordings: ``blis-replay list`` and ``inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.options import (
    complete_checks,
    one_experiment,
    store_option,
    verb,
)


@verb("list", longer="Print every column, some below the others where there is no room.")
@store_option
@form_options
def list_verb(store_path: Path) -> None:
    """List the experiments of the store and those that ship with the package.

    \b
    Examples:
      blis-replay list
      blis-replay list --csv
      blis-replay list -f markdown -o experiments.md
    """
    from blis_replay.validate.inspection import experiments_answer

    print_answer(experiments_answer(store_path))


@verb("inspect")
@one_experiment(required=False)
@click.option(
    "--check", "check", metavar="NAME", help="The evidence of one instrument check.", shell_complete=complete_checks
)
@click.option("--checks", "list_checks", is_flag=True, help="List the instrument checks.")
@store_option
@form_options
def inspect_verb(name: str | None, check: str | None, list_checks: bool, store_path: Path) -> None:
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
    from blis_replay.ingest.store import open_for_reading
    from blis_replay.validate.experiment import find_experiment
    from blis_replay.validate.inspection import checks_answer, evidence_answer, inspected
    from blis_replay.validate.schedule import SCHEDULE_CHECK, schedule_evidence

    if list_checks and (name is not None or check is not None):
        other = f"--check {check}" if check is not None else name
        raise click.UsageError(f"--checks lists the instrument checks of no experiment; leave {other} out")
    if list_checks:
        print_answer(checks_answer(check_names() | {SCHEDULE_CHECK.name: SCHEDULE_CHECK.measures}))
        return
    if name is None:
        raise click.UsageError("name an experiment, or list the checks with --checks")
    if check is None:
        print_answer(inspected(store_path, name))
        return
    chosen = named_check(check, SCHEDULE_CHECK)
    with open_for_reading(store_path) as store:
        slug = find_experiment(store, name)
        of_schedule = chosen is SCHEDULE_CHECK
        found = schedule_evidence(store, slug) if of_schedule else check_evidence(store, slug, [chosen])[0]
        print_answer(evidence_answer(found))
