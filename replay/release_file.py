"""Coefficient releases by name or by file, and from the artifacts of others."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from blis_replay.blis.architecture import Architecture, architecture_of_config
from blis_replay.blis.defaults_yaml import parse_defaults, rows_of
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.gpu import gpu_named
from blis_replay.blis.latency import Lifecycle
from blis_replay.blis.physical import PhysicalModel
from blis_replay.blis.release import CoefficientRelease, ModelEntry, bundled_releases, parse_release
from blis_replay.blis.release_text import format_release
from blis_replay.blis.roofline import RooflineModel
from blis_replay.blis.stepml import import_stepml
from blis_replay.replay.errors import UnknownNameError

# A release, or a policy, is a page of text; a larger file is something else.
_LARGEST_BYTES = 1_000_000


def load_release(name_or_path: str) -> CoefficientRelease:
    """A release that ships with the package, by name, or one's own, by path.

    Raises ``UnknownNameError`` if there is neither, ``ReleaseError`` if the file is no sound
    release.
    """
    bundled = bundled_releases()
    if name_or_path in bundled:
        return parse_release(bundled[name_or_path], name_or_path)
    path = Path(name_or_path)
    if not path.exists():
        raise UnknownNameError(f"no release or file is called {name_or_path}; releases that ship: {', '.join(bundled)}")
    return parse_release(page_of_text(path, "coefficients"), str(path))


def release_of_stepml(path: Path, name: str, model: str, tensor_parallelism: int, hardware: str) -> CoefficientRelease:
    """The coefficients of a StepML artifact (a JSON file) as a release for one model.

    An artifact names neither model nor hardware, so the caller does.  Raises ``ReleaseError``
    if the file is no artifact, or has features that a batch does not keep.
    """
    artifact = _json(path, "name a StepML artifact")
    latency, lifecycle = import_stepml(artifact, str(path))
    return _imported(
        path, name, "StepML artifact", hardware, (ModelEntry(model, tensor_parallelism, latency, lifecycle),)
    )


def release_of_defaults(
    path: Path, name: str, gpu: str | None = None, vllm_version: str | None = None
) -> CoefficientRelease:
    """The coefficients of a ``defaults.yaml`` of BLIS as a release, of one GPU and one version of vLLM.

    Either may be left out where the file has only one.  Raises ``ReleaseError`` if the file is none, or
    leaves a choice.
    """
    rows = rows_of(parse_defaults(page_of_text(path, "coefficients"), str(path)), gpu, vllm_version, str(path))
    versions = ", ".join(sorted({row.vllm_version for row in rows}))
    return _imported(path, name, f"BLIS (vLLM {versions})", rows[0].gpu, tuple(row.entry for row in rows))


def _imported(path: Path, name: str, what: str, hardware: str, models: tuple[ModelEntry, ...]) -> CoefficientRelease:
    release = CoefficientRelease(
        name=name,
        status="valid",
        summary=f"{what} {path.name}, imported.",
        source=f"{path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}",
        hardware=hardware,
        sha256="",
        models=models,
        fitted_on=(),
        published_replay={},
        published_errors={},
    )
    # A release is what its text says: what the text cannot hold is refused here.
    return parse_release(format_release(release), str(path))


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
    hardware: str,
    architecture: Architecture,
) -> CoefficientRelease:
    """The shared coefficients of a physical release on another model, without a recording of it.

    Raises ``ReleaseError`` if the release is not physical, its models do not share their
    coefficients, or the hardware has no datasheet here.
    """
    latencies = [entry.latency for entry in shared.models]
    physical = [latency for latency in latencies if isinstance(latency, PhysicalModel)]
    if len(physical) < len(latencies) or len({latency.coefficients for latency in physical}) != 1:
        raise ReleaseError(
            f"release {shared.name} has no coefficients that its models share; use h100-physical or one of "
            "`blis-replay generalize --out`"
        )
    latency = PhysicalModel(architecture, gpu_named(hardware), tensor_parallelism, physical[0].coefficients)
    entry = replace(
        shared.models[0], model=model, tensor_parallelism=tensor_parallelism, latency=latency, applies_to=()
    )
    text = format_release(
        replace(
            shared,
            name=name,
            summary=f"Coefficients of {shared.name}, fitted to other models, on the architecture of {model}.",
            hardware=hardware,
            models=(entry,),
        )
    )
    return parse_release(text, name)


def roofline_release(
    name: str,
    model: str,
    hardware: str,
    latency: RooflineModel,
) -> CoefficientRelease:
    """A release with the roofline of one model, without delays: nothing of it is fitted.

    Raises ``ReleaseError`` if a step of it takes too long to be one.
    """
    rests_on = "smooth efficiencies" if latency.efficiency is None else "efficiency tables"
    release = CoefficientRelease(
        name=name,
        status="valid",
        summary=f"Roofline of {model}, {rests_on}, mixed steps {latency.mixed}.",
        source="architecture and datasheet, nothing fitted",
        hardware=hardware,
        sha256="",
        models=(ModelEntry(model, latency.tensor_parallelism, latency, Lifecycle()),),
        fitted_on=(),
        published_replay={},
        published_errors={},
    )
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
        if path.stat().st_size > _LARGEST_BYTES:
            raise error(f"{path}: too large for {what}; name another file")
        return path.read_text("utf-8")
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror}); name a readable file") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text; name a file of {what}") from None
