"""Coefficient releases: what a simulator needs to know of a model, as reviewed data.

A release is a YAML text under version control.  Quantities carry their unit
(``intercept: 13546 us``); an unknown unit, an unknown or a missing field is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from shlex import quote
from typing import Annotated, Any, Literal

import yaml
from msgspec import Meta

from blis_replay.base.document import IF_SET, REQUIRED, UNWRITTEN, Number, Text, document_of, read_yaml
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.models import FirstUse, LatencyModel, Lifecycle
from blis_replay.blis.releases.fit import FitRecord
from blis_replay.blis.releases.latency import LatencyOfKind

# The hardware of a release that was fitted to recordings that do not name theirs.
UNKNOWN_HARDWARE = "not recorded"

# The delays that a release may have.
DELAYS = tuple(
    name.removesuffix("_us") for name in Lifecycle.__dataclass_fields__ if name.endswith("_us") and name != "stamp_us"
)


@dataclass(frozen=True)
class ModelEntry:
    """Coefficients of one model on one tensor parallelism.

    ``dtype``: the data type served (``bfloat16``, ``fp8``), None if the release does not say.  ``applies_to``: alias
    patterns (``70b-hf-*``) that narrow the entry further; empty for all experiments of the model.  ``first_use``: what
    a new server compiles, None if nothing is known of that.  ``fit``: how the coefficients came about, where that is
    recorded.
    """

    model: Text
    tensor_parallelism: Annotated[int, Meta(ge=1)]
    dtype: Text | None = field(default=None, kw_only=True)
    applies_to: Annotated[tuple[str, ...], IF_SET] = field(default=(), kw_only=True)
    latency: LatencyOfKind
    lifecycle: Lifecycle
    first_use: FirstUse | None = None
    fit: FitRecord | None = None

    def __post_init__(self) -> None:
        # A model by architecture and datasheet is split over as many GPUs as its entry says.
        if getattr(self.latency, "tensor_parallelism", self.tensor_parallelism) != self.tensor_parallelism:
            latency: Any = self.latency
            object.__setattr__(self, "latency", replace(latency, tensor_parallelism=self.tensor_parallelism))

    @property
    def sources(self) -> dict[str, str]:
        """Where the value of each delay is from, and that of ``first_use``; those that are stated."""
        sources = {name: getattr(self.lifecycle, f"{name}_source") for name in DELAYS}
        sources["first_use"] = None if self.first_use is None else self.first_use.source
        return {name: source for name, source in sources.items() if source is not None}

    def draws(self, n: int, seed: int) -> list[ModelEntry]:
        """``n`` entries that the recordings of the fit leave possible; this one, where no fit is recorded."""
        from blis_replay.blis.releases.draws import draws  # for intervals, which not every run has

        if self.fit is None:
            return [self] * n
        found = draws(self.latency, self.lifecycle, self.fit, n, seed)
        return [replace(self, latency=latency, lifecycle=lifecycle) for latency, lifecycle in found]

    def is_for(self, model: str, tensor_parallelism: int | None, alias: str, dtype: str | None) -> bool:
        """Whether these coefficients are for a recording; an unknown property (None) fits any."""
        if self.model.lower() != model.lower() or tensor_parallelism not in (None, self.tensor_parallelism):
            return False
        if dtype is not None and self.dtype not in (None, dtype):
            return False
        return not self.applies_to or any(fnmatchcase(alias, pattern) for pattern in self.applies_to)


@dataclass(frozen=True)
class RunMark:
    """What tells a run whoever recorded it: its requests share no latency with those that another side saw.

    ``requests``: their number.  ``sent_us``: Unix time of the first and the last, None without a clock of the day.
    ``model``: None if not recorded.  ``server_files``: SHA-256 of the files that the server wrote of it.
    """

    requests: int
    model: Annotated[Text | None, IF_SET] = None
    sent_us: Annotated[tuple[int, int] | None, IF_SET] = None
    server_files: Annotated[tuple[Text, ...], IF_SET] = ()


@dataclass(frozen=True)
class FittedOn:
    """An experiment a release was fitted on: its content hash and what was used of it.

    ``data``: ``steps`` (step records) or ``latencies`` (client or server latencies).  ``requests_hash``: of its
    requests alone, by which a copy under another name is known; ``sketch``: of single requests, by which a part of it
    is known (``ingest/identity.py``).  None in older releases.  ``vllm_version``: of its server, None if not recorded.
    ``layers``: what its layers attended to in the fit (``window 512 x5, full``), None in older releases.  ``run``: when
    it ran and what its server wrote, by which files of the same run from another side are known.
    """

    experiment: Text
    content_hash: Text
    data: Literal["steps", "latencies"]
    requests_hash: Text | None = None
    sketch: Annotated[Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]{2,2732}={0,2}$")] | None, IF_SET] = None
    vllm_version: Annotated[Text | None, IF_SET] = None
    layers: Annotated[Text | None, IF_SET] = None
    run: RunMark | None = None


@dataclass(frozen=True)
class CoefficientRelease:
    """A coefficient release; ``sha256`` is that of its text.

    ``status`` ``invalid`` releases can be read but not validated with.
    ``fitted_on``: empty if nothing of it was fitted to a recording, None if it does not say.
    ``published_errors``: mean absolute errors of its publisher, in percent.
    """

    schema: Literal["blis-replay/coefficients/1"] = field(default="blis-replay/coefficients/1", kw_only=True)
    name: Text
    status: Literal["valid", "invalid"]
    summary: Text
    source: Text
    hardware: Text
    fitted_on: tuple[FittedOn, ...] | None = field(default=None, kw_only=True)
    sha256: Annotated[str, UNWRITTEN] = ""
    models: Annotated[tuple[ModelEntry, ...], Meta(min_length=1), REQUIRED] = ()
    published_errors: Annotated[Mapping[str, Number], IF_SET] = field(default_factory=dict)

    def entry_for(self, model: str, tensor_parallelism: int | None, alias: str, dtype: str | None = None) -> ModelEntry:
        """The coefficients for a recording; an unknown property (None) fits any.

        Raises ``ReleaseError`` if the release has no such entry.
        """
        for entry in self.models:
            if entry.is_for(model, tensor_parallelism, alias, dtype):
                return entry
        shipped = (parse_release(text, name) for name, text in bundled_releases().items() if name != self.name)
        others = [
            f"take the release {release.name}, or "
            for release in shipped
            if release.status == "valid"
            and any(e.fit is not None and e.is_for(model, tensor_parallelism, alias, dtype) for e in release.models)
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


def parse_release(text: str, origin: str) -> CoefficientRelease:
    """Read a release from its YAML text; ``origin`` names it in errors.

    Raises ``ReleaseError`` naming the field and what is wrong with it.
    """
    release = read_yaml(text, CoefficientRelease, origin, "a release", ReleaseError)
    for i, entry in enumerate(release.models):
        try:
            entry.latency.for_kernel()
        except ReleaseError as error:
            raise ReleaseError(f"{origin}, field models[{i}].latency: {error}") from None
    for entry in release.models if release.status == "valid" else ():
        if isinstance(entry.latency, LatencyModel) and entry.latency.smallest_positive_batch() > 1:
            problem = f"give {entry.model} a negative step time; fit it again, or set status: invalid"
            raise ReleaseError(f"{origin}, field models: {problem}")
    return replace(release, sha256=hashlib.sha256(text.encode()).hexdigest())


def format_release(release: CoefficientRelease, columns: int = 110) -> str:
    """YAML text of a release, folded at ``columns``; parsing it gives the same release but for ``sha256``.

    Raises ``ReleaseError`` for observed step times, which belong to a recording.
    """

    class Rows(yaml.SafeDumper):
        """Numbers of a list stand in a row."""

    def row(dumper: yaml.SafeDumper, items: list[object]) -> yaml.Node:
        numbers = all(isinstance(item, int | float) for item in items)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=numbers)

    Rows.add_representer(list, row)
    return str(yaml.dump(document_of(release), Dumper=Rows, sort_keys=False, allow_unicode=True, width=columns))
