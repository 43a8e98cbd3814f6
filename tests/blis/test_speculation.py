"""Speculative decoding: worked by hand, without drafts as without it, and what is drawn.

That the schedules are those of vLLM is shown by the workloads ``draft-...`` of ``test_release_digests``.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from engine_cases import ENGINE, make_trace
from oracle_workloads import SERIES, random_spec
from scenario import digest_of, engine_of, latency_of, simulated_schedule, trace_of

from blis_replay.base.errors import TraceError
from blis_replay.blis.closed_loop import ClosedLoop, simulate_load
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.result import SimResult
from blis_replay.blis.speculation import Drafts, Speculation, speculation_of
from blis_replay.blis.trace import Behaviours, BlockKeys, EngineConfig, RequestTrace

TEN_MS = LatencyModel("blackbox", 10_000_000, 0, 0, 0)
TWO = replace(ENGINE, speculation=Speculation(2))


def accepting(trace: RequestTrace, accepted: list[int], drafted: int = 2) -> RequestTrace:
    """The trace with two drafts behind each token, and how many of them are accepted, token by token."""
    start = np.cumsum(trace.output_tokens) - trace.output_tokens
    return replace(trace, drafts=Drafts(start, np.full(len(accepted), drafted, np.int8), np.array(accepted, np.int8)))


def run(engine: EngineConfig, outputs: int, accepted: list[int]) -> SimResult:
    return simulate(accepting(make_trace([0], [10], [outputs]), accepted), engine, TEN_MS)


def test_a_step_gives_what_it_accepts_and_one_token_more() -> None:
    """One token by the prefill; both drafts accepted: 4; none: 5; both again, of which 6 is the last: 4 steps."""
    result = run(TWO, 6, [2, 0, 0, 0, 2, 0])
    assert result.steps["decode_tokens"].tolist() == [0, 3, 3, 3]
    assert result.token_times_us(0).tolist() == [10_000, 20_000, 20_000, 20_000, 30_000, 40_000]
    # KV tokens that a step attends to: those before it and its own three.
    assert result.steps["context_tokens"].tolist() == [0, 10 + 3, 13 + 3, 14 + 3]


def test_gaps_are_between_tokens_and_tokens_of_one_step_have_none() -> None:
    """Times 10, 20, 20, 20, 30, 40 ms: gaps of 10, 0, 0, 10, 10."""
    result = run(TWO, 6, [2, 0, 0, 0, 2, 0])
    assert np.sort(np.repeat(*result.inter_token_gaps(np.ones(1, bool)))).tolist() == [0, 0, 10_000, 10_000, 10_000]


@pytest.mark.parametrize("index", [1, 4, 5, 8, 12, 13, 17])
def test_without_drafts_it_is_the_other_kernel(index: int) -> None:
    """Random workloads with preemptions, prefix hits and clients that give up, synchronous.

    0.24 is the last release that does not add empty drafts to a request admitted for one token.
    """
    spec = random_spec(3, index)
    spec["engine_args"]["async_scheduling"] = False
    engine, latency = engine_of(spec, "0.24.0"), latency_of(spec)
    trace = trace_of(spec, engine)
    plain = simulated_schedule(simulate(trace, engine, latency))
    none = accepting(trace, [0] * int(trace.output_tokens.sum()), drafted=0)
    walked = simulate(none, replace(engine, speculation=Speculation(2)), latency)
    for name, values in simulated_schedule(walked).items():
        np.testing.assert_array_equal(values, plain[name], name)


@pytest.mark.parametrize(
    ("switch", "index"),
    [
        ("lookahead_at_admission", 2),
        ("drafts_end_with_preemption", 1),
        ("hashes_look_ahead", 6),
        ("drafts_cached_as_accepted", 29),
        ("single_tokens_padded", 7),
        ("padding_without_company", 38),
    ],
)
def test_recorded_schedules_show_each_switch(switch: str, index: int) -> None:
    """These workloads equal 0.33.0 or 0.32.0 (test_release_digests); without the switch they are others."""
    spec = SERIES["draft"](3, index)
    engine = engine_of(spec, "0.33.0")
    without = replace(engine, behaviours=replace(engine.behaviours, **{switch: False}))
    trace = trace_of(spec, engine)
    one, other = (digest_of(simulated_schedule(simulate(trace, e, latency_of(spec)))) for e in (engine, without))
    assert one != other


def test_empty_drafts_give_way_where_the_model_ends() -> None:
    """A decodes 20 tokens. B's prompt of 17, all but one cached, would with 5 drafts go beyond the 21 of the model.

    So it is admitted at 60 ms without them; before 0.29 it waited until A was done.
    """
    keys = BlockKeys(np.array([0, 0, 0]), np.array([1, 0, 1]), np.array([0], np.int32), 16)
    trace = replace(make_trace([0, 30_000, 55_000], [17, 1, 17], [1, 20, 1]), block_keys=keys)
    trace = accepting(trace, [0] * 22, drafted=0)
    padded = Behaviours(single_tokens_padded=True)
    engine = replace(ENGINE, block_size=16, max_model_len=21, speculation=Speculation(5), behaviours=padded)
    fits = replace(engine, behaviours=replace(padded, padding_where_it_fits=True))
    waits, admitted = (simulate(trace, one, TEN_MS) for one in (engine, fits))
    assert admitted.scheduled_us[2] == 60_000
    assert waits.scheduled_us[2] == waits.finished_us[1]


def test_a_run_goes_on_from_a_copy_and_step_by_step() -> None:
    trace = make_trace([0, 5_000, 9_000], [40, 30, 20], [30, 20, 10])
    engine = replace(TWO, speculation=Speculation(2, acceptance=(0.7, 0.4)))
    whole = simulate(trace, engine, TEN_MS)
    half = Engine(trace, engine)
    half.advance(TEN_MS, until_us=100_000)
    twin = copy.deepcopy(half)
    half.advance(TEN_MS)
    while twin.schedule() is not None:
        twin.run(10_000)
    for other in (half.result(), twin.result()):
        np.testing.assert_array_equal(other.steps, whole.steps)
        np.testing.assert_array_equal(other.segments, whole.segments)


def test_what_is_accepted_is_drawn_by_position() -> None:
    """20,000 draws: each share is met within 3 standard deviations, 3 * sqrt(0.25 / 20,000) = 0.0107."""
    drafts = Speculation(3, acceptance=(0.8, 0.5, 0.1), drafted_share=0.6, seed=5).draw(np.array([15_000, 5_000]))
    assert drafts.start.tolist() == [0, 15_000]
    shares = [float((drafts.accepted > position).mean()) for position in range(3)]
    assert shares == pytest.approx([0.8, 0.5, 0.1], abs=0.0107)
    assert float((drafts.drafted == 3).mean()) == pytest.approx(0.6, abs=0.0107)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_speculative_tokens": 0}, "give 1 to 64"),
        ({"method": "medusa"}, "'medusa' is not simulated; ngram"),
        ({"acceptance": (0.5, 0.6)}, "rises with the position"),
        ({"acceptance": (1.5, 0.6)}, "not within 0 and 1"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, object], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        Speculation(**({"num_speculative_tokens": 2} | values))  # type: ignore[arg-type]


def test_arguments_of_a_server_say_it() -> None:
    """As the readers write ``speculative_config``; without the shares, or with another drafter, it is not known."""
    arguments = {
        "speculative_config": "method=eagle3 model=x num_speculative_tokens=2",
        "speculative_acceptance": "0.7 0.4",
    }
    assert speculation_of(arguments) == Speculation(2, "eagle3", (0.7, 0.4))
    for name, value in {
        "speculative_acceptance": "0.7",
        "speculative_config": "method=medusa num_speculative_tokens=2",
        "data_parallel_size": 2,
    }.items():
        assert speculation_of(arguments | {name: value}) is None


def test_without_shares_nothing_can_be_drawn() -> None:
    with pytest.raises(TraceError, match="0 shares of accepted drafts for 2 positions"):
        simulate(make_trace([0], [10], [3]), TWO, TEN_MS)


def test_a_closed_loop_is_refused() -> None:
    """Its clients are answered by the other kernel, which knows no drafts."""
    trace = accepting(make_trace([0], [10], [4]), [0, 0, 0, 0])
    with pytest.raises(TraceError, match="a closed loop is not simulated with it"):
        simulate_load(trace, TWO, TEN_MS, loop=ClosedLoop(1))


def test_up_to_0_11_0_a_last_token_in_flight_costs_a_decode_more() -> None:
    """Three tokens: a prefill and two decodes; asynchronously a third is under way before the last token is in."""
    once_more = Behaviours(decodes_once_more=True)
    trace = make_trace([0], [10], [3])
    for asynchronous, decodes in ((False, 2), (True, 3)):
        engine = replace(ENGINE, async_scheduling=asynchronous, behaviours=once_more)
        assert simulate(trace, engine, TEN_MS).steps["decode_tokens"].tolist() == [0] + [1] * decodes
    assert simulate(trace, replace(ENGINE, async_scheduling=True), TEN_MS).steps["decode_tokens"].tolist() == [0, 1, 1]
