"""Releases that are made: ``coefficients for-model`` and others."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from blis_replay.base.files import write_whole
from blis_replay.validate.cli.answers import Command, form_options, print_answer
from blis_replay.validate.cli.options import (
    FILE,
    FOLDER,
    OUT_FILE,
    gpu_file_option,
    release_option,
    verb,
)
from blis_replay.validate.text.answer import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blis_replay.blis.latency.datasheets import Gpu
    from blis_replay.blis.latency.roofline import Mixed
    from blis_replay.blis.releases.release import CoefficientRelease


_out_option = click.option("--out", "-o", type=OUT_FILE, required=True, help="The release to write.")


def _deployment(command: Command) -> Command:
    """``CONFIG``, ``--model``, ``--tensor-parallelism`` and ``--hardware``: the model, and what it runs on."""
    parts = (
        click.argument("config", type=FILE),
        click.option("--model", required=True, metavar="NAME", help="The model's name, as recordings have it."),
        click.option(
            "--tensor-parallelism", type=click.IntRange(min=1), default=1, show_default=True, help="Its GPUs."
        ),
        click.option("--hardware", help="And their kind.  [default: H100-SXM]"),
    )
    for part in reversed(parts):
        command = part(command)
    return command


def _write(out: Path, release: CoefficientRelease, said: str, known: Mapping[str, object]) -> None:
    """Write the release and say so; ``said`` follows the file's name, ``known`` is for programs."""
    from blis_replay.blis.releases.release import format_release

    write_whole(out, format_release(release))
    print_answer(one_line(f"wrote {out}{said}", {"release": str(out), **known, "sha256": release.sha256}))


def _look(out: Path) -> str:
    return f"; look at it: blis-replay coefficients show {quote(str(out))}"


_DEFAULT_GPU = "H100-SXM"


def _gpu(hardware: str | None, gpu_file: Path | None) -> Gpu:
    """The GPU of ``--hardware`` and ``--gpu-file``."""
    from blis_replay.replay.release_file import chosen_gpu

    return chosen_gpu(hardware or (_DEFAULT_GPU if gpu_file is None else None), gpu_file)


@verb("for-model", short_help="Make a release for a model that nobody recorded.")
@_deployment
@gpu_file_option
@release_option(
    "--shared", default="h100-physical", show_default=True, help_text="The physical release whose coefficients to take."
)
@_out_option
@form_options
def for_model(
    config: Path,
    model: str,
    tensor_parallelism: int,
    hardware: str | None,
    gpu_file: Path | None,
    shared: str,
    out: Path,
) -> None:
    """Make a release for a model that nobody recorded, from its CONFIG (config.json).

    Step times follow from its architecture, the GPU's datasheet and coefficients that were
    fitted to other models; `blis-replay coefficients generalize --lomo` says how far off that is.

    \b
    Example:
      blis-replay coefficients for-model config.json --model org/new-13b \\
          --tensor-parallelism 2 --out new-13b.yaml
      blis-replay coefficients for-model config.json --model org/new-13b \\
          --gpu-file gpus.yaml --hardware RTX-4090 --out new-13b.yaml
      blis-replay simulate --requests load.csv --engine engine.yaml \\
          --coefficients new-13b.yaml --out run
    """
    from blis_replay.blis.latency.physical import most_kv_blocks
    from blis_replay.replay.release_file import architecture_of_file, load_release, release_for_model

    architecture, gpu = architecture_of_file(config), _gpu(hardware, gpu_file)
    release = release_for_model(load_release(shared), out.stem, model, tensor_parallelism, gpu, architecture)
    blocks = most_kv_blocks(architecture, gpu, tensor_parallelism)
    room = "" if blocks is None else f"; at most {blocks:,} KV blocks of 16 tokens fit beside them"
    _write(
        out,
        release,
        f" for {model} ({architecture.parameters / 1e9:.2f} billion parameters{room}){_look(out)}",
        {"model": model, "parameters": architecture.parameters, "most_kv_blocks": blocks},
    )


@verb("roofline", short_help="Make a release of the roofline of a model.")
@_deployment
@gpu_file_option
@click.option(
    "--efficiency", type=FOLDER, help="Folder of measured kernel efficiencies (gemm/, mha/).  [default: smooth curves]"
)
@click.option(
    "--mixed",
    type=click.Choice(["weighted", "token_proportional", "additive", "largest"]),
    default="weighted",
    show_default=True,
    help="How a step with prefills and decodes takes its time from one with either.",
)
@_out_option
@form_options
def roofline(
    config: Path,
    model: str,
    tensor_parallelism: int,
    hardware: str | None,
    gpu_file: Path | None,
    efficiency: Path | None,
    mixed: Mixed,
    out: Path,
) -> None:
    """Make a release of the roofline of a model, from its CONFIG (config.json); nothing is fitted.

    The parameters are BLIS's: 82 % of the bandwidth, 100 us a layer, kernels by efficiency.

    \b
    Example:
      blis-replay coefficients roofline config.json --model org/new-13b --out roofline.yaml
      blis-replay validate mine --coefficients roofline.yaml
    """
    from blis_replay.blis.latency.roofline import RooflineModel
    from blis_replay.replay.release_file import architecture_of_file, efficiency_of_folder, roofline_release

    architecture, gpu = architecture_of_file(config), _gpu(hardware, gpu_file)
    tables = (
        None if efficiency is None else efficiency_of_folder(efficiency, architecture, gpu.name, tensor_parallelism)
    )
    latency = RooflineModel(architecture, gpu, tensor_parallelism, mixed, tables)
    release = roofline_release(out.stem, model, gpu.name, latency)
    _write(out, release, _look(out), {"model": model})


@verb("silicon", short_help="Make a release from measured operator times.")
@_deployment
@click.option(
    "--expert-parallelism",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="GPUs that split the experts.",
)
@click.option("--dtype", metavar="NAME", help="Of the weights, e.g. fp8.  [default: as CONFIG says]")
@click.option("--kv-cache-dtype", metavar="NAME", help="Of the KV cache.  [default: as CONFIG says]")
@_out_option
@form_options
def silicon(
    config: Path,
    model: str,
    tensor_parallelism: int,
    hardware: str | None,
    expert_parallelism: int,
    dtype: str | None,
    kv_cache_dtype: str | None,
    out: Path,
) -> None:
    """Make a release from measured operator times of a GPU, for a model with a CONFIG (config.json).

    Needs aiconfigurator-core (pip install 'blis-replay[silicon]') to make, and nothing to run: the
    release carries the tables. Matrix products, attention and all-reduces were measured; the time of
    the host is not in them, and a recording can fit it.

    \b
    Example:
      blis-replay coefficients silicon config.json --model org/new-13b --hardware H200-SXM --out silicon.yaml
      blis-replay validate --experiment mine --coefficients silicon.yaml
    """
    from blis_replay.replay.silicon import Deployment, silicon_release

    deployment = Deployment(
        config, hardware or _DEFAULT_GPU, tensor_parallelism, expert_parallelism, dtype, kv_cache_dtype
    )
    release, tabulated = silicon_release(out.stem, model, deployment)
    _write(
        out,
        release,
        f": {tabulated.tables.source}; interpolation is off by {tabulated.mean_error:.1%} on average, "
        f"{tabulated.largest_error:.1%} at most, over {tabulated.batches} random batches",
        {
            "model": model,
            "system": tabulated.system,
            "interpolation_mean_error": tabulated.mean_error,
            "interpolation_largest_error": tabulated.largest_error,
        },
    )
