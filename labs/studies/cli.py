"""The verb ``blis-replay study``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from blis_replay.validate.cli.answers import form_options, print_answer
from blis_replay.validate.cli.options import VerbGroup, executor_options, store_option
from blis_replay.validate.cli.progress import progress_line

if TYPE_CHECKING:
    from blis_replay.replay.executors import Workers


@click.group("study", cls=VerbGroup)
def study_verb() -> None:
    """Published findings about the simulator, run again on this engine.

    \b
    Examples:
      blis-replay study list
      blis-replay study run sjf
      blis-replay study run --all
      blis-replay study run --all --json
    """


@study_verb.command("list")
@form_options
def list_studies() -> None:
    """List the studies that ship with the package.

    \b
    Examples:
      blis-replay study list
      blis-replay study list --json
    """
    from blis_replay.ingest.tables import Column, Table, table_of
    from blis_replay.validate.text.answer import Answer
    from blis_replay_labs.studies.read import load_study, study_names

    studies = [load_study(name) for name in study_names()]
    records = [{"name": s.name, "family": s.family, "title": s.title, "source": s.source} for s in studies]
    columns = (Column("study", "text"), Column("what it says", "text", below=True))
    page = [Table("", columns, [[s.name, s.title] for s in studies])]
    print_answer(Answer(page, {"studies": records}, table_of(records)))


@study_verb.command("run")
@click.argument("names", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All studies that ship.")
@executor_options
@store_option
@form_options
def run(names: tuple[str, ...], every: bool, store_path: Path, **workers: Unpack[Workers]) -> int:
    """Run studies and judge them: what was measured, effects with intervals over seeds, verdicts.

    A check is confirmed if all of its 95 % interval is where it should be, refuted if all of it
    is not, else inconclusive. --all prints one table; name a study to see all of it.

    \b
    Examples:
      blis-replay study run sjf
      blis-replay study run prefix-affinity shared-prefix --csv
      blis-replay study run --all --markdown

    Exit codes: 0 every verdict is the one on record and every difference from a published one
    is explained by evidence, 1 one is not, 3 a study that was named needs recordings that are
    not in the store (--all says so and goes on).
    """
    from blis_replay_labs.studies.read import load_study, study_names
    from blis_replay_labs.studies.study import run_studies
    from blis_replay_labs.studies.text import studies_answer

    if bool(names) == every:
        raise click.UsageError("name studies, or give --all; `blis-replay study list` names them")
    studies = [load_study(name) for name in dict.fromkeys(names or study_names())]
    with progress_line("running") as progress:
        results = run_studies(studies, store_path, progress=progress, **workers)
    print_answer(studies_answer(results, summary=every))
    if not all(result.passed for result in results):
        return 1
    return 3 if names and any(result.absent for result in results) else 0
