"""``blis-replay validate``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.ingest.printable import printable
from blis_replay.validate.cli.options import WINDOW, first_line, form_options, print_frame, print_json, store_option

if TYPE_CHECKING:
    from blis_replay.blis.release import CoefficientRelease
    from blis_replay.ingest.store import Store
    from blis_replay.replay.mode import ReplayMode
    from blis_replay.replay.simulator import Simulator
    from blis_replay.validate.experiment import Validated


@click.command("validate")
@click.option("--experiment", "names", multiple=True, help="Slug or alias; may be given several times.")
@click.option("--all", "everything", is_flag=True, help="All stored and bundled experiments.")
@click.option("--coefficients", default=None, help="A release that ships, or a YAML file.  [default: our own]")
@click.option(
    "--replay",
    "mode_text",
    default="exact",
    show_default=True,
    metavar="MODE",
    help="exact, as-published, spec (requests generated from the load profile), blis-spec (as BLIS expands it), "
    "or substitutions: arrivals=flat|profile, lengths=re-tokenised|profile, prefix=none|profile, "
    "scheduling=synchronous, surplus_steps=1, joined by commas.",
)
@click.option(
    "--simulator",
    "choice",
    type=click.Choice(["embedded", "blis", "both"]),
    default="embedded",
    show_default=True,
    help="Our engine, the BLIS binary, or both side by side.",
)
@click.option("--blis-binary", default=None, metavar="PATH", help="The BLIS binary, for --simulator blis and both.")
@click.option(
    "--blis-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="End a BLIS run after this long.",
)
@click.option(
    "--blis-model",
    type=click.Choice(["release", "own"]),
    default=None,
    help="BLIS runs the coefficients as its blackbox model, or the latency model that its build has.  "
    "[default: release where --coefficients is given, else own]",
)
@click.option("--by-stage", is_flag=True, help="Add a row for each load stage.")
@click.option(
    "--window", type=WINDOW, default=(0.0, 1.0), help="Compare only requests of this share of the run, e.g. 0.6:1."
)
@store_option
@form_options
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    everything: bool,
    coefficients: str | None,
    mode_text: str,
    choice: str,
    blis_binary: str | None,
    blis_timeout: float,
    blis_model: str | None,
    by_stage: bool,
    window: tuple[float, float],
    store_path: Path,
    form: str | None,
) -> int:
    """Replay recorded requests through the simulator and compare.

    Prints observed and simulated mean, p50, p90 and p99 of TTFT, ITL, TPOT and E2E with
    signed errors, and passes if the means are within E2E 10 %, TTFT 15 %, ITL 15 %.
    A metric that an instrument check calls unusable is not printed; exit code 3 if it
    is one of these three and no other of them fails.

    \b
    Examples:
      blis-replay validate --experiment 34b-general
      blis-replay validate --experiment 34b-general --by-stage
      blis-replay validate --experiment 34b-general --coefficients mine.yaml
      blis-replay validate --experiment 34b-general --coefficients stepml-direct --replay as-published
      blis-replay validate --experiment 34b-general --replay spec
      blis-replay validate --experiment 34b-general --simulator both --blis-binary ./blis
      blis-replay validate --all --csv
    """
    if bool(names) == everything:
        raise click.UsageError("name experiments with --experiment, or use --all")
    if choice != "embedded" and blis_binary is None:
        raise click.UsageError(f"--simulator {choice} needs --blis-binary PATH")
    if not blis_timeout > 0:  # not a number is no limit either
        raise click.UsageError(f"--blis-timeout {blis_timeout} is no time; give seconds")
    if everything:
        first_line("reading the store")
    from blis_replay.ingest.store import open_store
    from blis_replay.replay.mode import parse_mode
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.comparison.simulators import chosen_simulators, informed
    from blis_replay.validate.experiment import DEFAULT_RELEASE, all_experiments, find_experiment

    own_model = blis_model == "own" if blis_model else coefficients is None
    release = load_release(coefficients or DEFAULT_RELEASE)
    release.refuse_if_invalid()
    mode = parse_mode(mode_text, release.published_replay)
    simulators = chosen_simulators(choice, release, blis_binary or "", blis_timeout, own_model)
    with open_store(store_path) as store:
        slugs = all_experiments(store) if everything else [find_experiment(store, n) for n in dict.fromkeys(names)]
        reports = [_validated(store, slugs, everything, release, mode, window, by_stage, s) for s in simulators]
    if choice == "both":
        embedded = {c.slug: c for c in reports[0].comparisons}
        known = [informed(c, embedded[c.slug]) if c.slug in embedded else c for c in reports[1].comparisons]
        reports[1] = replace(reports[1], comparisons=known)
    _print(reports, everything, form)
    return exit_code([c.verdict for report in reports for c in report.comparisons])


def _validated(
    store: Store,
    slugs: list[str],
    tolerant: bool,
    release: CoefficientRelease,
    mode: ReplayMode,
    window: tuple[float, float],
    by_stage: bool,
    simulator: Simulator,
) -> Validated:
    """Validate experiments with one simulator; ``tolerant``: those that cannot be judged are listed."""
    from blis_replay.validate.experiment import validate_many

    label = f"validating ({simulator.name})"
    hidden = not (tolerant and sys.stderr.isatty())
    with click.progressbar(slugs, label=label, file=sys.stderr, hidden=hidden) as bar:
        return validate_many(store, bar, release, mode, window, simulator, stages=by_stage, tolerant=tolerant)


def _print(reports: list[Validated], everything: bool, form: str | None) -> None:
    from blis_replay.validate.comparison import as_json as json_form
    from blis_replay.validate.comparison import comparison_text as text
    from blis_replay.validate.comparison.simulators import side_by_side_text

    first, *others = reports
    if form is not None and form != "json":
        _print_rows(reports, form)
        return
    if form == "json":
        whole = json_form.report_json(first.comparisons, first.stages, first.not_judged)
        for report in others:
            whole[report.simulator] = json_form.report_json(report.comparisons, report.stages, report.not_judged)
        print_json(whole)
        return
    if everything:
        for report in reports:
            title = f"simulator {report.simulator}\n\n" if others else ""
            click.echo(title + text.summary_text(report.comparisons, report.not_judged))
    elif others:
        for embedded, blis in zip(first.comparisons, others[0].comparisons, strict=True):
            click.echo(side_by_side_text(embedded, blis))
    else:
        for comparison in first.comparisons:
            click.echo(text.comparison_text(comparison))
    for report in reports:
        for comparison in report.comparisons if report.stages else ():
            title = f"simulator {report.simulator}: " if others else ""
            click.echo(f"\n{title}" + text.stages_text(comparison, report.stages[comparison.slug]))


def _print_rows(reports: list[Validated], form: str) -> None:
    """A row a number; what could not be judged has none, and is named on standard error."""
    import polars as pl

    from blis_replay.validate.experiment import comparison_frame

    for report in reports:
        for name, reason in report.not_judged.items():
            click.echo(f"not judged: {printable(name)}: {printable(reason)}", err=True)
    compared = [part for report in reports for c in report.comparisons for part in (c, *report.stages.get(c.slug, []))]
    if compared:
        print_frame(pl.concat(map(comparison_frame, compared)), form)


def exit_code(verdicts: list[str]) -> int:
    """0 all passed (overloaded ones do not count), 1 one failed, 3 nothing, or one not, could be judged."""
    if "fail" in verdicts:
        return 1
    if "unusable" in verdicts:
        return 3
    return 0 if {"pass", "overloaded"} & set(verdicts) else 3
