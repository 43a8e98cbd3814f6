"""How far a simulated run is from the recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.recording import Finding
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.comparison.unusable import unusable_cells
from blis_replay.validate.errors import NothingToJudgeError, ValidateError
from blis_replay.validate.metrics import (
    METRICS,
    STATISTICS,
    LatencySamples,
    correlation,
    latency_statistics,
    paired_mape,
    relative_error,
)
from blis_replay.validate.observed import (
    Cells,
    Gaps,
    Selection,
    cells_from_aggregates,
    cells_from_requests,
    has_gaps,
    observed_requests,
    samples_of,
)

if TYPE_CHECKING:
    from blis_replay.validate.comparison.saturation import Saturation

_REQUESTS_ONLY = "the simulator reports requests only, no times of single tokens"

# Largest absolute error of the mean that passes (design, section 7).
THRESHOLDS = {"e2e": 0.10, "ttft": 0.15, "itl": 0.15}


@dataclass(frozen=True)
class Cell:
    """One number of the table: observed and simulated us, signed error as a fraction.

    ``observed_us`` and ``error`` are None, with a ``reason``, where the recording cannot
    give them, ``simulated_us`` and ``error`` where the simulator cannot; ``between_us`` are
    bounds of the observed value where it has only those.  ``unusable``: the instrument check
    that forbids the observed value, which is then None.
    """

    observed_us: float | None
    simulated_us: float | None
    error: float | None
    reason: str | None = None
    between_us: tuple[float, float] | None = None
    unusable: str | None = None


@dataclass(frozen=True)
class Pairing:
    """Request-by-request agreement of one metric: MAPE as a fraction, Pearson's r."""

    mape: float | None
    correlation: float | None


@dataclass(frozen=True)
class Comparison:
    """A recording against its replay.

    ``verdict``: ``pass``, ``fail``, ``overloaded`` (reported, not gated) or ``not judged``
    (no gated metric has an observed value) or ``unusable`` (a gated metric must not be used,
    and none of the others fails).  ``unusable``: those metrics, each with check and reason.
    ``uses``: what of this experiment the coefficients were fitted on: ``own steps``, ``own
    latencies``, ``held out``, or ``not stated`` by the release.
    ``excluded``: requests left out of the comparison, by reason.  ``saturation``: of a whole
    run that queues, or its recording does.
    """

    slug: str
    alias: str
    ground_truth: str
    requests: int
    excluded: dict[str, int]
    metrics: dict[str, dict[str, Cell]]
    paired: dict[str, Pairing]
    verdict: str
    failed_thresholds: tuple[str, ...]
    unusable: dict[str, str]
    uses: str
    findings: tuple[Finding, ...]
    selection: Selection
    run: ReplayRun
    saturation: Saturation | None = None


def compare(
    run: ReplayRun,
    findings: Sequence[Finding] = (),
    *,
    overloaded: bool = False,
    selection: Selection | None = None,
    token_gaps: Gaps | None = None,
) -> Comparison:
    """Compare a replay with its recording, over the requests that both finished.

    ``token_gaps``: observed pooled inter-token gaps of the selection, where recorded.
    Raises ``NothingToJudgeError`` if no request is left to compare, ``ValidateError`` for a
    window of published aggregates.
    """
    recording, selection = run.recording, selection or Selection()
    requests = recording.requests
    selected = selection.of(requests)
    recorded = observed_requests(recording)
    finished = run.simulated.completed & (requests["status"] == "ok").to_numpy()
    per_request = bool(recorded.any())
    compared = selected & finished & (recorded if per_request else np.ones(len(finished), np.bool_))
    if not compared.any() or not (per_request or recording.aggregates.height):
        raise NothingToJudgeError(
            f"{recording.slug}: no request that succeeded with recorded latencies in the selection, nothing to judge"
        )
    if per_request:
        observed = cells_from_requests(recording, samples_of(recording, compared), selection, token_gaps)
    else:
        if selection.window != (0.0, 1.0):
            raise ValidateError(
                f"{recording.slug}: published aggregates cover whole stages; use --by-stage, not --window"
            )
        observed = cells_from_aggregates(recording, selection.stage)
    simulated = simulated_samples(run, compared)
    metrics = _table(observed, simulated_statistics(run, simulated, compared), run.simulated.engine is None)
    forbidden = unusable_cells(findings, token_times=per_request and has_gaps(token_gaps))
    metrics = _refused(metrics, forbidden)
    unusable = {m: _said(forbidden[m, "mean"]) for m in THRESHOLDS if (m, "mean") in forbidden}
    failed = tuple(m for m, limit in THRESHOLDS.items() if abs(metrics[m]["mean"].error or 0.0) > limit)
    return Comparison(
        slug=recording.slug,
        alias=recording.alias,
        ground_truth=recording.ground_truth,
        requests=int(compared.sum()),
        excluded=_excluded(run, selected, recorded, finished, per_request),
        metrics=metrics,
        paired=_pairings(samples_of(recording, compared), simulated, forbidden) if per_request else {},
        verdict=_verdict(metrics, failed, unusable, overloaded),
        failed_thresholds=failed,
        unusable=unusable,
        uses=_uses(run),
        findings=tuple(findings),
        selection=selection,
        run=run,
    )


def simulated_samples(run: ReplayRun, chosen: NDArray[np.bool_]) -> LatencySamples:
    """Simulated client latencies of the chosen requests, in request order."""
    return LatencySamples(run.ttft_us[chosen], run.e2e_us[chosen], run.simulated.output_tokens[chosen])


class Judged(Protocol):
    """What a mean over experiments takes of each: its verdict and its table."""

    @property
    def verdict(self) -> str:
        """As ``Comparison.verdict``."""

    @property
    def metrics(self) -> Mapping[str, Mapping[str, Cell]]:
        """As ``Comparison.metrics``."""


def mean_abs_errors(comparisons: Sequence[Judged]) -> dict[str, float | None]:
    """Per metric, the mean over gated experiments of the absolute error of the mean."""
    gated = [c for c in comparisons if c.verdict in ("pass", "fail")]
    errors = {
        metric: [abs(e) for c in gated if (e := c.metrics[metric]["mean"].error) is not None] for metric in METRICS
    }
    return {metric: float(np.mean(values)) if values else None for metric, values in errors.items()}


def simulated_statistics(
    run: ReplayRun, samples: LatencySamples, chosen: NDArray[np.bool_]
) -> dict[str, dict[str, float]]:
    """Each metric's mean and quantiles in us for the chosen requests, whose ``samples`` these are; absent if none."""
    if run.simulated.engine is None:
        return latency_statistics(samples, None)
    gaps = run.token_gaps()
    return latency_statistics(samples, (gaps.gap_us, gaps.counts(chosen)))


def _table(observed: Cells, simulated: dict[str, dict[str, float]], without_tokens: bool) -> dict[str, dict[str, Cell]]:
    table: dict[str, dict[str, Cell]] = {}
    for metric in METRICS:
        table[metric] = {}
        for name in STATISTICS:
            seen, value = observed[metric][name], simulated[metric].get(name)
            reason = seen.reason
            if without_tokens and metric == "itl" and value is None:
                reason = f"{reason}; {_REQUESTS_ONLY}" if reason else _REQUESTS_ONLY
            table[metric][name] = Cell(
                seen.value_us, value, relative_error(seen.value_us, value), reason, seen.between_us
            )
    return table


def _refused(
    metrics: dict[str, dict[str, Cell]], forbidden: Mapping[tuple[str, str], Finding]
) -> dict[str, dict[str, Cell]]:
    """The table without the observed numbers that must not be used."""
    return {
        metric: {
            name: cell if (why := forbidden.get((metric, name))) is None else _refusal(cell, why)
            for name, cell in cells.items()
        }
        for metric, cells in metrics.items()
    }


def _refusal(cell: Cell, why: Finding) -> Cell:
    return Cell(None, cell.simulated_us, None, f"unusable: {_said(why)}", unusable=why.check)


def _said(finding: Finding) -> str:
    return f"{finding.check}: {finding.message}"


def _pairings(
    observed: LatencySamples, simulated: LatencySamples, forbidden: Mapping[tuple[str, str], Finding]
) -> dict[str, Pairing]:
    pairs = {
        "e2e": (observed.e2e_us, simulated.e2e_us),
        "ttft": (observed.ttft_us, simulated.ttft_us),
        "tpot": (observed.tpot_us, simulated.tpot_us),
    }
    return {
        metric: Pairing(None, None)
        if (metric, "mean") in forbidden
        else Pairing(paired_mape(*pair), correlation(*pair))
        for metric, pair in pairs.items()
    }


def _verdict(
    metrics: dict[str, dict[str, Cell]], failed: tuple[str, ...], unusable: Mapping[str, str], overloaded: bool
) -> str:
    if overloaded:
        return "overloaded"
    if unusable and not failed:
        return "unusable"
    if all(metrics[metric]["mean"].error is None for metric in THRESHOLDS):
        return "not judged"
    return "fail" if failed else "pass"


def _uses(run: ReplayRun) -> str:
    if not run.release.fitted_on:
        return "not stated"
    return {"steps": "own steps", "latencies": "own latencies", None: "held out"}[run.release.used(run.recording.slug)]


def _excluded(
    run: ReplayRun,
    selected: NDArray[np.bool_],
    recorded: NDArray[np.bool_],
    finished: NDArray[np.bool_],
    per_request: bool,
) -> dict[str, int]:
    failed = (run.recording.requests["status"] != "ok").to_numpy()
    counts = {
        "failed in the recording": int((selected & failed).sum()),
        "outside the selection": int((~selected).sum()),
        "without recorded latencies": int((selected & ~failed & ~recorded).sum()) if per_request else 0,
        "not finished by the simulator": int((selected & recorded & ~finished).sum()),
    }
    return {reason: count for reason, count in counts.items() if count}
