"""``blis-replay segments``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import (
    OUT_FILE,
    coefficients_option,
    experiment_option,
    form_options,
    print_answer,
    replay_option,
    store_option,
)
from blis_replay.validate.cli.verb import verb


@verb("segments")
@experiment_option
@coefficients_option
@replay_option
@click.option("--out", "-o", type=OUT_FILE, default=None, help="Write every request (.parquet, .csv).")
@store_option
@form_options
def command(
    name: str, coefficients: str | None, mode_text: str, out: Path | None, store_path: Path, form: str | None
) -> None:
    """Lay the way of a request side by side, observed and simulated.

    Send to queue, queue wait, prefill, decode, delivery: on either side they sum to E2E.  What
    was not recorded is merged into its neighbour and named.

    \b
    Examples:
      blis-replay segments 34b-general
      blis-replay segments mine --replay scheduling=synchronous --out requests.csv
    """
    from blis_replay.replay.driver import replay
    from blis_replay.replay.mode import parse_mode
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.attribution.text import segments_answer
    from blis_replay.validate.comparison.segments import segment_frame, segments_of
    from blis_replay.validate.experiment import DEFAULT_RELEASE, stored_experiment

    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise click.UsageError(f"--out {out}: name a .parquet or a .csv file")
    release = load_release(coefficients or DEFAULT_RELEASE)
    recording = stored_experiment(store_path, name)
    segments = segments_of(replay(recording, release, parse_mode(mode_text, release.published_replay)))
    if out is not None:
        frame = segment_frame(segments)
        frame.write_parquet(out) if out.suffix == ".parquet" else frame.write_csv(out)
    print_answer(form, segments_answer(segments))
