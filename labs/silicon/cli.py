"""``coefficients silicon``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.answers import form_options
from blis_replay.validate.cli.coefficients import (
    DEFAULT_GPU,
    deployment_options,
    release_file_option,
    write_release,
)
from blis_replay.validate.cli.options import verb


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
      blis-replay coefficients silicon config.json --model org/new-13b -o s.yaml
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
