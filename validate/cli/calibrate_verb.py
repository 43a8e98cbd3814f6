"""``blis-replay calibrate``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import WINDOW, json_option, print_json, store_option


@click.command("calibrate")
@click.option(
    "--train", "names", multiple=True, required=True, help="Slug or alias to fit on; may be given several times."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The release to write.")
@click.option("--name", default=None, help="Name of the release.  [default: the file's]")
@click.option(
    "--from",
    "data",
    type=click.Choice(["auto", "steps", "latencies"]),
    default="auto",
    show_default=True,
    help="Fit to step records, or to latencies; auto takes steps where there are some.",
)
@click.option("--window", type=WINDOW, default=(0.0, 1.0), help="Fit to this share of each run only, e.g. 0:0.6.")
@store_option
@json_option
def command(
    names: tuple[str, ...],
    out: Path,
    name: str | None,
    data: str,
    window: tuple[float, float],
    store_path: Path,
    as_json: bool,
) -> None:
    """Fit a non-negative step-time line per model and write a coefficient release.

    Step records give start-to-start step cycles (their recorded duration is CPU time
    inside the scheduler, and is not used); without them, the gaps that clients saw.
    One entry is fitted for each model, tensor parallelism and name of the deployment.

    \b
    Examples:
      blis-replay calibrate --train 34b-general --out mine.yaml
      blis-replay calibrate --train 7b-general --train 7b-codegen --out 7b.yaml
      blis-replay calibrate --train 7b-train --window 0:0.6 --out first.yaml
    """
    from blis_replay.blis.release_text import format_release
    from blis_replay.ingest.store import open_store, read_stored
    from blis_replay.validate.calibration.calibrate import calibrate, fits_json, fits_text
    from blis_replay.validate.experiment import find_experiment

    with open_store(store_path) as store:
        recordings = [read_stored(store, find_experiment(store, train)) for train in dict.fromkeys(names)]
    release, fits = calibrate(recordings, name or out.stem, data, window)  # type: ignore[arg-type]  # click checked it
    out.write_text(format_release(release), "utf-8")
    if as_json:
        print_json({"release": str(out), "fits": fits_json(fits)})
    else:
        click.echo(fits_text(fits))
        click.echo(f"wrote {out}; try it: blis-replay validate --experiment {names[0]} --coefficients {out}")
