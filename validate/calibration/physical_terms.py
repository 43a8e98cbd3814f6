"""Which costs of the physical model carry to a model never seen: each left out in turn, models left out in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from blis_replay.blis.architecture import Architecture
from blis_replay.blis.physical import COEFFICIENT_NAMES
from blis_replay.replay.executor_ledger import Progress
from blis_replay.replay.executors import ExecutorName
from blis_replay.validate.calibration.generalize import Case, generalize
from blis_replay.validate.calibration.physical_fit import PRIORS, Prior

# The weights are most of a step: without them the other costs would only stand in for them.
TERMS = tuple(name for name in COEFFICIENT_NAMES if name != "weight_read")
_NONE = Prior(0.0, 1e-9, "left out")


def without_terms(
    cases: Sequence[Case],
    architectures: Mapping[str, Architecture],
    terms: Sequence[str] = TERMS,
    *,
    executor: ExecutorName = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """A row a term and experiment of the model left out: ``term`` (null: all are there), ``left_out``, ``alias``,
    ``overloaded``, and ``e2e``, ``ttft``: signed errors of the mean in fractions, null where there is none.

    Raises as ``generalize`` does.
    """
    rows = []
    for done, term in enumerate([None, *terms]):
        priors = PRIORS if term is None else {**PRIORS, term: _NONE}
        result = generalize(
            cases, "model", "physical", architectures, priors=priors, executor=executor, workers=workers
        )
        for fold in result.folds:
            for score in fold.scores:
                row: dict[str, object] = {"term": term, "left_out": fold.name, "alias": score.alias}
                row["overloaded"] = score.overloaded
                rows.append(row | {metric: score.errors.get(metric, {}).get("mean") for metric in ("e2e", "ttft")})
        if progress is not None:
            progress(done + 1, len(terms) + 1)
    return pl.DataFrame(rows, infer_schema_length=None)
