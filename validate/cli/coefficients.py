"""The verb of coefficient releases, ``blis-replay coefficients``: list and show them, test them against recordings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from blis_replay.base.addons import needed_addon
from blis_replay.base.files import write_whole
from blis_replay.ingest.tables import Column, Table, Toned, table_of
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import (
    FILE,
    OUT_FILE,
    VerbGroup,
    coefficients_option,
    experiment_option,
    gpu_file_option,
    release_option,
    store_option,
    verb,
)
from blis_replay.validate.text.answer import Answer, Block, Line, Part, Verbatim, one_line
from blis_replay.validate.text.terminal import wrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blis_replay.blis.releases.release import CoefficientRelease


_SHORT_HASH = 12
_NAMES = ("model", "tensor_parallelism", "applies_to")
_YAML_COLUMNS = 48  # a word that begins before a fold ends behind it, and a page has 80 columns


_RELEASE_COLUMNS = (
    *(Column("release", "text"), Column("status", "text"), Column("models", "count")),
    *(Column("hardware", "text", wide=1), Column("fitted on", "word", wide=2), Column("sha256", "text", wide=3)),
)


def releases_answer(releases: Sequence[CoefficientRelease]) -> Answer:
    """A table, and a summary of each."""
    cells = [
        [
            r.name,
            r.status if r.status == "valid" else Toned(r.status, "bad"),
            len(r.models),
            r.hardware,
            "-" if r.fitted_on is None else f"{len({used.experiment for used in r.fitted_on})} experiments",
            r.sha256[:_SHORT_HASH],
        ]
        for r in releases
    ]
    summaries = [Line(f"{r.name}: {r.summary}", mark=Toned(r.name, "heading")) for r in releases]
    names = [[entry.model for entry in r.models] for r in releases]
    records: list[dict[str, Any]] = [
        {"name": r.name, "status": r.status, "summary": r.summary, "models": models, "sha256": r.sha256}
        for r, models in zip(releases, names, strict=True)
    ]
    rows = table_of({**record, "models": " ".join(record["models"])} for record in records)
    return Answer([Table("", _RELEASE_COLUMNS, cells), *summaries], {"releases": records}, rows)


def release_answer(release: CoefficientRelease) -> Answer:
    """Its fitted coefficients, or all of it as YAML, and why it must not be used if so; for programs with its hash.

    The rows are the numbers and words of each model.  ``field`` is a place in the release, e.g.
    ``step_time.intercept``; values are as written there, with their units.
    """
    import yaml

    from blis_replay.base.errors import ReleaseError
    from blis_replay.blis.releases.release import format_release

    written = format_release(release, _YAML_COLUMNS)
    try:
        release.refuse_if_invalid()
        page, valid = written.removesuffix("\n"), True
    except ReleaseError as error:
        page, valid = written + wrap(f"# {error}", "# "), False
    document = {**yaml.safe_load(written), "sha256": release.sha256}
    fields = [
        {"model": entry["model"], "tensor_parallelism": entry["tensor_parallelism"]}
        | {"applies_to": "; ".join(entry.get("applies_to") or ()), "field": field, "value": value}
        for entry in document["models"]
        for field, value in _fields({k: v for k, v in entry.items() if k not in _NAMES}, "")
    ]
    return Answer([Verbatim(page)], document, table_of(fields), brief=_brief(release) if valid else ())


def _brief(release: CoefficientRelease) -> list[Part]:
    """The fitted coefficients of each model with their intervals; nothing of a release that is not all fitted."""
    from blis_replay.validate.fit.text import coefficients_table

    fits = [(entry, entry.fit) for entry in release.models if entry.fit is not None]
    if len(fits) < len(release.models):
        return []
    title = f"{release.name}  ({release.hardware})"
    page: list[Part] = [Block([Line(title, mark=Toned(release.name, "heading")), Line(f"  {release.summary}")])]
    for entry, fit in fits:
        only = f" of {'; '.join(entry.applies_to)}" if entry.applies_to else ""
        named = f"{entry.model} tp {entry.tensor_parallelism}{only}"
        page.append(Block([Line(f"{named}: {fit.form}", mark=Toned(named, "heading")), coefficients_table(fit)]))
    return [*page, "more: -v prints the release file, with origin and scores"]


def _fields(value: Any, place: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [found for name, part in value.items() for found in _fields(part, f"{place}.{name}" if place else name)]
    if isinstance(value, list):
        return [found for i, part in enumerate(value) for found in _fields(part, f"{place}[{i}]")]
    return [] if value is None else [(place, str(value))]


@click.group("coefficients", cls=VerbGroup, labs=("convert",))
def coefficients_verb() -> None:
    """List, show, make, convert and test coefficient releases.

    \b
    Examples:
      blis-replay coefficients list
      blis-replay coefficients show stepml-direct
      blis-replay coefficients make config.json --model NAME --out OUT
      blis-replay coefficients test tiny-live-d
    """


@coefficients_verb.command("list")
def list_releases() -> None:
    """List the releases that ship with the package.

    \b
    Examples:
      blis-replay coefficients list
      blis-replay coefficients list --markdown
      blis-replay coefficients list --json
    """
    from blis_replay.blis.releases.release import bundled_releases, parse_release

    print_answer(releases_answer([parse_release(text, name) for name, text in bundled_releases().items()]))


@coefficients_verb.command("show", short_help="Show the coefficients of a release.")
@click.argument("release")
def show(release: str) -> None:
    """Show a release: its coefficients; with -v all of it, as YAML.

    RELEASE is a name from `coefficients list`, or a YAML file.

    \b
    Examples:
      blis-replay coefficients show h100-vllm-0.15.1
      blis-replay coefficients show h100-physical --markdown
      blis-replay coefficients show mine.yaml --csv
    """
    from blis_replay.replay.release_file import load_release

    print_answer(release_answer(load_release(release)))


@verb("test")
@experiment_option
@coefficients_option
@store_option
def test_verb(name: str, coefficients: str | None, store_path: Path) -> None:
    """How well do coefficients predict single engine steps?

    MAPE, signed error of the mean and Pearson's r against the step cycle, by regime
    (decode-only, mixed with few or many prefill tokens) and by batch size.

    \b
    Examples:
      blis-replay coefficients test tiny-live-d
      blis-replay coefficients test tiny-live-a -o steps.csv
      blis-replay coefficients test tiny-live-b --json
    """
    from blis_replay.replay.simulator import EmbeddedEngine
    from blis_replay.validate.experiment import release_for, stored_experiment
    from blis_replay.validate.fit.step_errors import step_cycles, step_errors
    from blis_replay.validate.fit.text import steps_answer

    recording = stored_experiment(store_path, name)
    release = release_for(coefficients, [name])
    latency = EmbeddedEngine(release).entry_for(recording).latency
    print_answer(steps_answer(recording, release.name, step_errors(latency, step_cycles(recording))))


# What a verb of labs that makes a release shares with ``make``.
release_file_option = click.option("--out", "-o", type=OUT_FILE, required=True, help="The release to write.")


def write_release(out: Path, release: CoefficientRelease, said: str, fields: Mapping[str, object]) -> None:
    """Write the release and say so; ``said`` follows the file's name in text, ``fields`` are added to the JSON."""
    from blis_replay.blis.releases.release import format_release

    write_whole(out, format_release(release))
    print_answer(one_line(f"wrote {out}{said}", {"release": str(out), **fields, "sha256": release.sha256}))


def show_hint(out: Path) -> str:
    """The command that shows the release."""
    return f"; look at it: blis-replay coefficients show {quote(str(out))}"


DEFAULT_GPU = "H100-SXM"


@verb("make", short_help="Make a release for a model that nobody recorded.")
@click.argument("config", type=FILE)
@click.option("--model", required=True, metavar="NAME", help="The model's name, as recordings have it.")
@click.option("--tensor-parallelism", type=click.IntRange(min=1), default=1, show_default=True, help="Its GPUs.")
@click.option("--hardware", help="And their kind.  [default: H100-SXM]")
@gpu_file_option
@release_option(
    "--shared", default="h100-physical", show_default=True, help_text="The physical release whose coefficients to take."
)
@click.option("--operators", is_flag=True, help="Take measured operator times of the GPU (a lab).")
@click.option("--expert-parallelism", type=click.IntRange(min=1), default=1, metavar="N", help="GPUs of the experts.")
@click.option("--dtype", metavar="NAME", help="Type of the weights, e.g. fp8.  [default: as in CONFIG]")
@click.option("--kv-cache-dtype", metavar="NAME", help="Type of the KV cache.  [default: as in CONFIG]")
@release_file_option
def make_verb(
    config: Path,
    model: str,
    tensor_parallelism: int,
    hardware: str | None,
    gpu_file: Path | None,
    shared: str,
    operators: bool,
    expert_parallelism: int,
    dtype: str | None,
    kv_cache_dtype: str | None,
    out: Path,
) -> None:
    """Make a release for a model that nobody recorded, from its CONFIG (config.json).

    Step times follow from its architecture, the GPU's datasheet and coefficients that were
    fitted to other models; `blis-replay study generalize --lomo` says how far off that is.
    With --operators, from measured times of operators; the last three options go with it.

    \b
    Examples:
      blis-replay coefficients make config.json --model org/new-13b \\
          --tensor-parallelism 2 --out new-13b.yaml
      blis-replay coefficients make config.json --model org/new-13b \\
          --gpu-file gpus.yaml --hardware RTX-4090 --out new-13b.yaml
    """
    if operators:
        if gpu_file is not None:
            raise click.UsageError("--operators has times of known GPUs only; leave --gpu-file out")
        measured = needed_addon("make", "operators", "--operators")
        deployment = config, hardware or DEFAULT_GPU, tensor_parallelism, expert_parallelism, dtype, kv_cache_dtype
        write_release(out, *measured(out.stem, model, deployment))
        return
    if expert_parallelism > 1 or dtype or kv_cache_dtype:
        raise click.UsageError("--expert-parallelism, --dtype and --kv-cache-dtype go with --operators; name it")
    from blis_replay.blis.latency.physical import most_kv_blocks
    from blis_replay.replay.other_hardware import architecture_of_file, chosen_gpu, release_for_model
    from blis_replay.replay.release_file import load_release

    gpu = chosen_gpu(hardware or (DEFAULT_GPU if gpu_file is None else None), gpu_file)
    architecture = architecture_of_file(config)
    release = release_for_model(load_release(shared), out.stem, model, tensor_parallelism, gpu, architecture)
    blocks = most_kv_blocks(architecture, gpu, tensor_parallelism)
    room = "" if blocks is None else f"; at most {blocks:,} KV blocks of 16 tokens fit beside them"
    write_release(
        out,
        release,
        f" for {model} ({architecture.parameters / 1e9:.2f} billion parameters{room}){show_hint(out)}",
        {"model": model, "parameters": architecture.parameters, "most_kv_blocks": blocks},
    )


for made in (make_verb, test_verb):
    coefficients_verb.add_command(made)
