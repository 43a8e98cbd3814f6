"""One server with one sequence at a time against M/M/1 (``blis/verification/queueing.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from blis_replay.blis.verification.phases import CoefficientSet
from blis_replay.blis.verification.queueing import calibrate, mm1_wait_us, simulate_waits, wait_interval
from blis_replay.validate.studies.study import System

MEASURES = (
    *("zero_load_e2e_ms", "step_total_ms", "wait_ms", "below_e2e_mm1_percent", "off_step_mm1_percent"),
    *("nominal_utilization", "effective_utilization", "late_starts"),
)


@dataclass(frozen=True)
class QueueRun:
    """A nominal utilisation (rate times zero-load E2E), coefficients scaled, and how much is simulated.

    ``surplus_step``: the latency at zero load bills one step more than there is, as published figures do.
    """

    nominal_utilization: Annotated[float, Meta(gt=0, lt=1)]
    beta_scale: Annotated[float, Meta(gt=0, le=1)]
    replications: Annotated[int, Meta(ge=2, le=10_000)]
    arrivals: Annotated[int, Meta(ge=100, le=1_000_000)]
    alpha: bool = False
    surplus_step: bool = False


def run(described: QueueRun, system: System | None, seed: int) -> Mapping[str, float]:
    """All of ``MEASURES`` by name.

    ``step_total_ms``: the server's part of a request alone, of 128 outputs.  ``below_e2e_mm1_percent``: how far the
    mean wait is below M/M/1 with the mean time at the client as service time; ``off_step_mm1_percent``: how far it is
    from M/M/1 with the server's part.  ``effective_utilization``: arrival rate times the server's part.
    """
    if system is None:
        raise ValueError("a queue needs the coefficients of a system")
    chosen = _scaled(system.coefficients, described)
    calibration = calibrate(chosen)
    surplus_us = calibration.surplus_us if described.surplus_step else 0
    rate = described.nominal_utilization / (calibration.e2e_us + surplus_us)
    stream = [seed, round(described.nominal_utilization * 1000), round(described.beta_scale * 1000), described.alpha]
    waits = simulate_waits(chosen, rate, calibration.server_us, described.replications, described.arrivals, stream)
    wait_us, server_us = wait_interval(waits, rate).mean, float(waits.server_us.mean())
    believed_us = mm1_wait_us(rate, float(waits.e2e_less_wait_us.mean()) + surplus_us)
    return {
        "zero_load_e2e_ms": (calibration.e2e_us + surplus_us) / 1000,
        "step_total_ms": calibration.server_us / 1000,
        "wait_ms": wait_us / 1000,
        "below_e2e_mm1_percent": 100 * (1 - wait_us / believed_us),
        "off_step_mm1_percent": 100 * (wait_us / mm1_wait_us(rate, server_us) - 1),
        "nominal_utilization": described.nominal_utilization,
        "effective_utilization": rate * server_us,
        "late_starts": float(waits.late_starts),
    }


def _scaled(chosen: CoefficientSet, described: QueueRun) -> CoefficientSet:
    before, per_prefill, per_decode = (round(described.beta_scale * value, 3) for value in chosen.beta_us)
    alpha = chosen.alpha_us if described.alpha else (0.0, 0.0, 0.0)
    return CoefficientSet(chosen.name, alpha, (before, per_prefill, per_decode))
