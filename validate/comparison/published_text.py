"""Our errors beside published ones: as a table, as a frame and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from blis_replay.validate.comparison.published import COLUMNS, Errors, PublishedTable, mean_abs
from blis_replay.validate.terminal import table, wrap


def published_text(compared: PublishedTable) -> str:
    """The table in 80 columns: each simulator and, below it, ours on the same experiments."""
    rows = []
    for row in compared.rows:
        rows.append([row.name, str(len(row.theirs)), *_cells(list(row.theirs.values()))])
        rows.append(["  ours on the same", "", *_cells(list(row.ours.values()))])
    header = ["mean |error| in %", "n", "E2E", "TTFT", "ITL", "true gap", "E2E p99", "TTFT p99"]
    counts = {use: list(compared.uses.values()).count(use) for use in sorted(set(compared.uses.values()))}
    fits = ", ".join(f"{count} {use}" for use, count in counts.items())
    return "\n\n".join(
        [
            table(header, rows),
            wrap(f"ours: {compared.coefficients}; of the {len(compared.uses)} experiments: {fits}"),
            wrap(
                "ITL: against what its publisher took for true: the reported ITL, half the true gap (step-model "
                "studies), or the gap by re-tokenised lengths (the others); true gap: against (E2E - TTFT) / "
                "(output tokens - 1) with the lengths that were decoded"
            ),
        ]
    )


def _cells(errors: Sequence[Errors]) -> list[str]:
    means = [mean_abs(errors, column) for column in COLUMNS]
    return ["-" if mean is None else f"{100 * mean:,.1f}" for mean in means]


def published_json(compared: PublishedTable) -> dict[str, object]:
    """The same with every experiment; errors as signed fractions."""
    return {
        "coefficients": compared.coefficients,
        "coefficients_use": dict(compared.uses),
        "simulators": [
            {
                "name": row.name,
                "source": row.source,
                "itl_truth": row.itl_truth,
                "theirs": {slug: dict(errors) for slug, errors in row.theirs.items()},
                "ours": {slug: dict(errors) for slug, errors in row.ours.items()},
                "mean_abs_error": {
                    side: {column: mean_abs(list(errors.values()), column) for column in COLUMNS}
                    for side, errors in (("theirs", row.theirs), ("ours", row.ours))
                },
            }
            for row in compared.rows
        ],
    }


def published_frame(compared: PublishedTable) -> pl.DataFrame:
    """A row a simulator, experiment and number: ``theirs`` and ``ours``, signed fractions."""
    return pl.DataFrame(
        [
            {
                "simulator": row.name,
                "experiment": slug,
                "number": column,
                "theirs": errors[column],
                "ours": row.ours[slug].get(column),
            }
            for row in compared.rows
            for slug, errors in row.theirs.items()
            for column in COLUMNS
            if column in errors
        ],
        infer_schema_length=None,
    )
