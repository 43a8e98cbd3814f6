"""``blis-replay steps``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import json_option, print_json, store_option


@click.command("steps")
@click.option("--experiment", "name", required=True, help="Slug or alias of a recording with step records.")
@click.option("--coefficients", default=None, help="A release that ships, or a YAML file.  [default: our own]")
@store_option
@json_option
def command(name: str, coefficients: str | None, store_path: Path, as_json: bool) -> None:
    """How well do coefficients predict single engine steps?

    MAPE, signed error of the mean and Pearson's r, by regime (decode-only, mixed with few
    or many prefill tokens) and by batch size, against the step cycle; and lines fitted to
    the cycle and to step.duration_us, to show which of the two is a step time.

    \b
    Examples:
      blis-replay steps --experiment 34b-general
      blis-replay steps --experiment 34b-general --coefficients stepml-per-model-linear
      blis-replay steps --experiment 70b-general --json
    """
    from blis_replay.replay.release_file import load_release
    from blis_replay.replay.simulator import EmbeddedEngine
    from blis_replay.validate.calibration.step_errors import line_fits, step_errors, step_targets
    from blis_replay.validate.calibration.step_text import steps_json, steps_text
    from blis_replay.validate.experiment import DEFAULT_RELEASE, stored_experiment

    recording = stored_experiment(store_path, name)
    release = load_release(coefficients or DEFAULT_RELEASE)
    latency = EmbeddedEngine(release).entry_for(recording).latency
    targets = step_targets(recording)
    answer = step_errors(latency, targets.cycle), step_errors(latency, targets.duration), line_fits(targets)
    if as_json:
        print_json(
            {"slug": recording.slug, "alias": recording.alias, "coefficients": release.name, **steps_json(*answer)}
        )
    else:
        click.echo(steps_text(f"{recording.alias}: steps by {release.name}", *answer))
