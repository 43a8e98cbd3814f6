"""How the coefficients of a release entry came about: a fit's record in YAML, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict

from blis_replay.blis.releases.step_range import StepRange
from blis_replay.strict.document import Number, Text

Status = Literal["fitted", "measured", "prior"]
Part = Literal["fit", "choose", "test"]
Scheduling = Literal["asynchronous", "synchronous"]
Told = Literal["asynchronous", "synchronous", "not told apart"]


@dataclass(frozen=True)
class CoefficientFit:
    """A coefficient in us (per token), its bounds of 95 %, and where it comes from.

    ``status``: ``fitted``; ``measured`` (stamps show it); ``prior`` (the recordings do not
    determine it; bounds equal the value).  ``remark``: why, or from what.
    """

    name: Text
    value_us: Number
    low_us: Number
    high_us: Number
    status: Status
    remark: Text


@dataclass(frozen=True)
class PartScore:
    """Signed errors (fractions) of a part of an experiment, by arrival: ``window`` is its share of the run.

    ``errors``: ``e2e``, ``ttft``, ``itl`` of the mean, ``e2e_p99`` and ``ttft_p99``.
    """

    experiment: str
    part: Part
    window: tuple[float, float]
    requests: int
    errors: Mapping[str, float]


@dataclass(frozen=True)
class FitRecord:
    """``form`` of the step time, shares of the runs used (``fitted_until``, ``chosen_until``), and what came out.

    The form was chosen by what it scored from ``fitted_until`` to ``chosen_until``, after a fit to what
    is before; then it was fitted to all before ``chosen_until``.  ``scheduling``: the mode of the engine
    that was fitted with; ``scheduling_told``: what the latencies tell, with the evidence in words.  ``steps``: the
    range of the steps fitted on, None in older releases.
    """

    form: str
    fitted_until: float
    chosen_until: float
    scheduling: Scheduling
    scheduling_told: Told
    scheduling_evidence: str
    coefficients: tuple[CoefficientFit, ...]
    scores: tuple[PartScore, ...]
    steps: StepRange | None = None


class _ScoreText(Struct, frozen=True, rename={"begin": "from"}):
    experiment: Text
    part: Part
    begin: Number
    until: Number
    requests: int
    errors: dict[str, Number]


class FitText(Struct, frozen=True):
    """The record as it is written in a release."""

    form: Text
    fitted_until: Number
    chosen_until: Number
    scheduling: Scheduling
    scheduling_told: Told
    scheduling_evidence: Text
    coefficients: tuple[CoefficientFit, ...]
    scores: tuple[_ScoreText, ...]
    steps: StepRange | None = None

    def record(self) -> FitRecord:
        """What it stands for."""
        scores = (PartScore(s.experiment, s.part, (s.begin, s.until), s.requests, s.errors) for s in self.scores)
        return FitRecord(**(asdict(self) | {"scores": tuple(scores)}))


def fit_text(record: FitRecord) -> FitText:
    """The record as it is written."""
    scores = (_ScoreText(s.experiment, s.part, *s.window, s.requests, dict(s.errors)) for s in record.scores)
    return FitText(**(vars(record) | {"scores": tuple(scores)}))
