"""The verbs of recordings: ``blis-replay record``, ``ingest``, ``list`` and ``inspect``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from blis_replay.base.addons import in_labs
from blis_replay.base.errors import BAD_DATA, counted, printable
from blis_replay.validate.cli.answers import asked_form, has_out_file, print_answer, quiet
from blis_replay.validate.cli.options import DURATION, FILE, FOLDER, completer, one_experiment, store_option, verb
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.text.answer import Answer, Block, part_text

if TYPE_CHECKING:
    from blis_replay.ingest.ingest import IngestOutcome
    from blis_replay.validate.server_recording import ServerRecording


@verb("record", answers=False, context_settings={"ignore_unknown_options": True})
@click.option(
    *("--out", "-o", "directory"),
    type=FOLDER,
    help="The experiment's directory.  [default: in runs/, by date and model]",
)
@click.option("--spans/--no-spans", default=True, help="Receive the server's request spans (OTLP).  [default: yes]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the server's output goes to stderr.")
@click.argument("command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def record_verb(directory: Path | None, spans: bool, as_json: bool, command_line: tuple[str, ...]) -> int:
    """Run a vLLM server, and record every engine step and every arrival from inside of it.

    Nothing is installed where the server runs: vLLM loads the recorder as a plugin, from a
    folder that PYTHONPATH names. The server's output goes on to the terminal, and into
    vllm.log; its /metrics are fetched when it is up, and before its end. Ctrl-C and SIGTERM
    are passed on; the exit code is the server's. Then put the load generator's result into
    the directory, and `blis-replay ingest` reads it.

    \b
    Examples:
      blis-replay record -- vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64
      blis-replay record --out runs/my-server --no-spans -- vllm serve MODEL
    """
    import asyncio

    from blis_replay.validate.server_recording import new_directory, record_server, step_counts

    chosen = new_directory(command_line) if directory is None else directory
    say = lambda line: click.echo(line, err=True)  # noqa: E731
    output = getattr(sys.stderr if as_json else sys.stdout, "buffer", None)
    made = asyncio.run(record_server(command_line, chosen, spans=spans, say=say, output=output))
    logs = {path.name: step_counts(path) for path in made.step_logs}
    if as_json:
        recorded = {"directory": str(made.directory), "exit_code": made.exit_code, "step_logs": logs}
        recorded |= {"spans": made.spans, "metrics": list(made.metrics), "not_recorded": made.notes}
        click.echo(json.dumps({"recorded": recorded}))
    else:
        click.echo("\n".join(_what_was_recorded(made, logs)), err=True)
    return made.exit_code


_RULE = "-" * 80


def _what_was_recorded(made: ServerRecording, logs: dict[str, str]) -> list[str]:
    if logs or made.spans or (made.metrics and not made.exit_code):
        following = f"with the load generator's result in it, `blis-replay ingest {quote(str(made.directory))}`"
    else:
        following = f"see why in {quote(str(made.directory / 'vllm.log'))}, and record again into another directory"
    none = "  no engine steps: no engine started, or it loaded no plugin (see vllm.log)"
    return [
        # The server's last line may have no end, and goes to the same terminal.
        "",
        _RULE,
        f"recorded in {made.directory}: the server ended with {made.exit_code}",
        *([f"  {name}: {counts}" for name, counts in logs.items()] or [none]),
        *([f"  {counted(made.spans, 'span')}"] if made.spans else []),
        *(f"  not recorded: {note}" for note in made.notes),
        f"next: {following}",
    ]


@verb("ingest")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--name", default="", help="Of the experiment.  [default: its directory]")
@click.option(
    "--input-format", "file_format", default="", metavar="FORMAT", help="Format of the files, if not recognised."
)
@click.option(
    "--columns",
    multiple=True,
    metavar="FIELD=COLUMN:UNIT,...",
    help="The columns of a table, where their names do not say.",
)
@click.option("--model", metavar="NAME", help="What was served, where no file says it.")
@click.option(
    "--engine",
    "engine_file",
    type=FILE,
    help="YAML of engine arguments, e.g. `num_gpu_blocks: 26603`.",
)
@click.option("--from", "from_us", type=DURATION, help="Only requests sent from this time on.  [default: 0s]")
@click.option("--to", "until_us", type=DURATION, help="Only requests sent before this time.")
@click.option(
    "--by", type=click.Choice(["client", "stage"]), help="An experiment for each client's file or load stage."
)
@click.option("--replace", "even_worse", is_flag=True, help="Store also what has fewer requests or steps.")
@store_option
def ingest_verb(
    paths: tuple[str, ...],
    name: str,
    file_format: str,
    columns: tuple[str, ...],
    model: str | None,
    engine_file: Path | None,
    from_us: int | None,
    until_us: int | None,
    by: str | None,
    even_worse: bool,
    store_path: Path,
) -> int:
    """Read experiments, as load generators and vLLM leave them, into the store.

    A directory is one experiment, or holds several with an exp-config.yaml or a result each; the
    files of one folder are one. The content of a file says its format. Reading the same content
    again changes nothing; --replace is needed for a copy with fewer requests or steps.
    --from, --to and --by make experiments of parts of a server's recording with several loads.
    An experiment that cannot be read is named, the others are read; the exit code is then 4.

    \b
    Examples:
      blis-replay ingest runs/20260218-150304-codellama-34b-tp2-general
      blis-replay ingest runs/* --engine engine.yaml
      blis-replay ingest bench/benchmarks.json 'bench/traces*.json' --name my-run
      blis-replay ingest requests.csv --columns ttft=first_after:ms,arrival=sent:s
    """
    from blis_replay.base.errors import RecordingError
    from blis_replay.fixtures.catalogue import profile_of
    from blis_replay.ingest.assemble import parts_of
    from blis_replay.ingest.ingest import ingest_source, outcomes_table
    from blis_replay.ingest.readers.discovery import Part, sources_of
    from blis_replay.ingest.readers.formats import given_columns, input_formats, labs_formats

    form = asked_form()
    if file_format in labs_formats():
        raise click.BadParameter(in_labs(f"the format {file_format}"), param_hint="--input-format")
    if file_format and file_format not in input_formats():
        raise click.BadParameter(
            f"{printable(file_format)} is not one of {', '.join(input_formats())}", param_hint="--input-format"
        )
    outcomes, refused = [], []
    at_once = form is None and not quiet() and not has_out_file()
    said = ",".join(columns) if columns else None
    try:
        given_columns(said or "")
    except RecordingError as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}", param_hint=str(error.path)) from error
    part = None if (from_us, until_us, by) == (None, None, None) else Part(from_us, until_us)
    sources = sources_of(paths, slug=name, form=file_format, columns=said, model=model, part=part, one=by == "client")
    for source in [one for whole in sources for one in (parts_of(whole, by) if by else [whole])]:
        try:
            with progress_line(source.slug) as progress:
                outcome = ingest_source(
                    store_path,
                    source,
                    profile=profile_of(source.slug),
                    engine_file=engine_file,
                    even_worse=even_worse,
                    progress=None if progress is None else lambda name, done, total: progress(done, total, name),
                )
        except RecordingError as error:
            refused.append({"source": str(source.root), "error": str(error)})
            click.echo(f"error: {error}", err=True)
            continue
        outcomes.append(outcome)
        if at_once:
            click.echo(part_text(Block(outcome_lines(outcome))))
    if not at_once:
        document = {"ingested": [vars(outcome) for outcome in outcomes], "refused": refused}
        lines = [line for outcome in outcomes for line in outcome_lines(outcome)]
        print_answer(Answer([Block(lines)], document, outcomes_table(outcomes)))
    return BAD_DATA if refused else 0


def outcome_lines(outcome: IngestOutcome) -> list[str]:
    """What an ingest did, and below it what it took from earlier ones or left out."""
    iterations = f"{counted(outcome.iterations, 'iteration')}, " if outcome.iterations else ""
    rejected = f", {counted(outcome.rejected, 'record')} rejected" if outcome.rejected else ""
    had = f" (had {outcome.before})" if outcome.before else ""
    lines = [
        f"{outcome.alias} ({outcome.slug}): {outcome.outcome}{had}; {counted(outcome.requests, 'request')}, "
        f"{counted(outcome.steps, 'step')}, {iterations}{counted(outcome.findings, 'finding')}{rejected}; "
        f"{outcome.seconds:.1f} s"
    ]
    if outcome.unusable:
        why = f"`blis-replay inspect {outcome.alias}` says why"
        lines.append(f"  not to be used, at least in part: {outcome.unusable}; {why}")
    if outcome.engine_given_before:
        lines.append(f"  engine arguments given before, used again: {outcome.engine_given_before}")
    if outcome.left_out:
        lines.append(f"  left out, part of no experiment: {outcome.left_out}; name each with the files it belongs to")
    if outcome.not_used:
        lines.append(f"  files not used: {printable(outcome.not_used)}")
    return lines


# What ``--pack`` means without a folder.
_SHIPPED = "shipped"


@verb("list", longer="Print every column, some below the others where there is no room.")
@click.option(
    "--pack",
    type=FOLDER,
    is_flag=False,
    flag_value=_SHIPPED,
    metavar="[FOLDER]",
    help="Verify the files that ship, or of a folder with MANIFEST.tsv.",
)
@click.option("--remove", multiple=True, metavar="NAME", help="Take an experiment out of the store first.")
@store_option
def list_verb(pack: Path | None, remove: tuple[str, ...], store_path: Path) -> int:
    """List the experiments of the store and those that ship with the package.

    --pack lists files instead, with hash and licence; exit code 4 if one is not as listed.

    \b
    Examples:
      blis-replay list
      blis-replay list --csv
      blis-replay list -o experiments.md
      blis-replay list --pack
      blis-replay list --remove wrong-run
    """
    from blis_replay.validate.inspection import experiments_answer, pack_answer, removed

    if remove and pack is not None:
        raise click.UsageError("--remove is of the store and --pack of files; leave one of them out")
    if remove:
        removed(store_path, remove)
        if not quiet():
            click.echo(f"removed: {', '.join(remove)}", err=True)
    if pack is None:
        return print_answer(experiments_answer(store_path))
    from blis_replay.fixtures.pack import BUNDLED, read_pack

    return print_answer(pack_answer(read_pack(BUNDLED if str(pack) == _SHIPPED else pack)), "pack")


def _checks(_ctx: click.Context) -> Iterable[str]:
    from blis_replay.ingest.checks.registry import check_names

    return check_names()


@verb("inspect")
@one_experiment(required=False)
@click.option(
    "--check", "check", metavar="NAME", help="The evidence of one instrument check.", shell_complete=completer(_checks)
)
@click.option("--checks", "list_checks", is_flag=True, help="List the instrument checks.")
@store_option
def inspect_verb(name: str | None, check: str | None, list_checks: bool, store_path: Path) -> None:
    """Show what a recording holds and what its instrument checks found.

    Engine arguments are listed with their source; what the recording lacks is named.
    With --check: what was measured, the thresholds and why, what was corrected, and the
    numbers behind it.

    \b
    Examples:
      blis-replay inspect 34b-general
      blis-replay inspect 34b-general --json
      blis-replay inspect 34b-general -o findings.csv
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
