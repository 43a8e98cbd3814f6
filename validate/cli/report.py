"""``blis-replay report``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from blis_replay.compiled.files import write_whole
from blis_replay.validate.cli.options import (
    OUT_FILE,
    coefficients_option,
    complete_releases,
    experiments_options,
    form_options,
    print_answer,
    replay_option,
    store_option,
)
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.cli.verb import verb


@verb("report")
@experiments_options
@coefficients_option
@click.option(
    "--baseline",
    default=None,
    metavar="RELEASE",
    shell_complete=complete_releases,
    help="Another one, whose errors are shown below in the overview.",
)
@replay_option
@click.option("--out", "-o", type=OUT_FILE, required=True, help="The HTML file to write.")
@store_option
@form_options
def command(
    names: tuple[str, ...],
    everything: bool,
    out: Path,
    coefficients: str | None,
    baseline: str | None,
    mode_text: str,
    store_path: Path,
    form: str | None,
) -> None:
    """Write one HTML page with the verdicts and all of their evidence.

    Opens offline and loads nothing: errors of all experiments, the worst first; for each one
    the verdict and its cause, distributions, errors over time, step cycles against the latency
    model, depths, the parts of the error, instrument findings, and what it all depends on.
    The exit code is 0 once it is written, whatever the verdicts: `gate` is there to fail.

    \b
    Examples:
      blis-replay report 34b-general --out report.html
      blis-replay report 34b-general --replay scheduling=synchronous --out report.html
      blis-replay report --all --coefficients mine.yaml --baseline h100-vllm-0.15.1 --out report.html
    """
    if bool(names) == everything:
        raise click.UsageError("name experiments, or use --all")
    with progress_line("reporting") as progress:
        from blis_replay.ingest.store import open_for_reading
        from blis_replay.replay.mode import parse_mode
        from blis_replay.replay.release_file import load_release
        from blis_replay.validate.experiment import DEFAULT_RELEASE, named_experiments
        from blis_replay.validate.report.report import report, report_answer

        release = load_release(coefficients or DEFAULT_RELEASE)
        mode = parse_mode(mode_text, release.published_replay)
        asked = ["--all"] if everything else [part for name in names for part in ("--experiment", name)]
        given = {"--coefficients": coefficients, "--baseline": baseline, "--replay": mode_text, "--out": out.name}
        chosen = [part for option, value in given.items() if value for part in (option, value)]
        again = shlex.join(["blis-replay", "report", *asked, *chosen])
        with open_for_reading(store_path) as store:
            slugs = named_experiments(store, None if everything else names)
        before = load_release(baseline) if baseline else None
        written = report(store_path, slugs, release, mode, baseline=before, command=again, progress=progress)
    size = write_whole(out, written.html)
    print_answer(form, report_answer(written, out, size))
