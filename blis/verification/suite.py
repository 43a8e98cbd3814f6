"""All checks, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from blis_replay.blis.verification.conservation import check_conservation, check_limits, check_liveness, check_overload
from blis_replay.blis.verification.invariants import check_admission, check_causality, check_determinism, check_driving
from blis_replay.blis.verification.phases import LLAMA_8B_TP2, SECOND_SET, check_phases
from blis_replay.blis.verification.queueing import Effort, calibration_rows, check_shortfalls, check_waits
from blis_replay.blis.verification.workloads import VerificationRow, scenarios

Check = Callable[[], list[VerificationRow]]

# The wait varies more the busier the server is, so there are more replications.
FULL = Effort((60, 60, 60, 300), 5_000, 0.08), Effort((60, 60, 60, 60), 5_000, 0.02)
QUICK = Effort((20, 20, 20, 120), 2_000, 0.5), Effort((10, 10, 10, 10), 2_000, 0.2)
# Where beta is scaled down the interval is narrow anyhow.
SCALED = Effort((15, 15, 15, 15), 5_000, 0.02)
_REQUESTS = {True: 60, False: 400}


def checks(seed: int, quick: bool) -> list[tuple[str, Check]]:
    """Names and checks, each a function without arguments that gives its rows; ``quick`` makes them small."""
    chosen = scenarios(seed, _REQUESTS[quick])
    waits, shortfalls = QUICK if quick else FULL
    efforts = {1.0: shortfalls, 0.1: shortfalls if quick else SCALED, 0.01: shortfalls if quick else SCALED}
    return [
        ("conservation", lambda: [check_conservation(chosen)]),
        ("determinism", lambda: [check_determinism(chosen)]),
        ("liveness", lambda: [check_liveness(chosen)]),
        ("overload", lambda: [check_overload(seed, _REQUESTS[quick], mode) for mode in (False, True)]),
        ("causality", lambda: [check_causality(chosen), check_admission(chosen)]),
        ("limits", lambda: check_limits(chosen)),
        ("driving", lambda: check_driving(chosen, seed)),
        ("phases", lambda: [*check_phases(LLAMA_8B_TP2), *check_phases(SECOND_SET)]),
        ("calibration", lambda: calibration_rows(LLAMA_8B_TP2)),
        ("waits", lambda: check_waits(LLAMA_8B_TP2, waits, seed)),
        *(
            (f"shortfalls, beta x {scale:g}", partial(check_shortfalls, LLAMA_8B_TP2, scale, effort, seed))
            for scale, effort in efforts.items()
        ),
    ]


def verify(
    seed: int, quick: bool, progress: Callable[[int, int, str], None] | None = None
) -> Iterator[VerificationRow]:
    """Run all checks; ``progress`` is told before each: how many are done, of how many, and its name."""
    chosen = checks(seed, quick)
    for done, (name, check) in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), name)
        yield from check()
