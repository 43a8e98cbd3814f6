"""``blis-replay validate``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Unpack

import click

from blis_replay.base.errors import UnreplayableError
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import (
    FOLDER,
    WINDOW,
    coefficients_option,
    completer,
    experiments_options,
    record_option,
    repeat_option,
    replay_option,
    slo_option,
    store_option,
    timeout_option,
    verb,
    workers_option,
)
from blis_replay.validate.cli.progress import progress_line

if TYPE_CHECKING:
    from blis_replay.replay.executors import Workers
    from blis_replay.replay.simulator import Simulator
    from blis_replay.validate.metrics.objectives import Objectives
    from blis_replay.validate.text.answer import Answer


def _simulators(_ctx: click.Context) -> Iterable[str]:
    from blis_replay.replay.simulators import simulator_kinds

    return simulator_kinds()


@verb("validate", longer="Print every number, assumption and finding.")
@experiments_options
@coefficients_option
@replay_option
@click.option(
    "--simulator",
    "choice",
    metavar="NAME",
    shell_complete=completer(_simulators),
    default="embedded",
    help="embedded, blis or 'cmd:PATH ARGS'.",
)
@click.option("--blis-binary", metavar="PATH", help="The BLIS binary, for --simulator blis.")
@timeout_option
@click.option("--by-stage", is_flag=True, help="Add a row for each load stage.")
@click.option("--window", type=WINDOW, default=(0.0, 1.0), help="Compare only this share of the run, e.g. 0.6:1.")
@record_option
@click.option("--ci", type=FOLDER, metavar="FOLDER", help="Write summary, annotations, JUnit, badge there.")
@click.option("--laws", is_flag=True, help="Try laws that every simulator must keep.")
@click.option("--prefill", metavar="NAME", help="The recording of the server that prefilled.")
@click.option("--transfer", metavar="COSTS", default="", help="With --prefill: 'hand_over_us=9000 load_us=500 ...'.")
@repeat_option
@slo_option
@workers_option
@store_option
def validate_verb(
    names: tuple[str, ...],
    everything: bool,
    coefficients: str | None,
    mode_text: str,
    choice: str,
    blis_binary: str | None,
    timeout_s: float,
    by_stage: bool,
    window: tuple[float, float],
    history: Path | None,
    ci: Path | None,
    laws: bool,
    prefill: str | None,
    transfer: str,
    repeats: tuple[str, ...],
    objectives: Objectives,
    store_path: Path,
    **workers: Unpack[Workers],
) -> int:
    """Replay recorded requests through the simulator and compare.

    Judges the means against E2E 10 %, TTFT 15 %, ITL 15 %, each by the 95 % interval of its
    error; an overloaded recording by what was served.

    \b
    PASS        held out, and every interval within its limit        exit code 0
    FITS        would pass, but the coefficients were fitted on it             0
    FAIL        one interval beyond its limit                                  1
    UNDECIDED   neither; says what would decide                                3
    NOT JUDGED  the recording cannot carry a verdict; says why                 4

    \b
    Examples:
      blis-replay validate 34b-general
      blis-replay validate 34b-general --coefficients mine.yaml --slo itl.p90=9ms
      blis-replay validate 34b-general --simulator blis --blis-binary ./blis
      blis-replay validate 34b-general --simulator 'cmd:./mine --fast' --laws
      blis-replay validate --all --csv
    """
    if bool(names) == everything:
        raise click.UsageError("name experiments, or use --all")
    if choice.startswith("blis") and blis_binary is None:
        raise click.UsageError(f"--simulator {choice}: the BLIS binary is not named; give --blis-binary PATH")
    if not timeout_s > 0:  # also rejects nan
        raise click.UsageError(f"--simulator-timeout {timeout_s} is not a time; give seconds")
    if laws and (len(names) != 1 or by_stage or repeats or objectives or history or ci or window != (0.0, 1.0)):
        raise click.UsageError("--laws judges no recording; name one that lends its requests, and no other option")
    if judged := [name for name in repeats if name in names]:
        raise click.UsageError(f"--repeat {judged[0]}: that is what is judged; name another recording of the same load")
    if prefill is not None and (len(names) != 1 or laws or choice != "embedded"):
        raise click.UsageError("--prefill goes with one recording and the embedded simulator; leave the others out")
    if transfer and prefill is None:
        raise click.UsageError("--transfer is of a prefill on another server; name its recording with --prefill")
    if transfer:
        from blis_replay.replay.transfers import given_costs  # few servers are a pair

        try:
            given_costs(transfer)
        except UnreplayableError as error:
            raise click.UsageError(f"--transfer: {error}") from None
    with progress_line("validating") as progress:
        from blis_replay.replay.mode import parse_mode
        from blis_replay.replay.simulator import EmbeddedEngine
        from blis_replay.validate.comparison.validated import validate_many
        from blis_replay.validate.comparison.verdict_text import first_answer
        from blis_replay.validate.experiment import given_options, release_for

        release = release_for(coefficients)
        release.refuse_if_invalid()
        mode = parse_mode(mode_text)
        simulator: Simulator = EmbeddedEngine(release)
        if choice != "embedded":
            from blis_replay.replay.simulators import SimulatorInputs, simulator_named  # which few runs need

            model = "own" if coefficients is None else "release"
            simulator = simulator_named(choice, SimulatorInputs(release, store_path, timeout_s, blis_binary, model))
        if prefill is not None:
            from blis_replay.replay.apart import ApartEngine  # few servers are a pair
            from blis_replay.validate.experiment import stored_experiment

            simulator = ApartEngine(release, prefill=stored_experiment(store_path, prefill), costs=transfer)
        if laws:
            from blis_replay.validate.experiment import stored_experiment
            from blis_replay.validate.laws import laws_answer, rulings

            recording = stored_experiment(store_path, names[0])
            found = list(rulings(simulator, recording, mode))
            return print_answer(laws_answer(simulator.name, recording, found), "laws")
        report = validate_many(
            store_path,
            None if everything else names,
            mode,
            window,
            simulator,
            ships=coefficients is None,
            stages=by_stage,
            repeats=repeats,
            objectives=objectives,
            progress=progress,
            **workers,
        )
    if ci is not None:
        from blis_replay.validate.ci import write_for_ci

        write_for_ci(ci, [one.judgement for one in report.comparisons], report.not_judged, report.simulator)
    if history is not None:
        from blis_replay.validate.history import record

        record(
            history, [(one.judgement, one.verdict) for one in report.comparisons], report.not_judged, report.simulator
        )
    given = {
        "simulator": None if choice == "embedded" else choice,
        "blis-binary": blis_binary,
        "replay": None if mode_text == "exact" else mode_text,
        "prefill": prefill,
        "transfer": transfer,
    }
    again = "".join(f" --{name} {quote(value)}" for name, value in given.items() if value)
    again += given_options(coefficients, store_path)

    def whole() -> Answer:
        from blis_replay.validate.comparison.pages import validation_answer  # for -v, for programs, and of several

        return validation_answer(report, summary=everything, again=again)

    one = not everything and not by_stage and len(report.comparisons) + len(report.not_judged) == 1
    return print_answer(first_answer(report, again, whole) if one else whole())
