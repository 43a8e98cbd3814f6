"""The roofline: steps by hand, modes of mixed batches, efficiencies, its release form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.blis.engine import simulate
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency.datasheets import Architecture, Gpu, bundled_architectures, gpu_named
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay_labs.silicon.roofline import (
    MIXED_MODES,
    DecodeGrid,
    Efficiency,
    Mixed,
    PrefillCurve,
    ProductCurve,
    RooflineModel,
    smooth_efficiency,
)

H100 = gpu_named("H100-SXM")
# 1 layer of 100: query and output 100 x 100, key and value 100 x 100, network 3 times 100 x 400; 1,600 head sizes.
SMALL = Architecture(1, 100, 10, 10, 10, 400, 1, bytes_per_parameter=2)
# 1 TB/s, 1 PFLOP/s, 0.1 TB/s: a MB takes a us, a GFLOP a us, 0.1 MB over the link a us.
PLAIN = Gpu("plain", 1e12, 1e15, 1e11)
# Products at half the peak, prefill attention at a quarter, decode attention at a hundredth.
FLAT = Efficiency(
    (ProductCurve(1, 1, (1.0,), (0.5,)),), PrefillCurve((1.0,), (0.25,)), DecodeGrid((1.0,), (1.0,), ((0.01,),))
)


def duration_us(
    model: RooflineModel, prefill: int, decode: int, context: int = 0, attended: int = 0, prefills: int = 1
) -> int:
    batch = np.zeros(1, k.BATCH)
    batch["prefill_tokens"], batch["decode_tokens"], batch["context_tokens"] = prefill, decode, context
    batch["attended_tokens"], batch["prefill_requests"] = attended, prefills if prefill else 0
    return int(step_duration_us(*model.for_kernel(), batch, 0))


def plain(mixed: Mixed = "weighted", gpus: int = 1, layers: int = 1000, **others: float) -> RooflineModel:
    """The small model with so many layers and without overhead, at the whole bandwidth."""
    settings = {"bandwidth_efficiency": 1.0, "per_layer_us": 0.0} | others
    return RooflineModel(replace(SMALL, layers=layers), PLAIN, gpus, mixed, FLAT, **settings)


def test_a_decode_reads_the_weights() -> None:
    """1,000 layers of 160,200 parameters (4 * 100^2 + 3 * 100 * 400 and 2 norms of 100), 200 more: 320.4 MB; a new
    token writes 2 * 10 * 10 * 2 * 1,000 bytes of KV and passes on 100 * 2 * 1,000: 0.6 MB.  Products: 320 MB.
    """
    assert duration_us(plain(), 0, 1, 0) == 321


def test_a_decode_reads_its_context() -> None:
    """Each context token is 0.4 MB; attention computes 4 * 100 * 1,000 FLOPs at 1 %: 0.04 us, which is less."""
    assert duration_us(plain(), 0, 1, 1000) - duration_us(plain(), 0, 1, 0) == 400


def test_a_prefill_computes() -> None:
    """10,000 tokens: 2 * 160,000 FLOPs * 1,000 layers each at half a PFLOP/s, 0.64 us: 6,400.  Attention over
    10,000 * 10,001 / 2 pairs, 0.4 MFLOP each at a quarter: 80,008 us.  Reading takes less.
    """
    assert duration_us(plain(), 10_000, 0, attended=10_000 * 10_001 // 2) == 6_400 + 80_008


def test_overhead_and_traffic_come_on_top() -> None:
    """100 us in each of 1,000 layers over 2 GPUs: 50,000.  Two messages of 200 bytes a layer, half of them both
    ways: 0.4 MB a token, 4 us at 0.1 TB/s.  And half of 320.4 MB and of 0.6 MB: 160.5; half a us is rounded up.
    """
    assert duration_us(plain(gpus=2, per_layer_us=100.0), 0, 1, 0) == 50_000 + 4 + 161


@pytest.mark.parametrize(
    ("mixed", "expected_us"),
    [
        ("largest", 920),
        # Products of 1,200 tokens take 768 us; reading the weights once and writing the tokens 320.4 + 720.
        ("additive", 1040),
        # (1,000 * 920.4 + 200 * 440.4) / 1,200
        ("token_proportional", 840),
        # 1,000 is more than 4 * 200: 0.75 * 920.4 + 0.25 * 440.4
        ("weighted", 800),
    ],
)
def test_a_mixed_step_by_its_mode(mixed: Mixed, expected_us: int) -> None:
    """Alone: 1,000 tokens of prefill read 320.4 MB of weights and write 600 MB, more than their products' 640 us;
    200 decodes read 320.4 MB and write 120 MB.
    """
    alone = [duration_us(plain(mixed), 1_000, 0), duration_us(plain(mixed), 0, 200)]
    assert alone == [920, 440]
    assert duration_us(plain(mixed), 1_000, 200) == expected_us


@pytest.mark.parametrize(
    ("prefill", "decode", "share"), [(101, 25, 0.75), (100, 24, 100 / 124), (20, 51, 0.35), (20, 50, 20 / 70)]
)
def test_the_weights_of_the_published_average(prefill: int, decode: int, share: float) -> None:
    """0.75 above 4 times the decodes and 100 tokens, 0.35 above twice the prefill and 50 decodes, else by tokens."""
    model = plain("weighted")
    prefill_us, decode_us = duration_us(model, prefill, 0), duration_us(model, 0, decode)
    expected_us = share * prefill_us + (1 - share) * decode_us
    assert duration_us(model, prefill, decode) == pytest.approx(expected_us, abs=1.01)


TOKENS, CONTEXT = st.integers(1, 4096), st.integers(0, 10**6)


@pytest.mark.slow
@settings(max_examples=30)  # each makes four tables
@given(st.sampled_from(sorted(bundled_architectures())), st.sampled_from([1, 2, 4]), TOKENS, CONTEXT)
def test_modes_are_equal_where_no_batch_is_mixed(model: str, gpus: int, tokens: int, context: int) -> None:
    """So nothing that a client sends one at a time can tell them apart."""
    models = [RooflineModel(bundled_architectures()[model], H100, gpus, mixed) for mixed in MIXED_MODES]
    assert len({duration_us(m, tokens, 0, attended=tokens + context) for m in models}) == 1
    assert len({duration_us(m, 0, tokens, tokens + context) for m in models}) == 1


@pytest.mark.slow
@settings(max_examples=30)
@given(TOKENS, st.integers(1, 256), st.integers(1, 2000))
def test_a_mixed_step_is_between_its_phases_and_their_sum(prefill: int, decode: int, context: int) -> None:
    """Means are between the two phases, the largest is one of them, and adding is at most both.

    Smooth curves, 34B on 2 GPUs.  One us for the rounding of each.
    """
    architecture = bundled_architectures()["codellama/CodeLlama-34b-Instruct-hf"]
    attended = prefill * (prefill + 1) // 2
    took = {}
    for mixed in MIXED_MODES:
        model = RooflineModel(architecture, H100, 2, mixed, per_layer_us=0.0)
        alone = duration_us(model, prefill, 0, 0, attended), duration_us(model, 0, decode, decode * context)
        took[mixed] = duration_us(model, prefill, decode, decode * context, attended)
    traffic_us = 1 + 2 * 48 * 8192 * 2 * (prefill + decode) / 450e3
    for mixed in ("weighted", "token_proportional", "largest"):
        assert min(alone) - 1 <= took[mixed] <= max(alone) + traffic_us + 1
    assert max(alone) - traffic_us <= took["additive"] <= sum(alone) + 2


def test_the_engine_runs_it() -> None:
    """One request of 1,000 tokens and 3 outputs.  Prefill: products 640 us, attention over 1,000 * 1,001 / 2 pairs
    800.8.  Decodes attend to 1,001 and 1,002 tokens: 320.4 + 0.6 + 400.4 us, and 0.4 more.
    """
    zeros = np.zeros(1, np.int64)
    trace = RequestTrace(zeros, zeros + 1_000, zeros + 1_000, zeros + 3, zeros + NEVER_US)
    result = simulate(trace, EngineConfig(8, 2048, 4096, async_scheduling=False), plain(), Lifecycle())
    assert (result.ttft_us[0], result.e2e_us[0]) == (1_441, 1_441 + 721 + 722)


def test_experts_that_a_batch_touches_are_read() -> None:
    """Mixtral, one token of two experts: (1,605,681,152 always + 2 * 32 * 176,160,768) * 2 bytes / 2 / 0.82 / 3.35e12.

    = 4,688.7 us; 32 layers * 100 us / 2 more; attention and traffic are below 20 us.
    """
    architecture = bundled_architectures()["mistralai/Mixtral-8x7B-v0.1"]
    read_us = (architecture.always_read_parameters + 64 * architecture.expert_parameters) / 0.82 / 3.35e6
    took_us = duration_us(RooflineModel(architecture, H100, 2), 0, 1, 1)
    assert read_us + 1_600 <= took_us <= read_us + 1_600 + 20 + 32 * 16


def test_decode_attention_of_the_smooth_curve() -> None:
    """A launch of 16 us a layer and KV bytes at 94 % of the bandwidth: measured for 56 query and 8 KV heads of 128 on
    two GPUs, batch 32 of 4,096 tokens, 100.8 us; 64 of 8,192 tokens 346 us (published H100 tables).
    """
    architecture = replace(SMALL, attention_heads=56, kv_heads=8, head_size=128)
    decode = smooth_efficiency(architecture, H100, 2).decode
    for batch, context, measured_us in ((32, 4096, 100.801), (64, 8192, 346.018)):
        row = decode.mfu[decode.requests.index(pytest.approx(batch))]
        mfu = row[decode.context_tokens.index(pytest.approx(context))]
        us = 4 * 56 * 128 * batch * context / 2 / 989.5e6 / mfu
        assert us == pytest.approx(measured_us, rel=0.07)


def test_tables_are_looked_up_between_their_knots() -> None:
    """Prefill of one prompt of 3,000 tokens is half way from 2,000 to 4,000, and MFU 0.3; a batch of 2 with 1,500
    tokens each a quarter of the way in both directions: 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * (0.75 * 3 + 0.25 * 4)
    percent.
    """
    tables = replace(
        FLAT,
        prefill=PrefillCurve((2_000.0, 4_000.0), (0.2, 0.4)),
        decode=DecodeGrid((1.0, 5.0), (1_000.0, 3_000.0), ((0.01, 0.02), (0.03, 0.04))),
    )
    # Compute alone counts: memory is far faster.
    model = replace(plain(layers=1), gpu=Gpu("fast memory", 1e18, 1e9, 1e18), efficiency=tables)
    product_us = 2 * 160_000 / 0.5 / 1e3
    attended = 3_000 * 3_001 // 2
    prefill_us = duration_us(model, 3_000, 0, attended=attended)
    assert prefill_us == pytest.approx(3_000 * product_us + attended * 400 / 0.3 / 1e3, rel=1e-6)
    mfu = 0.01 * (0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * (0.75 * 3 + 0.25 * 4))
    decode_us = duration_us(model, 0, 2, 3_000)
    assert decode_us == pytest.approx(2 * product_us + 3_000 * 400 / mfu / 1e3, abs=0.5)


def test_a_product_takes_the_nearest_larger_shape() -> None:
    """Larger in both directions and nearest, else the largest of all."""
    curves = [ProductCurve(k, n, (1.0,), (mfu,)) for k, n, mfu in ((100, 100, 0.1), (100, 400, 0.2), (200, 400, 0.3))]
    efficiency = replace(FLAT, products=tuple(curves))
    tokens = np.ones(1)
    asked = {(90, 90): 0.1, (90, 101): 0.2, (150, 10): 0.3, (500, 10): 0.3}
    assert {shape: efficiency.product_mfu(tokens, *shape)[0] for shape in asked} == asked


def release_of(latency: RooflineModel) -> CoefficientRelease:
    entry = ModelEntry("org/model", latency.tensor_parallelism, latency, Lifecycle())
    return CoefficientRelease("r", "valid", "s", "t", "H100-SXM", "", (entry,), fitted_on=())


@pytest.mark.parametrize("efficiency", [None, FLAT])
@pytest.mark.parametrize("mixed", MIXED_MODES)
def test_a_roofline_release_survives_being_written(efficiency: Efficiency | None, mixed: Mixed) -> None:
    model = RooflineModel(bundled_architectures()["meta-llama/Llama-2-7b-hf"], H100, 2, mixed, efficiency, 0.7, 12.5)
    assert parse_release(format_release(release_of(model)), "r").models[0].latency == model


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("mixed: weighted", "mixed: mean", "latency.mixed: is 'mean'; write one of additive, largest"),
        (
            "bandwidth_efficiency: 1.0",
            "bandwidth_efficiency: 1.2",
            "is 1.2; write a number above 0 and at most 1",
        ),
        (
            "bandwidth_efficiency: 1.0",
            "bandwidth_efficiency: .nan",
            "is nan; write a number above 0 and at most 1",
        ),
        ("per_layer: 0 us", "per_layer: -1 us", "per_layer: is -1 us; write a number with a unit from 0 us"),
        ("inputs: 1", "inputs: 0", "efficiency.products[0].inputs: is 0; write a whole number from 1"),
        ("- 0.25", "- 0", "efficiency.prefill.mfu[0]: is 0; write a number above 0 and at most 1"),
        ("- 0.25", "- .inf", "efficiency.prefill.mfu[0]: is inf; write a number above 0 and at most 1"),
        ("- 0.25", "- 0.25\n        - 0.3", "efficiency.prefill.mfu: has 2 for 1 tokens"),
        (
            "context_tokens:\n",
            "context_token:\n",
            "context_token: is not a field of a release; did you mean context_tokens?",
        ),
        ("      - - 0.01", "      - 0.01", "efficiency.decode.mfu[0]: is 0.01; write a list, each a number above 0"),
        ("memory_bandwidth: 1000 GB/s", "memory_bandwidth: 1e-9 GB/s", "latency: a step takes more than an hour"),
    ],
)
def test_what_is_wrong_with_a_roofline_release_is_named(old: str, new: str, complaint: str) -> None:
    text = format_release(release_of(plain()))
    assert old in text
    with pytest.raises(ReleaseError) as refused:
        parse_release(text.replace(old, new, 1), "mine.yaml")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
