"""BLIS's own ``defaults.yaml``, as its builds with a blackbox model read it, both ways (blis-semantics 8).

A row of ``models`` has alpha and beta of one model on one GPU and tensor parallelism, measured with one
version of vLLM; ``defaults`` says which row a model takes, and how it is spelled.  BLIS reads the file
strictly, so nothing else may stand in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import yaml

from blis_replay.blis.blackbox import beyond_blackbox, blackbox_coefficients
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency import LatencyModel, Lifecycle
from blis_replay.blis.release import CoefficientRelease, ModelEntry
from blis_replay.blis.release_fields import Fields

NOT_STATED = "not stated"

# What BLIS calls the GPUs of its rows, by how recordings begin their name.
_GPUS = {"H100": "H100", "A100": "A100-80", "L40S": "L40S"}
_MOST_GPUS = 1024


@dataclass(frozen=True)
class DefaultsText:
    """The text of a ``defaults.yaml``, and what of the release is not in it, a sentence each."""

    text: str
    not_carried: tuple[str, ...]


@dataclass(frozen=True)
class DefaultsRow:
    """A row of ``models``: ``entry`` without what BLIS does not know, and what the row is of."""

    entry: ModelEntry
    gpu: str
    vllm_version: str


def format_defaults(
    release: CoefficientRelease, vllm_version: str = NOT_STATED, context_tokens: float = 0.0
) -> DefaultsText:
    """A release in the form of ``defaults.yaml``.

    ``vllm_version``: by which BLIS looks rows up.  ``context_tokens``: as in ``blackbox_coefficients``.
    Raises ``ReleaseError`` if none of its models can be said in three betas, or two of them would be one row.
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
    """Of each model its first row, as a release takes its first entry, and how the release spells it."""
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


class DefaultsFields(Fields):
    """A mapping of a ``defaults.yaml`` being read."""

    document = "BLIS's defaults.yaml"


def parse_defaults(text: str, origin: str) -> tuple[DefaultsRow, ...]:
    """The rows of a ``defaults.yaml``, in its order, models spelled as ``defaults`` has them.

    KV blocks, losses and workload presets are read over: a release has no place for them.  Raises
    ``ReleaseError`` naming the field; for a file of a build without a blackbox model, too.
    """
    top = DefaultsFields.of_yaml(text, origin)
    if "models" not in top.values:
        top.refuse("models", "is missing", "only files of builds with a blackbox model have coefficients by model")
    spelled = _spelled(top.mapping("defaults", optional=True))
    return tuple(_parse_row(fields, spelled) for fields in top.list("models"))


def _spelled(defaults: Fields) -> dict[str, str]:
    models = {name: defaults.mapping(name) for name in defaults.values}
    return {name: fields.text("hf_repo", optional=True) or name for name, fields in models.items()}


def _parse_row(fields: Fields, spelled: Mapping[str, str]) -> DefaultsRow:
    alpha, beta = _three(fields, "alpha_coeffs"), _three(fields, "beta_coeffs")
    model = fields.text("id")
    # Whole ns, and truncated as BLIS does.
    intercept, per_prefill, per_decode = (round(1000 * value) for value in beta)
    latency = LatencyModel("blackbox", intercept, per_prefill, per_decode, rounding="truncate")
    entry = ModelEntry(
        model=spelled.get(model, model),
        tensor_parallelism=fields.count("tensor_parallelism", 1, _MOST_GPUS),
        latency=latency,
        lifecycle=Lifecycle(*alpha),
    )
    return DefaultsRow(entry, fields.text("GPU"), fields.text("vllm_version"))


def _three(fields: Fields, name: str) -> tuple[float, float, float]:
    values = fields.values.get(name)
    if not isinstance(values, list) or len(values) != 3:
        fields.refuse(name, "is missing or not three numbers", "write e.g. [1601.35, 3.51, 1805.54]")
    numbers = Fields(dict(zip("012", values, strict=True)), fields.origin, f"{fields.path}{name}.").numbers()
    first, second, third = numbers.values()
    return first, second, third


def rows_of(rows: tuple[DefaultsRow, ...], gpu: str | None, vllm_version: str | None, origin: str) -> list[DefaultsRow]:
    """The rows of one GPU and, if given, one version of vLLM, a row for each model and tensor parallelism.

    Raises ``ReleaseError`` where that leaves none, or several to choose from.
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
