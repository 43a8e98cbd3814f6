"""``blis-replay timeline``."""

from __future__ import annotations

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
@click.option("--from", "from_us", type=DURATION, default="0s", show_default=True, help="Where the window begins.")
@click.option("--for", "length_us", type=DURATION, default="5s", show_default=True, help="How long it is.")
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
    from_us: int,
    length_us: int,
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
      blis-replay timeline 34b-general --replay scheduling=synchronous --out trace.json
    """
    from blis_replay.replay.driver import replay
    from blis_replay.replay.mode import parse_mode
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.experiment import DEFAULT_RELEASE, stored_experiment
    from blis_replay.validate.timeline.viewer_files import FORMATS, write_timeline
    from blis_replay.validate.timeline.window import timeline, timeline_answer

    if out.suffix not in FORMATS:
        raise click.UsageError(f"--out {out}: name a .json (Chrome trace events) or a .pftrace (Perfetto) file")
    if not length_us:
        raise click.UsageError("--for 0 is not a window; give a time such as 500ms")
    release = load_release(coefficients or DEFAULT_RELEASE)
    run = replay(stored_experiment(store_path, name), release, parse_mode(mode_text, release.published_replay))
    shown = timeline(run, from_us, from_us + length_us)
    write_timeline(shown, out)
    if shown.absent:
        click.echo(f"absent, because not recorded: {'; '.join(shown.absent)}", err=True)
    print_answer(form, timeline_answer(shown, out))
