"""Coefficient releases by name or by file, and from the artifacts of others."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from blis_replay.blis.errors import ReleaseError
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
from blis_replay.blis.releases.release import (
    CoefficientRelease,
    ModelEntry,
    bundled_releases,
    format_release,
    parse_release,
)
from blis_replay.replay.errors import UnknownNameError, exists_already

# A release, or a policy, is a page of text; a larger file is something else.
_LARGEST_BYTES = 1_000_000


def load_release(name_or_path: str) -> CoefficientRelease:
    """A release that ships with the package, by name, or one's own, by path.

    Raises ``UnknownNameError`` if there is neither, ``ReleaseError`` if the file is no sound
    release.
    """
    if not name_or_path:
        raise UnknownNameError("the name of the coefficients is empty; name a release that ships, or a file")
    bundled = bundled_releases()
    if name_or_path in bundled:
        return _parsed(bundled[name_or_path], name_or_path)
    path = Path(name_or_path)
    if not path.exists():
        raise UnknownNameError(f"no release or file is called {name_or_path}; releases that ship: {', '.join(bundled)}")
    return parse_release(page_of_text(path, "coefficients"), str(path))


def refuse_other_file(path: Path, name: str, models: Collection[str]) -> None:
    """Let a release be written only where nothing is, or an earlier one of its name whose models it has as well.

    Raises ``FileExistsAlreadyError``.  A pipe or a device holds nothing.
    """
    if not path.is_file():
        return
    try:
        earlier = parse_release(page_of_text(path, "coefficients"), str(path))
    except ReleaseError:
        raise exists_already(path) from None
    if earlier.name != name or not {entry.model for entry in earlier.models} <= set(models):
        raise exists_already(path)


# Those that ship are asked for once an experiment; to read one takes as long as a replay.
_parsed = cache(parse_release)


def architecture_of_file(path: Path) -> Architecture:
    """The architecture that a model's ``config.json`` describes.

    Raises ``ReleaseError`` if the file cannot be read or lacks a field.
    """
    return architecture_of_config(_json(path, "name the config.json of a model"), str(path))


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
            "`blis-replay coefficients generalize --out`"
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
                "datasheet; use h100-physical, or one of `blis-replay coefficients for-model` or `roofline`"
            )
        models.append(replace(entry, latency=replace(latency, gpu=gpu)))
    name = f"{release.name} on {gpu.name}"
    return parse_release(format_release(replace(release, name=name, hardware=gpu.name, models=tuple(models))), name)


def unfitted_release(name: str, summary: str, source: str, hardware: str, entry: ModelEntry) -> CoefficientRelease:
    """A release of one model, nothing of it fitted.  Raises ``ReleaseError`` for what a release cannot say."""
    release = CoefficientRelease(name, "valid", summary, source, hardware, models=(entry,), fitted_on=())
    return parse_release(format_release(release), name)


def _json(path: Path, mend: str) -> object:
    try:
        document: object = json.loads(page_of_text(path, "coefficients"))
    except (ValueError, RecursionError) as error:
        raise ReleaseError(f"{path}: no valid JSON ({error}); {mend}") from None
    return document


def page_of_text(path: Path, what: str, error: type[Exception] = ReleaseError) -> str:
    """The text of a file that holds ``what``; raises ``error`` if it cannot be read, is no text, or too large."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)  # devices and pipes have no size
        if len(content) > _LARGEST_BYTES:
            raise error(f"{path}: too large for {what}; name another file")
        return content.decode("utf-8")
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror}); name a readable file") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text; name a file of {what}") from None
