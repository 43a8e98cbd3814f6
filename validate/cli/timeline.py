"""``blis-replay timeline``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from blis_replay.validate.cli.options import (
    DURATION,
    OUT_FILE,
    coefficients_option,
    experiment_option,
    form_options,
    print_answer,
    replay_option,
    store_option,
)
from blis_replay.validate.cli.verb import verb


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
def command(
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
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.experiment import DEFAULT_RELEASE, stored_experiment
    from blis_replay.validate.timeline.viewer_files import FORMATS, write_timeline
    from blis_replay.validate.timeline.window import timeline, timeline_answer, window_named

    if out.suffix not in FORMATS:
        raise click.UsageError(f"--out {out}: name a .json (Chrome trace events) or a .pftrace (Perfetto) file")
    if sum(given is not None for given in (from_us, around, request)) > 1:
        raise click.UsageError("--from, --around and --request each name a window; leave all but one out")
    if length_us == 0:
        raise click.UsageError("--for 0 is not a window; give a time such as 500ms")
    release = load_release(coefficients or DEFAULT_RELEASE)
    run = replay(stored_experiment(store_path, name), release, parse_mode(mode_text, release.published_replay))
    window = window_named(run, from_us, length_us, around, request)
    shown = timeline(run, window.from_us, window.until_us, window.request_index)
    if window.remark:
        shown = replace(shown, remarks=(window.remark, *shown.remarks))
    write_timeline(shown, out)
    if shown.absent:
        click.echo(f"absent, because not recorded: {'; '.join(shown.absent)}", err=True)
    print_answer(form, timeline_answer(shown, out))
