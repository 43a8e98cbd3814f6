"""The answer of a gate as JSON and as a frame: documented in docs/json.md, stable."""

from __future__ import annotations

import math

import polars as pl

from blis_replay.blis.release import CoefficientRelease
from blis_replay.validate.gating.policy import Policy
from blis_replay.validate.gating.verdicts import Check, GateReport, Judgement, Ordered


def gate_json(report: GateReport) -> dict[str, object]:
    """The whole answer; errors and limits as fractions, times in ms."""
    return {
        "verdict": report.verdict,
        "candidate": _release(report.candidate),
        "baseline": report.baseline and _release(report.baseline),
        "policy": _policy(report.policy),
        "experiments": [_judgement(judgement) for judgement in report.judgements],
        "checks": [_check(check) for check in report.checks],
        "left_out": report.left_out,
    }


def _release(release: CoefficientRelease) -> dict[str, object]:
    return {"coefficients": release.name, "coefficients_hash": release.sha256, "hardware": release.hardware}


def _policy(policy: Policy) -> dict[str, object]:
    return {
        "name": policy.name,
        "policy_hash": policy.sha256 or None,
        "thresholds": {f"{metric} {statistic}": limit for (metric, statistic), limit in policy.thresholds.items()},
        "regression": {
            "cells": [" ".join(cell) for cell in policy.regression.cells],
            "margin": policy.regression.margin,
            "confidence": policy.regression.confidence,
        },
        "ranking": {"metrics": list(policy.ranking.metrics), "tolerance": policy.ranking.tolerance},
        "coverage": {"experiments": policy.coverage.experiments, "models": list(policy.coverage.models)},
        "held_out_only": policy.held_out_only,
    }


def _judgement(judgement: Judgement) -> dict[str, object]:
    return {
        "slug": judgement.slug,
        "alias": judgement.alias,
        "model": judgement.model,
        "ground_truth": judgement.ground_truth,
        "requests": judgement.requests,
        "coefficients_use": judgement.uses,
        "standing": judgement.standing,
        "reason": judgement.reason,
        "outcome": judgement.outcome,
        "errors": {" ".join(cell): error for cell, error in judgement.errors.items()},
        "p99": {metric: _ordered(p99) for metric, p99 in judgement.ordered.items()},
        "checks": [_check(check) for check in judgement.checks],
    }


def _ordered(p99: Ordered) -> dict[str, object]:
    interval = p99.interval_us and [_ms(bound) for bound in p99.interval_us]
    return {
        "observed_ms": _ms(p99.observed_us),
        "simulated_ms": _ms(p99.simulated_us),
        "observed_interval_ms": interval,
    }


def _check(check: Check) -> dict[str, object]:
    return {
        "rule": check.rule,
        "experiment": check.experiment,
        "metric": check.metric,
        "statistic": check.statistic,
        "outcome": check.outcome,
        "value": check.value,
        "limit": check.limit,
        "interval": _interval(check),
        "message": check.message,
    }


def _interval(check: Check) -> list[float] | None:
    finite = check.interval is not None and all(map(math.isfinite, check.interval))
    return list(check.interval or ()) if finite else None


def _ms(value_us: float | None) -> float | None:
    return None if value_us is None else round(value_us / 1000, 6)


_COLUMNS = {
    **dict.fromkeys(("rule", "experiment", "metric", "statistic", "outcome"), pl.String),
    **dict.fromkeys(("value", "limit", "low", "high"), pl.Float64),
    "message": pl.String,
}


def checks_frame(report: GateReport) -> pl.DataFrame:
    """A row a check, of an experiment or of the gate as a whole (``experiment`` empty); fractions."""
    rows = []
    for check in report.all_checks:
        low, high = _interval(check) or (None, None)
        cell = (check.rule, check.experiment, check.metric, check.statistic, check.outcome)
        rows.append((*cell, check.value, check.limit, low, high, check.message))
    return pl.DataFrame(rows, orient="row", schema=_COLUMNS)
