"""BLIS's own ``defaults.yaml``, as its builds with a blackbox model read it, both ways (blis-semantics 8).

A row of ``models`` has alpha and beta of one model on one GPU and tensor parallelism, measured with one version of
vLLM.  ``defaults`` chooses the row of each model, and spells its name.  BLIS refuses other fields.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import yaml
from msgspec import Meta, Struct

from blis_replay.base.document import Number, Text, read_values, yaml_values
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release
from blis_replay.replay.blis_binary import blackbox_coefficients
from blis_replay.replay.release_file import page_of_text


def beyond_blackbox(entry: ModelEntry) -> tuple[str, ...]:
    """Names of the parts of an entry that BLIS does not have: delays, kernels to compile, a bend of the line."""
    delays = entry.lifecycle
    values = {
        "first_token_per_decode": delays.first_token_per_decode_us,
        "post_request": delays.post_request_us,
        "scheduling": delays.scheduling_us,
        "preemption": delays.preemption_us,
        "first_use": entry.first_use,
        "prefill_beyond": isinstance(entry.latency, LatencyModel) and entry.latency.prefill_beyond.more_per_token_ns,
    }
    return tuple(name for name, value in values.items() if value)


NOT_STATED = "not stated"

# How a GPU's name begins in recordings -> its name in BLIS.
_GPUS = {"H100": "H100", "A100": "A100-80", "L40S": "L40S"}


@dataclass(frozen=True)
class DefaultsText:
    """The text of a ``defaults.yaml``; ``not_carried``: one sentence for each part of the release not in it."""

    text: str
    not_carried: tuple[str, ...]


@dataclass(frozen=True)
class DefaultsRow:
    """A row of ``models``: its coefficients as an ``entry``, and its GPU and version of vLLM."""

    entry: ModelEntry
    gpu: str
    vllm_version: str


def format_defaults(
    release: CoefficientRelease, vllm_version: str = NOT_STATED, context_tokens: float = 0.0
) -> DefaultsText:
    """A release in the form of ``defaults.yaml``.

    ``vllm_version``: by which BLIS looks rows up.  ``context_tokens``: as in ``blackbox_coefficients``.
    Raises ``ReleaseError`` if three betas can express none of its models, or if two models would share a row.
    """
    gpu = next((name for begin, name in _GPUS.items() if release.hardware.startswith(begin)), release.hardware)
    rows: list[dict[str, object]] = []
    not_carried: list[str] = []
    for entry in release.models:
        try:
            rows.append(_row(entry, gpu, vllm_version, context_tokens))
        except ReleaseError as error:
            not_carried.append(f"{error}: left out")
            continue
        not_carried += _lost(entry, context_tokens)
    _refuse_twins(release.name, rows)
    if not rows:
        raise ReleaseError(
            f"release {release.name} has no model that BLIS's blackbox can run: {'; '.join(not_carried)}; "
            "export another release"
        )
    not_carried.append("total_kv_blocks are not in a release: give BLIS --total-kv-blocks from the server's log")
    document = {"defaults": _chosen(release, rows), "models": rows}
    return DefaultsText(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), tuple(not_carried))


def _chosen(release: CoefficientRelease, rows: list[dict[str, object]]) -> dict[str, object]:
    """The first row of each model, as a release uses its first entry, and the model's spelling in the release."""
    spelled = {entry.model.lower(): entry.model for entry in release.models}
    first = {str(row["id"]): row for row in reversed(rows)}
    return {
        name: {key: row[key] for key in ("GPU", "tensor_parallelism", "vllm_version")} | {"hf_repo": spelled[name]}
        for name, row in sorted(first.items())
    }


def _row(entry: ModelEntry, gpu: str, vllm_version: str, context_tokens: float) -> dict[str, object]:
    alpha, beta = blackbox_coefficients(entry, context_tokens)
    return {
        "id": entry.model.lower(),
        "GPU": gpu,
        "tensor_parallelism": entry.tensor_parallelism,
        "vllm_version": vllm_version,
        "alpha_coeffs": [float(f"{value:.15g}") for value in alpha],
        "beta_coeffs": [float(f"{value:.15g}") for value in beta],
    }


def _lost(entry: ModelEntry, context_tokens: float) -> list[str]:
    name = f"{entry.model} tp {entry.tensor_parallelism}"
    lost = [f"{name}: BLIS has no {delay}" for delay in beyond_blackbox(entry)]
    if isinstance(entry.latency, LatencyModel) and entry.latency.per_context_token_ns:
        lost.append(f"{name}: the cost of a context is that of {context_tokens:g} tokens, whatever a request has")
    if entry.applies_to or entry.dtype:
        lost.append(f"{name}: BLIS applies it to every experiment and data type")
    return lost


def _refuse_twins(release: str, rows: list[dict[str, object]]) -> None:
    keys = [(row["id"], row["tensor_parallelism"]) for row in rows]
    twins = sorted({f"{model} tp {tp}" for model, tp in keys if keys.count((model, tp)) > 1})
    if twins:
        raise ReleaseError(
            f"release {release} has several entries for {', '.join(twins)}, which BLIS cannot tell apart; "
            "export a release with one of them"
        )


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
