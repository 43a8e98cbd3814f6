"""``blis-replay experiments``."""

from __future__ import annotations

from pathlib import Path

import click

from blis_replay.validate.cli.options import form_options, print_frame, print_json, store_option


@click.command("experiments")
@store_option
@form_options
def command(store_path: Path, form: str | None) -> None:
    """List the experiments of the store and those that ship with the package.

    \b
    Examples:
      blis-replay experiments
      blis-replay experiments --csv
    """
    from blis_replay.validate.terminal import table

    rows = _rows(store_path)
    if form == "json":
        print_json({"experiments": rows})
        return
    if form is not None:
        import polars as pl

        print_frame(pl.DataFrame(rows, infer_schema_length=None), form)
        return
    header = ["alias", "model", "tp", "requests", "failed", "ground truth", ""]
    click.echo(table(header, [_line(row) for row in rows], left=2))


def _rows(store_path: Path) -> list[dict[str, object]]:
    from blis_replay.fixtures.catalogue import bundled_aliases, load_document
    from blis_replay.ingest.store import list_experiments, open_store

    stored = []
    if store_path.exists():
        with open_store(store_path, read_only=True) as store:
            stored = [{**vars(row), "stored": True} for row in list_experiments(store)]
    slugs = {row["slug"] for row in stored}
    for alias, slug in bundled_aliases().items():
        if slug not in slugs:
            document = load_document(slug)
            stages = document["load"]["stages"]
            stored.append(
                {
                    "slug": slug,
                    "alias": alias,
                    "model": document["model"],
                    "hardware": document["hardware"],
                    "tensor_parallelism": document["tensor_parallelism"],
                    "workload": document["workload"],
                    "ground_truth": "published aggregates",
                    "requests": sum(stage["requests"] for stage in stages),
                    "failed": sum(stage["failures"] for stage in stages),
                    "overloaded": None,  # the checks run when it is first used
                    "findings": None,
                    "stored": False,
                }
            )
    return sorted(stored, key=lambda row: str(row["slug"]))


def _line(row: dict[str, object]) -> list[str]:
    truth = str(row["ground_truth"]).split()[0]  # recorded, published, arrival
    overloaded = "overloaded" if row["overloaded"] else ""
    return [
        str(row["alias"]),
        str(row["model"] or "not recorded").split("/")[-1],
        str(row["tensor_parallelism"] or "-"),
        f"{row['requests']:,}",
        f"{row['failed']:,}",
        truth,
        overloaded,
    ]
