"""BLIS's own ``defaults.yaml``, as its builds with a blackbox model read it (blis-semantics 8).

A row of ``models`` has alpha and beta of one model on one GPU and tensor parallelism, measured with one version of
vLLM.  ``defaults`` spells the model's name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

from msgspec import Meta, Struct

from blis_replay.base.document import Number, Text, read_values, yaml_values
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release
from blis_replay.replay.release_file import page_of_text


@dataclass(frozen=True)
class DefaultsRow:
    """A row of ``models``: its coefficients as an ``entry``, and its GPU and version of vLLM."""

    entry: ModelEntry
    gpu: str
    vllm_version: str


class _SpellingText(Struct, frozen=True):
    hf_repo: str | None = None


class _RowText(Struct, frozen=True):
    id: Text
    GPU: Text
    tensor_parallelism: Annotated[int, Meta(ge=1, le=1024)]
    vllm_version: Text
    alpha_coeffs: tuple[Number, Number, Number]
    beta_coeffs: tuple[Number, Number, Number]


class _DefaultsText(Struct, frozen=True):
    models: tuple[_RowText, ...]
    defaults: dict[str, _SpellingText] = {}


def parse_defaults(text: str, origin: str) -> tuple[DefaultsRow, ...]:
    """The rows of a ``defaults.yaml``, in its order, models spelled as ``defaults`` has them.

    KV blocks, losses and workload presets are ignored: a release does not have them.  Raises ``ReleaseError`` naming
    the field, also for the file of a build without a blackbox model.
    """
    values = yaml_values(text, origin, ReleaseError)
    if isinstance(values, dict) and "models" not in values:
        problem = "is missing; only files of builds with a blackbox model have coefficients by model"
        raise ReleaseError(f"{origin}, field models: {problem}")
    given = read_values(values, _DefaultsText, origin, "", ReleaseError)
    spelled = {name: model.hf_repo or name for name, model in given.defaults.items()}
    return tuple(_default_row(row, spelled.get(row.id, row.id)) for row in given.models)


def _default_row(row: _RowText, model: str) -> DefaultsRow:
    # Whole ns, and truncated as BLIS does.
    intercept, per_prefill, per_decode = (round(1000 * value) for value in row.beta_coeffs)
    latency = LatencyModel("blackbox", intercept, per_prefill, per_decode, rounding="truncate")
    entry = ModelEntry(model, row.tensor_parallelism, latency, Lifecycle(*row.alpha_coeffs))
    return DefaultsRow(entry, row.GPU, row.vllm_version)


def rows_of(rows: tuple[DefaultsRow, ...], gpu: str | None, vllm_version: str | None, origin: str) -> list[DefaultsRow]:
    """The rows of one GPU and, if given, one version of vLLM, a row for each model and tensor parallelism.

    Raises ``ReleaseError`` if that leaves none, or several rows for one model.
    """
    if not (left := [row for row in rows if gpu in (None, row.gpu) and vllm_version in (None, row.vllm_version)]):
        _choose(rows, origin, "none is of that GPU and version of vLLM")
    if len({row.gpu for row in left}) > 1:
        _choose(rows, origin, "of several GPUs, and a release is of one")
    keys = [(row.entry.model, row.entry.tensor_parallelism) for row in left]
    if len(set(keys)) < len(keys):
        _choose(rows, origin, "several for one model and tensor parallelism")
    return left


def _choose(rows: tuple[DefaultsRow, ...], origin: str, problem: str) -> NoReturn:
    gpus, versions = sorted({row.gpu for row in rows}), sorted({row.vllm_version for row in rows})
    raise ReleaseError(
        f"{origin}, field models: has {len(rows)} rows, {problem}; choose with --gpu ({', '.join(gpus)}) and "
        f"--vllm-version ({', '.join(versions)})"
    )


def release_of_defaults(
    path: Path, name: str, gpu: str | None = None, vllm_version: str | None = None
) -> CoefficientRelease:
    """The coefficients of a ``defaults.yaml`` of BLIS as a release, of one GPU and one version of vLLM.

    Either may be left out where the file has only one.  Raises ``ReleaseError`` if the file is not valid, or if several
    rows remain for one model.
    """
    rows = rows_of(parse_defaults(page_of_text(path, "coefficients"), str(path)), gpu, vllm_version, str(path))
    versions = ", ".join(sorted({row.vllm_version for row in rows}))
    release = CoefficientRelease(
        name,
        "valid",
        f"BLIS (vLLM {versions}) {path.name}, imported.",
        f"{path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}",
        rows[0].gpu,
        models=tuple(row.entry for row in rows),
    )
    # Parsing its text refuses values that a release cannot have.
    return parse_release(format_release(release), str(path))
