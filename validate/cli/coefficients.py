"""``blis-replay coefficients``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import yaml

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.releases.release import CoefficientRelease, bundled_releases, format_release, parse_release
from blis_replay.ingest.tables import Column, Table, Toned, table_of
from blis_replay.validate.cli.coefficients_exchange import export_defaults, import_defaults, import_stepml
from blis_replay.validate.cli.coefficients_made import for_model, roofline, silicon, trees
from blis_replay.validate.cli.generalize import command as generalize
from blis_replay.validate.cli.options import form_options, print_answer
from blis_replay.validate.cli.steps import command as steps
from blis_replay.validate.cli.verb import VerbGroup
from blis_replay.validate.text.answer import Answer, Line, Verbatim

_SHORT_HASH = 12
_NAMES = ("model", "tensor_parallelism", "applies_to")


def bundled() -> list[CoefficientRelease]:
    """The releases that ship."""
    return [parse_release(text, name) for name, text in bundled_releases().items()]


_RELEASE_COLUMNS = (
    Column("release", "text"),
    Column("status", "text"),
    Column("models", "count"),
    Column("hardware", "text", wide=1),
    Column("fitted on", "word", wide=2),
    Column("sha256", "text", wide=3),
)


def releases_answer(releases: Sequence[CoefficientRelease]) -> Answer:
    """A table, and a summary of each."""
    cells = [
        [
            r.name,
            r.status if r.status == "valid" else Toned(r.status, "bad"),
            len(r.models),
            r.hardware,
            f"{len({used.experiment for used in r.fitted_on})} experiments",
            r.sha256[:_SHORT_HASH],
        ]
        for r in releases
    ]
    summaries = [Line(f"{r.name}: {r.summary}", mark=Toned(r.name, "heading")) for r in releases]
    records: list[dict[str, Any]] = [
        {"name": r.name, "status": r.status, "summary": r.summary, "models": models, "sha256": r.sha256}
        for r in releases
        for models in [[entry.model for entry in r.models]]
    ]
    return Answer(
        [Table("", _RELEASE_COLUMNS, cells), *summaries],
        {"releases": records},
        table_of({**record, "models": " ".join(record["models"])} for record in records),
    )


def release_answer(release: CoefficientRelease) -> Answer:
    """The release's own YAML, and why it must not be used if so; for programs with its hash.

    The rows are the numbers and words of each model.  ``field`` is a place in the release, e.g.
    ``step_time.intercept``; values are as written there, with their units.
    """
    written = format_release(release)
    try:
        release.refuse_if_invalid()
        page = written.removesuffix("\n")
    except ReleaseError as error:
        page = f"{written}# {error}"
    document = {**yaml.safe_load(written), "sha256": release.sha256}
    fields = [
        {
            "model": entry["model"],
            "tensor_parallelism": entry["tensor_parallelism"],
            "applies_to": "; ".join(entry.get("applies_to") or ()),
            "field": field,
            "value": value,
        }
        for entry in document["models"]
        for field, value in _fields({k: v for k, v in entry.items() if k not in _NAMES}, "")
    ]
    return Answer([Verbatim(page)], document, table_of(fields))


def _fields(value: Any, place: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [found for name, part in value.items() for found in _fields(part, f"{place}.{name}" if place else name)]
    if isinstance(value, list):
        return [found for i, part in enumerate(value) for found in _fields(part, f"{place}[{i}]")]
    return [] if value is None else [(place, str(value))]


@click.group("coefficients", cls=VerbGroup)
def command() -> None:
    """List, show, import, export, scale and test coefficient releases.

    \b
    Examples:
      blis-replay coefficients list
      blis-replay coefficients show stepml-direct
      blis-replay coefficients import-stepml FILE --model NAME --tensor-parallelism 2 --out OUT
      blis-replay coefficients import-defaults defaults.yaml --gpu H100 --out OUT
      blis-replay coefficients export-defaults RELEASE --out defaults.yaml
      blis-replay coefficients for-model config.json --model NAME --out OUT
      blis-replay coefficients roofline config.json --model NAME --out OUT
      blis-replay coefficients trees --train 34b-general --out OUT
      blis-replay coefficients steps 34b-general
      blis-replay coefficients generalize --lomo
    """


@command.command("list")
@form_options
def list_releases(form: str | None) -> None:
    """List the releases that ship with the package.

    \b
    Examples:
      blis-replay coefficients list
      blis-replay coefficients list --markdown
      blis-replay coefficients list --json
    """
    print_answer(form, releases_answer(bundled()))


@command.command("show", short_help="Show the coefficients of a release, their origin and scores.")
@click.argument("release")
@form_options
def show(release: str, form: str | None) -> None:
    """Show a release: its models, coefficients with units, origin and scores.

    RELEASE is a name from `coefficients list`, or a YAML file.

    \b
    Examples:
      blis-replay coefficients show h100-vllm-0.15.1
      blis-replay coefficients show h100-physical --markdown
      blis-replay coefficients show mine.yaml --csv
    """
    from blis_replay.replay.release_file import load_release

    print_answer(form, release_answer(load_release(release)))


for made in (import_stepml, import_defaults, export_defaults, for_model, roofline, silicon, trees, steps, generalize):
    command.add_command(made)
