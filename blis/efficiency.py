"""What share of a GPU's peak its kernels reach: measured tables, or a smooth curve where there are none.

Model FLOP utilisation (MFU) of matrix products by their size, of attention in prefill by the length of the
sequence, and in decode by batch and context.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.architecture import Architecture
from blis_replay.blis.gpu import Gpu

Floats = NDArray[np.float64]

# Of the smooth curves, from a least-squares fit to the published H100 tables (112 products of 8-bit numbers within
# 5 % on average, 30 prefills within 11 %, 700 decodes in 18 tables within 5 %; docs/roofline.md).
_PRODUCT_SHARE, _PRODUCT_LAUNCH_US = 0.62, 5.0
_PREFILL_SHARE, _PREFILL_HALF_TOKENS = 0.84, 2_290.0
_DECODE_BANDWIDTH, _DECODE_LAUNCH_US = 0.94, 16.0

_HALF_OCTAVES = 2.0**0.5


@dataclass(frozen=True)
class ProductCurve:
    """MFU of products of ``tokens`` rows with a matrix of ``inputs`` x ``outputs``; tokens ascend."""

    inputs: int
    outputs: int
    tokens: tuple[float, ...]
    mfu: tuple[float, ...]


@dataclass(frozen=True)
class Efficiency:
    """MFU tables: products; prefill attention by sequence length; decode attention, a row a batch size.

    All lists of tokens and requests ascend, and no MFU is 0.
    """

    products: tuple[ProductCurve, ...]
    prefill_tokens: tuple[float, ...]
    prefill_mfu: tuple[float, ...]
    decode_requests: tuple[float, ...]
    decode_context_tokens: tuple[float, ...]
    decode_mfu: tuple[tuple[float, ...], ...]

    def product_mfu(self, tokens: Floats, inputs: int, outputs: int) -> Floats:
        """MFU of products of so many rows, linear between those measured, as the ends are beyond them.

        The curve is that of the nearest shape that is as large in both directions, else of the largest.
        """
        larger = [c for c in self.products if c.inputs >= inputs and c.outputs >= outputs]
        if larger:
            curve = min(larger, key=lambda c: (hypot(c.inputs - inputs, c.outputs - outputs), c.inputs))
        else:
            curve = max(self.products, key=lambda c: (c.inputs * c.outputs, c.inputs))
        return np.asarray(np.interp(tokens, curve.tokens, curve.mfu), np.float64)


def layer_products(architecture: Architecture) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of the attention's matrices of a layer: query, key, value, output."""
    hidden, head = architecture.hidden_size, architecture.head_size
    query, key = architecture.attention_heads * head, architecture.kv_heads * head
    return (hidden, query), (hidden, key), (hidden, key), (query, hidden)


def network_products(architecture: Architecture) -> tuple[tuple[int, int], ...]:
    """Those of one feed-forward network: gate, up, down."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    return (hidden, inner), (hidden, inner), (inner, hidden)


def smooth_efficiency(architecture: Architecture, gpu: Gpu, tensor_parallelism: int) -> Efficiency:
    """Curves for hardware without tables: a launch, then work at a constant share of the peak.

    A product: launch and FLOPs at 62 % of the peak.  Prefill attention: 84 % of the peak, half of it at 2,290
    tokens.  Decode attention: launch and KV bytes at 94 % of the bandwidth, whatever the batch.
    """
    shapes = sorted({*layer_products(architecture), *network_products(architecture)})
    tokens = _octaves(1, 2**17)
    sequence = _octaves(16, 2**17)
    requests, contexts = _octaves(1, 2**10), _octaves(16, 2**17)
    decode = np.outer(requests, contexts)
    return Efficiency(
        products=tuple(_product(k, n, tokens, gpu) for k, n in shapes),
        prefill_tokens=tuple(sequence.tolist()),
        prefill_mfu=tuple((_PREFILL_SHARE * sequence / (sequence + _PREFILL_HALF_TOKENS)).tolist()),
        decode_requests=tuple(requests.tolist()),
        decode_context_tokens=tuple(contexts.tolist()),
        decode_mfu=tuple(tuple(row) for row in _decode(decode, architecture, gpu, tensor_parallelism).tolist()),
    )


def _octaves(first: float, last: float) -> Floats:
    return np.asarray(first * _HALF_OCTAVES ** np.arange(round(2 * np.log2(last / first)) + 1), np.float64)


def _product(inputs: int, outputs: int, tokens: Floats, gpu: Gpu) -> ProductCurve:
    at_peak_us = 2 * tokens * inputs * outputs / gpu.flops_per_s * 1e6
    mfu = at_peak_us / (_PRODUCT_LAUNCH_US + at_peak_us / _PRODUCT_SHARE)
    return ProductCurve(inputs, outputs, tuple(tokens.tolist()), tuple(mfu.tolist()))


def _decode(context_tokens: Floats, architecture: Architecture, gpu: Gpu, tensor_parallelism: int) -> Floats:
    layers = architecture.layers
    at_peak_us = architecture.attention_flops_per_pair / layers / tensor_parallelism / gpu.flops_per_s * 1e6
    read_us = architecture.kv_bytes_per_token(tensor_parallelism) / layers / gpu.memory_bytes_per_s * 1e6
    taken_us = _DECODE_LAUNCH_US + context_tokens * read_us / _DECODE_BANDWIDTH
    return np.asarray(context_tokens * at_peak_us / taken_us, np.float64)
