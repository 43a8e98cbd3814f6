"""``blis-replay validate``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from blis_replay.validate.cli.options import WINDOW, json_option, print_json, store_option


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
    help="exact, as-published, or substitutions: arrivals=flat, lengths=re-tokenised, prefix=none, "
    "scheduling=synchronous, surplus_steps=1, joined by commas.",
)
@click.option("--by-stage", is_flag=True, help="Add a row for each load stage.")
@click.option(
    "--window", type=WINDOW, default=(0.0, 1.0), help="Compare only requests of this share of the run, e.g. 0.6:1."
)
@store_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    everything: bool,
    coefficients: str | None,
    mode_text: str,
    by_stage: bool,
    window: tuple[float, float],
    store_path: Path,
    as_json: bool,
) -> int:
    """Replay recorded requests through the simulator and compare.

    Prints observed and simulated mean, p50, p90 and p99 of TTFT, ITL, TPOT and E2E with
    signed errors, and passes if the means are within E2E 10 %, TTFT 15 %, ITL 15 %.

    \b
    Examples:
      blis-replay validate --experiment 34b-general
      blis-replay validate --experiment 34b-general --by-stage
      blis-replay validate --experiment 34b-general --coefficients mine.yaml
      blis-replay validate --experiment 34b-general --coefficients stepml-direct --replay as-published
      blis-replay validate --all --json
    """
    from blis_replay.ingest.store import open_store
    from blis_replay.replay.mode import parse_mode
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate import as_json as json_form
    from blis_replay.validate import comparison_text as text
    from blis_replay.validate.experiment import (
        DEFAULT_RELEASE,
        all_experiments,
        find_experiment,
        validate_experiment,
        validate_many,
    )
    from blis_replay.validate.experiment import by_stage as stage_comparisons

    if bool(names) == everything:
        raise click.UsageError("name experiments with --experiment, or use --all")
    release = load_release(coefficients or DEFAULT_RELEASE)
    release.refuse_if_invalid()
    mode = parse_mode(mode_text, release.published_replay)
    with open_store(store_path) as store:
        if everything:
            slugs = all_experiments(store)
            with click.progressbar(slugs, label="validating", file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
                comparisons, not_judged = validate_many(store, bar, release, mode, window)
        else:
            slugs = [find_experiment(store, name) for name in dict.fromkeys(names)]
            comparisons = [validate_experiment(store, slug, release, mode, window) for slug in slugs]
            not_judged = {}
        stages = {c.slug: stage_comparisons(store, c) for c in comparisons} if by_stage else {}
    if as_json:
        print_json(json_form.report_json(comparisons, stages, not_judged))
    elif everything:
        click.echo(text.summary_text(comparisons, not_judged))
    else:
        for comparison in comparisons:
            click.echo(text.comparison_text(comparison))
    if not as_json:
        for comparison in comparisons if by_stage else ():
            click.echo("\n" + text.stages_text(comparison, stages[comparison.slug]))
    return exit_code([comparison.verdict for comparison in comparisons])


def exit_code(verdicts: list[str]) -> int:
    """0 all passed (overloaded ones do not count), 1 one failed, 3 nothing could be judged."""
    if "fail" in verdicts:
        return 1
    return 0 if {"pass", "overloaded"} & set(verdicts) else 3
