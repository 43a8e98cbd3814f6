"""Step time by the roofline: the work of each layer at the peak that its kernels reach, or its bytes at the bandwidth.

Form and parameters are those of BLIS's roofline model (blis-semantics 3.4): products and attention by MFU tables, 82 %
of the bandwidth, 100 us per layer.  Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from blis_replay.base.arrays import Floats
from blis_replay.base.document import REQUIRED, UNWRITTEN, FieldError, NonNegativeTime
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel import step_time
from blis_replay.blis.kernel.state import LONGEST_STEP_US
from blis_replay.blis.latency.datasheets import Architecture, Gpu, Size
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.latency.physical import all_reduced_bytes_per_token, expert_read_us, touched_table
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.replay.release_file import unfitted_release
from blis_replay_labs.silicon import roofline_kernel as kernel

# Of the smooth curves, from a least-squares fit to the published H100 tables (112 products of 8-bit numbers within
# 5 % on average, 30 prefills within 11 %, 700 decodes in 18 tables within 5 %; research/roofline.md).
_PRODUCT_SHARE, _PRODUCT_LAUNCH_US = 0.62, 5.0
_PREFILL_SHARE, _PREFILL_HALF_TOKENS = 0.84, 2_290.0
_DECODE_BANDWIDTH, _DECODE_LAUNCH_US = 0.94, 16.0

_HALF_OCTAVES = 2.0**0.5

# Knots are numbers of tokens or requests.  Shares of the peak are at most 1, also in tables of 8-bit products.
Knots = Annotated[tuple[Annotated[float, Meta(gt=0, le=1e15)], ...], Meta(min_length=1)]
Shares = tuple[Annotated[float, Meta(gt=0, le=1)], ...]


def _refuse_uneven(name: str, knots: Knots, values: Sequence[object]) -> None:
    if any(low >= high for low, high in pairwise(knots)):
        raise FieldError(name, "does not ascend", "correct it")
    if len(values) != len(knots):
        raise FieldError("mfu", f"has {len(values)} for {len(knots)} {name}", "give one for each")


@dataclass(frozen=True)
class ProductCurve:
    """MFU of products of ``tokens`` rows with a matrix of ``inputs`` x ``outputs``; tokens ascend."""

    inputs: Size
    outputs: Size
    tokens: Knots
    mfu: Shares

    def __post_init__(self) -> None:
        _refuse_uneven("tokens", self.tokens, self.mfu)


@dataclass(frozen=True)
class PrefillCurve:
    """MFU of prefill attention by sequence length."""

    tokens: Knots
    mfu: Shares

    def __post_init__(self) -> None:
        _refuse_uneven("tokens", self.tokens, self.mfu)


@dataclass(frozen=True)
class DecodeGrid:
    """MFU of decode attention: a row per batch size, a column per context."""

    requests: Knots
    context_tokens: Knots
    mfu: tuple[Shares, ...]

    def __post_init__(self) -> None:
        _refuse_uneven("requests", self.requests, self.mfu)
        for row in self.mfu:
            _refuse_uneven("context_tokens", self.context_tokens, row)


@dataclass(frozen=True)
class Efficiency:
    """MFU tables.  Lists of tokens and requests ascend; every MFU is above 0."""

    products: Annotated[tuple[ProductCurve, ...], Meta(min_length=1)]
    prefill: PrefillCurve
    decode: DecodeGrid

    def product_mfu(self, tokens: Floats, inputs: int, outputs: int) -> Floats:
        """MFU of products with ``tokens`` rows: linear between the measured sizes, constant beyond them.

        Uses the curve of the nearest shape that is at least as large in both directions, else of the largest.
        """
        larger = [c for c in self.products if c.inputs >= inputs and c.outputs >= outputs]
        if larger:
            curve = min(larger, key=lambda c: (hypot(c.inputs - inputs, c.outputs - outputs), c.inputs))
        else:
            curve = max(self.products, key=lambda c: (c.inputs * c.outputs, c.inputs))
        return np.asarray(np.interp(tokens, curve.tokens, curve.mfu), np.float64)


def layer_products(architecture: Architecture) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of the attention matrices of a layer: query, key, value, output."""
    hidden, head = architecture.hidden_size, architecture.head_size
    query, key = architecture.attention_heads * head, architecture.kv_heads * head
    return (hidden, query), (hidden, key), (hidden, key), (query, hidden)


def network_products(architecture: Architecture) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of the matrices of one feed-forward network: gate, up, down."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    return (hidden, inner), (hidden, inner), (inner, hidden)


def smooth_efficiency(architecture: Architecture, gpu: Gpu, tensor_parallelism: int) -> Efficiency:
    """Curves for hardware without tables: a launch, then work at a constant share of the peak.

    A product: launch and FLOPs at 62 % of the peak.  Prefill attention: 84 % of the peak, half of it at 2,290
    tokens.  Decode attention: launch and KV bytes at 94 % of the bandwidth, whatever the batch.
    """
    flops_per_s = gpu.flops_at(architecture.bytes_per_parameter)
    shapes = sorted({*layer_products(architecture), *network_products(architecture)})
    tokens = _octaves(1, 2**17)
    sequence = _octaves(16, 2**17)
    requests, contexts = _octaves(1, 2**10), _octaves(16, 2**17)
    prefill = _PREFILL_SHARE * sequence / (sequence + _PREFILL_HALF_TOKENS)
    decode = _decode(np.outer(requests, contexts), architecture, gpu, tensor_parallelism)
    return Efficiency(
        products=tuple(_product(k, n, tokens, flops_per_s) for k, n in shapes),
        prefill=PrefillCurve(tuple(sequence.tolist()), tuple(prefill.tolist())),
        decode=DecodeGrid(tuple(requests.tolist()), tuple(contexts.tolist()), tuple(map(tuple, decode.tolist()))),
    )


def _octaves(first: float, last: float) -> Floats:
    return np.asarray(first * _HALF_OCTAVES ** np.arange(round(2 * np.log2(last / first)) + 1), np.float64)


def _product(inputs: int, outputs: int, tokens: Floats, flops_per_s: float) -> ProductCurve:
    at_peak_us = 2 * tokens * inputs * outputs / flops_per_s * 1e6
    mfu = at_peak_us / (_PRODUCT_LAUNCH_US + at_peak_us / _PRODUCT_SHARE)
    return ProductCurve(inputs, outputs, tuple(tokens.tolist()), tuple(mfu.tolist()))


def _decode(context_tokens: Floats, architecture: Architecture, gpu: Gpu, tensor_parallelism: int) -> Floats:
    layers, flops_per_s = architecture.layers, gpu.flops_at(architecture.bytes_per_parameter)
    at_peak_us = architecture.attention_flops_per_pair / layers / tensor_parallelism / flops_per_s * 1e6
    read_us = architecture.kv_bytes_per_token(tensor_parallelism) / layers / gpu.memory_bytes_per_s * 1e6
    taken_us = _DECODE_LAUNCH_US + context_tokens * read_us / _DECODE_BANDWIDTH
    return np.asarray(context_tokens * at_peak_us / taken_us, np.float64)


Mixed = Literal["weighted", "token_proportional", "additive", "largest"]
MIXED_MODES: tuple[Mixed, ...] = ("weighted", "token_proportional", "additive", "largest")

# As published for the H100.
BANDWIDTH_EFFICIENCY = 0.82
PER_LAYER_US = 100.0

# More tokens than in a step of any recorded server; beyond, products take proportional time.
_TABLE_TOKENS = 16_384
_US = 1e6


@dataclass(frozen=True)
class RooflineModel:
    """Step time of one model on its GPUs, nothing fitted.

    ``mixed``: how a step that prefills and decodes takes its time from the two phases.  ``weighted``: 3/4 prefill
    where that has more than 4 times the tokens (and 100), 0.65 decode where that has more than twice (and 50), else
    as ``token_proportional``, the mean by tokens.  ``additive``: products of all tokens at once, attention of both,
    weights read once.  ``largest``: the longer phase.  ``efficiency`` None: ``smooth_efficiency``.
    ``bandwidth_efficiency``: share of the datasheet's bandwidth.  ``per_layer_us``: a layer's overhead on one GPU,
    divided by their number as BLIS has it.
    """

    architecture: Architecture
    gpu: Gpu
    tensor_parallelism: Annotated[int, UNWRITTEN] = 1  # its entry in a release has it
    mixed: Annotated[Mixed, REQUIRED] = "weighted"
    efficiency: Efficiency | None = None
    bandwidth_efficiency: Annotated[float, Meta(gt=0, le=1), REQUIRED] = BANDWIDTH_EFFICIENCY
    per_layer_us: Annotated[NonNegativeTime, REQUIRED] = PER_LAYER_US

    def for_kernel(self) -> step_time.KernelModel:
        """Kind, integer and float parameters as ``roofline_kernel`` reads them.

        Raises ``ReleaseError`` if a step of the longest table takes more than an hour.
        """
        a, gpus = self.architecture, self.tensor_parallelism
        efficiency = self.efficiency or smooth_efficiency(a, self.gpu, gpus)
        head, products = self._head_us(), self._products_us(efficiency)
        experts = expert_read_us(a, self.gpu, gpus) / self.bandwidth_efficiency * touched_table(a)
        prefill, decode = efficiency.prefill, efficiency.decode
        curves = [prefill.tokens, prefill.mfu, decode.requests, decode.context_tokens, *decode.mfu]
        float_params = np.concatenate([head, products, experts, *curves])
        if not np.isfinite(float_params).all() or head.sum() + products[-1] + experts[-1] > LONGEST_STEP_US:
            raise ReleaseError("a step takes more than an hour; check architecture, GPU and efficiencies")
        sizes = [len(products), len(experts), *(len(curves[i]) for i in (0, 2, 3))]
        int_params = np.array([MIXED_MODES.index(self.mixed), *sizes], np.int64)
        return step_time.registered(kernel.step_us, int_params, float_params)

    def _head_us(self) -> Floats:
        """Cost of a step, a token and a pair of tokens, in the order of ``roofline_kernel``."""
        a, gpus = self.architecture, self.tensor_parallelism
        kv_bytes = a.kv_bytes_per_token(gpus)
        passed_on_bytes = a.layers * a.hidden_size * a.bytes_per_parameter / gpus
        head = np.zeros(kernel.HEAD)
        head[kernel.STEP_US] = self.per_layer_us * a.layers / gpus
        head[kernel.WEIGHTS_US] = self._bandwidth_us(a.always_read_parameters * a.bytes_per_parameter / gpus)
        head[kernel.KV_US] = self._bandwidth_us(kv_bytes)
        head[kernel.TOKEN_US] = self._bandwidth_us(kv_bytes + passed_on_bytes)
        head[kernel.TRAFFIC_US] = all_reduced_bytes_per_token(a, gpus) / self.gpu.link_bytes_per_s * _US
        head[kernel.PAIR_US] = a.attention_flops_per_pair / gpus / self.gpu.flops_at(a.bytes_per_parameter) * _US
        return head

    def _bandwidth_us(self, size_bytes: float) -> float:
        return size_bytes / (self.gpu.memory_bytes_per_s * self.bandwidth_efficiency) * _US

    def _products_us(self, efficiency: Efficiency) -> Floats:
        """float64[n]: time of the products of all layers for 0, 1, ... n - 1 tokens, split evenly over experts."""
        a = self.architecture
        tokens = np.arange(1, _TABLE_TOKENS + 1, dtype=np.float64)
        layer_us = sum(self._product_us(efficiency, tokens, *shape) for shape in layer_products(a))
        touched, rows = np.ones(len(tokens)), tokens
        if a.experts:
            touched = a.experts * (1 - (1 - a.experts_per_token / a.experts) ** tokens)
            rows = tokens * a.experts_per_token / touched
        for shape in network_products(a):
            layer_us = layer_us + touched * self._product_us(efficiency, rows, *shape)
        return np.concatenate([[0.0], a.layers * layer_us / self.tensor_parallelism])

    def _product_us(self, efficiency: Efficiency, tokens: Floats, inputs: int, outputs: int) -> Floats:
        """Time of one product on one GPU: its FLOPs at the reached peak, or its matrix at the bandwidth."""
        width = self.architecture.bytes_per_parameter
        reached = self.gpu.flops_at(width) * efficiency.product_mfu(tokens, inputs, outputs)
        read_us = self._bandwidth_us(inputs * outputs * width)
        return np.maximum(2 * tokens * inputs * outputs / reached * _US, read_us)


def roofline_release(
    name: str,
    model: str,
    hardware: str,
    latency: RooflineModel,
) -> CoefficientRelease:
    """A release with the roofline of one model, without delays; nothing is fitted.

    Raises ``ReleaseError`` if a step takes more than an hour.
    """
    rests_on = "smooth efficiencies" if latency.efficiency is None else "efficiency tables"
    summary = f"Roofline of {model}, {rests_on}, mixed steps {latency.mixed}."
    entry = ModelEntry(model, latency.tensor_parallelism, latency, Lifecycle())
    return unfitted_release(name, summary, "architecture and datasheet, nothing fitted", hardware, entry)
