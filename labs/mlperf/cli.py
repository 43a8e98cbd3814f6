"""The verb ``blis-replay study mlperf``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from blis_replay.base.errors import ReplayError
from blis_replay.ingest.tables import Cell, Column, Number, Table, columns_named, table_of
from blis_replay.validate.cli.answers import print_answer
from blis_replay.validate.cli.options import verb
from blis_replay.validate.cli.progress import progress_line
from blis_replay.validate.comparison.overview import mean_abs
from blis_replay.validate.text.answer import Answer, Block, Part
from blis_replay_labs.mlperf.loadgen import METRICS, STATISTICS, Run, each_run
from blis_replay_labs.mlperf.prediction import (
    Case,
    NotPredictedError,
    Predicted,
    Sites,
    predicted,
    read_submissions,
    sites_of,
)

_BUNDLED = Path(__file__).with_name("submissions.yaml")
_SHOWN = ("mean", "p50.00", "p99.00")
_HEADINGS = ("mean", "p50", "p99")
_FITTED = tuple(f"fit {name}" for name in _HEADINGS)
_SIGNED, _PERCENT, _MS = Number(1, 100, signed=True), Number(1, 100), Number(1, 1e-3)
_RUNS = (
    Column("run", Number()),
    Column("submitter", "text", wide=1),
    *columns_named("GPU", "model", "scenario", kind="text"),
    Column("rate/s", Number(1)),
    Column("factor", Number(2)),
    Column("of run", Number()),
)
_ERRORS = (
    Column("run", Number()),
    Column("metric", "text"),
    *columns_named("audited ms", "simulated", kind=_MS),
    *(Column(name, _SIGNED, wide=int("p50" in name)) for name in (*_HEADINGS, *_FITTED)),
)
_MEANS = (
    *columns_named("GPU", "model", "metric", kind="text"),
    Column("runs", Number()),
    *(Column(name, _PERCENT, wide=int("p50" in name)) for name in (*_HEADINGS, *_FITTED)),
)
_SITES = (
    Column("runs", Number()),
    *columns_named("GPU", "model", "scenario", kind="text"),
    *columns_named("TPOT", "E2E", "TTFT", kind=_PERCENT),
)
_ORDER = ("tpot", "e2e", "ttft")


@verb("mlperf")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--submissions",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=_BUNDLED,
    show_default="those of v5.1 that say enough",
    help="Engine arguments, replicas, model and lengths of runs (YAML).",
)
@click.option("--framework", default="vllm", show_default=True, help="Runs whose framework has this word.")
def mlperf_verb(files: tuple[Path, ...], submissions: Path, framework: str) -> int:
    """Predict MLPerf's audited runs, and count those that cannot be.

    FILES: LoadGen's detail or summary logs, or tables of results with a row per run.
    Arrivals are rebuilt from the published seed. Each run is simulated with measured
    operator times (`pip install 'blis-replay-labs[silicon]'`), nothing fitted, and again
    with these times scaled to the mean TPOT of another run on the same GPU.

    \b
    Examples:
      blis-replay study mlperf v4.1.csv.gz v5.1.csv.gz
      blis-replay study mlperf mlperf_log_detail.txt --submissions mine.yaml
    """
    known = read_submissions(submissions)
    runs = [run for run in each_run(files) if framework.lower() in run.facts.get("framework", framework).lower()]
    if not runs:
        raise ReplayError(f"no run on {framework}; name another with --framework")
    cases: list[Case] = []
    refused: list[tuple[Run, str]] = []
    for run in runs:
        try:
            cases.append(Case(run, known))
        except NotPredictedError as error:
            refused.append((run, str(error)))
    with progress_line("simulating"):
        found = predicted(cases)
    return print_answer(mlperf_answer(found, refused, sites_of(runs)))


def mlperf_answer(found: Sequence[Predicted], refused: Sequence[tuple[Run, str]], sites: Sequence[Sites]) -> Answer:
    """Predictions beside audited latencies, mean absolute errors of single nodes, sites, and what was not predicted."""
    numbers = {id(one.case): i for i, one in enumerate(found, 1)}
    reasons = Counter(reason for _, reason in refused)
    stated = dict.fromkeys(
        f"{one.case.submission.workload}: prompts {one.case.workload.prompt}; answers {one.case.workload.output}. "
        f"{one.case.workload.source}"
        for one in found
    )
    tables = [
        Table("runs", _RUNS, [_run_row(one, numbers) for one in found]),
        Table(
            "latencies", _ERRORS, [_error_row(one, numbers[id(one.case)], metric) for one in found for metric in _ORDER]
        ),
        Table("mean absolute error of runs on one node, %", _MEANS, mean_rows(found)),
        Table("sites with the same machine and software: largest mean over smallest, %", _SITES, _site_rows(sites)),
    ]
    page: list[Part] = [
        f"{len(found)} of {len(found) + len(refused)} runs predicted. Signed errors in %. Without a fit operator times "
        "are as measured; fit: times the factor that gives another run on the same GPU its mean TPOT.",
        *(table for table in tables if table.rows),
        Block(
            [f"{count} run{'s' * (count > 1)}: {reason}" for reason, count in reasons.most_common()], "not predicted"
        ),
        Block([*stated, "KV cache: unlimited where no num_gpu_blocks is stated."], "stated, not recorded"),
    ]
    document = {
        "predicted": len(found),
        "not_predicted": dict(reasons.most_common()),
        "lengths": list(stated),
        "sites": [{"path": [run.path for run in s.runs], **{m: s.spread(m) for m in METRICS}} for s in sites],
        "mean_abs_error": [dict(zip((c.name for c in _MEANS), row, strict=True)) for row in mean_rows(found)],
    }
    return Answer(page, document, table_of([_record(one, m, s) for one in found for m in METRICS for s in STATISTICS]))


def mean_rows(found: Sequence[Predicted]) -> list[list[Cell]]:
    """Mean absolute errors (fractions) by GPU, model and metric: as measured, then fitted; of runs on one node."""
    single = [one for one in found if one.case.run.facts.get("nodes") in (None, "", "1")]
    rows: list[list[Cell]] = []
    for gpu, model in dict.fromkeys((one.case.gpu, one.case.submission.model) for one in single):
        alike = [one for one in single if (one.case.gpu, one.case.submission.model) == (gpu, model)]
        for metric in _ORDER:
            errors = [[one.error(metric, s, fitted=fit) for one in alike] for fit in (False, True) for s in _SHOWN]
            rows.append([gpu, model, metric.upper(), len(alike), *map(mean_abs, errors)])
    return rows


def _run_row(one: Predicted, numbers: dict[int, int]) -> list[Cell]:
    run, other = one.case.run, one.fitted_on
    return [
        numbers[id(one.case)],
        run.facts.get("submitter", ""),
        f"{run.devices} x {one.case.gpu}",
        one.case.submission.model,
        run.scenario,
        run.rate_per_s,
        one.factor,
        None if other is None else numbers[id(other)],
    ]


def _error_row(one: Predicted, number: int, metric: str) -> list[Cell]:
    audited = one.case.run.audited_us.get((metric, "mean"))
    errors = [one.error(metric, name, fitted=fitted) for fitted in (False, True) for name in _SHOWN]
    return [number, metric.upper(), audited, one.simulated_us[metric, "mean"], *errors]


def _site_rows(sites: Sequence[Sites]) -> list[list[Cell]]:
    return [
        [
            len(s.runs),
            *(s.runs[0].facts.get(name, "") for name in ("accelerator", "model")),
            s.runs[0].scenario,
            *(s.spread(metric) for metric in _ORDER),
        ]
        for s in sites
    ]


def _record(one: Predicted, metric: str, statistic: str) -> dict[str, str | float | None]:
    run = one.case.run
    return {
        "path": run.path,
        "gpu": one.case.gpu,
        "model": one.case.submission.model,
        "scenario": run.scenario,
        "metric": metric,
        "statistic": statistic,
        "audited_us": run.audited_us.get((metric, statistic)),
        "simulated_us": one.simulated_us[metric, statistic],
        "error": one.error(metric, statistic),
        "factor": one.factor,
        "fitted_on": None if one.fitted_on is None else one.fitted_on.run.path,
        "fitted_error": one.error(metric, statistic, fitted=True),
    }
