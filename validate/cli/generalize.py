"""``blis-replay generalize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.compiled.files import write_whole
from blis_replay.validate.cli.options import executor_options, form_options, print_answer, selector_option, store_option
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.cli.verb import verb

if TYPE_CHECKING:
    from blis_replay.replay.executors import ExecutorName


@verb("generalize")
@click.option("--lomo", "by", flag_value="model", help="Leave one model out at a time.")
@click.option("--lowo", "by", flag_value="workload", help="Leave one workload out at a time.")
@selector_option("all, stored and bundled")
@click.option(
    "--model-form",
    "model_form",
    type=click.Choice(["per-model", "physical"]),
    default="physical",
    show_default=True,
    help="Coefficients of each model, or what all models share on each one's architecture.",
)
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="MODEL=PATH",
    help="The config.json of a model whose architecture does not ship; may be given several times.",
)
@click.option("--gpu", default=None, metavar="NAME", help="The GPU of recordings that do not name it, e.g. H100-SXM.")
@click.option(
    *("--out", "-o"),
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder for a release of each fit.",
)
@executor_options
@store_option
@form_options
def command(
    by: str | None,
    names: tuple[str, ...],
    model_form: str,
    configs: tuple[str, ...],
    gpu: str | None,
    out: Path | None,
    executor: ExecutorName,
    workers: int | None,
    store_path: Path,
    form: str | None,
) -> None:
    """Do coefficients hold for a model, or a workload, that they were not fitted to?

    Fits to all but one model or workload and predicts that one, in turn, beside a fit to
    everything. Step records are fitted to where there are some, else latencies. The
    physical form takes a model's architecture and the GPU's datasheet, and nothing else
    of it. Overloaded runs are predicted, never fitted to, and not averaged.

    \b
    Examples:
      blis-replay coefficients generalize --lomo
      blis-replay coefficients generalize --lowo --model-form per-model
      blis-replay coefficients generalize --lomo '7b-*' '34b-*'
      blis-replay coefficients generalize --lomo --config org/new-3b=config.json --out releases
    """
    from blis_replay.blis.latency.architecture import bundled_architectures
    from blis_replay.blis.releases.release import format_release
    from blis_replay.ingest.store import open_for_reading
    from blis_replay.replay.release_file import architecture_of_file
    from blis_replay.validate.calibration.generalize import generalize, read_cases
    from blis_replay.validate.calibration.text import generalisation_answer

    if by is None:
        raise click.UsageError("say what to leave out: --lomo (a model) or --lowo (a workload)")
    if by == "model" and model_form == "per-model":
        raise click.UsageError("coefficients of one model do not transfer to another; use --model-form physical")
    pairs = [config.split("=", 1) for config in configs]
    if any(len(pair) != 2 for pair in pairs):
        raise click.UsageError("--config takes MODEL=PATH, e.g. org/new-3b=config.json")
    architectures = bundled_architectures() | {model: architecture_of_file(Path(path)) for model, path in pairs}
    with open_for_reading(store_path) as store:
        cases = read_cases(store, names, gpu)
    with progress_line("fitting") as progress:
        result = generalize(
            cases,
            by,  # type: ignore[arg-type]  # click checked
            model_form,  # type: ignore[arg-type]
            architectures,
            executor=executor,
            workers=workers,
            progress=progress,
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for fold in (*result.folds, result.in_distribution):
            if fold.release is not None:
                write_whole(out / f"{fold.release.name}.yaml", format_release(fold.release))
    print_answer(form, generalisation_answer(result))
