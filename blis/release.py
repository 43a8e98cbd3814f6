"""Coefficient releases: what a simulator is told about a model, as reviewed data.

A release is a YAML text under version control.  Quantities carry their unit
(``intercept: 13546 us``); an unknown unit, an unknown or a missing field is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import Literal

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency import Latency, LatencyModel, Lifecycle
from blis_replay.blis.release_fields import NS, NS_PER_TOKEN, Fields
from blis_replay.blis.release_fit import FitRecord, parse_fit
from blis_replay.blis.release_latency import parse_latency

SCHEMA = "blis-replay/coefficients/1"

_STATUSES: tuple[Literal["valid", "invalid"], ...] = ("valid", "invalid")
_FIT_DATA: tuple[Literal["steps", "latencies"], ...] = ("steps", "latencies")

_LIFECYCLE_FIELDS = {
    "pre_queue": ("pre_queue_us", NS),
    "pre_queue_per_prompt_token": ("pre_queue_per_prompt_token_us", NS_PER_TOKEN),
    "post_token": ("post_token_us", NS),
    "first_token_per_decode": ("first_token_per_decode_us", NS_PER_TOKEN),
    "post_request": ("post_request_us", NS),
    "scheduling": ("scheduling_us", NS),
    "preemption": ("preemption_us", NS),
}


@dataclass(frozen=True)
class ModelEntry:
    """Coefficients of one model on one tensor parallelism.

    ``applies_to``: alias patterns (``70b-hf-*``) that narrow the entry further; empty for
    all experiments of the model.  ``sources``: per delay, where its value is from.  ``fit``: how
    the coefficients came about, where that is recorded.
    ``dtype``: the data type served (``bfloat16``, ``fp8``), None if the release does not say.
    """

    model: str
    tensor_parallelism: int
    latency: Latency
    lifecycle: Lifecycle
    applies_to: tuple[str, ...] = ()
    sources: Mapping[str, str] | None = None
    fit: FitRecord | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class FittedOn:
    """An experiment a release was fitted on: its content hash and what was used of it.

    ``data``: ``steps`` (step records) or ``latencies`` (client or server latencies).
    """

    experiment: str
    content_hash: str
    data: Literal["steps", "latencies"]


@dataclass(frozen=True)
class CoefficientRelease:
    """A coefficient release; ``sha256`` is that of its text.

    ``status`` ``invalid`` releases can be read but not validated with.
    ``published_replay``: the replay settings under which the numbers of its publisher
    came about; ``published_errors``: mean absolute errors in percent, quoted.
    """

    name: str
    status: Literal["valid", "invalid"]
    summary: str
    source: str
    hardware: str
    sha256: str
    models: tuple[ModelEntry, ...]
    fitted_on: tuple[FittedOn, ...]
    published_replay: Mapping[str, str | int]
    published_errors: Mapping[str, float]

    def entry_for(self, model: str, tensor_parallelism: int | None, alias: str, dtype: str | None = None) -> ModelEntry:
        """The coefficients for a recording; what it does not know (None) fits any.

        Raises ``ReleaseError`` if there are none.
        """
        for entry in self.models:
            if entry.model.lower() != model.lower() or tensor_parallelism not in (None, entry.tensor_parallelism):
                continue
            if dtype is not None and entry.dtype not in (None, dtype):
                continue
            if not entry.applies_to or any(fnmatchcase(alias, pattern) for pattern in entry.applies_to):
                return entry
        has = {f"{e.model} tp {e.tensor_parallelism}" + (f" {e.dtype}" if e.dtype else "") for e in self.models}
        raise ReleaseError(
            f"release {self.name} has no coefficients for {model}"
            f"{f' tp {tensor_parallelism}' if tensor_parallelism else ''}{f' {dtype}' if dtype else ''} "
            f"(it has {', '.join(sorted(has))}); fit some with `blis-replay calibrate --train {alias} --out FILE.yaml`"
        )

    def refuse_if_invalid(self) -> None:
        """Raise ``ReleaseError``, with the reason, for a release that must not be used."""
        if self.status == "valid":
            return
        reasons = []
        for entry in self.models:
            batch = entry.latency.smallest_positive_batch() if isinstance(entry.latency, LatencyModel) else 1
            if batch > 1:
                reasons.append(f"{entry.model}: step time is negative below a batch of {batch} decodes")
        why = "; ".join(reasons) or self.summary
        raise ReleaseError(
            f"release {self.name} is marked invalid: {why}; it can be listed and shown, use another to validate"
        )

    def used(self, experiment: str) -> Literal["steps", "latencies"] | None:
        """What of ``experiment`` (a slug) the release was fitted on, if anything."""
        kinds = {fit.data for fit in self.fitted_on if fit.experiment == experiment}
        if "latencies" in kinds:
            return "latencies"
        return "steps" if kinds else None


def bundled_releases() -> dict[str, str]:
    """The releases that ship with the package: name to YAML text, sorted by name."""
    folder = resources.files("blis_replay.blis") / "coefficients"
    texts = {entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): texts[name] for name in sorted(texts)}


def parse_release(text: str, origin: str) -> CoefficientRelease:
    """Read a release from its YAML text; ``origin`` names it in errors.

    Raises ``ReleaseError`` naming the field and what is wrong with it.
    """
    top = Fields.of_yaml(text, origin)
    if top.text("schema") != SCHEMA:
        top.refuse("schema", f"is not {SCHEMA!r}", "this program reads no other")
    status = top.choice("status", _STATUSES)
    release = CoefficientRelease(
        name=top.text("name"),
        status=status,
        summary=top.text("summary"),
        source=top.text("source"),
        hardware=top.text("hardware"),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        models=tuple(_model_entry(fields) for fields in top.list("models")),
        fitted_on=tuple(_fitted_on(fields) for fields in top.list("fitted_on", optional=True)),
        published_replay=top.mapping("published_replay", optional=True).settings(),
        published_errors=top.mapping("published_errors", optional=True).numbers(),
    )
    top.refuse_unknown()
    if not release.models:
        top.refuse("models", "is empty", "list at least one model")
    if release.status == "valid":
        for entry in release.models:
            if isinstance(entry.latency, LatencyModel) and entry.latency.smallest_positive_batch() > 1:
                top.refuse("models", f"give {entry.model} a negative step time", "fit it again, or set status: invalid")
    return release


def _model_entry(fields: Fields) -> ModelEntry:
    lifecycle = fields.mapping("lifecycle")
    delays = {
        name: lifecycle.quantity(key, units, optional=True) / 1000 for key, (name, units) in _LIFECYCLE_FIELDS.items()
    }
    sources = {key: lifecycle.text(f"{key}_source") for key in _LIFECYCLE_FIELDS if f"{key}_source" in lifecycle.values}
    lifecycle.refuse_unknown()
    tensor_parallelism = fields.values.get("tensor_parallelism")
    if not isinstance(tensor_parallelism, int) or isinstance(tensor_parallelism, bool) or tensor_parallelism < 1:
        fields.refuse("tensor_parallelism", "is missing or no positive whole number", "write e.g. 2")
    patterns = fields.values.get("applies_to", [])
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        fields.refuse("applies_to", "is not a list of alias patterns", "write e.g. [70b-hf-*]")
    entry = ModelEntry(
        model=fields.text("model"),
        tensor_parallelism=tensor_parallelism,
        latency=parse_latency(fields.mapping("latency"), tensor_parallelism),
        lifecycle=Lifecycle(**delays),
        applies_to=tuple(patterns),
        sources=sources,
        fit=parse_fit(fields.mapping("fit")) if "fit" in fields.values else None,
        dtype=fields.text("dtype") if "dtype" in fields.values else None,
    )
    fields.seen |= {"tensor_parallelism", "applies_to"}
    fields.refuse_unknown()
    return entry


def _fitted_on(fields: Fields) -> FittedOn:
    fitted = FittedOn(fields.text("experiment"), fields.text("content_hash"), fields.choice("data", _FIT_DATA))
    fields.refuse_unknown()
    return fitted
