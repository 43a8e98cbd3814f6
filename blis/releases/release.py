"""Coefficient releases: what a simulator is told about a model, as reviewed data.

A release is a YAML text under version control.  Quantities carry their unit
(``intercept: 13546 us``); an unknown unit, an unknown or a missing field is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from shlex import quote
from typing import Annotated, Any, Literal

import yaml
from msgspec import Meta, Struct

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.models import FirstUse, Latency, LatencyModel, Lifecycle
from blis_replay.blis.releases.fit import FitRecord, FitText, fit_text
from blis_replay.blis.releases.latency import LatencyText, latency_text, read_latency
from blis_replay.strict.document import (
    FieldError,
    NonNegativeTime,
    Number,
    Text,
    Time,
    TimePerToken,
    document_of,
    read_yaml,
)

SCHEMA: Literal["blis-replay/coefficients/1"] = "blis-replay/coefficients/1"


@dataclass(frozen=True)
class ModelEntry:
    """Coefficients of one model on one tensor parallelism.

    ``applies_to``: alias patterns (``70b-hf-*``) that narrow the entry further; empty for
    all experiments of the model.  ``sources``: per delay, where its value is from.  ``fit``: how
    the coefficients came about, where that is recorded.  ``first_use``: what a new server compiles, None if nothing is
    known of that.
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
    first_use: FirstUse | None = None

    def is_for(self, model: str, tensor_parallelism: int | None, alias: str, dtype: str | None) -> bool:
        """Whether it has the coefficients for a recording; what that does not know (None) fits any."""
        if self.model.lower() != model.lower() or tensor_parallelism not in (None, self.tensor_parallelism):
            return False
        if dtype is not None and self.dtype not in (None, dtype):
            return False
        return not self.applies_to or any(fnmatchcase(alias, pattern) for pattern in self.applies_to)


@dataclass(frozen=True)
class FittedOn:
    """An experiment a release was fitted on: its content hash and what was used of it.

    ``data``: ``steps`` (step records) or ``latencies`` (client or server latencies).  ``requests_hash``: of its
    requests alone, by which a copy under another name is known; None in older releases.
    """

    experiment: Text
    content_hash: Text
    data: Literal["steps", "latencies"]
    requests_hash: Text | None = None


@dataclass(frozen=True)
class CoefficientRelease:
    """A coefficient release; ``sha256`` is that of its text.

    ``status`` ``invalid`` releases can be read but not validated with.
    ``fitted_on``: empty if nothing of it was fitted to a recording, None if it does not say.
    ``published_replay``: the replay settings under which the numbers of its publisher
    came about; ``published_errors``: mean absolute errors in percent, quoted.
    """

    name: str
    status: Literal["valid", "invalid"]
    summary: str
    source: str
    hardware: str
    sha256: str = ""
    models: tuple[ModelEntry, ...] = ()
    fitted_on: tuple[FittedOn, ...] | None = None
    published_replay: Mapping[str, str | int] = field(default_factory=dict)
    published_errors: Mapping[str, float] = field(default_factory=dict)

    def entry_for(self, model: str, tensor_parallelism: int | None, alias: str, dtype: str | None = None) -> ModelEntry:
        """The coefficients for a recording; what it does not know (None) fits any.

        Raises ``ReleaseError`` if there are none.
        """
        for entry in self.models:
            if entry.is_for(model, tensor_parallelism, alias, dtype):
                return entry
        shipped = (parse_release(text, name) for name, text in bundled_releases().items() if name != self.name)
        others = [
            f"take --coefficients {release.name}, or "
            for release in shipped
            if release.status == "valid"
            and release.fitted_on  # not what is known of a GPU alone
            and any(e.is_for(model, tensor_parallelism, alias, dtype) for e in release.models)
        ]
        has = {f"{e.model} tp {e.tensor_parallelism}" + (f" {e.dtype}" if e.dtype else "") for e in self.models}
        raise ReleaseError(
            f"release {self.name} has no coefficients for {model}"
            f"{f' tp {tensor_parallelism}' if tensor_parallelism else ''}{f' {dtype}' if dtype else ''} "
            f"(it has {', '.join(sorted(has))}); {''.join(others[:1])}fit some with "
            f"`blis-replay calibrate --train {quote(alias)} --out FILE.yaml`"
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

    def used(
        self, experiment: str, content_hash: str = "", requests_hash: str = ""
    ) -> Literal["steps", "latencies"] | None:
        """What of an experiment the release was fitted on, if anything: known by its slug, or by what is in it."""
        known = {experiment, content_hash, requests_hash} - {""}
        fits = self.fitted_on or ()
        kinds = {fit.data for fit in fits if known & {fit.experiment, fit.content_hash, fit.requests_hash or ""}}
        if "latencies" in kinds:
            return "latencies"
        return "steps" if kinds else None


def bundled_releases() -> dict[str, str]:
    """The releases that ship with the package: name to YAML text, sorted by name."""
    folder = resources.files("blis_replay.blis.releases") / "coefficients"
    texts = {entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): texts[name] for name in sorted(texts)}


class _LifecycleText(Struct, frozen=True):
    """Delays, and where the value of each is from; in the order in which they are written."""

    pre_queue: Time = 0.0
    pre_queue_per_prompt_token: TimePerToken = 0.0
    post_token: Time = 0.0
    post_request: Time = 0.0
    scheduling: Time = 0.0
    preemption: Time = 0.0
    first_token_per_decode: TimePerToken | None = None
    pre_queue_source: Text | None = None
    pre_queue_per_prompt_token_source: Text | None = None
    post_token_source: Text | None = None
    first_token_per_decode_source: Text | None = None
    post_request_source: Text | None = None
    scheduling_source: Text | None = None
    preemption_source: Text | None = None


DELAYS = tuple(name for name in _LifecycleText.__struct_fields__ if not name.endswith("_source"))


class _FirstUseText(Struct, frozen=True, kw_only=True):
    """As ``FirstUse``; ``source``: where the time is from."""

    compile: NonNegativeTime
    experts: Annotated[int, Meta(ge=1, le=100_000)]
    experts_per_token: Annotated[int, Meta(ge=1, le=1_000)]
    source: Text | None = None

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise FieldError("experts_per_token", "is more than there are experts", "correct one of them")

    def first_use(self) -> FirstUse:
        """What it stands for."""
        return FirstUse(round(self.compile), self.experts, self.experts_per_token)


class _EntryText(Struct, frozen=True, kw_only=True):
    model: Text
    tensor_parallelism: Annotated[int, Meta(ge=1)]
    dtype: Text | None = None
    applies_to: tuple[str, ...] | None = None
    latency: LatencyText
    lifecycle: _LifecycleText
    first_use: _FirstUseText | None = None
    fit: FitText | None = None

    def entry(self) -> ModelEntry:
        """What it stands for; raises ``ReleaseError`` for a model that no step can be run with."""
        delays = self.lifecycle
        sources = {name: getattr(delays, f"{name}_source") for name in DELAYS}
        kernels = self.first_use
        if kernels is not None:
            sources["first_use"] = kernels.source
        return ModelEntry(
            model=self.model,
            tensor_parallelism=self.tensor_parallelism,
            latency=read_latency(self.latency, self.tensor_parallelism),
            lifecycle=Lifecycle(**{f"{name}_us": getattr(delays, name) or 0.0 for name in DELAYS}),
            applies_to=self.applies_to or (),
            sources={name: source for name, source in sources.items() if source is not None},
            fit=None if self.fit is None else self.fit.record(),
            dtype=self.dtype,
            first_use=None if kernels is None else kernels.first_use(),
        )


class _ReleaseText(Struct, frozen=True, kw_only=True):
    schema: Literal["blis-replay/coefficients/1"] = SCHEMA
    name: Text
    status: Literal["valid", "invalid"]
    summary: Text
    source: Text
    hardware: Text
    fitted_on: tuple[FittedOn, ...] | None = None
    models: Annotated[tuple[_EntryText, ...], Meta(min_length=1)]
    published_replay: dict[str, str | Annotated[int, Meta(le=9)]] | None = None
    published_errors: dict[str, Number] | None = None


def parse_release(text: str, origin: str) -> CoefficientRelease:
    """Read a release from its YAML text; ``origin`` names it in errors.

    Raises ``ReleaseError`` naming the field and what is wrong with it.
    """
    given = read_yaml(text, _ReleaseText, origin, "a release", ReleaseError)
    models: list[ModelEntry] = []
    for i, entry_text in enumerate(given.models):
        try:
            models.append(entry_text.entry())
        except ReleaseError as error:
            raise ReleaseError(f"{origin}, field models[{i}].latency: {error}") from None
    for entry in models if given.status == "valid" else ():
        if isinstance(entry.latency, LatencyModel) and entry.latency.smallest_positive_batch() > 1:
            problem = f"give {entry.model} a negative step time; fit it again, or set status: invalid"
            raise ReleaseError(f"{origin}, field models: {problem}")
    return CoefficientRelease(
        name=given.name,
        status=given.status,
        summary=given.summary,
        source=given.source,
        hardware=given.hardware,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        models=tuple(models),
        fitted_on=given.fitted_on,
        published_replay=given.published_replay or {},
        published_errors=given.published_errors or {},
    )


def format_release(release: CoefficientRelease, columns: int = 110) -> str:
    """YAML text of a release, folded at so many columns; parsing it gives the same release but for ``sha256``.

    Raises ``ReleaseError`` for what a release cannot say.
    """
    try:
        models = tuple(map(_entry_text, release.models))
    except FieldError as error:
        raise ReleaseError(f"release {release.name}, {error}") from None
    document = _ReleaseText(
        name=release.name,
        status=release.status,
        summary=release.summary,
        source=release.source,
        hardware=release.hardware,
        fitted_on=release.fitted_on,
        models=models,
        published_replay=dict(release.published_replay) or None,
        published_errors=dict(release.published_errors) or None,
    )
    return yaml.safe_dump(document_of(document), sort_keys=False, allow_unicode=True, width=columns)


def _entry_text(entry: ModelEntry) -> _EntryText:
    delays = {name: getattr(entry.lifecycle, f"{name}_us") for name in DELAYS}
    delays["first_token_per_decode"] = delays["first_token_per_decode"] or None
    sources: dict[str, Any] = {f"{name}_source": text for name, text in (entry.sources or {}).items()}
    kernels, source = entry.first_use, sources.pop("first_use_source", None)
    return _EntryText(
        model=entry.model,
        tensor_parallelism=entry.tensor_parallelism,
        dtype=entry.dtype or None,
        applies_to=entry.applies_to or None,
        latency=latency_text(entry.latency),
        lifecycle=_LifecycleText(**delays, **sources),
        first_use=None
        if kernels is None
        else _FirstUseText(
            compile=kernels.compile_us,
            experts=kernels.experts,
            experts_per_token=kernels.experts_per_token,
            source=source,
        ),
        fit=None if entry.fit is None else fit_text(entry.fit),
    )
