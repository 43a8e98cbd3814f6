"""``coefficients roofline`` and ``coefficients silicon``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blis_replay.validate.cli.answers import form_options
from blis_replay.validate.cli.coefficients_made import (
    DEFAULT_GPU,
    deployment_options,
    gpu_of_options,
    release_file_option,
    show_hint,
    write_release,
)
from blis_replay.validate.cli.options import FOLDER, gpu_file_option, verb

if TYPE_CHECKING:
    from blis_replay_labs.silicon.roofline import Mixed


@verb("roofline", short_help="Make a release of the roofline of a model.")
@deployment_options
@gpu_file_option
@click.option(
    "--efficiency", type=FOLDER, help="Folder of measured kernel efficiencies (gemm/, mha/).  [default: smooth curves]"
)
@click.option(
    "--mixed",
    type=click.Choice(["weighted", "token_proportional", "additive", "largest"]),
    default="weighted",
    show_default=True,
    help="How the times of the two phases combine in a step that prefills and decodes.",
)
@release_file_option
@form_options
def roofline_verb(
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
    from blis_replay.replay.other_hardware import architecture_of_file
    from blis_replay_labs.silicon.efficiency_files import efficiency_of_folder
    from blis_replay_labs.silicon.roofline import RooflineModel, roofline_release

    architecture, gpu = architecture_of_file(config), gpu_of_options(hardware, gpu_file)
    tables = (
        None if efficiency is None else efficiency_of_folder(efficiency, architecture, gpu.name, tensor_parallelism)
    )
    latency = RooflineModel(architecture, gpu, tensor_parallelism, mixed, tables)
    release = roofline_release(out.stem, model, gpu.name, latency)
    write_release(out, release, show_hint(out), {"model": model})


@verb("silicon", short_help="Make a release from measured operator times.")
@deployment_options
@click.option(
    "--expert-parallelism",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="GPUs that split the experts.",
)
@click.option("--dtype", metavar="NAME", help="Type of the weights, e.g. fp8.  [default: as in CONFIG]")
@click.option("--kv-cache-dtype", metavar="NAME", help="Type of the KV cache.  [default: as in CONFIG]")
@release_file_option
@form_options
def silicon_verb(
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

    Needs aiconfigurator-core (pip install 'blis-replay-labs[silicon]') to make, and nothing to run: the
    release carries the tables. Matrix products, attention and all-reduces were measured; the time of
    the host is not in them, and a recording can fit it.

    \b
    Example:
      blis-replay coefficients silicon config.json --model org/new-13b --hardware H200-SXM --out silicon.yaml
      blis-replay validate --experiment mine --coefficients silicon.yaml
    """
    from blis_replay_labs.silicon.tabulate import Deployment, silicon_release

    deployment = Deployment(
        config, hardware or DEFAULT_GPU, tensor_parallelism, expert_parallelism, dtype, kv_cache_dtype
    )
    release, tabulated = silicon_release(out.stem, model, deployment)
    write_release(
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
