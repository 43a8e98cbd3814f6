"""All checks, in the order in which they are printed; here those of causes before effects and of equal outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np

from blis_replay.base.arrays import Bools
from blis_replay.blis.engine import simulate
from blis_replay.blis.kernel.state import NEVER
from blis_replay.blis.result import SimResult
from blis_replay_labs.verification.conservation import check_conservation, check_limits, check_liveness, check_overload
from blis_replay_labs.verification.theory import (
    LLAMA_8B_TP2,
    SECOND_SET,
    Effort,
    calibration_rows,
    check_phases,
    check_shortfalls,
    check_waits,
)
from blis_replay_labs.verification.workloads import (
    ENGINE,
    LATENCY,
    LIFECYCLE,
    Scenario,
    SlowLatency,
    VerificationRow,
    row_of_faults,
    scenarios,
)

_REQUESTS_WITH_TOKENS_CHECKED = 50

# -- Timestamps of requests and steps ---------------------------------------------------------


def causality_faults(result: SimResult) -> list[str]:
    """Timestamps of requests that are out of order, and steps that overlap or end before they begin."""
    admitted, served = result.scheduled_us >= 0, result.first_step >= 0
    completed = result.completed
    orders = [
        ("queued before it arrived", result.queued_us < result.arrival_us),
        ("scheduled before it queued", admitted & (result.scheduled_us < result.queued_us)),
        ("first token without being scheduled", served & ~admitted),
        ("first token not after it was scheduled", served & (result.first_token_us <= result.scheduled_us)),
        ("finished before its first token", completed & (result.finished_us < result.first_token_us)),
        ("completed without a first token", completed & ~served),
        ("latency to the client below that of the engine", completed & (result.e2e_us < result.ttft_us)),
    ]
    faults = [f"request {int(np.argmax(wrong))} {what}" for what, wrong in orders if wrong.any()]
    return faults + _step_order_faults(result) + _admission_step_faults(result) + _token_faults(result)


def late_admissions(result: SimResult) -> list[str]:
    """Requests not admitted by the first ``schedule()`` at or after queueing, where there is always room."""
    calls_us = result.steps["scheduled_us"]
    place = np.searchsorted(calls_us, result.queued_us)
    first_call_us = calls_us[np.minimum(place, len(calls_us) - 1)]
    late = result.scheduled_us != first_call_us
    return [f"request {i} was not admitted at the first schedule() after it queued" for i in np.flatnonzero(late)]


def check_causality(chosen: Sequence[Scenario]) -> VerificationRow:
    """Arrival <= queued <= scheduled < first token <= finished, token times ascend, steps never overlap."""
    faults: list[str] = []
    stamps = 0
    for scenario in chosen:
        result = simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)
        faults += [f"{scenario.name}: {text}" for text in causality_faults(result)]
        stamps += 5 * len(scenario.trace) + 3 * len(result.steps)
    return row_of_faults("causality", f"{len(chosen)} workloads", faults, f"{stamps:,} timestamps")


def check_admission(chosen: Sequence[Scenario]) -> VerificationRow:
    """With room for everybody, a request is admitted by the first ``schedule()`` at or after queueing."""
    faults: list[str] = []
    requests = 0
    for scenario in chosen:
        n = len(scenario.trace)
        tokens = int((scenario.trace.prompt_tokens + scenario.trace.output_tokens).sum())
        room = replace(
            ENGINE,
            async_scheduling=scenario.engine.async_scheduling,
            max_num_seqs=n,
            max_num_batched_tokens=tokens,
            num_gpu_blocks=n + 2 + tokens // ENGINE.block_size,
        )
        trace = replace(scenario.trace, abort_us=np.full(n, NEVER), block_keys=None)
        faults += [f"{scenario.name}: {text}" for text in late_admissions(simulate(trace, room, LATENCY, LIFECYCLE))]
        requests += n
    return row_of_faults(
        "admission without delay", f"{len(chosen)} workloads, room for all", faults, f"{requests:,} requests"
    )


def _step_order_faults(result: SimResult) -> list[str]:
    start, end, call = (result.steps[column] for column in ("start_us", "end_us", "scheduled_us"))
    orders: list[tuple[str, Bools]] = [
        ("ends before it begins", end <= start),
        ("begins before it is scheduled", start < call),
        ("overlaps the step before it", np.concatenate([[False], start[1:] < end[:-1]])),
        ("is scheduled before the step before it", np.concatenate([[False], np.diff(call) < 0])),
    ]
    return [f"step {int(np.argmax(wrong))} {what}" for what, wrong in orders if wrong.any()]


def _admission_step_faults(result: SimResult) -> list[str]:
    """A request is scheduled when the step that first held it was."""
    admitted = np.flatnonzero(result.scheduled_us >= 0)
    call_us = result.steps["scheduled_us"][result.scheduled_step[admitted]]
    wrong = admitted[call_us != result.scheduled_us[admitted]]
    return [f"request {wrong[0]} was scheduled at another time than its step"] if len(wrong) else []


def _token_faults(result: SimResult) -> list[str]:
    """Token times of a sample of requests: ascending, as many as tokens, first and last where they should be."""
    completed = np.flatnonzero(result.completed)
    sample = completed[:: max(1, len(completed) // _REQUESTS_WITH_TOKENS_CHECKED)]
    faults = []
    for i in sample.tolist():
        times_us = result.token_times_us(i)
        ends = (int(result.first_token_us[i]), int(result.finished_us[i]))
        sound = len(times_us) == result.output_tokens[i] and (int(times_us[0]), int(times_us[-1])) == ends
        if not sound or (np.diff(times_us) <= 0).any():
            faults.append(f"request {i}: its token times do not ascend from the first token to the last")
    return faults


# -- Repeatability ----------------------------------------------------------------------------


def differing_fields(a: SimResult, b: SimResult) -> list[str]:
    """Names of the arrays and counts of two results that are not byte for byte the same."""
    different = []
    for name in (field.name for field in fields(SimResult) if field.name != "lifecycle"):
        left, right = np.asarray(getattr(a, name)), np.asarray(getattr(b, name))
        if (left.shape, left.dtype, left.tobytes()) != (right.shape, right.dtype, right.tobytes()):
            different.append(f"{name} differs")
    return different


def check_determinism(chosen: Sequence[Scenario]) -> VerificationRow:
    """Two whole runs of each workload are byte-identical."""
    faults: list[str] = []
    for scenario in chosen:
        first = simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)
        second = simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)
        faults += [f"{scenario.name}: {text}" for text in differing_fields(first, second)]
    return row_of_faults("determinism", f"{len(chosen)} workloads", faults, "two runs of each, byte for byte")


def check_driving(chosen: Sequence[Scenario], seed: int) -> list[VerificationRow]:
    """A step at a time with a Python latency model, and in random pieces of time, against the whole run."""
    stepped: list[str] = []
    pieces: list[str] = []
    rng = np.random.default_rng([seed, 3])
    steps = 0
    for scenario in chosen:
        whole = simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)
        steps += len(whole.steps)
        stepped += [f"{scenario.name}: {text}" for text in differing_fields(whole, _a_step_at_a_time(scenario))]
        pauses_us = np.sort(rng.integers(0, int(whole.step_end_us[-1]) + 1, 100))
        pieces += [f"{scenario.name}: {text}" for text in differing_fields(whole, _in_pieces(scenario, pauses_us))]
    configuration = f"{len(chosen)} workloads"
    return [
        row_of_faults("step at a time = whole run", configuration, stepped, f"{steps:,} steps, byte for byte"),
        row_of_faults("paused and resumed = whole run", configuration, pieces, "100 pauses in each, byte for byte"),
    ]


def _a_step_at_a_time(scenario: Scenario) -> SimResult:
    engine, latency = scenario.start(), SlowLatency()
    while (batch := engine.schedule()) is not None:
        engine.run(max(int(latency.step_time(batch)), 1))
    return engine.result()


def _in_pieces(scenario: Scenario, pauses_us: np.ndarray[tuple[int], np.dtype[np.int64]]) -> SimResult:
    engine = scenario.start()
    for until_us in pauses_us.tolist():
        engine.advance(LATENCY, until_us)
    engine.advance(LATENCY)
    return engine.result()


# -- All checks -------------------------------------------------------------------------------

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
    """Run all checks; ``progress`` gets, before each, the number done, the number of all, and its name."""
    chosen = checks(seed, quick)
    for done, (name, check) in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), name)
        yield from check()
