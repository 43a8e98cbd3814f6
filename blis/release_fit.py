"""How the coefficients of a release entry came about: a fit's record in YAML, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from blis_replay.blis.release_fields import Fields

Status = Literal["fitted", "measured", "prior"]
Part = Literal["fit", "choose", "test"]

_STATUSES: tuple[Status, ...] = ("fitted", "measured", "prior")
_PARTS: tuple[Part, ...] = ("fit", "choose", "test")
Scheduling = Literal["asynchronous", "synchronous"]
Told = Literal["asynchronous", "synchronous", "not told apart"]

_SCHEDULING: tuple[Scheduling, ...] = ("asynchronous", "synchronous")
_TOLD: tuple[Told, ...] = (*_SCHEDULING, "not told apart")


@dataclass(frozen=True)
class CoefficientFit:
    """A coefficient in us (per token), its bounds of 95 %, and where it comes from.

    ``status``: ``fitted``; ``measured`` (stamps show it); ``prior`` (the recordings do not
    determine it; bounds equal the value).  ``remark``: why, or from what.
    """

    name: str
    value_us: float
    low_us: float
    high_us: float
    status: Status
    remark: str


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
    that was fitted with; ``scheduling_told``: what the latencies tell, with the evidence in words.
    """

    form: str
    fitted_until: float
    chosen_until: float
    scheduling: Scheduling
    scheduling_told: Told
    scheduling_evidence: str
    coefficients: tuple[CoefficientFit, ...]
    scores: tuple[PartScore, ...]


def parse_fit(fields: Fields) -> FitRecord:
    """The record of a fit.  Raises ``ReleaseError`` naming the field."""
    record = FitRecord(
        form=fields.text("form"),
        fitted_until=fields.number("fitted_until"),
        chosen_until=fields.number("chosen_until"),
        scheduling=fields.choice("scheduling", _SCHEDULING),
        scheduling_told=fields.choice("scheduling_told", _TOLD),
        scheduling_evidence=fields.text("scheduling_evidence"),
        coefficients=tuple(_coefficient(item) for item in fields.list("coefficients")),
        scores=tuple(_score(item) for item in fields.list("scores")),
    )
    fields.refuse_unknown()
    return record


def format_fit(record: FitRecord) -> dict[str, object]:
    """The fields that ``parse_fit`` reads."""
    scores = [
        {
            "experiment": score.experiment,
            "part": score.part,
            "from": score.window[0],
            "until": score.window[1],
            "requests": score.requests,
            "errors": dict(score.errors),
        }
        for score in record.scores
    ]
    return {**vars(record), "coefficients": [vars(fit) for fit in record.coefficients], "scores": scores}


def _coefficient(fields: Fields) -> CoefficientFit:
    fit = CoefficientFit(
        name=fields.text("name"),
        value_us=fields.number("value_us"),
        low_us=fields.number("low_us"),
        high_us=fields.number("high_us"),
        status=fields.choice("status", _STATUSES),
        remark=fields.text("remark"),
    )
    fields.refuse_unknown()
    return fit


def _score(fields: Fields) -> PartScore:
    score = PartScore(
        experiment=fields.text("experiment"),
        part=fields.choice("part", _PARTS),
        window=(fields.number("from"), fields.number("until")),
        requests=round(fields.number("requests")),
        errors=fields.mapping("errors").numbers(),
    )
    fields.refuse_unknown()
    return score
