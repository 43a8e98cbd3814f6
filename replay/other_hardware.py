"""Releases on another GPU or of another model, by datasheets and architectures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.datasheets import (
    Architecture,
    Gpu,
    Gpus,
    architecture_of_config,
    bundled_gpus,
    gpu_named,
    gpus_of,
)
from blis_replay.blis.latency.physical import PhysicalModel
from blis_replay.blis.releases.release import CoefficientRelease, format_release, parse_release
from blis_replay.replay.release_file import page_of_text


def architecture_of_file(path: Path) -> Architecture:
    """The architecture that a model's ``config.json`` describes.

    Raises ``ReleaseError`` if the file cannot be read or lacks a field.
    """
    text = page_of_text(path, "coefficients")
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReleaseError(f"{path}: no valid JSON ({error}); name the config.json of a model") from None
    return architecture_of_config(document, str(path))


def release_for_model(
    shared: CoefficientRelease,
    name: str,
    model: str,
    tensor_parallelism: int,
    gpu: Gpu,
    architecture: Architecture,
) -> CoefficientRelease:
    """The shared coefficients of a physical release on another model, without a recording of it.

    Raises ``ReleaseError`` if the release is not physical, or its models do not share their coefficients.
    """
    latencies = [entry.latency for entry in shared.models]
    physical = [latency for latency in latencies if isinstance(latency, PhysicalModel)]
    if len(physical) < len(latencies) or len({latency.coefficients for latency in physical}) != 1:
        raise ReleaseError(
            f"release {shared.name} has no coefficients that its models share; use h100-physical or one of "
            "`blis-replay study generalize --out`"
        )
    latency = PhysicalModel(architecture, gpu, physical[0].coefficients, tensor_parallelism)
    entry = replace(
        shared.models[0], model=model, tensor_parallelism=tensor_parallelism, latency=latency, applies_to=()
    )
    text = format_release(
        replace(
            shared,
            name=name,
            summary=f"Coefficients of {shared.name}, fitted to other models, on the architecture of {model}.",
            hardware=gpu.name,
            models=(entry,),
        )
    )
    return parse_release(text, name)


def gpus_of_file(path: Path) -> Gpus:
    """The datasheets of a file, and those that ship for all other names; raises ``ReleaseError`` as ``gpus_of``."""
    own = gpus_of(page_of_text(path, "datasheets"), str(path))
    return {**{name: gpu for name, gpu in bundled_gpus().items() if name not in own}, **own}


def chosen_gpu(name: str | None, path: Path | None) -> Gpu:
    """The GPU of a name, or without one the only GPU of a file of datasheets.

    Raises ``ReleaseError`` for a name that neither the file nor this package has, and for a file of several GPUs.
    """
    if path is None:
        return gpu_named(name)
    own = {gpu.name: gpu for gpu in gpus_of(page_of_text(path, "datasheets"), str(path)).values()}
    if name is not None:
        return gpu_named(name, gpus_of_file(path))
    if len(own) > 1:
        raise ReleaseError(f"{path}: has {', '.join(own)}; choose one by name")
    return next(iter(own.values()))


def on_gpu(release: CoefficientRelease, gpu: Gpu) -> CoefficientRelease:
    """A release whose step times follow from a datasheet, on another GPU; its coefficients stay as they are.

    Raises ``ReleaseError`` for one whose times are those of the GPU that it was fitted on.
    """
    models = []
    for entry in release.models:
        latency: Any = entry.latency
        if not hasattr(latency, "gpu"):
            raise ReleaseError(
                f"release {release.name}: the step times of {entry.model} are of {release.hardware} and follow from no "
                "datasheet; use h100-physical, or one of `blis-replay coefficients make`"
            )
        models.append(replace(entry, latency=replace(latency, gpu=gpu)))
    name = f"{release.name} on {gpu.name}"
    return parse_release(format_release(replace(release, name=name, hardware=gpu.name, models=tuple(models))), name)
