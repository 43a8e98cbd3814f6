"""The verbs of causes: ``blis-replay explain`` and ``segments``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.validate.cli.options import (
    OUT_FILE,
    coefficients_option,
    complete_releases,
    executor_options,
    experiment_option,
    form_options,
    given_options,
    print_answer,
    replay_option,
    store_option,
    verb,
)
from blis_replay.validate.cli.progress import progress_line

if TYPE_CHECKING:
    from blis_replay.replay.executors import ExecutorName


@verb("attribute")
@experiment_option
@coefficients_option
@replay_option
@click.option(
    "--reference",
    default=None,
    metavar="RELEASE",
    shell_complete=complete_releases,
    help="Release whose coefficients stand in for what was not recorded, or none.  "
    "[default: that which ships for the experiment]",
)
@click.option("--seed", type=click.IntRange(min=0), default=42, show_default=True, help="Of the resampling.")
@executor_options
@store_option
@form_options
def explain_verb(
    name: str,
    coefficients: str | None,
    mode_text: str,
    reference: str | None,
    seed: int,
    executor: ExecutorName,
    workers: int | None,
    store_path: Path,
    form: str | None,
) -> None:
    """Say which component of the simulator its error comes from.

    Replays the experiment with every set of components replaced by what was recorded, and gives
    each its Shapley value: its share of the error of mean and p99 of E2E, TTFT and ITL.  The
    shares and what no component explains sum to the error.

    \b
    Examples:
      blis-replay explain 34b-general --replay scheduling=synchronous
      blis-replay explain 34b-general --coefficients stepml-direct \\
          --replay as-published
      blis-replay explain 34b-general --coefficients mine.yaml --json
    """
    from blis_replay.ingest.store import open_for_reading, read_stored
    from blis_replay.replay.mode import parse_mode
    from blis_replay.replay.simulator import entry_of
    from blis_replay.validate.attribution.attribute import attribute
    from blis_replay.validate.attribution.text import attribution_answer
    from blis_replay.validate.experiment import find_experiment, release_for
    from blis_replay.validate.metrics.observed import observed_requests, pooled_gaps

    release = release_for(coefficients, [name])
    mode = parse_mode(mode_text, release.published_replay)
    # Open for all of it: each of many replays looks into the recording.
    with open_for_reading(store_path) as store, progress_line("replaying") as progress:
        recording = read_stored(store, find_experiment(store, name))
        gaps = pooled_gaps(store, recording.slug, observed_requests(recording))
        stand_in = None if reference == "none" else release_for(reference, [name])
        if stand_in and reference:
            entry_of(stand_in, recording)  # one that was named must have the model
        attribution = attribute(
            recording,
            release,
            mode,
            reference=stand_in,
            token_gaps=gaps,
            options=given_options(coefficients, store_path),
            seed=seed,
            executor=executor,
            workers=workers,
            progress=progress,
        )
    print_answer(form, attribution_answer(attribution))


@verb("segments")
@experiment_option
@coefficients_option
@replay_option
@click.option("--out", "-o", type=OUT_FILE, default=None, help="Write every request (.parquet, .csv).")
@store_option
@form_options
def segments_verb(
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
    from blis_replay.compiled.files import whole_file
    from blis_replay.replay.driver import replay
    from blis_replay.replay.mode import parse_mode
    from blis_replay.validate.attribution.text import segments_answer
    from blis_replay.validate.comparison.segments import segment_frame, segments_of
    from blis_replay.validate.experiment import release_for, stored_experiment

    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise click.UsageError(f"--out {out}: name a .parquet or a .csv file")
    release = release_for(coefficients, [name])
    recording = stored_experiment(store_path, name)
    segments = segments_of(replay(recording, release, parse_mode(mode_text, release.published_replay)))
    if out is not None:
        frame = segment_frame(segments)
        with whole_file(out) as file:
            frame.write_parquet(file) if out.suffix == ".parquet" else frame.write_csv(file)
    print_answer(form, segments_answer(segments))
