"""Gate policies: what a coefficient release must show before it is used (docs/release-in-ci.md), and what a gate found.

A policy is a YAML text under version control, read as strictly as a release: an unknown
field, a percentage without its sign, a metric that does not exist are refused.  Every
field but ``schema`` may be left out, and has then the default of the design (section 7).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from blis_replay.base.document import PERCENT, FieldError, Percentage, Text, read_yaml
from blis_replay.base.errors import PolicyError
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import GroundTruth
from blis_replay.replay.release_file import page_of_text
from blis_replay.validate.judgement import Judgement, Verdict, worst
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, THRESHOLDS, Metric, Statistic, of_requests
from blis_replay.validate.metrics.uncertainty import Estimate

DEFAULT_NAME = "default"

Limits = dict[tuple[str, str], float]

_MEANS: Limits = {(metric, "mean"): limit for metric, limit in THRESHOLDS.items()}
# No error is within 0 %, and reports state errors as multiples of their limits.
Limit = Annotated[float, Meta(gt=0, lt=1e4, extra=PERCENT)]
Confidence = Annotated[float, Meta(ge=0.5, lt=1, extra=PERCENT)]


@dataclass(frozen=True)
class Regression:
    """When a candidate is worse than the baseline.

    ``cells``: what is judged, as ``e2e mean``; ``margin``: by how much, as a fraction of the observed value, the
    absolute error may grow; ``confidence``: of the interval of the change.
    """

    cells: tuple[str, ...] = tuple(map(" ".join, _MEANS))
    margin: Percentage = 0.005
    confidence: Confidence = 0.90

    def __post_init__(self) -> None:
        for text, (metric, statistic) in zip(self.cells, map(_number, self.cells), strict=True):
            if metric not in METRICS or statistic not in STATISTICS:
                known = f"{', '.join(METRICS)}; {', '.join(STATISTICS)}"
                raise FieldError("cells", f"names {text!r}", f"write e.g. e2e mean: {known}")
            if not of_requests((metric, statistic)):
                raise FieldError("cells", f"names {text!r}, which cannot be resampled", "use itl mean, or tpot")

    @property
    def numbers(self) -> tuple[tuple[str, str], ...]:
        """``(metric, statistic)`` of the cells, each once."""
        return tuple(dict.fromkeys(map(_number, self.cells)))

    def verdict(self, change: Estimate) -> Verdict:
        """FAIL: the whole interval is worse, and the change beyond the margin; PASS: at most the margin, all of it."""
        if change.low > 0 and change.error > self.margin:
            return "FAIL"
        return "PASS" if change.high <= self.margin else "UNDECIDED"


def _number(text: str) -> tuple[str, str]:
    metric, _, statistic = text.partition(" ")
    return metric, statistic


@dataclass(frozen=True)
class Ranking:
    """Which order between experiments the simulator must keep.

    ``metrics``: those whose p99 is ordered; ``tolerance``: observed p99s that differ by
    less than this fraction of the smaller have no order.
    """

    metrics: tuple[Metric, ...] = ("e2e", "ttft")
    tolerance: Percentage = 0.05


@dataclass(frozen=True)
class Coverage:
    """What must have been judged: the least number of experiments, and models with at least one each."""

    experiments: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    models: tuple[Text, ...] = ()


@dataclass(frozen=True)
class Policy:
    """A gate policy; fractions, not percentages.

    ``thresholds``: largest absolute error by ``(metric, statistic)``, None: the usual ones of each metric that a
    recording states.  ``held_out_only``: experiments that are not held out are shown and not gated.  ``sha256``: of the
    policy's text, empty for the default.
    """

    name: str = DEFAULT_NAME
    thresholds: Limits | None = None
    regression: Regression = Regression()
    ranking: Ranking = Ranking()
    coverage: Coverage = Coverage()
    held_out_only: bool = True
    sha256: str = ""

    @property
    def limits(self) -> Limits:
        """``thresholds``, or the usual ones."""
        return _MEANS if self.thresholds is None else self.thresholds


class _PolicyText(Struct, frozen=True):
    schema: Literal["blis-replay/gate-policy/1"]
    name: Text | None = None
    thresholds: dict[Metric, dict[Statistic, Limit]] | None = None
    regression: Regression = Regression()
    ranking: Ranking = Ranking()
    coverage: Coverage = Coverage()
    held_out_only: bool = True


def load_policy(path: Path | None) -> Policy:
    """The policy of a file, the default one for None.  Raises ``PolicyError`` naming file and field."""
    return Policy() if path is None else parse_policy(page_of_text(path, "a gate policy", PolicyError), str(path))


def parse_policy(text: str, origin: str) -> Policy:
    """Read a policy from its YAML text; ``origin`` names it in errors.

    Raises ``PolicyError`` naming the field and what is wrong with it.
    """
    given = read_yaml(text, _PolicyText, origin, "a gate policy", PolicyError)
    limits = None if given.thresholds is None else given.thresholds.items()
    return Policy(
        name=given.name or Path(origin).stem,
        thresholds=None if limits is None else {(m, s): limit for m, row in limits for s, limit in row.items()},
        regression=given.regression,
        ranking=Ranking(tuple(dict.fromkeys(given.ranking.metrics)), given.ranking.tolerance),
        coverage=given.coverage,
        held_out_only=given.held_out_only,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


Standing = Literal["gated", "overloaded", "not held out", "refused"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Check:
    """One thing that a gate judged; fractions of the observed value.

    ``rule``: ``recording``, ``release``, ``threshold``, ``capacity``, ``held out``, ``regression``, ``ranking`` or
    ``coverage``.  ``experiment``: alias, or empty for the gate as a whole.  ``value``: the error (threshold) or the
    change of the absolute error (regression), with its ``interval``; ``limit``: what it was held against.
    ``message``: one sentence with the numbers.
    """

    rule: str
    experiment: str
    metric: str
    statistic: str
    outcome: Verdict
    message: str
    value: float | None = None
    limit: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class Ordered:
    """The p99 of an experiment for the ranking, us: observed with the interval of its resamples, and simulated.

    ``observed_us`` is None where the recording has none, ``unusable`` the reason where it must not be used.
    """

    observed_us: float | None
    simulated_us: float | None
    interval_us: Interval | None = None
    unusable: str | None = None


@dataclass(frozen=True)
class Gated:
    """What a gate found of one experiment.

    ``judgement``: as ``validate`` has it, with the limits of the policy; None where the release cannot replay it.
    ``standing``: ``gated``; ``overloaded``: judged by what was served only; ``not held out`` (under
    ``held_out_only``): shown and not gated; ``refused``: the release is not for it.
    """

    slug: str
    alias: str
    model: str
    ground_truth: GroundTruth
    judgement: Judgement | None = None
    standing: Standing = "refused"
    reason: str = ""
    ordered: dict[str, Ordered] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()

    @property
    def outcome(self) -> Verdict | None:
        """The worst of its judgement and its checks; None if it is not gated."""
        if self.standing == "not held out":
            return None
        judged = [] if self.judgement is None else [self.judgement.verdict]
        return worst([*judged, *(check.outcome for check in self.checks)])


@dataclass(frozen=True)
class GateReport:
    """The answer of a gate.

    ``judgements``: in order of alias.  ``checks``: of the gate as a whole (ranking, coverage).
    ``left_out``: alias to reason, experiments that were not asked for by name and that the
    release is not about, and copies.
    """

    candidate: CoefficientRelease
    baseline: CoefficientRelease | None
    policy: Policy
    judgements: tuple[Gated, ...]
    checks: tuple[Check, ...]
    left_out: dict[str, str]

    @property
    def all_checks(self) -> tuple[Check, ...]:
        """Those of the experiments, then those of the gate as a whole."""
        return (*(check for judgement in self.judgements for check in judgement.checks), *self.checks)

    @property
    def verdict(self) -> Verdict:
        """The worst of the experiments that are gated, and of the checks of the gate as a whole."""
        outcomes = [judgement.outcome for judgement in self.judgements if judgement.outcome is not None]
        return worst([*outcomes, *(check.outcome for check in self.checks)])
