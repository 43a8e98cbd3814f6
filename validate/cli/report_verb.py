"""``blis-replay report``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from blis_replay.validate.cli.options import first_line, progress_line, store_option


@click.command("report")
@click.option("--experiment", "names", multiple=True, help="Slug or alias; may be given several times.")
@click.option("--all", "everything", is_flag=True, help="All stored and bundled experiments.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The HTML file to write.")
@click.option("--coefficients", default=None, help="Release to replay with: a name or a file.  [default: bundled]")
@click.option("--baseline", default=None, help="Another release, whose errors are shown below in the overview.")
@click.option("--replay", "mode_text", default="exact", show_default=True, help="Replay mode, as for validate.")
@store_option
def command(
    names: tuple[str, ...],
    everything: bool,
    out: Path,
    coefficients: str | None,
    baseline: str | None,
    mode_text: str,
    store_path: Path,
) -> None:
    """Write one HTML page with the verdicts and all of their evidence.

    Opens offline and runs no script: errors of all experiments, the worst first; for each one
    the verdict and its cause, distributions, errors over time, step cycles against the latency
    model, depths, the parts of the error, instrument findings, and what it all depends on.
    The exit code is 0 once it is written, whatever the verdicts: `gate` is there to fail.

    \b
    Examples:
      blis-replay report --experiment 34b-general --out report.html
      blis-replay report --experiment 34b-general --replay scheduling=synchronous --out report.html
      blis-replay report --all --coefficients mine.yaml --baseline h100-vllm-0.15.1 --out report.html
    """
    if bool(names) == everything:
        raise click.UsageError("name experiments with --experiment, or use --all")
    first_line("reading the store")
    from blis_replay.ingest.store import open_store
    from blis_replay.replay.mode import parse_mode
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.experiment import DEFAULT_RELEASE, all_experiments, find_experiment
    from blis_replay.validate.report.report import report

    release = load_release(coefficients or DEFAULT_RELEASE)
    mode = parse_mode(mode_text, release.published_replay)
    asked = ["--all"] if everything else [part for name in names for part in ("--experiment", name)]
    given = {"--coefficients": coefficients, "--baseline": baseline, "--replay": mode_text, "--out": out.name}
    chosen = [part for option, value in given.items() if value for part in (option, value)]
    again = shlex.join(["blis-replay", "report", *asked, *chosen])
    with open_store(store_path) as store:
        slugs = all_experiments(store) if everything else [find_experiment(store, n) for n in dict.fromkeys(names)]
    before = load_release(baseline) if baseline else None
    told = progress_line("reporting")
    written = report(store_path, slugs, release, mode, baseline=before, command=again, progress=told)
    size = out.write_text(written.html, "utf-8")
    counts = {verdict: list(written.verdicts.values()).count(verdict) for verdict in written.verdicts.values()}
    counts |= {"not judged": len(written.not_judged)} if written.not_judged else {}
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    click.echo(f"{out}: {verdicts}; {size / 1e6:.2f} MB")
