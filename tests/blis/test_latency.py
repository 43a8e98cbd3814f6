"""Step times of the linear kinds: integer nanoseconds, the oracle's rounding and BLIS's."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_cases import duration_us, make_trace
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.base.document import FieldError
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel import step_time
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency.models import (
    FEATURE_NAMES,
    CorrectedModel,
    FirstUse,
    LatencyModel,
    Lifecycle,
    ObservedCycles,
    PrefillBeyond,
    Regime,
    RegimeModel,
    Roofline,
)
from blis_replay.blis.releases.release import ModelEntry, bundled_releases, format_release, parse_release
from blis_replay.blis.speculation import Speculation
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay.validate.explain.cycles import forced_steps


@pytest.mark.parametrize(
    ("rounding", "expected_us"),
    # The oracle's own step: 7000 + 18*636 us, and 7000 + 25 + 0.01*637 us of decode (7031.37).
    [("round_half_up", [18448, 7031]), ("truncate", [18448, 7031])],
)
def test_the_first_steps_of_the_oracle(rounding: str, expected_us: list[int]) -> None:
    model = LatencyModel("blackbox", 7_000_000, 18_000, 25_000, 10, rounding=rounding)  # type: ignore[arg-type]
    assert [duration_us(model, 636, 0), duration_us(model, 0, 1, 637)] == expected_us


@pytest.mark.parametrize(("rounding", "expected_us"), [("round_half_up", 1001), ("truncate", 1000)])
def test_half_a_microsecond(rounding: str, expected_us: int) -> None:
    """1000.5 us: half up gives 1001, truncation 1000."""
    assert duration_us(LatencyModel("blackbox", 1_000_500, 0, 0, rounding=rounding), 0, 1) == expected_us  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "tokens", "us"),
    [
        # max(5000, 1000 + 10 * prefill): 5000 up to 400 tokens, 6000 at 500.
        (LatencyModel("floor", 1_000_000, 10_000, 0, floor_ns=5_000_000), (0, 400, 500), [5000, 5000, 6000]),
        # StepML's floor with cap: within 5000 and 3 * 5000, whatever 10 us a prefill token comes to.
        (
            LatencyModel("floor", 0, 10_000, 0, floor_ns=5_000_000, cap_ns=15_000_000),
            *((100, 1000, 2000), [5000, 10_000, 15_000]),
        ),
        # 16.5 us a token, 22.7 beyond 1,103: 6,000 + 18,199.5 us, and 2,993 * 22.7 = 67,941.1 us more for 4,096.
        (
            LatencyModel("blackbox", 6_000_000, 16_500, 0, prefill_beyond=PrefillBeyond(1_103, 6_200)),
            *((0, 1_103, 4_096), [6_000, 24_200, 92_141]),
        ),
    ],
)
def test_floors_caps_and_prefill_tokens_beyond_a_number(
    model: LatencyModel, tokens: tuple[int, ...], us: list[int]
) -> None:
    assert [duration_us(model, prefill, 0) for prefill in tokens] == us


def test_a_prompt_costs_the_tokens_that_it_attends_to() -> None:
    """A prompt of 100 tokens attends to 1 + 2 + ... + 100 = 5,050: at 200 us per 1,000 of them 1,010 us."""
    batch = np.zeros(1, k.BATCH)
    batch["prefill_tokens"], batch["prefill_requests"], batch["attended_tokens"] = 100, 1, 5_050
    model = LatencyModel("blackbox", 1_000_000, 10_000, 0, per_1000_attended_ns=200_000)
    assert step_duration_us(*model.for_kernel(), batch, 0) == 1_000 + 1_000 + 1_010


def test_no_step_is_shorter_than_a_microsecond() -> None:
    assert duration_us(LatencyModel("blackbox", 0, 0, 0), 0, 1) == 1


@pytest.mark.parametrize(
    ("intercept_us", "per_decode_ns", "batch"),
    # The published per-model lines: 5525 / 215.1 = 25.7, 2633 / 106.4 = 24.7, 8035 / 249.3 = 32.2; 992 is positive.
    [(-5525, 215_100, 26), (-2633, 106_400, 25), (-8035, 249_300, 33), (992, 7_031, 1)],
)
def test_the_smallest_batch_with_a_positive_step_time(intercept_us: int, per_decode_ns: int, batch: int) -> None:
    assert LatencyModel("blackbox", intercept_us * 1000, 0, per_decode_ns).smallest_positive_batch() == batch


def test_a_model_that_is_never_positive_is_refused() -> None:
    with pytest.raises(ReleaseError, match="not positive at any size"):
        LatencyModel("blackbox", -1, 0, 0).smallest_positive_batch()


def test_the_first_regime_that_holds_is_used() -> None:
    """Decode only: 100 + 5 * decodes.  Below 256 prefill tokens: 200 + prefill.  Else expm1(7) = 1095.6, truncated."""
    model = RegimeModel(
        (
            Regime("decode only", 100.0, (("decode_tokens", 5.0),), condition=("prefill_tokens", "==", 0)),
            Regime("light", 200.0, (("prefill_tokens", 1.0),), condition=("prefill_tokens", "<", 256)),
            Regime("heavy", 7.0, (), expm1=True),
        )
    )
    assert [duration_us(model, *batch) for batch in [(0, 10), (50, 10), (300, 10)]] == [150, 250, 1095]


def test_every_feature_of_a_regime_model() -> None:
    """3 prefill tokens of 2 requests, 4 decodes with 100 context tokens, 96 before their own: by hand."""
    expected = {
        "prefill_tokens": 3,
        "decode_tokens": 4,
        "num_prefill_reqs": 2,
        "num_decode_reqs": 4,
        "scheduled_tokens": 7,
        "kv_sum": 96,
        "kv_mean": 24,
        "prefill_x_decode": 12,
        "decode_x_kv_mean": 96,
        "prefill_sq": 9,
    }
    assert tuple(expected) == FEATURE_NAMES
    for name, value in expected.items():
        model = RegimeModel((Regime("only", 1000.0, ((name, 10.0),)),))
        assert duration_us(model, 3, 4, 100, prefills=2) == 1000 + 10 * value, name


def test_overhead_and_cost_per_request_of_a_regime_model() -> None:
    """max(50, 200) within 3 * 200, and 10 us for each of 4 decodes and 1 prefill."""
    model = RegimeModel((Regime("only", 50.0, ()),), overhead_us=200.0, per_request_us=10.0)
    assert duration_us(model, 8, 4, prefills=1) == 250


FEW = ("decode_tokens", "<=", 64.0)
BENT = RegimeModel(
    (
        Regime("few", 13_610.7, (("prefill_tokens", 41.6), ("decode_tokens", 17.9), ("kv_sum", 0.029)), condition=FEW),
        Regime("many", 13_453.3, (("decode_tokens", 20.4), ("prefill_tokens", 41.6), ("kv_sum", 0.029))),
    )
)


@pytest.mark.parametrize(("prefill", "decode", "us"), [(0, 64, 14_756), (0, 65, 14_779), (100, 10, 17_949)])
def test_lines_bent_at_64_decodes_by_hand(prefill: int, decode: int, us: int) -> None:
    """13,610.7 + 17.9*64; 13,453.3 + 20.4*65; 13,610.7 + 41.6*100 + 17.9*10, truncated."""
    assert duration_us(BENT, prefill, decode, context=decode) == us


def test_lines_bent_at_1043_prefill_tokens_by_hand() -> None:
    """13,610.7 + 41.6*1,043 = 56,999.5 us, and 57 of 1,100 tokens beyond it at 41.6 + 15.3 us: 3,243.3 more."""
    beyond = replace(BENT, prefill_beyond=PrefillBeyond(1_043, 15_300))
    assert [duration_us(beyond, tokens, 0) for tokens in (1_043, 1_100)] == [56_999, 60_242]


@given(st.integers(0, 2_048), st.integers(0, 130), st.integers(0, 400_000), st.integers(0, 20_000))
def test_bent_lines_are_regimes_to_the_last_bit(prefill: int, decode: int, context: int, more_ns: int) -> None:
    """A third condition that never holds has the same lines read as regimes in general."""
    never = Regime("never", 1.0, (), condition=("prefill_tokens", "<", -1.0))
    bent = replace(BENT, prefill_beyond=PrefillBeyond(1_043, more_ns))
    general = replace(bent, regimes=(never, *bent.regimes))
    assert bent.for_kernel()[0] == step_time.BENT != general.for_kernel()[0]
    durations = {duration_us(model, prefill, decode, context=decode + context) for model in (bent, general)}
    assert len(durations) == 1


def test_a_regime_model_survives_a_release() -> None:
    """Written as YAML and read again, it is the same model."""
    decodes = Regime("decode only", 100.0, (("decode_tokens", 5.0),), condition=("prefill_tokens", "==", 0.0))
    mixed = Regime("mixed", 7.0, (("kv_sum", 0.5),), expm1=True)
    beyond = PrefillBeyond(1_043, 15_301)
    model = RegimeModel((decodes, mixed), overhead_us=400.0, per_request_us=2.0, prefill_beyond=beyond)
    entry = ModelEntry("some/Model", 1, model, Lifecycle(50.0, 0.5, 11.0, 0.0, 12.0, 13.0))
    release = replace(parse_release(bundled_releases()["stepml-direct"], "x"), models=(entry,))
    assert parse_release(format_release(release), "x").models == (entry,)


def test_observed_cycles_are_those_of_the_last_anchor() -> None:
    model = ObservedCycles(np.array([0, 1000, 2000]), np.array([11, 12, 13]))
    assert [duration_us(model, 0, 1, start_us=t) for t in (0, 999, 1000, 1500, 2000, 9999)] == [11, 11, 12, 12, 13, 13]
    with pytest.raises(ReleaseError, match="at least one anchor"):
        ObservedCycles(np.array([]), np.array([])).for_kernel()


@pytest.mark.parametrize(
    ("from_us", "cycle_us", "begins", "ends"),
    [
        # Steps began every 10 us from 1,000 us on; nothing is known of the second anchor's beginning.
        # A cycle later than 1,003 the nearest end is 1,010; than 1,007 it is 1,020; than 1,005 the earlier one.
        ([1_000, 2_000], [10, 20], [1, 0], {1_000: 1_010, 1_003: 1_010, 1_007: 1_020, 1_005: 1_010, 2_003: 2_023}),
        # Steps began at 0, 10 and 1,010 us: the cycle in between, as the first step of a cold server, is taken once.
        ([0, 10, 1_010], [10, 1_000, 10], [1, 1, 1], {0: 10, 9: 1_010, 11: 1_010, 400: 1_010, 1_009: 1_020}),
        # The server was idle after 0 us: the step that ends this a little early takes the cycle ahead.
        ([0, 5_000], [10, 400], [0, 1], {0: 10, 2_000: 2_010, 4_990: 5_390, 5_000: 5_400}),
    ],
)
def test_a_step_takes_the_cycle_of_the_nearest_observed_start(
    from_us: list[int], cycle_us: list[int], begins: list[int], ends: dict[int, int]
) -> None:
    observed = ObservedCycles(np.array(from_us), np.array(cycle_us), np.array(begins, np.bool_))
    assert {start: start + duration_us(observed, 0, 1, start_us=start) for start in ends} == ends


def test_a_corrected_model_is_the_model_and_what_it_lacked() -> None:
    """1000 + 3 * 10 + 2 * 20 = 1,070; the line adds 100 - 3 * 5 + 2 * 1 + 50 * 0.1 = 92; then 7, and from 500 us -9."""
    model = LatencyModel("blackbox", 1_000_000, 10_000, 20_000)
    corrected = CorrectedModel(model, (100_000, -5_000, 1_000, 100), np.array([0, 500]), np.array([7, -9]))
    assert duration_us(corrected, 3, 2, 50) == 1_169
    assert duration_us(corrected, 3, 2, 50, start_us=499) == 1_169
    assert duration_us(corrected, 3, 2, 50, start_us=500) == 1_153
    least = CorrectedModel(model, (-2_000_000, 0, 0, 0), np.array([0]), np.array([0]))
    assert duration_us(least, 3, 2) == 1
    varying = replace(corrected, pace=2.0, varying=(np.array([0, 500]), np.array([1.0, 1.5])))
    assert duration_us(varying, 3, 2, 50, start_us=499) == 1_169 + 1_070
    assert duration_us(varying, 3, 2, 50, start_us=500) == 1_153 + 2 * 1_070


def test_a_forced_run_asks_the_model_about_the_servers_batches() -> None:
    """Two requests of 10 and 20 prompt tokens and 3 output tokens; each step really takes 2,000 us.

    The model makes 1000 + 10 * 10 = 1,100 of the first prefill, 1000 + 10 * 20 + 20 of the second beside a decode.
    """
    trace = make_trace([0, 100], [10, 20], [3, 3])
    engine = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, async_scheduling=False)
    cycles = ObservedCycles(np.array([0]), np.array([2_000]))
    steps = forced_steps(trace, engine, Lifecycle(), cycles, LatencyModel("blackbox", 1_000_000, 10_000, 20_000))
    assert steps.start_us.tolist() == [0, 2_000, 4_000, 6_000]
    assert steps.batch[:, :2].tolist() == [[10, 0], [20, 1], [0, 2], [0, 1]]
    assert steps.observed_us.tolist() == [2_000] * 4
    assert steps.modelled_us.tolist() == [1_100, 1_220, 1_040, 1_020]


MIXTRAL = FirstUse(compile_us=900_000, experts=8, experts_per_token=2)


@pytest.mark.parametrize(
    ("tokens", "nearest", "variant"),
    # Choices of experts, and 8 fewer: 16 divides neither 1,154 nor 1,146; it divides 2,048; and 1,048 - 8 = 65 * 16.
    [(577, 512, 0), (1_024, 1_024, 1), (524, 512, 2), (768, 512, 1), (769, 1_024, 0), (9_999, 4_096, 0)],
)
def test_a_kernel_is_that_of_the_nearest_listed_size_and_of_what_16_divides(
    tokens: int, nearest: int, variant: int
) -> None:
    kernel_of = inspect.unwrap(step_time.kernel_of)
    assert kernel_of(tokens, 2, 8) == 3 * step_time.KERNEL_TOKENS.index(nearest) + variant


def test_the_first_batch_that_needs_a_kernel_waits_for_it() -> None:
    """Prompts of 577, 600 (16 divides 1,200), 577, 524, 256 and 2,048 tokens, one after the other, 10 us a token.

    Each of the first two and the fourth needs another kernel; 256 tokens are computed from a captured graph, and for
    2,048 the server has run a batch before.
    """
    model = LatencyModel("blackbox", 0, 10_000, 0)
    prompts = np.array([577, 600, 577, 524, 256, 2_048])
    trace = make_trace(range(0, 6_000_000, 1_000_000), prompts.tolist(), [1] * 6)
    engine = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2_048, max_model_len=4_096, async_scheduling=False)
    found = simulate(trace, engine, MIXTRAL.on(model, 256, 2_048))
    assert (found.ttft_us - 10 * prompts).tolist() == [900_000, 900_000, 0, 900_000, 0, 0]
    assert simulate(trace, engine, model).ttft_us.tolist() == (10 * prompts).tolist()


def test_a_run_goes_on_with_the_kernels_that_it_has() -> None:
    """Driven to second 1 and on from there, as a run of many requests is: the second prompt waits for nothing."""
    trace = make_trace([0, 2_000_000], [577] * 2, [1] * 2)
    engine = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2_048, max_model_len=4_096, async_scheduling=False)
    running = Engine(trace, engine)
    latency = MIXTRAL.on(LatencyModel("blackbox", 0, 10_000, 0), 256, 2_048)
    running.advance(latency, 1_000_000)
    running.advance(latency)
    assert running.result().ttft_us.tolist() == [905_770, 5_770]


@pytest.mark.parametrize("speculation", [None, Speculation(2, acceptance=(0.5, 0.25))], ids=["counted", "walked"])
def test_batches_that_are_kept_are_those_of_single_steps(speculation: Speculation | None) -> None:
    """30 requests of 200 and 200 tokens, 16 at a time: with one token a step there is no room for all at first."""
    requests = np.full(30, 200)
    trace = RequestTrace(np.arange(30) * 500_000, requests, requests, requests, np.full(30, NEVER_US))
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=400, async_scheduling=True)
    engine, model = replace(engine, speculation=speculation), LatencyModel("blackbox", 1_000_000, 10_000, 20_000)
    running, alone, single = Engine(trace, engine), Engine(trace, engine), []
    kept = running.advance_kept(model)
    assert (len(running.state.steps) > len(alone.state.steps)) == (speculation is None)
    while (batch := alone.schedule()) is not None:
        if batch.prefill_tokens + batch.decode_tokens > 0:
            single.append((batch.prefill_tokens, batch.decode_tokens, batch.context_tokens))
        alone.run(int(step_duration_us(*model.for_kernel(), alone.state.batch, batch.start_us)))
    assert len(single) == len(kept) > 2_000
    assert kept[["prefill_tokens", "decode_tokens", "context_tokens"]].tolist() == single


@k.of_kind
def _per_request_us(ints: int, ints_length: int, floats: int, floats_length: int, batch: int, start_us: int) -> int:
    """A constant, a cost per prefill request, and more after some time: as another distribution would have it."""
    own, costs = step_time.int_params_at(ints, ints_length), step_time.float_params_at(floats, floats_length)
    return int(own[0] + costs[0] * step_time.batch_at(batch).prefill_requests) + own[1] * (start_us > own[2])


def test_a_kind_of_another_distribution_runs_in_the_kernel() -> None:
    """100 us, 2.5 us for each prompt, 5 us more after 1 ms; observed steps exceed it by 7 us."""
    batch = np.zeros(1, k.BATCH)
    batch["prefill_requests"] = 2
    model = step_time.registered(_per_request_us, np.array([100, 5, 1_000]), np.array([2.5]))
    latency = SimpleNamespace(for_kernel=lambda: model)
    corrected = CorrectedModel(latency, (7_000, 0, 0, 0), np.array([0]), np.array([0]))  # type: ignore[arg-type]
    assert [step_duration_us(*model, batch, at) for at in (0, 2_000)] == [105, 110]
    assert step_duration_us(*corrected.for_kernel(), batch, 0) == 112


ROOFLINE = LatencyModel("roofline", 25_000_000, 100_000, 10_000, roofline=Roofline(200.0, 0.75))


@pytest.mark.parametrize(
    ("overlap", "prefill", "decode", "us"),
    [
        # Reading takes 200 tokens * 100 us = 20 ms of the 25: without overlap the line, with all of it the longer one.
        (0.0, 64, 0, 31_400),
        (1.0, 64, 0, 25_000),
        (1.0, 300, 0, 35_000),
        # 5 ms + (20 + 6.4 + sqrt(13.6^2 + 20 * 6.4)) / 2 ms
        (0.75, 64, 0, 27_045),
        # At the knee both take 20 ms: 5 + (40 + 20) / 2
        (0.75, 200, 0, 35_000),
        # Decodes cost what the line says.  Beside 150 of them 50 tokens ride free, and the next 50 do not.
        (1.0, 0, 150, 26_500),
        (1.0, 50, 150, 26_500),
        (1.0, 100, 150, 31_500),
    ],
)
def test_few_tokens_ride_free_under_the_reading_of_the_weights(
    overlap: float, prefill: int, decode: int, us: int
) -> None:
    roofline = Roofline(200.0, overlap)
    assert duration_us(replace(ROOFLINE, roofline=roofline), prefill, decode) == us
    more_us = roofline.more_us(np.array([float(prefill)]), np.array([float(decode)]), 100.0)
    assert 25_000 + 100 * prefill + 10 * decode + more_us == pytest.approx([us], abs=0.51)


# 8 experts, each token chooses 2: 8 (1 - 0.75^n) = 2, 3.5 and 7.199 of them touched, in 1 ms each.
@pytest.mark.parametrize(("decodes", "us"), [(1, 7_001), (2, 8_502), (8, 12_207)])
def test_experts_are_read_as_tokens_touch_them(decodes: int, us: int) -> None:
    model = LatencyModel("roofline", 5_000_000, 1_000, 1_000, roofline=Roofline(0.0, 1.0, 8, 2, 1_000_000))
    assert duration_us(model, 0, decodes) == us


def test_a_roofline_without_its_kind_is_refused() -> None:
    for slip in ({"kind": "blackbox"}, {"roofline": None}):
        with pytest.raises(FieldError):
            replace(ROOFLINE, **slip)  # type: ignore[arg-type]
    with pytest.raises(FieldError):
        Roofline(0.0, 1.0, 2, 3)
