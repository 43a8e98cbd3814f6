"""Step times from architecture and datasheet: parameter counts, the kernel kind, its release form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from engine_cases import duration_us
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from blis_replay.base.errors import ReleaseError
from blis_replay.blis.engine import Engine
from blis_replay.blis.latency.datasheets import (
    Architecture,
    architecture_of_config,
    bundled_architectures,
    bundled_gpus,
    gpu_named,
)
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.latency.physical import COEFFICIENT_NAMES, PhysicalCoefficients, PhysicalModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

LLAMA_7B = "meta-llama/Llama-2-7b-hf"
LLAMA_70B = "meta-llama/Llama-2-70b-hf"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
H100 = gpu_named("H100-SXM-80GB")
AT_THE_DATASHEET = PhysicalCoefficients(1, 1, 1, 0, 1, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # 32 * (4 * 4096^2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096
        (LLAMA_7B, 6_738_415_616),
        # 48 * (2 * 8192 * 128 * (64 + 8) + 3 * 8192 * 22016 + 2 * 8192) + 2 * 32000 * 8192 + 8192
        ("codellama/CodeLlama-34b-Instruct-hf", 33_743_970_304),
        # 80 * (2 * 8192 * 128 * (64 + 8) + 3 * 8192 * 28672 + 2 * 8192) + 2 * 32000 * 8192 + 8192
        (LLAMA_70B, 68_976_648_192),
        # 32 * (2 * 4096 * 128 * (32 + 8) + 8 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096) + 2 * 32000 * 4096 + 4096
        (MIXTRAL, 46_702_792_704),
    ],
)
def test_parameters_are_the_known_totals(model: str, parameters: int) -> None:
    """Published as 6.74, 33.7, 69.0 and 46.7 billion."""
    assert bundled_architectures()[model].parameters == parameters


def test_bundled_architectures_are_those_of_the_config_files(data_pack: Path) -> None:
    folder = data_pack / "h100-hardware" / "model_configs"
    for name, architecture in bundled_architectures().items():
        path = folder / name.split("/")[-1] / "config.json"
        assert architecture_of_config(json.loads(path.read_text("utf-8")), str(path)) == architecture


@pytest.mark.parametrize("name", ["H100-SXM", "H100-NVL"])
def test_bundled_gpus_are_those_of_the_datasheets(data_pack: Path, name: str) -> None:
    """Dense compute is half of what the datasheet prints with sparsity; the link half of both directions."""
    sheet = json.loads((data_pack / "h100-hardware" / "datasheets" / f"{name.lower()}.json").read_text("utf-8"))
    gpu = bundled_gpus()[name]
    assert gpu.memory_bytes_per_s == sheet["memory"]["bandwidth_tb_s"] * 1e12
    assert gpu.flops_per_s == sheet["compute"]["bf16_tensor_core"] / 2 * 1e12
    assert gpu.link_bytes_per_s == sheet["interconnect"]["nvlink_bandwidth_gb_s"] / 2 * 1e9


def test_reading_the_weights_of_a_dense_model() -> None:
    """70B on 4 GPUs: (68,976,648,192 - 32,000 * 8,192 of the token table) * 2 bytes / 4 / 3.35 TB/s = 10,255.9 us."""
    model = PhysicalModel(
        bundled_architectures()[LLAMA_70B], H100, replace(AT_THE_DATASHEET, traffic=0, prefill_compute=0), 4
    )
    assert duration_us(model, 0, 1, 0) == 10_256


def test_kv_cache_of_a_model_without_grouped_queries() -> None:
    """7B: 2 * 32 layers * 32 heads * 128 * 2 bytes / 3.35 TB/s = 0.1565 us a context token (measured: 0.157)."""
    model = PhysicalModel(bundled_architectures()[LLAMA_7B], H100, AT_THE_DATASHEET)
    assert duration_us(model, 0, 1, 100_000) - duration_us(model, 0, 1, 0) == pytest.approx(15_650, abs=1)


def test_with_fewer_kv_heads_than_gpus_each_holds_one() -> None:
    """8 KV heads: halved from 4 to 8 GPUs, and then no further."""
    architecture = bundled_architectures()[LLAMA_70B]
    assert [architecture.kv_bytes_per_token(n) * n for n in (4, 8, 16)] == pytest.approx([327_680, 327_680, 655_360])


@pytest.mark.parametrize(("tokens", "experts"), [(1, 2), (2, 3.5), (4, 5.46875), (1000, 8)])
def test_experts_that_a_batch_touches(tokens: int, experts: float) -> None:
    """8 * (1 - 0.75^tokens): 2, 3.5, 5.47, all; each of 32 layers * 3 * 4096 * 14336 * 2 bytes / 2 / 3.35 TB/s."""
    architecture = bundled_architectures()[MIXTRAL]
    model = PhysicalModel(architecture, H100, replace(AT_THE_DATASHEET, traffic=0), 2)
    always_us = architecture.always_read_parameters * 2 / 2 / 3.35e6
    expert_us = 32 * 3 * 4096 * 14336 * 2 / 2 / 3.35e6
    assert duration_us(model, 0, tokens, 0) == pytest.approx(always_us + experts * expert_us, abs=1)


def test_a_prefill_attends_to_what_came_before_it() -> None:
    """7B, 100 tokens: 2 * 32 * (4 * 4096^2 + 3 * 4096 * 11008) FLOPs a token, 4 * 32 * 4096 a pair, 989.5 TFLOP/s."""
    model = PhysicalModel(bundled_architectures()[LLAMA_7B], H100, replace(AT_THE_DATASHEET, weight_read=0))
    flops = 100 * 12_952_010_752 + 1_000_000 * 4 * 32 * 4096
    assert duration_us(model, 100, 0, 0, attended=1_000_000) == pytest.approx(flops / 989.5e6, abs=1)


def test_the_engine_counts_what_prefills_attend_to() -> None:
    """100 tokens in chunks of 64 and 36: 64 * 65 / 2 = 2,080, then 36 * 64 + 36 * 37 / 2 = 2,970; 5,050 in all."""
    zeros = np.zeros(1, np.int64)
    trace = RequestTrace(zeros, zeros + 100, zeros + 100, zeros + 2, zeros + NEVER_US)
    engine = Engine(trace, EngineConfig(8, 64, 4096, async_scheduling=False))
    counted = []
    while engine.schedule() is not None:
        counted.append(int(engine.state.batch[0].attended_tokens))
        engine.run(1000)
    assert counted == [2_080, 2_970, 0]


@pytest.mark.parametrize(("gpus", "rounds"), [(1, 0), (2, 1), (4, 2), (8, 3)])
def test_an_all_reduce_takes_a_round_of_messages_for_each_doubling_of_gpus(gpus: int, rounds: int) -> None:
    """Two all-reduces in each of 80 layers, 5 us a round."""
    only = PhysicalCoefficients(0, 0, 0, 0, 0, 0, 5, 0, 1, 0)
    assert duration_us(PhysicalModel(bundled_architectures()[LLAMA_70B], H100, only, gpus), 0, 1, 0) == 1 + 800 * rounds


SIZES = st.integers(1, 64)
ARCHITECTURES = st.builds(
    lambda layers, heads, ratio, width, experts: Architecture(
        layers, heads * 64, heads, max(heads // ratio, 1), 64, width * 128, 32_000, experts, min(2, experts)
    ),
    SIZES,
    SIZES,
    st.sampled_from([1, 4, 8]),
    SIZES,
    st.sampled_from([0, 8, 64]),
)
COEFFICIENTS = st.builds(
    PhysicalCoefficients, *[st.floats(0, 3)] * 5, *[st.floats(0, 100)] * 3, st.floats(1, 1000), st.floats(0, 100)
)


TOKENS, MANY_TOKENS = st.integers(0, 2048), st.integers(0, 10**6)


@given(ARCHITECTURES, COEFFICIENTS, st.sampled_from([1, 2, 4, 8]), TOKENS, TOKENS, MANY_TOKENS, MANY_TOKENS)
def test_the_kernel_is_the_formula(
    a: Architecture, c: PhysicalCoefficients, gpus: int, prefill: int, decode: int, context: int, attended: int
) -> None:
    """Written out once more, cost by cost, in plain Python.

    Off by half a us, and half a ps for each token: costs a token are whole ps.
    """
    requests = decode + (prefill > 0)
    byte_us, flop_us = 1 / H100.memory_bytes_per_s * 1e6, 1 / gpus / H100.flops_per_s * 1e6
    touched = a.experts * (1 - (1 - a.experts_per_token / a.experts) ** (prefill + decode)) if a.experts else 0
    weights = a.always_read_parameters + a.layers * touched * a.expert_parameters
    message = 2 * a.layers * a.hidden_size * 2 * 2 * (gpus - 1) / gpus
    expected_us = (
        c.weight_read * weights * 2 / gpus * byte_us
        + c.kv_read * context * 2 * a.layers * max(a.kv_heads / gpus, 1) * a.head_size * 2 * byte_us
        + c.prefill_compute * (prefill * a.layer_flops_per_token + attended * a.attention_flops_per_pair) * flop_us
        + c.decode_compute * (decode * a.layer_flops_per_token + context * a.attention_flops_per_pair) * flop_us
        + c.decode_compute * requests * 2 * a.vocabulary * a.hidden_size * flop_us
        + c.traffic * (prefill + decode) * message / H100.link_bytes_per_s * 1e6
        + c.per_layer_us * a.layers
        + c.per_exchange_us * 2 * a.layers * {1: 0, 2: 1, 4: 2, 8: 3}[gpus]
        + c.per_moe_layer_us * (a.layers if a.experts else 0)
        + c.per_step_us
        + c.per_request_us * requests
    )
    model = PhysicalModel(a, H100, c, gpus)
    rounding_us = 0.501 + 5e-7 * (prefill + decode + context + attended + requests)
    assert abs(duration_us(model, prefill, decode, context, attended, int(prefill > 0)) - expected_us) <= rounding_us


@given(ARCHITECTURES, COEFFICIENTS, st.sampled_from([1, 2, 4]), TOKENS, TOKENS, MANY_TOKENS)
def test_the_rounding_is_one_of_integers(
    a: Architecture, c: PhysicalCoefficients, gpus: int, prefill: int, decode: int, context: int
) -> None:
    """Whole picoseconds a quantity, their sum to us half up: exact in Python's integers."""
    model = PhysicalModel(a, H100, c, gpus)
    _kind, whole, _real = model.for_kernel()
    step, per_prefill, per_decode, per_context, _attended, per_request, half, *touched = map(int, whole)
    total_ps = step + per_prefill * prefill + per_decode * decode + per_context * context + per_request * decode
    total_ps += touched[min(prefill + decode, len(touched) - 1)]
    assert (half, duration_us(model, prefill, decode, context)) == (500_000, max((total_ps + 500_000) // 10**6, 1))


def release_of(latency: PhysicalModel) -> CoefficientRelease:
    entry = ModelEntry("org/model", latency.tensor_parallelism, latency, Lifecycle())
    return CoefficientRelease("p", "valid", "s", "t", "H100-SXM", "", (entry,), fitted_on=())


def test_a_physical_release_survives_being_written() -> None:
    coefficients = PhysicalCoefficients(*(round(0.1 + i / 7, 3) for i in range(len(COEFFICIENT_NAMES))))
    for model in (LLAMA_7B, MIXTRAL):
        latency = PhysicalModel(bundled_architectures()[model], H100, coefficients, 2)
        read = parse_release(format_release(release_of(latency)), "p").models[0].latency
        assert read == latency
        assert not isinstance(read, LatencyModel)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("layers: 32", "layers: 0", "architecture.layers: is 0; write a whole number from 1"),
        ("experts: 0", "experts: 8", "architecture.experts_per_token: does not go with experts"),
        (
            "memory_bandwidth: 3350 GB/s",
            "memory_bandwidth: 0 GB/s",
            "is 0 GB/s; write a number with a unit above 0 GB/s",
        ),
        ("weight_read: 1", "weight_read: -1", "coefficients.weight_read: is -1; write a number from 0"),
        ("per_layer: 0 us", "per_layer: 0", "coefficients.per_layer: is 0, and not a number with a unit"),
        ("layers: 32", "layers: 9999999", "models[0].latency: a token takes more than 0.1 s or a step more than a"),
        ("3350 GB/s", "1e-99 GB/s", "models[0].latency: a token takes more than 0.1 s or a step more than a day"),
    ],
)
def test_what_is_wrong_with_a_physical_release_is_named(old: str, new: str, complaint: str) -> None:
    text = format_release(release_of(PhysicalModel(bundled_architectures()[LLAMA_7B], H100, AT_THE_DATASHEET)))
    assert old in text
    with pytest.raises(ReleaseError) as refused:
        parse_release(text.replace(old, new, 1), "mine.yaml")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_the_configuration_of_a_model_that_does_not_ship() -> None:
    """Llama-3.1-8B is published with 8,030,261,248 parameters."""
    assert architecture_of_config(CONFIG, "config.json").parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": None}, "field hidden_size: is empty; write a whole number from 1"),
        ({"torch_dtype": "int4"}, "field torch_dtype: is 'int4'; write one of bfloat16"),
        ({"n_routed_experts": 64}, "field n_routed_experts: is of a kind of model that is not counted here"),
        ({"num_local_experts": 8}, "field num_experts_per_tok: is missing"),
    ],
)
def test_a_configuration_that_cannot_be_counted_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ReleaseError, match=r"config\.json") as refused:
        architecture_of_config(CONFIG | change, "config.json")
    assert complaint in str(refused.value)


def test_hardware_without_a_datasheet_is_refused() -> None:
    with pytest.raises(ReleaseError, match="no datasheet of the hardware TPU-v9; known are H100-SXM"):
        gpu_named("TPU-v9")
