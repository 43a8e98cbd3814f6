"""Gate policies: what a coefficient release must show before it is used (docs/gating.md).

A policy is a YAML text under version control, read as strictly as a release: an unknown
field, a percentage without its sign, a metric that does not exist are refused.  Every
field but ``schema`` may be left out, and has then the default of the design (section 7).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from blis_replay.blis.release_fields import Fields
from blis_replay.replay.release_file import page_of_text
from blis_replay.validate.comparison.compare import THRESHOLDS
from blis_replay.validate.comparison.resampling import resamplable
from blis_replay.validate.errors import PolicyError
from blis_replay.validate.metrics import METRICS, STATISTICS

SCHEMA = "blis-replay/gate-policy/1"
DEFAULT_NAME = "default"

Limits = dict[tuple[str, str], float]

_MEANS: Limits = {(metric, "mean"): limit for metric, limit in THRESHOLDS.items()}
_PERCENT = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*")


@dataclass(frozen=True)
class Regression:
    """When a candidate is worse than the baseline.

    ``cells``: ``(metric, statistic)`` judged; ``margin``: by how much, as a fraction of the
    observed value, the absolute error may grow; ``confidence`` of the interval whose lower
    end must not be beyond the margin.
    """

    cells: tuple[tuple[str, str], ...] = tuple(_MEANS)
    margin: float = 0.005
    confidence: float = 0.95


@dataclass(frozen=True)
class Ranking:
    """Which order between experiments the simulator must keep.

    ``metrics``: those whose p99 is ordered; ``tolerance``: observed p99s that differ by
    less than this fraction of the smaller have no order.
    """

    metrics: tuple[str, ...] = ("e2e", "ttft")
    tolerance: float = 0.05


@dataclass(frozen=True)
class Coverage:
    """What must have been judged: at least so many experiments, and one of each of these models."""

    experiments: int = 1
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class Policy:
    """A gate policy; fractions, not percentages.

    ``thresholds``: largest absolute error by ``(metric, statistic)``.  ``held_out_only``:
    experiments whose own latencies the release was fitted on are shown and not gated.
    ``sha256``: of the policy's text, empty for the default.
    """

    name: str = DEFAULT_NAME
    thresholds: Limits = field(default_factory=lambda: dict(_MEANS))
    regression: Regression = Regression()
    ranking: Ranking = Ranking()
    coverage: Coverage = Coverage()
    held_out_only: bool = False
    sha256: str = ""

    @property
    def gated(self) -> tuple[tuple[str, str], ...]:
        """Each ``(metric, statistic)`` that an experiment must have to be judged by itself."""
        return tuple(dict.fromkeys((*self.thresholds, *self.regression.cells)))


class _PolicyFields(Fields):
    document = "a gate policy"
    error = PolicyError


def load_policy(path: Path | None) -> Policy:
    """The policy of a file, the default one for None.  Raises ``PolicyError`` naming file and field."""
    return Policy() if path is None else parse_policy(page_of_text(path, "a gate policy", PolicyError), str(path))


def parse_policy(text: str, origin: str) -> Policy:
    """Read a policy from its YAML text; ``origin`` names it in errors.

    Raises ``PolicyError`` naming the field and what is wrong with it.
    """
    top = _PolicyFields.of_yaml(text, origin)
    if top.text("schema") != SCHEMA:
        top.refuse("schema", f"is not {SCHEMA!r}", "this program reads no other")
    policy = Policy(
        name=top.text("name") if "name" in top.values else Path(origin).stem,
        thresholds=_thresholds(top),
        regression=_regression(top),
        ranking=_ranking(top),
        coverage=_coverage(top),
        held_out_only=_switch(top, "held_out_only"),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
    top.refuse_unknown()
    return policy


def _thresholds(top: _PolicyFields) -> Limits:
    if "thresholds" not in top.values:
        return dict(_MEANS)
    limits: Limits = {}
    by_metric = top.mapping("thresholds")
    for metric in by_metric.values:
        _known(by_metric, metric, METRICS)
        cells = by_metric.mapping(metric)
        for statistic in cells.values:
            _known(cells, statistic, STATISTICS)
            limits[metric, statistic] = _percent(cells, statistic)
    return limits


def _regression(top: _PolicyFields) -> Regression:
    fields, default = top.mapping("regression", optional=True), Regression()
    cells = default.cells
    if "cells" in fields.values:
        cells = tuple(_cell(fields, text) for text in _words(fields, "cells"))
    regression = Regression(
        cells=cells,
        margin=_percent(fields, "margin") if "margin" in fields.values else default.margin,
        confidence=_percent(fields, "confidence") if "confidence" in fields.values else default.confidence,
    )
    if not 0.5 <= regression.confidence < 1:
        fields.refuse("confidence", "is not within 50 % and 100 %", "write e.g. 95 %")
    fields.refuse_unknown()
    return regression


def _cell(fields: _PolicyFields, text: str) -> tuple[str, str]:
    metric, _, statistic = text.partition(" ")
    if metric not in METRICS or statistic not in STATISTICS:
        fields.refuse("cells", f"names {text!r}", f"write e.g. e2e mean: {', '.join(METRICS)}; {', '.join(STATISTICS)}")
    if not resamplable((metric, statistic)):
        fields.refuse("cells", f"names {text!r}, of which requests cannot be resampled", "use itl mean, or tpot")
    return metric, statistic


def _ranking(top: _PolicyFields) -> Ranking:
    fields, default = top.mapping("ranking", optional=True), Ranking()
    metrics = _words(fields, "metrics") if "metrics" in fields.values else default.metrics
    for metric in metrics:
        if metric not in METRICS:
            fields.refuse("metrics", f"names {metric!r}", f"use some of {', '.join(METRICS)}, or []")
    tolerance = _percent(fields, "tolerance") if "tolerance" in fields.values else default.tolerance
    fields.refuse_unknown()
    return Ranking(metrics, tolerance)


def _coverage(top: _PolicyFields) -> Coverage:
    fields, default = top.mapping("coverage", optional=True), Coverage()
    experiments = fields.values.get("experiments", default.experiments)
    fields.seen.add("experiments")
    if not isinstance(experiments, int) or isinstance(experiments, bool) or not 1 <= experiments <= 1_000_000:
        fields.refuse("experiments", "is no positive whole number", "write e.g. 4")
    models = _words(fields, "models") if "models" in fields.values else default.models
    fields.refuse_unknown()
    return Coverage(experiments, models)


def _known(fields: _PolicyFields, name: str, names: tuple[str, ...]) -> None:
    fields.seen.add(name)
    if name not in names:
        fields.refuse(name, "does not exist", f"use one of {', '.join(names)}")


def _percent(fields: _PolicyFields, name: str) -> float:
    """A percentage with its sign, as a fraction."""
    fields.seen.add(name)
    value = fields.values.get(name)
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        fields.refuse(name, "is no percentage", "write e.g. 10 %")
    return float(match[1]) / 100


def _words(fields: _PolicyFields, name: str) -> tuple[str, ...]:
    fields.seen.add(name)
    values = fields.values[name]
    if not isinstance(values, list) or not all(isinstance(value, str) and value.strip() for value in values):
        fields.refuse(name, "is no list of words", "write e.g. [a, b]")
    return tuple(dict.fromkeys(values))


def _switch(top: _PolicyFields, name: str) -> bool:
    top.seen.add(name)
    value = top.values.get(name, False)
    if not isinstance(value, bool):
        top.refuse(name, "is neither true nor false", "write one of them")
    return value
