"""The verbs of stored recordings: ``blis-replay list``, ``inspect`` and ``export``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.ingest.errors import counted
from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.options import (
    PlacePath,
    complete_checks,
    experiment_option,
    one_experiment,
    store_option,
    verb,
)
from blis_replay.validate.text.answer import one_line


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
    from blis_replay.validate import inspect
    from blis_replay.validate.experiment import find_experiment
    from blis_replay.validate.inspection import checks_answer, evidence_answer
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
        print_answer(inspect(name, store_path))
        return
    chosen = named_check(check, SCHEDULE_CHECK)
    with open_for_reading(store_path) as store:
        slug = find_experiment(store, name)
        of_schedule = chosen is SCHEDULE_CHECK
        found = schedule_evidence(store, slug) if of_schedule else check_evidence(store, slug, [chosen])[0]
        print_answer(evidence_answer(found))


# As in replay.export.TARGETS, whose import would make help slow; a test compares the two.
TARGETS = ("tracev2", "legacy-csv", "mooncake", "parquet")


@verb("export")
@experiment_option
@click.option("--to", "target", type=click.Choice(TARGETS), required=True, help="The format to write.")
@click.option(
    "--out",
    "-o",
    type=PlacePath(),
    help="File, or folder for tracev2.  [default: called like the alias]",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
@store_option
@form_options
def export_verb(name: str, target: str, out: Path | None, force: bool, store_path: Path) -> None:
    """Write the requests of an experiment so that other simulators can replay them.

    tracev2 is BLIS's format (a folder with trace.yaml and trace.csv), legacy-csv the one
    before it; mooncake is JSON lines with ids of 512-token blocks, which AIPerf and
    Dynamo read too; parquet has every column. `blis-replay ingest` reads all of them, and
    finds the same requests. What a format cannot carry is named on standard error.

    \b
    Examples:
      blis-replay export 34b-general --to tracev2
      blis-replay export mooncake --to legacy-csv --out load.csv --force
      blis-replay export 34b-general --to parquet --json
    """
    from blis_replay.replay.export import export
    from blis_replay.validate.experiment import stored_experiment

    recording = stored_experiment(store_path, name)
    done = export(recording, target, out, force)
    if done.not_carried:
        click.echo(f"not carried by {target}: {', '.join(done.not_carried)}", err=True)
    print_answer(
        one_line(
            f"{recording.alias}: {counted(done.requests, 'request')} in {', '.join(map(str, done.files))}",
            {
                "slug": recording.slug,
                "alias": recording.alias,
                "to": target,
                "requests": done.requests,
                "files": [str(path) for path in done.files],
                "not_carried": list(done.not_carried),
            },
        )
    )
