"""Coefficient releases as tables, frames and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import yaml

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.release import CoefficientRelease, bundled_releases, parse_release
from blis_replay.blis.release_text import format_release
from blis_replay.validate.terminal import Toned, table, wrap

_SHORT_HASH = 12
_NAMES = ("model", "tensor_parallelism", "applies_to")
_COLUMNS = {
    "model": pl.String,
    "tensor_parallelism": pl.Int64,
    **dict.fromkeys(("applies_to", "field", "value"), pl.String),
}


def bundled() -> list[CoefficientRelease]:
    """The releases that ship."""
    return [parse_release(text, name) for name, text in bundled_releases().items()]


def releases_text(releases: Sequence[CoefficientRelease]) -> str:
    """A table, and a summary of each."""
    rows = [
        [r.name, r.status if r.status == "valid" else Toned(r.status, "bad"), str(len(r.models)), *_identity(r)]
        for r in releases
    ]
    header = ["release", "status", "models", "hardware", "fitted on", "sha256"]
    listed = table(header, rows, left=(0, 1, 3, 5), wide=(3, 4, 5))
    return "\n\n".join([listed, *(wrap(f"{r.name}: {r.summary}", mark=Toned(r.name, "heading")) for r in releases)])


def _identity(release: CoefficientRelease) -> list[str]:
    return [
        release.hardware,
        f"{len({used.experiment for used in release.fitted_on})} experiments",
        release.sha256[:_SHORT_HASH],
    ]


def releases_json(releases: Sequence[CoefficientRelease]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {
            "name": r.name,
            "status": r.status,
            "summary": r.summary,
            "models": [entry.model for entry in r.models],
            "sha256": r.sha256,
        }
        for r in releases
    ]


def releases_frame(releases: Sequence[CoefficientRelease]) -> pl.DataFrame:
    """The same as a frame, a row a release; its models in one column."""
    return pl.DataFrame(releases_json(releases)).with_columns(pl.col("models").list.join(" "))


def release_text(release: CoefficientRelease) -> str:
    """The release's own YAML, and why it must not be used if so."""
    try:
        release.refuse_if_invalid()
    except ReleaseError as error:
        return f"{format_release(release)}# {error}"
    return format_release(release).removesuffix("\n")


def release_json(release: CoefficientRelease) -> dict[str, Any]:
    """The same for programs, with its hash."""
    return {**yaml.safe_load(format_release(release)), "sha256": release.sha256}


def coefficients_frame(release: CoefficientRelease) -> pl.DataFrame:
    """A row a number or word of each model: ``model``, ``tensor_parallelism``, ``field``, ``value``.

    ``field``: its place in the release, e.g. ``step_time.intercept``; values as written there, with their units.
    """
    rows = [
        {
            "model": entry["model"],
            "tensor_parallelism": entry["tensor_parallelism"],
            "applies_to": " ".join(entry.get("applies_to") or ()),
            "field": field,
            "value": value,
        }
        for entry in release_json(release)["models"]
        for field, value in _fields({k: v for k, v in entry.items() if k not in _NAMES}, "")
    ]
    return pl.DataFrame(rows, schema=_COLUMNS)


def _fields(value: Any, place: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [found for name, part in value.items() for found in _fields(part, f"{place}.{name}" if place else name)]
    if isinstance(value, list):
        return [found for i, part in enumerate(value) for found in _fields(part, f"{place}[{i}]")]
    return [] if value is None else [(place, str(value))]
