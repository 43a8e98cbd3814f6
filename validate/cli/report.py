"""The verbs that write a run as a file to look at: ``blis-replay report`` and ``timeline``."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import click

from blis_replay.compiled.files import write_whole
from blis_replay.validate.cli.options import (
    DURATION,
    OUT_FILE,
    coefficients_option,
    complete_releases,
    experiment_option,
    experiments_options,
    form_options,
    print_answer,
    replay_option,
    store_option,
    verb,
)
from blis_replay.validate.cli.progress import progress_line


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
def report_verb(
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
    if out.suffix not in (".html", ".htm"):
        raise click.UsageError(f"--out {out}: the report is a page of HTML; name a .html file")
    with progress_line("reporting") as progress:
        from blis_replay.ingest.store import open_for_reading
        from blis_replay.replay.mode import parse_mode
        from blis_replay.replay.release_file import load_release
        from blis_replay.validate.experiment import named_experiments, release_for
        from blis_replay.validate.report.report import report, report_answer

        release = release_for(coefficients)
        mode = parse_mode(mode_text, release.published_replay)
        asked = ["--all"] if everything else [part for name in names for part in ("--experiment", name)]
        given = {"--coefficients": coefficients, "--baseline": baseline, "--replay": mode_text, "--out": out.name}
        chosen = [part for option, value in given.items() if value for part in (option, value)]
        again = shlex.join(["blis-replay", "report", *asked, *chosen])
        with open_for_reading(store_path) as store:
            slugs = named_experiments(store, None if everything else names)
        before = load_release(baseline) if baseline else None
        ships = coefficients is None
        written = report(
            store_path, slugs, release, mode, baseline=before, ships=ships, command=again, progress=progress
        )
    size = write_whole(out, written.html)
    print_answer(form, report_answer(written, out, size))


@verb("timeline")
@experiment_option
@coefficients_option
@replay_option
@click.option("--from", "from_us", type=DURATION, default=None, help="Where the window begins.  [default: 0s]")
@click.option("--for", "length_us", type=DURATION, default=None, help="How long it is.  [default: 5s]")
@click.option(
    "--around", type=click.Choice(["worst"]), default=None, help="Or the middle: the request that is off by most time."
)
@click.option("--request", default=None, metavar="ID", help="Or a window that holds this request, and only its lanes.")
@click.option(
    "--out",
    "-o",
    type=OUT_FILE,
    required=True,
    help="The file: .json (Chrome trace events) or .pftrace (Perfetto).",
)
@store_option
@form_options
def timeline_verb(
    name: str,
    from_us: int | None,
    length_us: int | None,
    around: str | None,
    request: str | None,
    out: Path,
    coefficients: str | None,
    mode_text: str,
    store_path: Path,
    form: str | None,
) -> None:
    """Write a window of a run for a trace viewer, observed and simulated on one clock.

    Open the file at ui.perfetto.dev or in chrome://tracing.  It has the steps of either side with
    their batches, running and waiting requests and KV cache use, and two lanes a request: queue wait,
    prefill, decode, preempted.  What was not recorded is absent, and named on standard error.

    \b
    Examples:
      blis-replay timeline 34b-general --out trace.json
      blis-replay timeline 34b-general --from 600s --for 500ms --out trace.pftrace
      blis-replay timeline mine --around worst --for 2s --out trace.pftrace
      blis-replay timeline mine --request cmpl-17 --out trace.pftrace
      blis-replay timeline 34b-general --replay scheduling=synchronous --out trace.json
    """
    from blis_replay.replay.driver import replay
    from blis_replay.replay.mode import parse_mode
    from blis_replay.validate.experiment import release_for, stored_experiment
    from blis_replay.validate.timeline.viewer_files import FORMATS, write_timeline
    from blis_replay.validate.timeline.window import timeline, timeline_answer, window_named

    if out.suffix not in FORMATS:
        raise click.UsageError(f"--out {out}: name a .json (Chrome trace events) or a .pftrace (Perfetto) file")
    if sum(given is not None for given in (from_us, around, request)) > 1:
        raise click.UsageError("--from, --around and --request each name a window; leave all but one out")
    if length_us == 0:
        raise click.UsageError("--for 0 is not a window; give a time such as 500ms")
    release = release_for(coefficients, [name])
    run = replay(stored_experiment(store_path, name), release, parse_mode(mode_text, release.published_replay))
    window = window_named(run, from_us, length_us, around, request)
    shown = timeline(run, window.from_us, window.until_us, window.request_index)
    if window.remark:
        shown = replace(shown, remarks=(window.remark, *shown.remarks))
    write_timeline(shown, out)
    if shown.absent:
        click.echo(f"absent, because not recorded: {'; '.join(shown.absent)}", err=True)
    print_answer(form, timeline_answer(shown, out))
