"""``coefficients for-model``, and what verbs of labs that make a release share with it."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from blis_replay.base.files import write_whole
from blis_replay.validate.cli.answers import Command, form_options, print_answer
from blis_replay.validate.cli.options import (
    FILE,
    OUT_FILE,
    gpu_file_option,
    release_option,
    verb,
)
from blis_replay.validate.text.answer import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blis_replay.blis.latency.datasheets import Gpu
    from blis_replay.blis.releases.release import CoefficientRelease


release_file_option = click.option("--out", "-o", type=OUT_FILE, required=True, help="The release to write.")


def deployment_options(command: Command) -> Command:
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


def write_release(out: Path, release: CoefficientRelease, said: str, fields: Mapping[str, object]) -> None:
    """Write the release and say so; ``said`` follows the file's name in text, ``fields`` are added to the JSON."""
    from blis_replay.blis.releases.release import format_release

    write_whole(out, format_release(release))
    print_answer(one_line(f"wrote {out}{said}", {"release": str(out), **fields, "sha256": release.sha256}))


def show_hint(out: Path) -> str:
    """The command that shows the release."""
    return f"; look at it: blis-replay coefficients show {quote(str(out))}"


DEFAULT_GPU = "H100-SXM"


def gpu_of_options(hardware: str | None, gpu_file: Path | None) -> Gpu:
    """The GPU of ``--hardware`` and ``--gpu-file``."""
    from blis_replay.replay.other_hardware import chosen_gpu

    return chosen_gpu(hardware or (DEFAULT_GPU if gpu_file is None else None), gpu_file)


@verb("for-model", short_help="Make a release for a model that nobody recorded.")
@deployment_options
@gpu_file_option
@release_option(
    "--shared", default="h100-physical", show_default=True, help_text="The physical release whose coefficients to take."
)
@release_file_option
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
    fitted to other models; `blis-replay study generalize --lomo` says how far off that is.

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
    from blis_replay.replay.other_hardware import architecture_of_file, release_for_model
    from blis_replay.replay.release_file import load_release

    architecture, gpu = architecture_of_file(config), gpu_of_options(hardware, gpu_file)
    release = release_for_model(load_release(shared), out.stem, model, tensor_parallelism, gpu, architecture)
    blocks = most_kv_blocks(architecture, gpu, tensor_parallelism)
    room = "" if blocks is None else f"; at most {blocks:,} KV blocks of 16 tokens fit beside them"
    write_release(
        out,
        release,
        f" for {model} ({architecture.parameters / 1e9:.2f} billion parameters{room}){show_hint(out)}",
        {"model": model, "parameters": architecture.parameters, "most_kv_blocks": blocks},
    )
