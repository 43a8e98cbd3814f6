"""What a gate found: single checks, the judgement of an experiment, the report of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import GroundTruth
from blis_replay.validate.gating.policy import Policy

Outcome = Literal["pass", "fail", "not judged"]
Standing = Literal["gated", "overloaded", "fitted", "refused"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Check:
    """One thing that a gate judged; fractions of the observed value.

    ``rule``: ``recording``, ``release``, ``threshold``, ``capacity``, ``regression``, ``ranking`` or
    ``coverage``.
    ``experiment``: alias, or empty for the gate as a whole.  ``value``: the error
    (threshold) or the change of the absolute error (regression), with its ``interval``;
    ``limit``: what it was held against.  ``message``: one sentence with the numbers.
    """

    rule: str
    experiment: str
    metric: str
    statistic: str
    outcome: Outcome
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
class Judgement:
    """What a gate found of one experiment.

    ``standing``: ``gated``; ``overloaded``: judged by what was served only; ``fitted`` (its own latencies, under
    ``held_out_only``): shown and not gated; ``refused``: the release is not for it, or the recording
    not to be judged by.
    ``errors``: signed error by ``(metric, statistic)``, None where there is none.
    ``resampled``: ``recorded requests``, or ``simulated requests`` against published numbers.
    """

    slug: str
    alias: str
    model: str
    ground_truth: GroundTruth
    uses: str
    standing: Standing
    reason: str
    errors: dict[tuple[str, str], float | None]
    ordered: dict[str, Ordered]
    checks: tuple[Check, ...]
    requests: int = 0

    @property
    def outcome(self) -> Outcome | None:
        """The worst of its checks; None if it is not gated."""
        return None if self.standing == "fitted" else worst(self.checks)


def worst(checks: Sequence[Check]) -> Outcome:
    """``fail`` if one failed, else ``not judged`` if one could not be, else ``pass``."""
    outcomes = {check.outcome for check in checks}
    return "fail" if "fail" in outcomes else "not judged" if "not judged" in outcomes else "pass"


@dataclass(frozen=True)
class GateReport:
    """The answer of a gate.

    ``judgements``: in order of alias.  ``checks``: of the gate as a whole (ranking, coverage).
    ``left_out``: alias to reason, experiments that were not asked for by name and that the
    release is not about.
    """

    candidate: CoefficientRelease
    baseline: CoefficientRelease | None
    policy: Policy
    judgements: tuple[Judgement, ...]
    checks: tuple[Check, ...]
    left_out: dict[str, str]

    @property
    def all_checks(self) -> tuple[Check, ...]:
        """Those of the experiments, then those of the gate as a whole."""
        return (*(check for judgement in self.judgements for check in judgement.checks), *self.checks)

    @property
    def verdict(self) -> Outcome:
        """``fail`` if a check failed, else ``not judged`` if one could not be, else ``pass``."""
        return worst(self.all_checks)
