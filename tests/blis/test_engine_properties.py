"""The kernel against a slow reference, and what must hold for every run."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_engine import Request, serve

from blis_replay.blis import kernel
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency import LatencyModel
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

request_lists = st.lists(
    st.tuples(
        st.integers(0, 30_000),  # arrival
        st.integers(1, 300),  # prompt
        st.integers(1, 300),  # of which uncached, at most
        st.integers(1, 12),  # output
        st.one_of(st.none(), st.integers(0, 40_000)),  # gives up after
    ),
    max_size=25,
)
engines = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 128),
    max_model_len=st.just(1000),
    async_scheduling=st.booleans(),
)
models = st.builds(
    LatencyModel,
    kind=st.sampled_from(["blackbox", "floor"]),
    intercept_ns=st.integers(0, 3_000_000),
    per_prefill_token_ns=st.integers(0, 40_000),
    per_decode_token_ns=st.integers(0, 90_000),
    per_context_token_ns=st.integers(0, 900),
    floor_ns=st.integers(0, 2_000_000),
    rounding=st.sampled_from(["round_half_up", "truncate"]),
)
Rows = list[tuple[int, int, int, int, int | None]]


def trace_of(rows: Rows) -> RequestTrace:
    rows = sorted(rows, key=lambda row: row[0])
    columns = [
        [a for a, *_ in rows],
        [p for _, p, *_ in rows],
        [min(p, u) for _, p, u, *_ in rows],
        [o for _, _, _, o, _ in rows],
        [NEVER_US if give_up is None else a + give_up for a, _, _, _, give_up in rows],
    ]
    return RequestTrace(*(np.array(column, np.int64) for column in columns))


@given(request_lists, engines, models)
@settings(max_examples=300, deadline=None)
def test_the_kernel_equals_the_reference(rows: Rows, engine: EngineConfig, latency: LatencyModel) -> None:
    """Every first and last token, admission and abort, to the microsecond."""
    trace = trace_of(rows)
    result = simulate(trace, engine, latency)
    columns = (trace.arrival_us, trace.prompt_tokens, trace.prefill_tokens, trace.output_tokens, trace.abort_us)
    requests = [Request(*map(int, row)) for row in zip(*columns, strict=True)]
    coefficients = latency.coefficients_ns()

    def step_us(prefill: int, decode: int, context: int) -> int:
        b0, b1, b2, b3, floor, half = map(int, coefficients)
        return max((max(b0 + b1 * prefill + b2 * decode + b3 * context, floor) + half) // 1000, 1)

    serve(requests, engine.max_num_seqs, engine.max_num_batched_tokens, 1 + engine.async_scheduling, step_us)
    assert result.completed.tolist() == [r.done for r in requests]
    assert result.scheduled_us.tolist() == [r.scheduled_us for r in requests]
    for i, request in enumerate(requests):
        if request.done:
            times = result.step_end_us[result.first_step[i] : result.last_step[i] + 1]
            assert times.tolist() == request.token_us


@given(request_lists, engines, models)
@settings(max_examples=100, deadline=None)
def test_invariants(rows: Rows, engine: EngineConfig, latency: LatencyModel) -> None:
    """Budget, sequences, one step at a time, causality, and nothing lost."""
    trace = trace_of(rows)
    result = simulate(trace, engine, latency)
    steps = result.steps
    assert (steps[kernel.STEP_PREFILL] + steps[kernel.STEP_DECODE] <= engine.max_num_batched_tokens).all()
    assert (steps[kernel.STEP_RUNNING] <= engine.max_num_seqs).all()
    assert (steps[kernel.STEP_START][1:] >= steps[kernel.STEP_END][:-1]).all()
    assert (steps[kernel.STEP_SCHEDULED_AT] <= steps[kernel.STEP_START]).all()
    assert np.isin(result.state, [kernel.COMPLETED, kernel.ABORTED]).all()
    done = result.completed
    assert (result.queued_us <= result.scheduled_us)[done].all()
    assert (result.scheduled_us < result.first_token_us)[done].all()
    assert (result.first_token_us <= result.finished_us)[done].all()
    assert (result.last_step - result.first_step + 1 == result.output_tokens)[done].all()


@given(request_lists, engines, models)
@settings(max_examples=30, deadline=None)
def test_compiled_equals_interpreted_and_runs_repeat(rows: Rows, engine: EngineConfig, latency: LatencyModel) -> None:
    """The kernel is plain Python too; equal input gives byte-equal output."""
    trace = trace_of(rows)
    arguments = (
        trace.arrival_us,
        trace.prompt_tokens,
        trace.prefill_tokens,
        trace.output_tokens,
        trace.abort_us,
        np.argsort(trace.abort_us, kind="stable"),
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        1 + engine.async_scheduling,
        latency.coefficients_ns(),
    )
    first, second, interpreted = (run(*arguments) for run in (kernel.run, kernel.run, kernel.run.py_func))
    for compiled, again, plain in zip(first, second, interpreted, strict=True):
        assert compiled.tobytes() == again.tobytes() == plain.tobytes()
