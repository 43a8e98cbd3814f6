"""``blis-replay calibrate``."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from blis_replay.compiled.files import write_whole
from blis_replay.validate.cli.options import (
    OUT_FILE,
    complete_releases,
    executor_options,
    form_options,
    print_answer,
    selector_option,
    store_option,
)
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.cli.verb import verb

if TYPE_CHECKING:
    from blis_replay.replay.executors import ExecutorName


class Split(click.ParamType[tuple[float, float]]):
    """Two shares of a run by time, written ``0.6:0.8``."""

    name = "fit:choose"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """``(fitted_until, chosen_until)`` with 0 < fitted_until <= chosen_until <= 1."""
        if isinstance(value, tuple):
            return value
        try:
            fitted, chosen = (float(part) for part in str(value).split(":"))
        except ValueError:
            self.fail(f"{value!r} is no split; write e.g. 0.6:0.8", param, ctx)
        if not 0 < fitted <= chosen <= 1:
            self.fail(f"{value!r} is no split; use 0 < fit <= choose <= 1", param, ctx)
        return fitted, chosen


@verb("calibrate")
@selector_option("", "--train")
@click.option("--out", "-o", type=OUT_FILE, required=True, help="The release to write.")
@click.option("--name", default=None, help="Name of the release.  [default: the file's]")
@click.option(
    "--from",
    "data",
    type=click.Choice(["auto", "steps", "latencies"]),
    default="auto",
    show_default=True,
    help="Fit to step records, or to latencies; auto takes both, as far as there are some.",
)
@click.option(
    "--split",
    type=Split(),
    default=(0.6, 0.8),
    help="Shares of each run: fit to the first, choose the form by what follows up to the second, test on the rest; "
    "1:1 fits to all.  [default: 0.6:0.8]",
)
@click.option(
    "--prior",
    default=None,
    metavar="RELEASE",
    shell_complete=complete_releases,
    help="Release whose values stand for what cannot be determined.  [default: h100-datasheet]",
)
@click.option(
    "--operators",
    default=None,
    metavar="RELEASE",
    shell_complete=complete_releases,
    help="Release of measured operator times (`coefficients silicon`): fit only how much faster or slower each part of "
    "them is, and what the host adds.",
)
@click.option("--seed", type=click.IntRange(min=0), default=42, show_default=True, help="Of the intervals.")
@click.option("--force", is_flag=True, help="Write the release even if it misses what it was fitted to.")
@executor_options
@store_option
@form_options
def command(
    names: tuple[str, ...],
    out: Path,
    name: str | None,
    data: str,
    split: tuple[float, float],
    prior: str | None,
    operators: str | None,
    seed: int,
    force: bool,
    executor: ExecutorName,
    workers: int | None,
    store_path: Path,
    form: str | None,
) -> int:
    """Fit step times and delays per model and write a coefficient release.

    Step records give start-to-start step cycles (their recorded duration is CPU time
    inside the scheduler, and is not used). Latencies are fitted through the simulator:
    mean E2E and TTFT of small windows of requests. A coefficient that neither
    determines keeps its prior, and is marked. Whether the server scheduled
    asynchronously is told from TTFT and compared with the recorded argument.
    A fit that misses what it was fitted to is not written, and the exit code is 1.

    \b
    Examples:
      blis-replay calibrate 34b-general --out mine.yaml
      blis-replay calibrate '*-codegen' '*-general' --out all.yaml
      blis-replay calibrate '7b-*' --from latencies --json --out 7b.yaml
      blis-replay calibrate 7b-train --split 0.6:0.6 --out first.yaml
      blis-replay calibrate mine --prior old.yaml --split 1:1 --out new.yaml

    \b
    Of the first one, abridged:
      coefficient                 us  95 % from      to                 status
      ----------------------  ------  ---------  ------  ---------------------
      intercept               13,484     13,471  13,496                 fitted
      per_context_token        0.029          -       -  prior: not identified
      pre_queue                6,927      6,680   7,173                 fitted
      experiment   part       E2E     p99    TTFT      p99     ITL
      -----------  ------  ------  ------  ------  -------  ------
      34b-general  test    +0.3 %  +0.2 %  -0.6 %  -14.6 %  +0.3 %
    """
    from blis_replay.blis.releases.release import format_release
    from blis_replay.ingest.store import open_for_reading, read_stored
    from blis_replay.replay.release_file import load_release
    from blis_replay.validate.calibration.calibrate import Options, calibrate
    from blis_replay.validate.calibration.model_fit import DEFAULT_PRIOR
    from blis_replay.validate.calibration.physical import calibrate_operators
    from blis_replay.validate.calibration.text import calibration_answer
    from blis_replay.validate.experiment import recorded_experiments

    if not names:
        raise click.UsageError("name what to fit to, e.g. `blis-replay calibrate 34b-general --out mine.yaml`")
    with open_for_reading(store_path) as store:
        recordings = [read_stored(store, slug) for slug in recorded_experiments(store, names)]
    options = Options(load_release(prior or DEFAULT_PRIOR), data, split, seed)  # type: ignore[arg-type]  # click checked it
    trained = " ".join(f"--train {quote(train)}" for train in names)
    source = f"blis-replay calibrate {trained}"
    if operators is not None:
        release, fits = calibrate_operators(recordings, name or out.stem, load_release(operators), options, source)
    else:
        with progress_line("fitting models") as progress:
            release, fits = calibrate(
                recordings,
                name or out.stem,
                options,
                source,
                executor=executor,
                workers=workers,
                progress=progress,
            )
    written = force or not any(fit.missed for fit in fits)
    if written:
        write_whole(out, format_release(release))
    return print_answer(form, calibration_answer(str(out), fits, recordings, written=written))
