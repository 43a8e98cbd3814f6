"""The verb ``blis-replay study``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from blis_replay.base.files import write_whole
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import (
    FOLDER,
    VerbGroup,
    gpu_file_option,
    name_option,
    selector_option,
    store_option,
    workers_option,
)
from blis_replay.validate.cli.progress import progress_line

if TYPE_CHECKING:
    from blis_replay.replay.executors import Workers


@click.group("study", cls=VerbGroup)
def study_verb() -> None:
    """Studies of the simulator over many recordings.

    \b
    Example:
      blis-replay study generalize --lomo
      blis-replay study pairs 'tiny-live-*'
    """


@study_verb.command("generalize")
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
@click.option("--gpu", metavar="NAME", help="The GPU of recordings that do not name it, e.g. H100-SXM.")
@gpu_file_option
@click.option(*("--out", "-o"), type=FOLDER, help="Folder for a release of each fit.")
@workers_option
@store_option
def generalize_models(
    by: str | None,
    names: tuple[str, ...],
    model_form: str,
    configs: tuple[str, ...],
    gpu: str | None,
    gpu_file: Path | None,
    out: Path | None,
    store_path: Path,
    **workers: Unpack[Workers],
) -> None:
    """Do coefficients hold where they were not fitted?

    Fits to all but one model or workload and predicts that one, in turn, beside a fit to
    everything. Step records are fitted to where there are some, else latencies. The
    physical form takes a model's architecture and the GPU's datasheet, and nothing else
    of it. Overloaded runs are predicted, never fitted to, and not averaged. --lomo needs
    recordings of two models; those that ship are not enough, so ingest your own first.

    \b
    Examples:
      blis-replay study generalize --lomo
      blis-replay study generalize --lowo --model-form per-model
      blis-replay study generalize --lomo '7b-*' '34b-*'
      blis-replay study generalize --lomo --config org/new-3b=config.json --out releases
    """
    from blis_replay.blis.latency.datasheets import bundled_architectures
    from blis_replay.blis.releases.release import format_release
    from blis_replay.ingest.store import open_for_reading
    from blis_replay.replay.other_hardware import architecture_of_file, gpus_of_file
    from blis_replay_labs.studies.generalisation_text import generalisation_answer
    from blis_replay_labs.studies.generalize import generalize, read_cases

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
            gpus=None if gpu_file is None else gpus_of_file(gpu_file),
            progress=progress,
            **workers,
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for fold in (*result.folds, result.in_distribution):
            if fold.release is not None:
                write_whole(out / f"{fold.release.name}.yaml", format_release(fold.release))
    print_answer(generalisation_answer(result))


@study_verb.command("pairs")
@selector_option("all, stored and bundled")
@workers_option
@store_option
def pairs_of_recordings(names: tuple[str, ...], store_path: Path, **workers: Unpack[Workers]) -> None:
    """How often do prediction intervals hold another recording?

    Fits each recording and predicts the others of its model: as replayed, and where the
    recording has steps also at its own pace, with the warm-up that it shows.

    \b
    Example:
      blis-replay study pairs 'tiny-live-*'
    """
    from blis_replay_labs.studies.pairs import pairs, recordings_of, tried_answer

    recordings = recordings_of(store_path, names)
    with progress_line("fitting") as progress:
        found = pairs(recordings, progress=progress, **workers)
    print_answer(tried_answer(found))


@study_verb.command("learning-curve")
@selector_option("all, stored and bundled")
@name_option("on", "Another recording to predict; may be given several times.", "--on", several=True)
@workers_option
@store_option
def learning_curve_of(
    names: tuple[str, ...], on: tuple[str, ...], store_path: Path, **workers: Unpack[Workers]
) -> None:
    """How many requests does a fit need?

    Fits the first 50, 100, 300, 1,000 and 5,000 requests of each recording, and predicts
    the rest of it and the recordings of --on.

    \b
    Example:
      blis-replay study learning-curve tiny-live-a --on tiny-live-a2
    """
    from blis_replay_labs.studies.pairs import learning_curve, recordings_of, tried_answer

    recordings = recordings_of(store_path, names)
    others = recordings_of(store_path, on) if on else []
    with progress_line("fitting") as progress:
        found, left_out = learning_curve(recordings, others, progress=progress, **workers)
    print_answer(tried_answer(found, left_out))
