"""``blis-replay steps``."""

from __future__ import annotations

from pathlib import Path

from blis_replay.validate.cli.options import (
    coefficients_option,
    experiment_option,
    form_options,
    print_answer,
    store_option,
)
from blis_replay.validate.cli.verb import verb


@verb("steps")
@experiment_option
@coefficients_option
@store_option
@form_options
def command(name: str, coefficients: str | None, store_path: Path, form: str | None) -> None:
    """How well do coefficients predict single engine steps?

    MAPE, signed error of the mean and Pearson's r, by regime (decode-only, mixed with few
    or many prefill tokens) and by batch size: against the step cycle, and against
    step.duration_us, which published step models were fitted to. And lines fitted to
    either, to show which of the two is a step time.

    \b
    Examples:
      blis-replay coefficients steps 34b-general
      blis-replay coefficients steps 34b-general --coefficients stepml-per-model-linear
      blis-replay coefficients steps 70b-general --json

    \b
    Of the first one, abridged:
      against the step cycle     n  cycle ms    MAPE   signed     r
      -----------------------  ---  --------  ------  -------  ----
      all                      716     15.74   2.5 %   +0.1 %  0.76
      decode-only              495     15.47   2.4 %   -0.4 %  0.67
      mixed, light (< 256)     220     16.28   2.8 %   +0.9 %  0.85
    """
    from blis_replay.replay.release_file import load_release
    from blis_replay.replay.simulator import EmbeddedEngine
    from blis_replay.validate.calibration.step_errors import line_fits, step_errors, step_targets
    from blis_replay.validate.calibration.text import steps_answer
    from blis_replay.validate.experiment import DEFAULT_RELEASE, stored_experiment

    recording = stored_experiment(store_path, name)
    release = load_release(coefficients or DEFAULT_RELEASE)
    latency = EmbeddedEngine(release).entry_for(recording).latency
    targets = step_targets(recording)
    named = {"slug": recording.slug, "alias": recording.alias, "coefficients": release.name}
    errors = step_errors(latency, targets.cycle), step_errors(latency, targets.duration), line_fits(targets)
    print_answer(form, steps_answer(f"{recording.alias}: steps by {release.name}", named, *errors))
